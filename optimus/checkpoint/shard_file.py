"""Work in threads: one piece beside what goes on, or many of a kind by a few. Needs no torch.

Reading, writing and hashing let other threads run, so that a few of them keep the disk busy.

Blocks of one file written by a thread while their owner fills the next. Needs no torch.

One writer's file of a full checkpoint: raw bytes, hashed in blocks while they are written.

A fixed header says what the file belongs to: one save of one step by one writer, so that a swapped
or stale file is none of this checkpoint's. Stretches of state follow, little-endian, each from a
multiple of 64 bytes on. The hashes of its blocks (of the whole file, header included) stand in the
checkpoint's index; whoever reads a byte compares the block that it is in. Needs no torch."""

from __future__ import annotations

import errno
import fcntl
import itertools
import json
import mmap
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from queue import SimpleQueue
from typing import Any, NamedTuple, TypeVar

import numpy
import xxhash

from optimus.errors import CheckpointError, OptimusError
from optimus.io import files
from optimus.launch.environment import available_cores

Item = TypeVar("Item")
Result = TypeVar("Result")

_FEW = 4
"""So many tasks are not worth a pool."""


class Task:
    """One piece of work in a thread of its own. Does not keep the process from ending."""

    def __init__(self, work: Callable[[], Any]) -> None:
        self._value: Any = None
        self._error: BaseException | None = None
        self._thread = threading.Thread(
            target=self._run, args=[work], name="optimus-save", daemon=True
        )
        self._thread.start()

    def _run(self, work: Callable[[], Any]) -> None:
        try:
            self._value = work()
        except BaseException as error:  # `value` raises it again
            self._error = error

    def wait(self, timeout_s: float | None = None) -> None:
        self._thread.join(timeout_s)

    @property
    def has_ended(self) -> bool:
        return not self._thread.is_alive()

    def value(self) -> Any:
        """What the work returned; raises what it raised."""
        assert self.has_ended
        if self._error is not None:
            raise self._error
        return self._value


class Stop:
    """Whether what threads do is still wanted; a `threading.Event` that can come too late."""

    def __init__(self) -> None:
        self._lock, self._set, self._claimed = threading.Lock(), False, False

    def set(self) -> bool:
        """Have them stop; False if the work was claimed before."""
        with self._lock:
            self._set = not self._claimed
            return self._set

    def is_set(self) -> bool:
        return self._set

    def claim(self) -> bool:
        """Nobody may stop it from here on; False if somebody has."""
        with self._lock:
            self._claimed = not self._set
            return self._claimed


def in_threads(
    function: Callable[[Item], Result], items: Sequence[Item], threads: int = 0
) -> Iterable[Result]:
    """`function` of every item, in their order; raises what the first that fails raises. `threads`
    0: two for each core that we may use, as half of them wait for the disk; at most 16."""
    if len(items) < _FEW or threads == 1:
        return [function(item) for item in items]
    with ThreadPoolExecutor(threads or min(16, 2 * available_cores())) as pool:
        return list(pool.map(function, items))


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


BLOCK_BYTES = 4 << 20
HEADER_BYTES = 4096
ALIGNED_BYTES = 64
DIRECT_BYTES = 4096
"""Of which what is written past the kernel's cache is a multiple."""
HASH_CHARS = 16
_MAGIC = "optimus shard"

traffic = {"opens": 0, "bytes": 0}
"""Of reading, since the process began or they were set to 0: shard files opened, bytes read."""


class Identity(NamedTuple):
    """What a shard file belongs to."""

    generation: str
    """One save's own random name."""
    step: int
    writer: int


class ShardFile(NamedTuple):
    """A finished shard file as the index of its checkpoint knows it."""

    writer: int
    size: int
    hashes: str
    """xxh3-64 of each block in hexadecimal, one behind the other."""

    @property
    def name(self) -> str:
        return shard_name(self.writer)

    @property
    def num_blocks(self) -> int:
        return len(self.hashes) // HASH_CHARS


def shard_name(writer: int) -> str:
    return f"shard-{writer:05d}.bin"


