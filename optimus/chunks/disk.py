"""Memory tier for optimizer states on disk, with one file per rank.

Code refers to a buffer on disk by a placeholder: a tensor on the meta device, with the dtype and
the length of the buffer but without memory. `DiskTier.read` and `DiskTier.write` accept
placeholders, views of placeholders, and tensors in memory.

For an update, the states of a chunk are read to a buffer in host memory, updated there, and written
back. The number of these host buffers is constant. While the host updates a chunk, the states of
the next chunks are read, and the states of the previous chunks are written. The file is read and
written with O_DIRECT, so that states take no memory in the page cache.
"""

from __future__ import annotations

import contextlib
import logging
import mmap
import random
import threading
import time
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from optimus.chunks.memory import Memory, Pace, Tier
from optimus.chunks.state_file import ALIGNED, StateFile, align, round_up
from optimus.config.machine import Links
from optimus.errors import OptimusError
from optimus.io.files import Closing

logger = logging.getLogger(__name__)

BUFFERS = 4
"""Largest number of buffers in host memory for the updates of states on disk. At the same time,
states are read from disk to one buffer, updated in a second buffer, and written to disk from a
third buffer. With a fourth buffer, the next read can begin while a thread waits for a processor
core."""
_BATCH_ELEMENTS = 1 << 22
"""Largest number of elements that `DiskTier.write` copies at a time."""
_LATE_S = 60.0
"""Longest delay, in seconds, of a read or write with `Memory.copies` = "late" or "random". If no
code has waited for the read or write after this time, there is a bug."""
_NAN_BYTE = 0xFF
"""A float whose bytes all have this value is NaN."""


def file_bytes(length: int, dtypes: Iterable[torch.dtype]) -> int:
    """Return the bytes that buffers of `length` elements, one for each dtype, take in the file."""
    return sum(round_up(length * dtype.itemsize) for dtype in dtypes)


def staging_bytes(sizes: Sequence[int]) -> int:
    """Return the bytes of the buffers in host memory in which states on disk are updated.

    Args:
        sizes: The result of `file_bytes` for the states of each chunk.
    """
    return min(BUFFERS, len(sizes)) * (max(sizes, default=0) + ALIGNED)


