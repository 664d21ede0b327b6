"""Tier of memory for optimizer states on disk: one file per rank.

A buffer on disk has a placeholder, a tensor on the meta device, which has a dtype and a length but
no memory. `DiskTier.read` and `DiskTier.write` accept placeholders and views of them, and also
tensors in memory.

For an update, the states of a chunk are read to a buffer in host memory, updated there, and written
back. The number of these buffers is constant. While the host updates a chunk, the states of the
next chunks are read, and those of the previous ones are written. The file is read and written with
O_DIRECT, so that states take no memory in the page cache.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import stat
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from optimus.chunks.memory import Memory, Pace, Tier
from optimus.config.machine import Links
from optimus.errors import ConfigError, OptimusError, counted, reason_of
from optimus.io.files import Closing

logger = logging.getLogger(__name__)

BUFFERS = 4
"""Largest number of buffers in host memory: the states of one chunk are read, those of another are
updated, and those of a third are written. The fourth lets a read begin while a thread waits for a
core."""
BLOCK_BYTES = 4 << 20
"""Bytes of a read or a write, as in optimus/checkpoint/shard_file.py."""
THREADS = 4
"""Number of threads that read, and of threads that write. A disk is fastest with several requests
at the same time."""
_ALIGNED = 4096
"""O_DIRECT needs offsets, sizes and addresses that are multiples of this number of bytes."""
_BATCH_ELEMENTS = 1 << 22
"""Largest number of elements that `DiskTier.write` copies at a time."""
_LOCK_S = 2.0
"""Seconds for which another rank of the same run may lock a file to remove it."""
_NAME = "optimus-states-rank"
_FLAGS = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
"""Flags of open(2). O_NOFOLLOW: a link could lead to a file elsewhere. O_NONBLOCK: a FIFO would
block."""
_NAN_BYTE = 0xFF
"""A float of which all bytes have this value is NaN."""


def file_bytes(length: int, dtypes: Iterable[torch.dtype]) -> int:
    """Return the bytes in the file for buffers of `length` elements, one of each dtype."""
    return sum(_round_up(length * dtype.itemsize) for dtype in dtypes)


def staging_bytes(sizes: Sequence[int]) -> int:
    """Return the bytes of the buffers in host memory through which updates move the states.

    Args:
        sizes: The result of `file_bytes` for the states of each chunk.
    """
    return min(BUFFERS, len(sizes)) * (max(sizes, default=0) + _ALIGNED)


def free_bytes(directory: Path) -> int:
    """Return the bytes that the files of a new run may have in a directory: the free bytes, and
    those of the files of processes that have ended. Raises ConfigError."""
    try:
        disk = os.statvfs(directory)
        stale = sum(path.stat().st_blocks * 512 for path in directory.glob(f"{_NAME}*"))
        return disk.f_bavail * disk.f_frsize + stale
    except OSError as error:
        raise ConfigError(
            f"offload.disk = '{directory}': {reason_of(error)}; use another directory"
        ) from None


class DiskTier(Closing):
    """Buffers on disk, and the states of chunks while they are updated.

    The file is created with its full size. It is locked, so that no other run uses it, and removed
    by `close` or at the end of the process. The file of a process that was killed is replaced. On
    the meta device, there is no file and no thread.

    Args:
        memory: Allocates the buffers in host memory, and counts their bytes and those on disk.
        directory: `offload.disk`.
        rank: Number of this rank, part of the name of the file.
        sizes: The result of `file_bytes` for the states of each chunk. Their sum is the first size
            of the file; `new` extends the file if it is full.
        links: Rates of an emulated device; None to read and write as fast as the disk does.

    Raises:
        ConfigError: The file cannot be created, another run uses it, or the disk is full.
    """

    def __init__(
        self,
        memory: Memory,
        directory: str,
        rank: int,
        sizes: Sequence[int],
        links: Links | None = None,
    ) -> None:
        self._memory = memory
        self._buffers: dict[int, tuple[Tensor, int]] = {}
        """Placeholder and offset in the file of each buffer, by its storage."""
        self._stop = 0
        """End of the last buffer in the file."""
        self.error: BaseException | None = None
        """First error of a read, an update or a write. The states are then partly updated and must
        not be used."""
        self._condition = threading.Condition()
        """Protects `error` and `_free`."""
        self._free: list[Tensor] = []
        """Buffers in host memory that no chunk uses now."""
        self.staging_bytes = staging_bytes(sizes)
        """Bytes of the buffers in host memory."""
        for _ in range(min(BUFFERS, len(sizes))):
            flat = memory.new(max(sizes) + _ALIGNED, torch.uint8, Tier.HOST)
            self._free.append(_align(flat)[: max(sizes)])
        self._reads: dict[int, Future[_Staged]] = {}
        """States that are read for an update, by the number of the chunk."""
        self._writes: list[Future[None]] = []
        self._file: _StateFile | None = None
        if not self._free[0].is_meta:
            self._file = _StateFile(Path(directory), rank, sum(sizes))
            weakref.finalize(self, self._file.close)
        self._read_pace = None if links is None else Pace(links.disk_read)
        self._write_pace = None if links is None else Pace(links.disk_write)
        self._reader = ThreadPoolExecutor(1, "reads states")
        self._writer = ThreadPoolExecutor(1, "writes states")

    # -- buffers ---------------------------------------------------------------------------------

    def new(self, length: int, dtype: torch.dtype) -> Tensor:
        """Return the placeholder of a new buffer of `length` zeros. Raises ConfigError if the disk
        is full."""
        size = _round_up(length * dtype.itemsize)
        whole = self._memory.new(size // dtype.itemsize, dtype, Tier.DISK)
        self._buffers[whole.untyped_storage()._cdata] = whole, self._stop
        self._stop += size
        if self._file is not None:
            self._file.extend(self._stop)
        return whole[:length]

    def has(self, flat: Tensor) -> bool:
        """Return True if a tensor is a placeholder or a view of it."""
        return flat.is_meta and flat.untyped_storage()._cdata in self._buffers

    def read(self, flat: Tensor) -> Tensor:
        """Return the elements of a 1-D tensor: a copy in host memory if it is on disk, otherwise
        the tensor itself. Raises OptimusError."""
        if not self.has(flat):
            return flat
        at = self._range_of(flat)
        buffer, values = at.new_buffer()
        self._open_file.read(at.aligned_start, buffer)
        return values.view(flat.dtype)

    def write(self, into: Tensor, values: Tensor) -> None:
        """Copy `values` to a 1-D tensor on disk or in memory. Do nothing if they are the same
        tensor. Raises OptimusError."""
        if self._file is None or not self.has(into):
            if into.data_ptr() != values.data_ptr():
                into.copy_(values)
            return
        batches = into.split(_BATCH_ELEMENTS), values.split(_BATCH_ELEMENTS)
        for target, source in zip(*batches, strict=True):
            at = self._range_of(target)
            buffer, content = at.new_buffer()
            if at.start > at.aligned_start:
                self._open_file.read(at.aligned_start, buffer[:_ALIGNED])
            if at.stop < at.aligned_stop:
                self._open_file.read(at.aligned_stop - _ALIGNED, buffer[-_ALIGNED:])
            content.view(target.dtype).copy_(source)
            self._open_file.write(at.aligned_start, buffer)

    def zero(self, flat: Tensor) -> None:
        """Set all elements of a 1-D tensor on disk or in memory to zero. Raises OptimusError."""
        for batch in flat.split(_BATCH_ELEMENTS):
            self.write(batch, torch.zeros(len(batch), dtype=flat.dtype, device="cpu"))

    def _range_of(self, flat: Tensor) -> _Range:
        offset = self._buffers[flat.untyped_storage()._cdata][1]
        start = offset + int(flat.storage_offset()) * flat.itemsize
        stop = start + flat.nbytes
        return _Range(start, stop, start // _ALIGNED * _ALIGNED, _round_up(stop))

    @property
    def path(self) -> Path:
        """Path of the file."""
        return self._open_file.path

    @property
    def _open_file(self) -> _StateFile:
        assert self._file is not None, "the states are on the meta device"
        return self._file

    # -- updates ---------------------------------------------------------------------------------

    def begin_read(self, number: int, states: Mapping[str, Tensor]) -> None:
        """Start to read the states of a chunk for an update, as soon as a buffer is free. Before
        the first chunk of an update, call `flush`.

        Args:
            number: Number of the chunk.
            states: The placeholders by name, made one directly after the other by `new`.
        """
        assert number not in self._reads, f"chunk {number} is being read already"
        self._reads[number] = self._reader.submit(self._read_states, states, time.monotonic())

    @contextlib.contextmanager
    def updating(self, number: int) -> Iterator[dict[str, Tensor]]:
        """Wait until the states of a chunk are read. Return a context manager that yields them in
        host memory, to be updated in place. At its end, they begin to be written. Chunks must be
        updated in the order of `begin_read`.

        Raises:
            OptimusError: A read or a write has failed.
        """
        staged = self._reads.pop(number).result()
        try:
            yield staged.tensors
        except BaseException as error:
            self.fail(error)
            raise
        self._writes.append(self._writer.submit(self._write_states, staged, time.monotonic()))

    def flush(self) -> None:
        """Wait until all writes are complete. Raises the first error of a read, an update or a
        write."""
        while self._writes:
            self._writes.pop().exception()  # waits; `error` has the first exception of all
        self.check()

    def check(self) -> None:
        """Raise the first error of a read, an update or a write, if there is one."""
        if self.error is not None:
            raise self.error

    def fail(self, error: BaseException) -> None:
        """Make this and all later updates fail with `error`, unless they fail already."""
        with self._condition:
            self.error = self.error or error
            self._condition.notify_all()

    def close(self) -> None:
        """End the threads and remove the file. The states must not be used afterwards."""
        self.fail(OptimusError("the states on disk are closed"))
        for pool in (self._reader, self._writer):
            pool.shutdown(cancel_futures=True)
        if self._file is not None:
            self._file.close()

    def _read_states(self, states: Mapping[str, Tensor], ready: float) -> _Staged:
        try:
            with self._condition:
                self._condition.wait_for(lambda: self._free or self.error is not None)
                self.check()
                buffer = self._free.pop()
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

    def _write_states(self, staged: _Staged, ready: float) -> None:
        try:
            self.check()
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
        """Wait for the time that an emulated disk takes. The bytes move at the end of this time, so
        that a missing wait changes results."""
        if pace is not None:
            pace.run(lambda: None, len(staged.content), ready)


class _Staged(NamedTuple):
    """States of a chunk in host memory."""

    start: int
    """First byte in the file."""
    content: Tensor
    """All bytes of the states, uint8."""
    tensors: dict[str, Tensor]
    """The states by name, views of `content`."""
    buffer: Tensor
    """The buffer that begins with `content`."""


class _Range(NamedTuple):
    """Bytes of a view in the file, and the smallest aligned range that contains them."""

    start: int
    stop: int
    aligned_start: int
    aligned_stop: int

    def new_buffer(self) -> tuple[Tensor, Tensor]:
        """Return a new uint8 buffer for the aligned range, and the view of it for the bytes."""
        size = self.aligned_stop - self.aligned_start
        buffer = _align(torch.empty(size + _ALIGNED, dtype=torch.uint8))[:size]
        return buffer, buffer[self.start - self.aligned_start :][: self.stop - self.start]


class _StateFile(Closing):
    """A locked file with threads that read and write it.

    Args:
        directory: Directory of the file.
        rank: Number in the name of the file.
        size: Bytes of the file.

    Raises:
        ConfigError: The file cannot be created, another process has locked it, or the disk is full.
    """

    def __init__(self, directory: Path, rank: int, size: int) -> None:
        self.path = directory / f"{_NAME}{rank:05d}"
        self._remove_stale(directory)
        self._size = 0
        self._lock = self._fd = -1
        try:
            self._lock = _open_locked(self.path)
            os.ftruncate(self._lock, 0)
            self.extend(size)
            self._fd = self._open_direct()
        except OSError as error:
            self.close()
            raise _cannot_create(self.path, error) from None
        except BaseException:
            self.close()
            raise
        self._readers = ThreadPoolExecutor(THREADS, "reads blocks")
        self._writers = ThreadPoolExecutor(THREADS, "writes blocks")

    def _remove_stale(self, directory: Path) -> None:
        """Remove the files of processes that have ended without removing them."""
        for path in directory.glob(f"{_NAME}*"):
            if path != self.path:
                with contextlib.suppress(OSError):
                    fd = os.open(path, _FLAGS)
                    try:
                        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                        path.unlink()
                    finally:
                        os.close(fd)

    def _open_direct(self) -> int:
        """Open the locked file with O_DIRECT, or without if its file system does not support
        this."""
        try:
            fd = os.open(self.path, _FLAGS | os.O_DIRECT)
            block = _align(torch.zeros(2 * _ALIGNED, dtype=torch.uint8))[:_ALIGNED]
            try:
                os.preadv(fd, [block.numpy().data], 0)
            except OSError:
                os.close(fd)
                raise
            return fd
        except (OSError, AttributeError) as error:  # macOS has no O_DIRECT
            if isinstance(error, OSError) and error.errno not in (errno.EINVAL, errno.ENOTSUP):
                raise
        logger.warning(
            "%s: its file system has no direct reads and writes (O_DIRECT); the states on disk "
            "also take memory in the page cache",
            self.path.parent,
        )
        return os.open(self.path, _FLAGS)

    def extend(self, size: int) -> None:
        """Extend the file to `size` bytes, and allocate them on the disk. Raises ConfigError."""
        more = size - self._size
        if more <= 0:
            return
        try:
            disk = os.statvfs(self.path.parent)
            missing = more - disk.f_bavail * disk.f_frsize
            if missing > 0:  # otherwise the disk would be full until posix_fallocate has failed
                raise ConfigError(
                    f"offload.disk: {self.path} needs {counted(more, 'byte')}, {missing:,} more "
                    "than are free; use another directory, or a smaller offload.disk_share"
                )
            os.posix_fallocate(self._lock, self._size, more)
        except OSError as error:
            raise ConfigError(
                f"offload.disk: cannot allocate {counted(more, 'byte')} for {self.path}: "
                f"{reason_of(error)}; use another directory, or a smaller offload.disk_share"
            ) from None
        self._size = size

    def read(self, start: int, buffer: Tensor) -> None:
        """Fill an aligned uint8 buffer with the bytes from `start`. Raises OptimusError."""
        self._move(os.preadv, self._readers, start, buffer)

    def write(self, start: int, buffer: Tensor) -> None:
        """Write an aligned uint8 buffer to the bytes from `start`. Raises OptimusError."""
        self._move(os.pwritev, self._writers, start, buffer)

    def _move(
        self, call: Callable[..., int], pool: ThreadPoolExecutor, start: int, buffer: Tensor
    ) -> None:
        content = buffer.numpy().data
        blocks = range(0, len(content), BLOCK_BYTES)
        move = partial(self._move_block, call)
        jobs = [pool.submit(move, content[at : at + BLOCK_BYTES], start + at) for at in blocks]
        try:
            for job in jobs:
                job.result()
        except OSError as error:
            verb = "read" if call is os.preadv else "write"
            raise OptimusError(
                f"offload.disk: cannot {verb} {self.path}: {reason_of(error)}; check the disk, and "
                "give the same command again to resume from the newest checkpoint"
            ) from None
        finally:
            wait(jobs)  # the memory must not be used while a thread still reads or writes it

    def _move_block(self, call: Callable[..., int], block: memoryview, at: int) -> None:
        while block:
            count = call(self._fd, [block], at)
            if count <= 0 or count % _ALIGNED:
                raise OSError(errno.EIO, f"{count} of {counted(len(block), 'byte')} at byte {at}")
            block, at = block[count:], at + count

    def close(self) -> None:
        """Remove the file. May be called more than once."""
        if self._lock < 0:
            return
        for pool in (getattr(self, "_readers", None), getattr(self, "_writers", None)):
            if pool is not None:
                pool.shutdown()
        with contextlib.suppress(OSError):
            self.path.unlink()
        for fd in {self._fd, self._lock} - {-1}:
            os.close(fd)
        self._fd = self._lock = -1


def check_directory(directory: str, ranks: Iterable[int]) -> None:
    """Check that ranks with these numbers can create their files in `offload.disk`. Creates no
    file.

    Raises:
        ConfigError: The directory is missing or not writable, or another run uses a file.
    """
    for rank in ranks:
        path = Path(directory) / f"{_NAME}{rank:05d}"
        try:
            fd = os.open(path, _FLAGS)
        except FileNotFoundError:
            continue
        except OSError as error:
            raise _cannot_create(path, error) from None
        try:
            if not stat.S_ISREG(os.fstat(fd).st_mode):
                raise _cannot_create(path, OSError(errno.EINVAL, "not a regular file"))
            fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            raise _in_use(path) from None
        finally:
            os.close(fd)
    kind = errno.ENOENT
    if os.path.lexists(directory):
        kind = errno.EACCES if os.path.isdir(directory) else errno.ENOTDIR
    if kind != errno.EACCES or not os.access(directory, os.W_OK | os.X_OK):
        path = Path(directory) / f"{_NAME}00000"
        raise _cannot_create(path, OSError(kind, os.strerror(kind)))


def _cannot_create(path: Path, error: OSError) -> ConfigError:
    return ConfigError(
        f"offload.disk: cannot create {path}: {reason_of(error)}; use another directory"
    )


def _in_use(path: Path) -> ConfigError:
    return ConfigError(
        f"offload.disk = '{path.parent}': another run uses {path.name}; wait for its end, or use "
        "another directory"
    )


def _open_locked(path: Path) -> int:
    """Create a file, or open the file of a process that has ended, and lock it.

    Raises:
        OSError: The file cannot be created, or is not a regular file.
        ConfigError: Another process has locked it.
    """
    deadline = time.monotonic() + _LOCK_S
    while True:
        fd = os.open(path, _FLAGS | os.O_CREAT, 0o600)
        try:
            if not stat.S_ISREG(os.fstat(fd).st_mode):
                raise OSError(errno.EINVAL, "not a regular file")
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.fstat(fd).st_nlink:
                return fd
            os.close(fd)  # another process has removed it since the call of open
        except BlockingIOError:
            os.close(fd)
            if time.monotonic() > deadline:
                raise _in_use(path) from None
            time.sleep(0.05)
        except BaseException:
            os.close(fd)
            raise


def _round_up(size: int) -> int:
    return -(-size // _ALIGNED) * _ALIGNED


def _align(buffer: Tensor) -> Tensor:
    """Return the view of a uint8 buffer from its first aligned address."""
    return buffer[-buffer.data_ptr() % _ALIGNED :]