def header(identity: Identity, size: int) -> bytes:
    """The first HEADER_BYTES of a file of `size` bytes."""
    text = json.dumps({"format": _MAGIC, **identity._asdict(), "size": size})
    return text.encode().ljust(HEADER_BYTES - 1) + b"\n"


def aligned(size: int) -> int:
    """The next multiple of ALIGNED_BYTES."""
    return -(-size // ALIGNED_BYTES) * ALIGNED_BYTES


class ShardWriter(files.Closing):
    """Writes one shard file, through memory of two blocks: one is hashed while one is written.

    A block at a time goes to the disk at once, past the kernel's cache, where the file system can
    do that: pages of the cache would cost a copy and the memory of programs that run beside, and
    whoever verifies would read them instead of the disk.
    """

    def __init__(
        self,
        directory: Path,
        identity: Identity,
        size: int,
        stop: Stop | None = None,
        direct: bool = True,
    ) -> None:
        """`size`: of the whole file. `direct`: past the cache, where that can be. Raises OSError,
        as `write` and `finish` do, and OptimusError instead of the next block once `stop` is set.
        """
        self._identity, self._size, self._stop = identity, size, stop
        self._hashes: list[str] = []
        self._written = 0
        """Of the whole file, blocks that are not full included."""
        self._block = memoryview(b"")
        path = directory / shard_name(identity.writer)
        self._fd = -1
        self._blocks = WriteBehind(BLOCK_BYTES, self._write_block)
        try:
            self._fd, self._direct = _create(path, direct)
            self._put(memoryview(header(identity, size)))
        except BaseException:
            self.close()
            raise

    def write(self, data: memoryview) -> int:
        """Append bytes and what fills them up to a multiple of 64; where they begin in the file."""
        begun = self._written
        self._put(data)
        if padding := aligned(self._written) - self._written:
            self._put(memoryview(bytes(padding)))
        return begun

    def finish(self) -> ShardFile:
        """Make the file durable and describe it."""
        assert self._written == self._size, (self._written, self._size)
        if rest := self._written % len(self._block):
            self._give(self._block[:rest])
        self._blocks.finish()
        os.fsync(self._fd)
        return ShardFile(self._identity.writer, self._size, "".join(self._hashes))

    def close(self) -> None:
        self._blocks.close()
        if self._fd >= 0:
            os.close(self._fd)
        self._fd = -1

    def _put(self, data: memoryview) -> None:
        while data:
            filled = self._written % BLOCK_BYTES
            if not filled:
                self._block = self._blocks.take()
            part = data[: len(self._block) - filled]
            self._block[filled : filled + len(part)] = part
            self._written += len(part)
            data = data[len(part) :]
            if filled + len(part) == len(self._block):
                self._give(self._block)

    def _give(self, block: memoryview) -> None:
        self._hashes.append(xxhash.xxh3_64_hexdigest(block))
        self._blocks.give(block)

    def _write_block(self, block: memoryview) -> None:
        if self._stop is not None and self._stop.is_set():
            raise OptimusError(f"{shard_name(self._identity.writer)}: no longer wanted")
        while block:
            if len(block) % DIRECT_BYTES:
                self._through_the_cache()
            try:
                block = block[os.write(self._fd, block) :]
            except OSError as error:
                if error.errno != errno.EINVAL or not self._direct:
                    raise
                self._through_the_cache()  # a file system with other rules

    def _through_the_cache(self) -> None:
        if self._direct:
            flags = fcntl.fcntl(self._fd, fcntl.F_GETFL)
            fcntl.fcntl(self._fd, fcntl.F_SETFL, flags & ~os.O_DIRECT)
        self._direct = False


def _create(path: Path, direct: bool) -> tuple[int, bool]:
    """A new file, and whether it is written past the kernel's cache."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
    if direct and hasattr(os, "O_DIRECT"):
        try:
            return os.open(path, flags | os.O_DIRECT, 0o644), True
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            path.unlink(missing_ok=True)  # some have made it all the same
    return os.open(path, flags, 0o644), False


class ShardReader(files.Closing):
    """Reads stretches of one shard file into memory; every block it touches is checked."""

    def __init__(
        self, directory: Path, identity: Identity, shard: ShardFile, block_bytes: int = BLOCK_BYTES
    ) -> None:
        """Raises CheckpointError if the file is missing, of another size or of another save."""
        self.path, self._shard, self._block_bytes = directory / shard.name, shard, block_bytes
        try:
            self._file = files.open_regular(self.path)
        except OSError as error:
            raise CheckpointError(f"{self.path}: {error.strerror}") from None
        self._fd = self._file.fileno()
        traffic["opens"] += 1
        self._scratch, self._kept = memoryview(b""), -1
        try:
            self._check_header(identity)
        except BaseException:
            self.close()
            raise

    def _check_header(self, identity: Identity) -> None:
        size = os.fstat(self._fd).st_size
        if size != self._shard.size:
            raise CheckpointError(f"{self.path}: {size} bytes, not {self._shard.size} as written")
        found = bytearray(HEADER_BYTES)
        self._read(memoryview(found), 0)
        if found != header(identity, size):
            raise CheckpointError(
                f"{self.path}: belongs to another checkpoint or writer, or its header is damaged"
            )

    def close(self) -> None:
        self._file.close()

    def read(self, runs: numpy.ndarray, targets: Sequence[memoryview]) -> None:
        """Fill `targets` by `runs` int64 [n, 4]: offset in this file, number of the target, offset
        there, length; in bytes, by ascending offset in the file. The last block that was not read
        in whole is kept for the next call. Raises CheckpointError."""
        if not self._scratch:
            self._scratch = memoryview(bytearray(min(self._block_bytes, self._shard.size)))
        for block, parts in _by_block(runs, self._block_bytes):
            start = block * self._block_bytes
            size = min(self._block_bytes, self._shard.size - start)
            assert size > 0, "the index refers to bytes after the end of a shard file"
            if len(parts) == 1 and parts[0][3] == size:
                _, number, at, _ = parts[0]
                self._read_block(block, targets[number][at : at + size])
                continue
            data = self._scratch[:size]
            if block != self._kept:
                self._kept = -1
                self._read_block(block, data)
                self._kept = block
            for offset, number, at, length in parts:
                targets[number][at : at + length] = data[offset - start : offset - start + length]

    def verify(self, blocks: range) -> None:
        """Compare these blocks with their hashes; raises CheckpointError."""
        scratch = memoryview(bytearray(min(self._block_bytes, self._shard.size)))
        for block in blocks:
            left = self._shard.size - block * self._block_bytes
            self._read_block(block, scratch[: min(left, self._block_bytes)])

    def _read_block(self, block: int, into: memoryview) -> None:
        self._read(into, block * self._block_bytes)
        expected = self._shard.hashes[block * HASH_CHARS : (block + 1) * HASH_CHARS]
        if xxhash.xxh3_64_hexdigest(into) != expected:
            raise CheckpointError(f"{self.path}: block {block} does not match its checksum")

    def _read(self, into: memoryview, offset: int) -> None:
        traffic["bytes"] += len(into)
        files.read_at(self._fd, offset, into, self.path)


def _by_block(runs: numpy.ndarray, block_bytes: int) -> Iterator[tuple[int, list[list[int]]]]:
    """Runs cut at the blocks of the file: (number of the block, the runs in it)."""
    first = runs[:, 0] // block_bytes
    count = (runs[:, 0] + runs[:, 3] - 1) // block_bytes - first + 1
    which = numpy.repeat(numpy.arange(len(runs)), count)
    nth = numpy.arange(len(which)) - numpy.repeat(numpy.cumsum(count) - count, count)
    block = first[which] + nth
    begun, ended = runs[which, 0], runs[which, 0] + runs[which, 3]
    start = numpy.maximum(begun, block * block_bytes)
    stop = numpy.minimum(ended, (block + 1) * block_bytes)
    cut = numpy.stack([start, runs[which, 1], runs[which, 2] + start - begun, stop - start], 1)
    limits = [*numpy.flatnonzero(numpy.diff(block, prepend=-1)), len(block)]
    for low, high in itertools.pairwise(limits):
        yield int(block[low]), cut[low:high].tolist()