class DiskTier(Closing):
    """Buffers on disk, and the host buffers in which their contents are updated.

    The constructor creates the file, allocates its bytes on the disk, and locks the file, so that
    no other run uses the same file. The file is removed by `close` or at the end of the process. A
    file that a killed process has left is replaced. On the meta device, there is no file and no
    thread.

    Args:
        memory: Allocates the buffers in host memory, and counts the bytes of buffers in host memory
            and on disk.
        directory: Directory of the file, such as `offload.disk`.
        rank: Number of this rank, for the name of the file.
        sizes: The result of `file_bytes` for the states of each chunk. Their sum is the first size
            of the file; `new` extends the file if it is full.
        links: Rates of an emulated device; None to read and write as fast as the disk does.
        key: Name of the setting with the directory, for messages.

    Raises:
        ConfigError: The file cannot be created, another run uses the file, or the disk is full.
    """

    def __init__(
        self,
        memory: Memory,
        directory: str,
        rank: int,
        sizes: Sequence[int],
        links: Links | None = None,
        key: str = "offload.disk",
    ) -> None:
        self._memory = memory
        self._buffers: dict[int, tuple[Tensor, int]] = {}
        """A dict from the storage of each placeholder (`UntypedStorage._cdata`) to the placeholder
        and the offset of its buffer in the file, in bytes."""
        self._stop = 0
        """Offset of the end of the last buffer in the file, in bytes."""
        self.error: BaseException | None = None
        """First error of a read, an update or a write; None without an error. After an error, some
        states are updated and others are not, so the states must not be used."""
        self._condition = threading.Condition()
        """Protects `error`, `_free`, and `_Transfer.may_begin`."""
        self._free: list[Tensor] = []
        """Buffers in host memory that no chunk uses now."""
        self.staging_bytes = staging_bytes(sizes)
        """Bytes of all buffers in host memory in which states are updated."""
        for _ in range(min(BUFFERS, len(sizes))):
            flat = memory.new(max(sizes) + ALIGNED, torch.uint8, Tier.HOST)
            self._free.append(align(flat)[: max(sizes)])
        self._reads: dict[int, _Transfer] = {}
        """Reads of states for which no update has waited yet, by the number of the chunk."""
        self._writes: list[_Transfer] = []
        """Writes of updated states that `flush` has not waited for yet, in the order of their
        start."""
        self._copies = memory.copies if links is None else "early"
        self._chance = random.Random(0)
        self._file: StateFile | None = None
        if not self._free[0].is_meta:
            self._file = StateFile(Path(directory), rank, sum(sizes), key)
            weakref.finalize(self, self._file.close)
        self._read_pace = None if links is None else Pace(links.disk_read)
        self._write_pace = None if links is None else Pace(links.disk_write)
        self._reader = ThreadPoolExecutor(1, "reads states")
        self._writer = ThreadPoolExecutor(1, "writes states")

    # -- buffers ---------------------------------------------------------------------------------

    def new(self, length: int, dtype: torch.dtype) -> Tensor:
        """Return the placeholder of a new 1-D buffer of `length` zeros. Raises ConfigError if the
        disk is full."""
        size = round_up(length * dtype.itemsize)
        whole = self._memory.new(size // dtype.itemsize, dtype, Tier.DISK)
        self._buffers[whole.untyped_storage()._cdata] = whole, self._stop
        self._stop += size
        if self._file is not None:
            self._file.extend(self._stop)
        return whole[:length]

    def has(self, flat: Tensor) -> bool:
        """Return True if a tensor is a placeholder or a view of a placeholder."""
        return flat.is_meta and flat.untyped_storage()._cdata in self._buffers

    def read(self, flat: Tensor) -> Tensor:
        """Return the elements of a 1-D tensor: a copy in host memory if the tensor is on disk,
        otherwise the tensor itself. Raises OptimusError if the file cannot be read."""
        if not self.has(flat):
            return flat
        at = self._range_of(flat)
        buffer, values = at.new_buffer()
        self._open_file.read(at.aligned_start, buffer)
        return values.view(flat.dtype)

    def map(self, flat: Tensor) -> Tensor:
        """Return a tensor with the elements of a 1-D tensor on disk. The returned tensor is a
        memory map of the file, and takes memory only in the page cache. The map is valid until the
        next write to the file. Changes of the map do not change the file. Call `flush` first."""
        start = self._range_of(flat).start
        first = start // mmap.ALLOCATIONGRANULARITY * mmap.ALLOCATIONGRANULARITY
        if not len(flat):
            return torch.empty(0, dtype=flat.dtype)
        mapped = self._open_file.map(first, start + flat.nbytes - first)
        return torch.frombuffer(mapped, dtype=flat.dtype, count=len(flat), offset=start - first)

    def write(self, into: Tensor, values: Tensor) -> None:
        """Copy `values` to `into`, a 1-D tensor on disk or in memory. Do nothing if `values` is
        `into` itself. Raises OptimusError if the file cannot be read or written."""
        if self._file is None or not self.has(into):
            if into.data_ptr() != values.data_ptr():
                into.copy_(values)
            return
        batches = into.split(_BATCH_ELEMENTS), values.split(_BATCH_ELEMENTS)
        for target, source in zip(*batches, strict=True):
            at = self._range_of(target)
            buffer, content = at.new_buffer()
            if at.start > at.aligned_start:
                self._open_file.read(at.aligned_start, buffer[:ALIGNED])
            if at.stop < at.aligned_stop:
                self._open_file.read(at.aligned_stop - ALIGNED, buffer[-ALIGNED:])
            content.view(target.dtype).copy_(source)
            self._open_file.write(at.aligned_start, buffer)

    def zero(self, flat: Tensor) -> None:
        """Set all elements of a 1-D tensor on disk or in memory to zero. Raises OptimusError if the
        file cannot be written."""
        for batch in flat.split(_BATCH_ELEMENTS):
            self.write(batch, torch.zeros(len(batch), dtype=flat.dtype, device="cpu"))

    def _range_of(self, flat: Tensor) -> _Range:
        offset = self._buffers[flat.untyped_storage()._cdata][1]
        start = offset + int(flat.storage_offset()) * flat.itemsize
        stop = start + flat.nbytes
        return _Range(start, stop, start // ALIGNED * ALIGNED, round_up(stop))

    @property
    def path(self) -> Path:
        """Path of the file."""
        return self._open_file.path

    @property
    def _open_file(self) -> StateFile:
        assert self._file is not None, "the states are on the meta device"
        return self._file

    # -- updates ---------------------------------------------------------------------------------

    def begin_read(self, number: int, states: Mapping[str, Tensor]) -> None:
        """Start to read the states of a chunk for an update. The read begins as soon as a host
        buffer is free. Call `flush` before the first chunk of an optimizer step.

        Args:
            number: Number of the chunk.
            states: The placeholders of the states by name, in the order in which successive calls
                of `new` have returned them.
        """
        assert number not in self._reads, f"chunk {number} is being read already"
        read = self._reads[number] = self._new_transfer()
        read.job = self._reader.submit(self._read_states, states, read, time.monotonic())

    @contextlib.contextmanager
    def updating(self, number: int) -> Iterator[dict[str, Tensor]]:
        """Context manager that waits until the states of a chunk are read, and yields the states in
        host memory, by name, to be updated in place. At the end of the context, the write of the
        updated states begins. Chunks must be updated in the order of the calls of `begin_read`.

        Raises:
            OptimusError: A read or a write has failed.
        """
        try:
            read = self._wait_for(self._reads.pop(number))
            if read.cancelled():
                self.check()
            staged = read.result()
            yield staged.tensors
            if self._memory.poison:
                old = torch.full((len(staged.content) + ALIGNED,), _NAN_BYTE, dtype=torch.uint8)
                self._open_file.write(staged.start, align(old)[: len(staged.content)])
            write = self._new_transfer()
            # After the end of the main thread, `submit` raises an error. The call of `fail` below
            # then also ends a read that waits for this buffer.
            write.job = self._writer.submit(self._write_states, staged, write, time.monotonic())
        except BaseException as error:
            self.fail(error)
            raise
        with self._condition:
            self._writes.append(write)
            self._condition.notify_all()

    def flush(self) -> None:
        """Wait until all writes are complete. Raises the first error of a read, an update or a
        write."""
        while self._writes:
            self._wait_for(self._writes.pop(0))  # does not raise errors; `check` does
        self.check()

    def check(self) -> None:
        """Raise the first error of a read, an update or a write, if there is one."""
        if self.error is not None:
            raise self.error

    def fail(self, error: BaseException) -> None:
        """Make the present update and all later updates raise `error`, or the earlier error if
        there is one."""
        with self._condition:
            self.error = self.error or error
            self._condition.notify_all()

    def close(self) -> None:
        """End the threads and remove the file. The states must not be used afterwards."""
        self.fail(
            OptimusError(
                "the file of the states on disk is closed; the states can no longer be used"
            )
        )
        for pool in (self._reader, self._writer):
            pool.shutdown(cancel_futures=True)
        if self._file is not None:
            self._file.close()

    def _new_transfer(self) -> _Transfer:
        is_late = self._copies == "random" and self._chance.random() < 0.5
        return _Transfer(may_begin=not (is_late or self._copies == "late"))

    def _wait_for(self, transfer: _Transfer) -> Future[Any]:
        """Wait until a read or a write is complete or cancelled."""
        with self._condition:
            transfer.may_begin = True
            self._condition.notify_all()
        assert transfer.job is not None
        with contextlib.suppress(CancelledError):
            # Not `concurrent.futures.wait`, which never returns for a job that `shutdown` cancels.
            transfer.job.exception()
        return transfer.job

    def _begin(self, transfer: _Transfer) -> None:
        """Wait until `transfer`, a read or a write, is allowed to begin (`_Transfer.may_begin`)."""
        with self._condition:
            may_begin = self._condition.wait_for(
                lambda: transfer.may_begin or self.error is not None, _LATE_S
            )
        assert may_begin, "no code waits for a read or a write of states"
        self.check()

    def _new_buffer(self) -> Tensor:
        """Return a free buffer of host memory. Wait until there is one."""
        with self._condition:
            while not self._free:
                self.check()
                for write in self._writes:  # a late write must run now, so that it frees its buffer
                    write.may_begin = True
                self._condition.notify_all()
                self._condition.wait()
            self.check()
            return self._free.pop()

    def _read_states(self, states: Mapping[str, Tensor], read: _Transfer, ready: float) -> _Staged:
        try:
            self._begin(read)
            buffer = self._new_buffer()
            if self._memory.poison:
                buffer.fill_(_NAN_BYTE)
            start = stop = self._range_of(next(iter(states.values()))).start
            tensors = {}
            for name, flat in states.items():
                at = self._range_of(flat)
                assert at.start == stop, "the states of a chunk are not adjacent in the file"
                tensors[name] = buffer[at.start - start :][: flat.nbytes].view(flat.dtype)
                stop = at.aligned_stop
            staged = _Staged(start, buffer[: stop - start], tensors, buffer)
            self._keep_pace(self._read_pace, staged, ready)
            self._open_file.read(start, staged.content)
            return staged
        except BaseException as error:
            self.fail(error)
            raise

    def _write_states(self, staged: _Staged, write: _Transfer, ready: float) -> None:
        try:
            self._begin(write)
            self._keep_pace(self._write_pace, staged, ready)
            self._open_file.write(staged.start, staged.content)
            if self._memory.poison:
                staged.buffer.fill_(_NAN_BYTE)
            with self._condition:
                self._free.append(staged.buffer)
                self._condition.notify_all()
        except BaseException as error:
            self.fail(error)
            raise

    @staticmethod
    def _keep_pace(pace: Pace | None, staged: _Staged, ready: float) -> None:
        """Wait for as long as the emulated disk needs for a transfer. The caller moves the bytes
        only after this wait. Code that uses the bytes without waiting for the transfer therefore
        computes wrong results, which tests detect."""
        if pace is not None:
            pace.run(lambda: None, len(staged.content), ready)


@dataclass
class _Transfer:
    """A read or a write of the states of a chunk. The transfer begins as soon as its thread is
    free. In tests, a late transfer (`Memory.copies`) begins only when code waits for the
    transfer."""

    may_begin: bool
    """False for a late transfer until code waits for it."""
    job: Future[Any] | None = None


class _Staged(NamedTuple):
    """States of a chunk in host memory."""

    start: int
    """First byte in the file."""
    content: Tensor
    """All bytes of the states, as a 1-D uint8 view of `buffer`."""
    tensors: dict[str, Tensor]
    """The states by name, views of `content`."""
    buffer: Tensor
    """The whole buffer of host memory, 1-D uint8. `content` is its first elements."""


class _Range(NamedTuple):
    """Offsets in the file: the bytes [start, stop) of a tensor, and the smallest aligned range that
    contains them."""

    start: int
    stop: int
    aligned_start: int
    aligned_stop: int

    def new_buffer(self) -> tuple[Tensor, Tensor]:
        """Return a new uint8 buffer for the aligned range, and its view for [start, stop)."""
        size = self.aligned_stop - self.aligned_start
        buffer = align(torch.empty(size + ALIGNED, dtype=torch.uint8))[:size]
        return buffer, buffer[self.start - self.aligned_start :][: self.stop - self.start]
