"""Blocks of one file written by a thread while their owner fills the next. Needs no torch."""

from __future__ import annotations

import mmap
from collections.abc import Callable
from contextlib import suppress
from queue import SimpleQueue

import numpy

from optimus.checkpoint.threads import Task

_BLOCKS = 2
"""One is filled while the other is written; a third gains nothing (docs/benchmarks)."""
_HUGE_PAGE = 2 << 20


class WriteBehind:
    """Memory of a few blocks on its way to `write`, in the order in which they are given.

    Whoever fills them is told of what `write` raises by a later call, at the latest by `finish`;
    nothing is written behind a block that could not be. `close` ends the thread in any case.
    """

    def __init__(self, block_bytes: int, write: Callable[[memoryview], None]) -> None:
        self._empty: SimpleQueue[memoryview | None] = SimpleQueue()
        self._filled: SimpleQueue[memoryview | None] = SimpleQueue()
        for _ in range(_BLOCKS):
            self._empty.put(_memory(block_bytes))
        self._task = Task(lambda: self._run(write))

    def take(self) -> memoryview:
        """A block to fill, once there is one."""
        block = self._empty.get()
        if block is None:
            self.finish()
        assert block is not None, "take() after close()"
        return block

    def give(self, block: memoryview) -> None:
        """Have it written, all of it; only the last may be shorter than those that were taken."""
        self._filled.put(block)

    def finish(self) -> None:
        """Wait until all is written."""
        self.close()
        self._task.value()

    def close(self) -> None:
        """End the thread behind what it was given, or where it failed."""
        self._filled.put(None)
        self._task.wait()

    def _run(self, write: Callable[[memoryview], None]) -> None:
        try:
            while (block := self._filled.get()) is not None:
                write(block)
                self._empty.put(block)
        finally:
            self._empty.put(None)  # nobody waits for a block that will not come


def _memory(size: int) -> memoryview:
    """Memory that begins with a page, of huge pages where the system has them: past the cache, a
    disk takes some hundred pages at a time, and so 4 MiB of huge ones at once (twice as fast)."""
    whole = mmap.mmap(-1, size + _HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # a kernel without them
            whole.madvise(mmap.MADV_HUGEPAGE)
    start = -numpy.frombuffer(whole, numpy.uint8).ctypes.data % _HUGE_PAGE
    return memoryview(whole)[start : start + size]
