"""The documents of one input file, in order, with what is wrong in it said by file and line.

Plain text and source files are one document each; JSON lines are a document a line. Text is taken
byte for byte: no newline is translated, nothing is stripped, an empty text is a document.
"""

from __future__ import annotations

import gzip
import io
import json
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import xxhash

from data_prep.sources import InputFile, is_gzip, kind_of
from optimus.errors import DataError, one_line

_READ_BYTES = 1 << 20


@dataclass(frozen=True)
class Document:
    """One text, its UTF-8 bytes, and its line in the file (0: the whole file)."""

    text: str
    data: bytes
    line: int


@dataclass(frozen=True)
class Problem:
    """A document that cannot be used: where (line 0: somewhere in the file) and why."""

    line: int
    reason: str


class DamagedFile(Exception):
    """The file as a whole cannot be read to its end, so none of it counts."""

    def __init__(self, line: int, reason: str):
        super().__init__(line, reason)
        self.problem = Problem(line, reason)


class _HashingFile(io.RawIOBase):
    """Reads a file, hashes what goes by and tells `advance` how much it was."""

    def __init__(self, name: str, advance: Callable[[int], None]):
        self._file = open(name, "rb", buffering=0)  # noqa: SIM115 - closed by close()
        self._advance = advance
        self._digest = xxhash.xxh3_64()
        self.size = 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer) -> int:
        count = self._file.readinto(buffer)
        self._digest.update(memoryview(buffer)[:count])
        self.size += count
        self._advance(count)
        return count

    def drain(self) -> str:
        """Read whatever is left; the xxh3-64 of the whole file."""
        buffer = bytearray(_READ_BYTES)
        while self.readinto(buffer):
            pass
        return self._digest.hexdigest()

    def close(self) -> None:
        self._file.close()
        super().close()


class InputReader:
    """Iterates over the documents of one file; afterwards `xxh3` is the hash of its bytes.

    `advance(n)` is told of every n bytes read from disk.
    """

    def __init__(self, file: InputFile, text_field: str, advance: Callable[[int], None]):
        self._file = file
        self._text_field = text_field
        self._advance = advance
        self.xxh3 = ""

    def __iter__(self) -> Iterator[Document | Problem]:
        """Documents and problems in order.

        Raises DamagedFile when the file cannot be decompressed to its end, and DataError when it
        cannot be opened or is not the file it was when the work was planned.
        """
        try:
            raw = _HashingFile(self._file.name, self._advance)
        except OSError as error:
            raise DataError(f"{self._file.name}: cannot be opened: {error.strerror}") from None
        with raw, io.BufferedReader(raw, _READ_BYTES) as buffered:
            try:
                yield from self._documents(buffered)
            except DamagedFile:
                self._finish(raw)
                raise
            self._finish(raw)

    def _finish(self, raw: _HashingFile) -> None:
        self.xxh3 = raw.drain()
        if raw.size != self._file.size:
            raise DataError(
                f"{self._file.name}: had {self._file.size} bytes when the work was planned and has "
                f"{raw.size} now; let nobody write to it, remove the output and start again"
            )

    def _documents(self, buffered: io.BufferedReader) -> Iterator[Document | Problem]:
        zipped = is_gzip(self._file.name)
        if zipped and self._file.size == 0:
            raise DamagedFile(1, "damaged gzip: the file is empty")
        stream = gzip.GzipFile(fileobj=buffered) if zipped else buffered
        line = 0
        try:
            if kind_of(self._file.name) == "text":
                yield _whole(stream.read())
                return
            for line, data in enumerate(stream, 1):
                if data.strip():
                    yield _from_json(data, line, self._text_field)
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            raise DamagedFile(line + 1, f"damaged gzip: {one_line(error)}") from None


def _whole(data: bytes) -> Document | Problem:
    try:
        return Document(data.decode(), data, 0)
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        return Problem(line, f"invalid UTF-8: {error.reason} (byte {error.start} of the file)")


def _from_json(data: bytes, line: int, text_field: str) -> Document | Problem:
    try:
        value = json.loads(data.decode())
    except UnicodeDecodeError as error:
        return Problem(line, f"invalid UTF-8: {error.reason} (byte {error.start} of the line)")
    except ValueError as error:
        return Problem(line, f"invalid JSON: {one_line(error)}")
    except RecursionError:
        return Problem(line, "invalid JSON: nested too deeply")
    if not isinstance(value, dict):
        return Problem(line, f"a JSON {type(value).__name__} where an object was expected")
    if text_field not in value:
        return Problem(line, f"no field {text_field!r}; --text-field names the right one")
    text = value[text_field]
    if not isinstance(text, str):
        return Problem(line, f"field {text_field!r} is {type(text).__name__}, not a string")
    try:
        return Document(text, text.encode(), line)
    except UnicodeEncodeError as error:
        return Problem(line, f"field {text_field!r} is not Unicode text: {error.reason}")
