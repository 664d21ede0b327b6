"""File for the states of a rank on disk. The file is locked against other processes, and several
threads read and write it.

Reads and writes use O_DIRECT, which bypasses the page cache. The offsets, sizes and addresses of
reads and writes must therefore be multiples of `ALIGNED` bytes. `optimus.chunks.disk` pads every
transfer.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import mmap
import os
import re
import stat
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from optimus.errors import ConfigError, OptimusError, counted, reason_of
from optimus.io.files import Closing

logger = logging.getLogger(__name__)

BLOCK_BYTES = 4 << 20
"""Largest number of bytes that a single read or write transfers, as in
optimus/checkpoint/shard_file.py."""
THREADS = 4
"""Number of threads that read. The same number of other threads write. A disk is fastest with
several requests at the same time."""
ALIGNED = 4096
"""O_DIRECT needs offsets, sizes and addresses that are multiples of this number of bytes."""
_LOCK_S = 2.0
"""Time, in seconds, to wait for a lock. Another rank of the same run can lock a file of an earlier
run for a short time, to remove the file."""
_NAME = "optimus-states-rank"
_NUMBERED = re.compile(_NAME + "([0-9]{5}|[1-9][0-9]{5,})")
_KEY = "offload.disk"
_locked_here: set[Path] = set()
"""Resolved paths of the files that this process has locked."""
_FLAGS = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
"""Flags of open(2). O_NOFOLLOW: a link could lead to a file elsewhere. O_NONBLOCK: a FIFO would
block."""


def free_bytes(directory: Path, key: str = _KEY) -> int:
    """Return the bytes that a directory has for the files of a new run: the free bytes, plus the
    bytes of the files that earlier runs have left in this directory.

    Raises:
        ConfigError: The directory cannot be read. The message contains `key`, the name of the
            setting with the directory.
    """
    try:
        disk = os.statvfs(directory)
        stale = sum(path.stat().st_blocks * 512 for path in _state_files(directory))
        return disk.f_bavail * disk.f_frsize + stale
    except OSError as error:
        raise ConfigError(
            f"{key} = '{directory}': {reason_of(error)}; use another directory"
        ) from None


def _state_files(directory: Path) -> Iterator[Path]:
    """Yield the paths of the files of runs in a directory. Other files belong to users."""
    return (path for path in directory.glob(f"{_NAME}*") if _NUMBERED.fullmatch(path.name))


class StateFile(Closing):
    """A locked file with threads that read and write it.

    Args:
        directory: Directory of the file.
        rank: Number in the name of the file.
        size: First size of the file, in bytes. `extend` increases it.
        key: Name of the setting with the directory, for messages.

    Raises:
        ConfigError: The file cannot be created or is locked already, or the disk is full.
    """

    def __init__(self, directory: Path, rank: int, size: int, key: str = _KEY) -> None:
        self._key = key
        self.path = directory / f"{_NAME}{rank:05d}"
        self._remove_stale(directory)
        self._size = 0
        self._lock = self._fd = -1
        try:
            self._lock = open_locked(self.path, key)
            _locked_here.add(self.path.resolve())
            os.ftruncate(self._lock, 0)
            self.extend(size)
            self._fd = self._open_direct()
        except OSError as error:
            self.close()
            raise _cannot_create(self.path, error, key) from None
        except BaseException:
            self.close()
            raise
        self._readers = ThreadPoolExecutor(THREADS, "reads blocks")
        self._writers = ThreadPoolExecutor(THREADS, "writes blocks")

    def _remove_stale(self, directory: Path) -> None:
        """Remove the files of ended processes: those that no process has locked."""
        for path in _state_files(directory):
            if path != self.path:
                with contextlib.suppress(OSError):
                    fd = os.open(path, _FLAGS)
                    try:
                        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                        path.unlink()
                    finally:
                        os.close(fd)

    def _open_direct(self) -> int:
        """Open the locked file with O_DIRECT, or without O_DIRECT if the file system does not
        support O_DIRECT. Return the file descriptor."""
        try:
            fd = os.open(self.path, _FLAGS | os.O_DIRECT)
            block = align(torch.zeros(2 * ALIGNED, dtype=torch.uint8))[:ALIGNED]
            try:
                os.preadv(fd, [block.numpy().data], 0)
            except OSError:
                os.close(fd)
                raise
            return fd
        except (OSError, AttributeError) as error:  # AttributeError: macOS has no O_DIRECT
            if isinstance(error, OSError) and error.errno not in (errno.EINVAL, errno.ENOTSUP):
                raise
        logger.warning(
            "%s: the file system of this directory has no direct reads and writes (O_DIRECT); the "
            "states on disk also take memory in the page cache",
            self.path.parent,
        )
        return os.open(self.path, _FLAGS)

    def extend(self, size: int) -> None:
        """Extend the file to `size` bytes, and allocate the additional bytes on the disk. Raises
        ConfigError if the disk has fewer free bytes."""
        more = size - self._size
        if more <= 0:
            return
        try:
            disk = os.statvfs(self.path.parent)
            missing = more - disk.f_bavail * disk.f_frsize
            if missing > 0:  # posix_fallocate would fill the disk before it fails
                raise ConfigError(
                    f"{self._key}: {self.path} needs {counted(more, 'byte')}, {missing:,} more "
                    "than are free; use a directory with more space, or keep fewer states on disk"
                )
            os.posix_fallocate(self._lock, self._size, more)
        except OSError as error:
            raise ConfigError(
                f"{self._key}: cannot allocate {counted(more, 'byte')} for {self.path}: "
                f"{reason_of(error)}; use another directory, or keep fewer states on disk"
            ) from None
        self._size = size

    def map(self, start: int, size: int) -> mmap.mmap:
        """Return a memory map of `size` bytes of the file from offset `start`. Changes of the map
        do not change the file."""
        return mmap.mmap(self._lock, size, access=mmap.ACCESS_COPY, offset=start)

    def read(self, start: int, buffer: Tensor) -> None:
        """Fill an aligned uint8 buffer with the bytes of the file from offset `start`. Raises
        OptimusError if a read fails."""
        self._move(os.preadv, self._readers, start, buffer)

    def write(self, start: int, buffer: Tensor) -> None:
        """Write an aligned uint8 buffer to the bytes of the file from offset `start`. Raises
        OptimusError if a write fails."""
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
                f"{self._key}: cannot {verb} {self.path}: {reason_of(error)}; check the disk, and "
                "start again from the newest checkpoint"
            ) from None
        finally:
            wait(jobs)  # the memory must not be used while a thread still reads or writes it

    def _move_block(self, call: Callable[..., int], block: memoryview, at: int) -> None:
        while block:
            count = call(self._fd, [block], at)
            if count <= 0 or count % ALIGNED:
                raise OSError(errno.EIO, f"{count} of {counted(len(block), 'byte')} at byte {at}")
            block, at = block[count:], at + count

    def close(self) -> None:
        """Remove the file. Later calls do nothing."""
        if self._lock < 0:
            return
        for pool in (getattr(self, "_readers", None), getattr(self, "_writers", None)):
            if pool is not None:
                pool.shutdown()
        _locked_here.discard(self.path.resolve())
        with contextlib.suppress(OSError):
            self.path.unlink()
        for fd in {self._fd, self._lock} - {-1}:
            os.close(fd)
        self._fd = self._lock = -1


def check_directory(directory: str, ranks: Iterable[int], key: str = _KEY) -> None:
    """Check that the ranks with the numbers `ranks` can create their files in `directory`, the
    value of the setting `key`. This function creates no file.

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
            raise _cannot_create(path, error, key) from None
        try:
            if not stat.S_ISREG(os.fstat(fd).st_mode):
                raise _cannot_create(path, OSError(errno.EINVAL, "not a regular file"), key)
            fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            raise _in_use(path, key) from None
        finally:
            os.close(fd)
    kind = errno.ENOENT
    if os.path.lexists(directory):
        kind = errno.EACCES if os.path.isdir(directory) else errno.ENOTDIR
    if kind != errno.EACCES or not os.access(directory, os.W_OK | os.X_OK):
        path = Path(directory) / f"{_NAME}00000"
        raise _cannot_create(path, OSError(kind, os.strerror(kind)), key)


