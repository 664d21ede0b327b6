"""Reader and writer of shard files. Shard files contain the states of a full checkpoint.

Each rank writes one shard file. The file begins with a header of fixed size, which contains the
name of the save, the step and the rank, so that a reader detects a file of another checkpoint. The
values of the states follow in little-endian byte order. Each slice of a state begins at a multiple
of 64 bytes. The index of the checkpoint contains the hashes of all blocks of the file, including
the header. A reader compares each block that it reads with the hash of the block. Each file is
written and read by threads. This module does not import torch.
"""

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

Argument = TypeVar("Argument")
Result = TypeVar("Result")

BLOCK_BYTES = 4 << 20
HEADER_BYTES = 4096
ALIGNED_BYTES = 64
DIRECT_BYTES = 4096
"""The size of a direct write, which bypasses the page cache, must be a multiple of this value."""
HASH_CHARS = 16
_MAGIC = "optimus shard"
_MIN_POOL_CALLS = 4
"""Minimum number of calls for which `in_threads` starts threads. For fewer calls, the start of the
threads takes more time than the threads save."""
_BUFFERS = 2
"""Number of buffers of a ShardWriter. One buffer is filled while the other is written. A third
buffer does not make saves faster (docs/benchmarks)."""
_HUGE_PAGE = 2 << 20

traffic = {"opens": 0, "bytes": 0}
"""Number of shard files that this process has opened, and number of bytes that this process has
read from shard files. Used by tests and benchmarks."""


class Task:
    """A call of a function in a new daemon thread."""

    def __init__(self, function: Callable[[], Any]) -> None:
        self._value: Any = None
        self._error: BaseException | None = None
        self._thread = threading.Thread(
            target=self._run, args=[function], name="optimus-save", daemon=True
        )
        self._thread.start()

    def _run(self, function: Callable[[], Any]) -> None:
        try:
            self._value = function()
        except BaseException as error:  # `value` raises this error
            self._error = error

    def wait(self, timeout_s: float | None = None) -> None:
        """Wait until the function has ended, at most `timeout_s` seconds."""
        self._thread.join(timeout_s)

    @property
    def has_ended(self) -> bool:
        return not self._thread.is_alive()

    def value(self) -> Any:
        """Return the result of the function, or raise the exception that the function has raised.
        The function must have ended."""
        assert self.has_ended
        if self._error is not None:
            raise self._error
        return self._value


class Stop:
    """Flag that requests threads to stop. Unlike `threading.Event`, the class has a method `claim`.
    After a call of `claim`, the flag cannot be set."""

    def __init__(self) -> None:
        self._lock, self._set, self._claimed = threading.Lock(), False, False

    def set(self) -> bool:
        """Request the stop. Return False, without effect, if `claim` was called before."""
        with self._lock:
            self._set = not self._claimed
            return self._set

    def is_set(self) -> bool:
        return self._set

    def claim(self) -> bool:
        """Make all later calls of `set` fail. Return False, without effect, if `set` was called
        before."""
        with self._lock:
            self._claimed = not self._set
            return self._claimed


def in_threads(
    function: Callable[[Argument], Result], arguments: Sequence[Argument], threads: int = 0
) -> Iterable[Result]:
    """Call a function once with each argument, in a pool of threads.

    Args:
        function: The function. It should mostly read, write or hash, because these operations
            release the GIL.
        arguments: The arguments of the calls.
        threads: Number of threads. 0 means two per available core, at most 16, because about half
            of the threads wait for the disk.

    Returns:
        The results, in the order of the arguments.

    Raises:
        Exception: The exception of the first call that fails.
    """
    if len(arguments) < _MIN_POOL_CALLS or threads == 1:
        return [function(argument) for argument in arguments]
    with ThreadPoolExecutor(threads or min(16, 2 * available_cores())) as pool:
        return list(pool.map(function, arguments))


class Identity(NamedTuple):
    """The save and the step to which a shard file belongs, and the rank that wrote the file."""

    generation: str
    """Random name of the save."""
    step: int
    writer: int
    """Rank that wrote the file."""


