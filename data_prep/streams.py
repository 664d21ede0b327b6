"""Bytes of an input file as they lie and as they read once unpacked: plain, gzip, zstd.

What is damaged or cut short raises DamagedStream; none of the libraries below may end early in
silence, as `zstandard`'s own reader does at a cut.
"""

from __future__ import annotations

import gzip
import io
import zlib
from collections.abc import Callable
from typing import IO

import xxhash

from data_prep.sources import packing_of
from optimus.errors import DataError, one_line

READ_BYTES = 1 << 20
_ZSTD_WINDOW = 1 << 31
"""The largest window of `zstd --long=31`; memory is taken only by files packed that way."""

_ZSTD_BLOCK = 1 << 16
"""Packed bytes given to zstd at a time; runs of one byte grow 10,000 times."""


class DamagedStream(Exception):
    """The file cannot be unpacked to its end. The message says why."""


class HashingFile(io.RawIOBase):
    """Reads a file, hashes what goes by and tells `advance` how much it was."""

    def __init__(self, name: str, advance: Callable[[int], None]):
        self._file = open(name, "rb", buffering=0)  # noqa: SIM115 - closed by close()
        self._advance = advance
        self._digest = xxhash.xxh3_64()
        self._expected: tuple[int, str] | None = None
        self.size = 0

    def readable(self) -> bool:
        return True

    def expect(self, size: int, xxh3: str) -> None:
        """Raise DataError once `size` bytes went by if their hash is not `xxh3`."""
        self._expected = (size, xxh3)

    def so_far(self) -> tuple[int, str]:
        """Number and hash of the bytes that went by."""
        return self.size, self._digest.hexdigest()

    def readinto(self, buffer) -> int:
        view = memoryview(buffer)
        if self._expected and self.size < self._expected[0]:
            view = view[: self._expected[0] - self.size]
        count = self._file.readinto(view)
        self._digest.update(view[:count])
        self.size += count
        if self._expected and self.so_far()[0] == self._expected[0]:
            if self.so_far() != self._expected:
                raise DataError(
                    f"{self._file.name}: changed since its tokenizing was interrupted; remove the "
                    "output and start again"
                )
            self._expected = None
        self._advance(count)
        return count

    def drain(self) -> str:
        """Read whatever is left; the xxh3-64 of the whole file."""
        buffer = bytearray(READ_BYTES)
        while self.readinto(buffer):
            pass
        return self._digest.hexdigest()

    def close(self) -> None:
        self._file.close()
        super().close()


class _ZstdReader(io.RawIOBase):
    """Frames of zstd, one after the other, as one stream."""

    def __init__(self, file: IO[bytes], name: str):
        try:
            import zstandard
        except ImportError:
            raise DataError(
                f"{name}: .zst files need the zstandard package: pip install zstandard"
            ) from None
        self._file, self._error = file, zstandard.ZstdError
        self._unpacker = zstandard.ZstdDecompressor(max_window_size=_ZSTD_WINDOW)
        self._frame = None
        self._packed = self._ready = b""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer) -> int:
        while not self._ready:
            packed = self._packed or self._file.read(_ZSTD_BLOCK)
            if not packed:
                if self._frame is not None:
                    raise DamagedStream("the file ends within a frame")
                return 0
            if self._frame is None:
                self._frame = self._unpacker.decompressobj()
            try:
                self._ready = self._frame.decompress(packed)
            except self._error as error:
                raise DamagedStream(one_line(error)) from None
            self._packed = b""
            if self._frame.eof:
                self._packed, self._frame = self._frame.unused_data, None
        count = min(len(buffer), len(self._ready))
        buffer[:count] = self._ready[:count]
        self._ready = self._ready[count:]
        return count


class _GzipReader(io.RawIOBase):
    """A gzip file as the standard library's or, faster, as isal's reader unpacks it."""

    def __init__(self, file: IO[bytes]):
        try:
            from isal.igzip import IGzipFile

            self._file = IGzipFile(fileobj=file)
        except ImportError:
            self._file = gzip.GzipFile(fileobj=file)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer) -> int:
        try:
            return self._file.readinto(buffer)
        except (EOFError, zlib.error, gzip.BadGzipFile, ValueError) as error:
            raise DamagedStream(one_line(error)) from None


def unpack(file: IO[bytes], name: str) -> IO[bytes]:
    """`file`'s content, unpacked as the end of `name` says. Reading it raises DamagedStream."""
    packing = packing_of(name)
    if packing == "gzip":
        return io.BufferedReader(_GzipReader(file), READ_BYTES)
    if packing == "zstd":
        return io.BufferedReader(_ZstdReader(file, name), READ_BYTES)
    return file


def damage_of_gzip(name: str) -> tuple[int, str]:
    """The line where a damaged gzip file breaks off, and why, as the standard library tells it.

    Other readers stop elsewhere and say it otherwise; a list of what was set aside must not depend
    on which is installed.
    """
    line = 0
    try:
        with gzip.open(name, "rb") as file:
            for _ in file:
                line += 1
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        return line + 1, one_line(error)
    return line, "readers of gzip differ about it"
