"""Byte streams of an input file: the stored bytes, and the bytes decompressed from gzip or zstd.

A damaged or truncated file raises DamagedStream. The stream reader of `zstandard` is not used,
because that reader ends without an error at a truncated frame.
"""

from __future__ import annotations

import gzip
import io
import zlib
from collections.abc import Callable, Iterator
from typing import IO, Any, cast

import xxhash

from data_prep.sources.inputs import packing_of
from optimus.errors import DataError, one_line

READ_BYTES = 1 << 20
_ZSTD_WINDOW = 1 << 31
"""Largest accepted window of a zstd frame, in bytes. `zstd --long=31` uses this window.
Decompression needs memory of the size of the window. Files that were compressed without this option
have smaller windows."""

_ZSTD_MAGIC = b"\x28\xb5\x2f\xfd"
_SKIPPED_MAGIC = b"\x2a\x4d\x18"
"""Last three bytes of the magic number of a skippable zstd frame. The first byte of the magic
number is from 0x50 to 0x5f."""


class DamagedStream(Exception):
    """Raised if a file cannot be decompressed to its end. The message is the reason."""


class HashingFile(io.RawIOBase):
    """Stream that reads the bytes of a file, and computes the hash of all bytes that were read.

    Args:
        name: The path of the file.
        advance: Function that is called after each read with the number of bytes that were read.
        expected: A pair (n, hash) from an earlier run, or None. `hash` is the xxh3-64 of the first
            n bytes of the file. A read raises DataError if these bytes now have another hash.
    """

    def __init__(
        self,
        name: str,
        advance: Callable[[int], None],
        expected: tuple[int, str] | None = None,
    ):
        self._file = open(name, "rb", buffering=0)  # noqa: SIM115 - closed by close()
        self._advance = advance
        self._digest = xxhash.xxh3_64()
        self._expected = expected
        self.size = 0

    def readable(self) -> bool:
        return True

    def so_far(self) -> tuple[int, str]:
        """Return (number of bytes that have been read so far, xxh3-64 of these bytes)."""
        return self.size, self._digest.hexdigest()

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer)
        if self._expected and self.size < self._expected[0]:
            view = view[: self._expected[0] - self.size]
        count = self._file.readinto(view)
        self._digest.update(view[:count])
        self.size += count
        if self._expected and (self.size == self._expected[0] or count == 0):
            if self.so_far() != self._expected:
                raise DataError(
                    f"{self._file.name}: changed since an earlier run read the file; remove the "
                    "output and start again"
                )
            self._expected = None
        self._advance(count)
        return count

    def drain(self) -> str:
        """Read the rest of the file and return the xxh3-64 of the whole file."""
        buffer = bytearray(READ_BYTES)
        while self.readinto(buffer):
            pass
        return self._digest.hexdigest()

    def close(self) -> None:
        self._file.close()
        super().close()


