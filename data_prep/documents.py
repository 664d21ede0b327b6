"""The documents of one input file, in order, with what is wrong in it said by file and line.

Plain text and source files are one document each; JSON lines are a document a line, parquet files
a document a row. Text is taken
byte for byte: no newline is translated, nothing is stripped, an empty text is a document.
"""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from data_prep.sources import InputFile, kind_of, packing_of
from data_prep.streams import READ_BYTES, DamagedStream, HashingFile, damage_of_gzip, unpack
from optimus.errors import DataError, one_line


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


@dataclass(frozen=True)
class Position:
    """A place between two documents of a file, from which reading can go on."""

    offset: int
    """Bytes of the unpacked file, or rows of a table, before it."""
    line: int
    raw_bytes: int
    """Bytes read from disk by then, and their hash: proof that the file is the same."""
    raw_xxh3: str


class DamagedFile(Exception):
    """The file as a whole cannot be read to its end, so none of it counts."""

    def __init__(self, line: int, reason: str):
        super().__init__(line, reason)
        self.problem = Problem(line, reason)


class InputReader:
    """Iterates over the documents of one file; afterwards `xxh3` is the hash of its bytes.

    `advance(n)` is told of every n bytes read from disk. `start` leaves out the documents before
    it. A line and an unpacked text are held whole: memory is some 8 times the longest document.
    """

    def __init__(
        self,
        file: InputFile,
        text_field: str,
        advance: Callable[[int], None],
        start: Position | None = None,
    ):
        self._file = file
        self._text_field = text_field
        self._advance = advance
        self._start = start
        self._raw: HashingFile | None = None
        self._offset = start.offset if start else 0
        self._line = start.line if start else 0
        self.xxh3 = ""

    def position(self) -> Position:
        """The place behind the document given last."""
        assert self._raw is not None
        return Position(self._offset, self._line, *self._raw.so_far())

    def __iter__(self) -> Iterator[Document | Problem]:
        """Documents and problems in order.

        Raises DamagedFile when the file cannot be unpacked to its end, and DataError when it cannot
        be opened or is not the file it was when the work was planned.
        """
        try:
            raw = HashingFile(self._file.name, self._advance)
        except OSError as error:
            raise DataError(f"{self._file.name}: cannot be opened: {error.strerror}") from None
        self._raw = raw
        if self._start:
            raw.expect(self._start.raw_bytes, self._start.raw_xxh3)
        with raw, io.BufferedReader(raw, READ_BYTES) as buffered:
            try:
                yield from self._documents(buffered)
            except DamagedFile:
                self._finish(raw)
                raise
            self._finish(raw)

    def _finish(self, raw: HashingFile) -> None:
        self.xxh3 = raw.drain()
        if raw.size != self._file.size:
            raise DataError(
                f"{self._file.name}: had {self._file.size} bytes when the work was planned and has "
                f"{raw.size} now; let nobody write to it, remove the output and start again"
            )

    def _documents(self, buffered: io.BufferedReader) -> Iterator[Document | Problem]:
        name, packing = self._file.name, packing_of(self._file.name)
        if packing and self._file.size == 0:
            raise DamagedFile(1, f"damaged {packing}: the file is empty")
        if kind_of(name) == "parquet":
            assert self._raw is not None
            self._raw.drain()  # the table is read out of order
            yield from self._rows()
            return
        stream = unpack(buffered, name)
        try:
            if kind_of(name) == "text":
                yield _whole(stream.read())
                return
            left = self._offset
            while left and (block := stream.read(min(left, READ_BYTES))):
                left -= len(block)
            for data in stream:
                self._line += 1
                self._offset += len(data)
                if data.strip():
                    yield _from_json(data, self._line, self._text_field)
        except DamagedStream as error:
            line, reason = self._line + 1, str(error)
            if packing == "gzip":
                line, reason = damage_of_gzip(name)
            raise DamagedFile(line, f"damaged {packing}: {reason}") from None

    def _rows(self) -> Iterator[Document | Problem]:
        from data_prep.parquet import DamagedTable, read_column

        try:
            for value in read_column(self._file.name, self._text_field, self._offset):
                self._line += 1
                self._offset += 1
                if value is None:
                    yield Problem(self._line, f"column {self._text_field!r} is null here")
                else:
                    yield Document(value, value.encode(), self._line)
        except DamagedTable as error:
            raise DamagedFile(self._line + 1, f"damaged parquet: {error}") from None


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