def _cannot_create(path: Path, error: OSError, key: str) -> ConfigError:
    return ConfigError(f"{key}: cannot create {path}: {reason_of(error)}; use another directory")


def _in_use(path: Path, key: str) -> ConfigError:
    user, remedy = "another run", "wait for its end"
    if path.resolve() in _locked_here:
        user, remedy = "another optimizer of this process", "call its close()"
    return ConfigError(
        f"{key} = '{path.parent}': {user} uses {path.name}; {remedy}, or use another directory"
    )


def open_locked(path: Path, key: str = _KEY) -> int:
    """Create a file, or open the file that an ended process has left. Lock the file, and return the
    file descriptor.

    Raises:
        OSError: The file cannot be created, or is not a regular file.
        ConfigError: Another process, or another StateFile of this process, has locked the file.
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
            os.close(fd)  # another process has removed the file since the call of open
        except BlockingIOError:
            os.close(fd)
            if time.monotonic() > deadline or path.resolve() in _locked_here:
                raise _in_use(path, key) from None
            time.sleep(0.05)
        except BaseException:
            os.close(fd)
            raise


def round_up(size: int) -> int:
    """Return `size`, rounded up to a multiple of ALIGNED."""
    return -(-size // ALIGNED) * ALIGNED


def align(buffer: Tensor) -> Tensor:
    """Return a view of a uint8 buffer, from the first address that is a multiple of ALIGNED."""
    return buffer[-buffer.data_ptr() % ALIGNED :]