class ShardFile(NamedTuple):
    """Entry for a complete shard file in the index of its checkpoint."""

    writer: int
    size: int
    hashes: str
    """The hashes (xxh3-64, hexadecimal) of all blocks of the file, concatenated in order."""

    @property
    def name(self) -> str:
        return shard_name(self.writer)

    @property
    def num_blocks(self) -> int:
        return len(self.hashes) // HASH_CHARS


def shard_name(writer: int) -> str:
    """Return the name of the shard file that rank `writer` writes."""
    return f"shard-{writer:05d}.bin"


def header(identity: Identity, size: int) -> bytes:
    """Return the header of a shard file of `size` bytes. The header has HEADER_BYTES bytes."""
    text = json.dumps({"format": _MAGIC, **identity._asdict(), "size": size})
    return text.encode().ljust(HEADER_BYTES - 1) + b"\n"


def aligned(size: int) -> int:
    """Return `size` rounded up to a multiple of ALIGNED_BYTES."""
    return -(-size // ALIGNED_BYTES) * ALIGNED_BYTES


class _BlockQueue:
    """Thread that writes submitted buffers in order while the caller fills the next buffer.

    If a write fails, a later call of `take` or `finish` raises the error, and the thread writes no
    further buffers. `close` ends the thread, with or without an error.
    """

    def __init__(self, block_bytes: int, write: Callable[[memoryview], None]) -> None:
        self._empty: SimpleQueue[memoryview | None] = SimpleQueue()
        self._filled: SimpleQueue[memoryview | None] = SimpleQueue()
        for _ in range(_BUFFERS):
            self._empty.put(_allocate(block_bytes))
        self._task = Task(lambda: self._run(write))

    def take(self) -> memoryview:
        """Wait until a buffer is empty. Return the buffer, which the caller fills."""
        block = self._empty.get()
        if block is None:
            self.finish()
        assert block is not None, "take() after close()"
        return block

    def submit(self, block: memoryview) -> None:
        """Add a filled buffer to the queue. Only the last buffer of a file may be partly filled."""
        self._filled.put(block)

    def finish(self) -> None:
        """Wait until all submitted buffers are written. Raises the error of a write that failed."""
        self.close()
        self._task.value()

    def close(self) -> None:
        """Wait until all submitted buffers are written or a write has failed. Then end the
        thread."""
        self._filled.put(None)
        self._task.wait()

    def _run(self, write: Callable[[memoryview], None]) -> None:
        try:
            while (block := self._filled.get()) is not None:
                write(block)
                self._empty.put(block)
        finally:
            self._empty.put(None)  # do not let `take` wait forever


def _allocate(size: int) -> memoryview:
    """Allocate page-aligned memory, in huge pages if the system has them. With small pages, the
    system splits a direct write into requests of a few hundred pages each. With huge pages, the
    system writes 4 MiB at once, which is twice as fast."""
    whole = mmap.mmap(-1, size + _HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # a kernel without huge pages
            whole.madvise(mmap.MADV_HUGEPAGE)
    start = -numpy.frombuffer(whole, numpy.uint8).ctypes.data % _HUGE_PAGE
    return memoryview(whole)[start : start + size]


class ShardWriter(files.Closing):
    """Writer of a shard file with two buffers. The caller fills and hashes one buffer while a
    thread writes the other buffer to the disk.

    Writes bypass the page cache if the file system supports this. A write through the page cache
    would need more memory and an additional copy of the data, and a check after the save would read
    the page cache instead of the disk.
    """

    def __init__(
        self,
        directory: Path,
        identity: Identity,
        size: int,
        stop: Stop | None = None,
        direct: bool = True,
    ) -> None:
        """Create the file and write its header.

        Args:
            directory: Directory of the checkpoint.
            identity: The save, the step and the rank that writes the file.
            size: Size of the whole file in bytes.
            stop: If this Stop is set, the next write of a block raises OptimusError.
            direct: True to bypass the page cache if the file system supports this.

        Raises:
            OSError: The file cannot be written. `write` and `finish` raise the same error.
        """
        self._identity, self._size, self._stop = identity, size, stop
        self._hashes: list[str] = []
        self._written = 0
        """Number of bytes passed to `_put`, including the bytes of a block that is not full yet."""
        self._block = memoryview(b"")
        self._fd, self._direct = -1, direct and hasattr(os, "O_DIRECT")
        self._blocks = _BlockQueue(BLOCK_BYTES, self._write_block)
        try:
            self._create(directory / shard_name(identity.writer))
            self._put(memoryview(header(identity, size)))
        except BaseException:
            self.close()
            raise

    def write(self, data: memoryview) -> int:
        """Append `data`, and padding up to a multiple of 64 bytes.

        Returns:
            The offset of `data` in the file, in bytes.
        """
        offset = self._written
        self._put(data)
        if padding := aligned(self._written) - self._written:
            self._put(memoryview(bytes(padding)))
        return offset

    def finish(self) -> ShardFile:
        """Write the last block and make the file durable. Return the index entry of the file."""
        assert self._written == self._size, (self._written, self._size)
        if rest := self._written % len(self._block):
            self._submit(self._block[:rest])
        self._blocks.finish()
        os.fsync(self._fd)
        return ShardFile(self._identity.writer, self._size, "".join(self._hashes))

    def close(self) -> None:
        self._blocks.close()
        if self._fd >= 0:
            os.close(self._fd)
        self._fd = -1

    def _create(self, path: Path) -> None:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
        if self._direct:
            try:
                self._fd = os.open(path, flags | os.O_DIRECT, 0o644)
                return
            except OSError as error:
                if error.errno != errno.EINVAL:
                    raise
                path.unlink(missing_ok=True)  # some file systems create the file and then fail
        self._fd, self._direct = os.open(path, flags, 0o644), False

    def _put(self, data: memoryview) -> None:
        while data:
            filled = self._written % BLOCK_BYTES
            if not filled:
                self._block = self._blocks.take()
            head = data[: len(self._block) - filled]
            self._block[filled : filled + len(head)] = head
            self._written += len(head)
            data = data[len(head) :]
            if filled + len(head) == len(self._block):
                self._submit(self._block)

    def _submit(self, block: memoryview) -> None:
        self._hashes.append(xxhash.xxh3_64_hexdigest(block))
        self._blocks.submit(block)

    def _write_block(self, block: memoryview) -> None:
        if self._stop is not None and self._stop.is_set():
            raise OptimusError(f"{shard_name(self._identity.writer)}: the save was stopped")
        while block:
            if len(block) % DIRECT_BYTES:
                self._use_cache()
            try:
                block = block[os.write(self._fd, block) :]
            except OSError as error:
                if error.errno != errno.EINVAL or not self._direct:
                    raise
                self._use_cache()  # the file system has other rules for direct writes

    def _use_cache(self) -> None:
        """Switch from direct writes to writes through the page cache, for the rest of the file."""
        if self._direct:
            flags = fcntl.fcntl(self._fd, fcntl.F_GETFL)
            fcntl.fcntl(self._fd, fcntl.F_SETFL, flags & ~os.O_DIRECT)
        self._direct = False


class ShardReader(files.Closing):
    """Reader that copies byte ranges of a shard file to memory, and checks every block that it
    reads."""

    def __init__(
        self, directory: Path, identity: Identity, shard: ShardFile, block_bytes: int = BLOCK_BYTES
    ) -> None:
        """Open the file and check its size and header.

        Args:
            directory: Directory of the checkpoint.
            identity: Expected save and step of the file, and the rank that wrote it.
            shard: Size of the file and hashes of its blocks, from the index.
            block_bytes: Bytes of the file in each hashed block.

        Raises:
            CheckpointError: The file is missing, has another size or belongs to another save.
        """
        self.path, self._shard, self._block_bytes = directory / shard.name, shard, block_bytes
        try:
            self._file = files.open_regular(self.path)
        except OSError as error:
            raise CheckpointError(f"{self.path}: {error.strerror}") from None
        self._fd = self._file.fileno()
        traffic["opens"] += 1
        self._buffer, self._buffered_block = memoryview(b""), -1
        try:
            size = os.fstat(self._fd).st_size
            if size != shard.size:
                raise CheckpointError(
                    f"{self.path}: the file has {size} bytes, but the index says {shard.size}"
                )
            content = bytearray(HEADER_BYTES)
            self._read(memoryview(content), 0)
            if content != header(identity, size):
                raise CheckpointError(
                    f"{self.path}: the file belongs to another checkpoint or rank, or its header "
                    "is damaged"
                )
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        self._file.close()

    def read(self, ranges: numpy.ndarray, targets: Sequence[memoryview]) -> None:
        """Copy ranges of the file to memory.

        If only a part of the last block is copied, the block is kept in memory for the next call.

        Args:
            ranges: int64 [n, 4], ascending by offset in the file. Columns: offset in the file,
                index in `targets`, offset in the target, length. Offsets and lengths are in bytes.
            targets: The memory to which the ranges are copied.

        Raises:
            CheckpointError: A block does not match its hash.
        """
        if not self._buffer:
            self._buffer = memoryview(bytearray(min(self._block_bytes, self._shard.size)))
        for block, in_block in _by_block(ranges, self._block_bytes):
            start = block * self._block_bytes
            size = min(self._block_bytes, self._shard.size - start)
            assert size > 0, "the index refers to bytes after the end of a shard file"
            if len(in_block) == 1 and in_block[0][3] == size:
                _, target, offset, _ = in_block[0]
                self._read_block(block, targets[target][offset : offset + size])
                continue
            data = self._buffer[:size]
            if block != self._buffered_block:
                self._buffered_block = -1
                self._read_block(block, data)
                self._buffered_block = block
            for position, target, offset, length in in_block:
                first = position - start
                targets[target][offset : offset + length] = data[first : first + length]

    def verify(self, blocks: range) -> None:
        """Read the blocks with the indices in `blocks`, and compare each block with its hash.

        Raises:
            CheckpointError: A block cannot be read or does not match its hash.
        """
        buffer = memoryview(bytearray(min(self._block_bytes, self._shard.size)))
        for block in blocks:
            left = self._shard.size - block * self._block_bytes
            self._read_block(block, buffer[: min(left, self._block_bytes)])

    def _read_block(self, block: int, target: memoryview) -> None:
        self._read(target, block * self._block_bytes)
        expected = self._shard.hashes[block * HASH_CHARS : (block + 1) * HASH_CHARS]
        if xxhash.xxh3_64_hexdigest(target) != expected:
            raise CheckpointError(f"{self.path}: block {block} does not match its checksum")

    def _read(self, target: memoryview, offset: int) -> None:
        traffic["bytes"] += len(target)
        files.read_at(self._fd, offset, target, self.path)


def _by_block(ranges: numpy.ndarray, block_bytes: int) -> Iterator[tuple[int, list[list[int]]]]:
    """Divide `ranges` at block boundaries. For each block with a range, yield the index of the
    block and the list of ranges in the block."""
    first = ranges[:, 0] // block_bytes
    count = (ranges[:, 0] + ranges[:, 3] - 1) // block_bytes - first + 1
    source = numpy.repeat(numpy.arange(len(ranges)), count)
    nth = numpy.arange(len(source)) - numpy.repeat(numpy.cumsum(count) - count, count)
    block = first[source] + nth
    range_start, range_stop = ranges[source, 0], ranges[source, 0] + ranges[source, 3]
    start = numpy.maximum(range_start, block * block_bytes)
    stop = numpy.minimum(range_stop, (block + 1) * block_bytes)
    offset = ranges[source, 2] + start - range_start
    cut = numpy.stack([start, ranges[source, 1], offset, stop - start], 1)
    limits = [*numpy.flatnonzero(numpy.diff(block, prepend=-1)), len(block)]
    for low, high in itertools.pairwise(limits):
        yield int(block[low]), cut[low:high].tolist()