class _ZstdReader(io.RawIOBase):
    """Stream of the decompressed content of a zstd file, which consists of consecutive frames.

    A call of `zstandard` decompresses all bytes that it receives at once, and four bytes can
    become 128 KiB. Each call therefore receives a single block, whose content is at most 128 KiB.
    The compressed length of each block is stored in front of the block (RFC 8878).

    `backports.zstd` can limit the size of its output, but is not used: after an error,
    `backports.zstd` discards content that precedes the damage. In 539 of 600 damaged files, it
    ended at an earlier line than this reader. With `backports.zstd`, the line numbers in
    quarantine.jsonl would therefore be too small.
    """

    def __init__(self, file: IO[bytes], name: str):
        try:
            import zstandard
        except ImportError:
            raise DataError(
                f"{name}: .zst files need the zstandard package: pip install zstandard"
            ) from None
        self._file, self._error = file, zstandard.ZstdError
        self._unpacker = zstandard.ZstdDecompressor(max_window_size=_ZSTD_WINDOW)
        self._blocks = self._unpack()
        self._ready = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._ready:
            try:
                block = next(self._blocks, None)
            except self._error as error:
                raise DamagedStream(one_line(error)) from None
            if block is None:
                return 0
            self._ready = memoryview(block)
        count = min(len(buffer), len(self._ready))
        buffer[:count] = self._ready[:count]
        self._ready = self._ready[count:]
        return count

    def _unpack(self) -> Iterator[bytes]:
        """Yield the decompressed content of each block of each frame."""
        while magic := self._file.read(4):
            if magic[1:] == _SKIPPED_MAGIC and magic[0] >> 4 == 5:
                left = int.from_bytes(self._take(4), "little")
                while left:
                    left -= len(self._take(min(left, READ_BYTES)))
                continue
            if magic != _ZSTD_MAGIC:
                cut = _ZSTD_MAGIC.startswith(magic)
                raise DamagedStream("the file ends within a frame" if cut else "not a zstd frame")
            frame, flags = self._unpacker.decompressobj(), self._take(1)
            # The rest of the header: window, dictionary, size of the content (RFC 8878, 3.1.1.1).
            one_segment = flags[0] >> 5 & 1
            content_size = (one_segment, 2, 4, 8)[flags[0] >> 6]
            rest = (1 - one_segment) + (0, 1, 2, 4)[flags[0] & 3] + content_size
            yield frame.decompress(magic + flags + self._take(rest))
            last = False
            while not last:
                head = self._take(3)
                bits = int.from_bytes(head, "little")
                last, repeated, size = bool(bits & 1), bits >> 1 & 3 == 1, bits >> 3
                checksum = 4 if last and flags[0] & 4 else 0
                yield frame.decompress(head + self._take((1 if repeated else size) + checksum))

    def _take(self, size: int) -> bytes:
        data = self._file.read(size)
        if len(data) < size:
            raise DamagedStream("the file ends within a frame")
        return data


_GZIP_DAMAGE = (EOFError, zlib.error, gzip.BadGzipFile, ValueError)


class _GzipReader(io.RawIOBase):
    """Stream of the decompressed content of a gzip file.

    The isal library is used if it is installed, because it is faster than the standard library.
    """

    def __init__(self, file: IO[bytes]):
        self._damage: tuple[type[Exception], ...] = _GZIP_DAMAGE
        try:
            from isal.igzip import IGzipFile
            from isal.igzip_lib import IsalError
        except ImportError:
            self._file = gzip.GzipFile(fileobj=file)
        else:
            self._file = IGzipFile(fileobj=file)
            # The type stub of isal declares IsalError as an instance instead of a class.
            self._damage = (*_GZIP_DAMAGE, cast(type[Exception], IsalError))

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        try:
            return self._file.readinto(buffer)
        except self._damage as error:
            raise DamagedStream(one_line(error)) from None


def unpack(file: IO[bytes], name: str) -> IO[bytes]:
    """Return a stream of the decompressed content of `file`. A read of the stream raises
    DamagedStream if the file is damaged.

    Args:
        file: The bytes of the file as stored on disk, from its start.
        name: The name of the file. The suffix of the name selects gzip, zstd or no compression.

    Raises:
        DataError: the package that decompresses such files is not installed.
    """
    packing = packing_of(name)
    if packing == "gzip":
        return io.BufferedReader(_GzipReader(file), READ_BYTES)
    if packing == "zstd":
        return io.BufferedReader(_ZstdReader(file, name), READ_BYTES)
    return file


def damage_of_gzip(name: str) -> tuple[int, str]:
    """Return (line at which Python's gzip module stops in a damaged file, error message of this
    module).

    The isal library stops at another line with another message. The list of quarantined files must
    not depend on the installed library, so this function never uses isal.
    """
    line, block = 0, b"\n"
    try:
        with gzip.open(name, "rb") as file:  # in blocks, because the whole file may be one line
            while more := file.read1():
                line, block = line + more.count(b"\n"), more
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        return line + 1, one_line(error)
    reason = "the isal library finds damage that Python's gzip module does not find"
    return line + (not block.endswith(b"\n")), reason
