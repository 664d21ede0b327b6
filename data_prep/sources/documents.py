"""Reader of the documents of one input file. For each document that cannot be used, the reader
reports the file and the line.

A text or source file is a single document. A file of JSON lines has a document per line, and a
Parquet file has a document per row. Text is used byte for byte: newlines are not translated, and
white space is not removed. An empty text is a document. A text file above LONG_BYTES is read twice:
first to check the file, and then in blocks, so that the file need not fit in memory.
"""

from __future__ import annotations

import codecs
import functools
import io
import itertools
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import IO, Any

import xxhash

from data_prep import layout
from data_prep.runtime.memory import Limits, bytes_of_line, bytes_of_text
from data_prep.sources.inputs import InputFile, kind_of, packing_of
from data_prep.sources.parquet import DamagedTable, read_column
from data_prep.sources.streams import READ_BYTES, DamagedStream, HashingFile, damage_of_gzip, unpack
from optimus.errors import DataError, one_line

BLOCK_BYTES = 1 << 20


@dataclass(frozen=True)
class Survey:
    """The result of `survey`: the size and hash of a text, and the first error in its encoding."""

    size: int
    """Size of the decompressed file in bytes."""
    xxh3: int
    """xxh3-64 of the decompressed file."""
    problem: tuple[int, str] | None = None
    """Line and description of the first bytes that are not UTF-8. None: the text is UTF-8."""


@dataclass
class LongText:
    """A document that is read in blocks: a text file above LONG_BYTES."""

    size: int
    xxh3: int
    blocks: Iterator[str]
    """The text in blocks. All blocks must be read before InputReader yields the next document."""
    line: int = 0

    @property
    def text(self) -> str:
        """Read all blocks and return the whole text."""
        return "".join(self.blocks)


def survey(stream: IO[bytes]) -> Survey:
    """Read a stream of text to its end. Return its size, its hash, and the first error in its
    encoding."""
    digest, decoder = xxhash.xxh3_64(), codecs.getincrementaldecoder("utf-8")()
    size, line, problem = 0, 1, None
    while True:
        block = stream.read(BLOCK_BYTES)
        digest.update(block)
        if problem is None:
            pending = len(decoder.getstate()[0])
            try:
                line += decoder.decode(block, final=not block).count("\n")
            except UnicodeDecodeError as error:
                line += error.object.count(b"\n", 0, error.start)
                byte = size - pending + error.start
                problem = line, f"invalid UTF-8: {error.reason} (byte {byte} of the file)"
        size += len(block)
        if not block:
            return Survey(size, digest.intdigest(), problem)


NO_LIMITS = Limits()
_DEPTH = 500
_NO_STRUCTURE = bytes(set(range(256)) - set(b'"[]{}'))
LONG_BYTES = 4 << 20
"""Size in bytes of the decompressed content above which a text file becomes a LongText."""


@dataclass(frozen=True)
class Document:
    """A document: its text, the UTF-8 bytes of the text, and its line in the input file (0: the
    document is the whole file)."""

    text: str
    data: bytes
    line: int
    id: object = None
    """The value of the field `id_field` of InputReader. None: the document does not have this
    field, or `id_field` is ""."""


@dataclass(frozen=True)
class Problem:
    """A document that cannot be used: its line (0: no line is known) and the reason."""

    line: int
    reason: str

    def at(self, name: str) -> str:
        """Return the problem as a message, with the name of the file and the line."""
        return f"{name}:{self.line}: {self.reason}"


@dataclass(frozen=True)
class Position:
    """A position between two documents of a file, from which reading can continue."""

    offset: int
    """Bytes of the decompressed file before the position. In a table: number of rows before the
    position."""
    line: int
    raw_bytes: int
    """Number of bytes that had been read from disk when reading reached this position. `raw_xxh3`
    is the hash of these bytes. A later run compares this hash to detect changes of the file."""
    raw_xxh3: str

    def is_possible(self) -> bool:
        """Return True if `InputReader.position` could have returned this position."""
        counts = [self.offset, self.line, self.raw_bytes - 1, self.offset - self.line]
        return layout.are_counts(counts) and layout.are_hashes([self.raw_xxh3])


class DamagedFile(Exception):
    """Raised if a file cannot be read to its end. The documents of this file are not used."""

    def __init__(self, line: int, reason: str):
        super().__init__(line, reason)
        self.problem = Problem(line, reason)


class InputReader:
    """Iterable of the documents of one file. After the iteration, `xxh3` is the hash of the file.

    See docs/formats/dataset.md, "Memory", for the memory that is needed to read a document.

    Args:
        file: The file, and the size that it had when the work was planned.
        text_field: The JSON field or Parquet column that contains the text.
        advance: Function that is called after each read from disk with the number of bytes that
            were read.
        start: The position to start from. None: the start of the file.
        limits: Limits on the size of a document and on the memory to read it.
        id_field: The JSON field or Parquet column that contains the id. "": documents have no ids.
    """

    def __init__(
        self,
        file: InputFile,
        text_field: str,
        advance: Callable[[int], None],
        start: Position | None = None,
        limits: Limits = NO_LIMITS,
        id_field: str = "",
    ):
        self._file = file
        self._text_field = text_field
        self._advance = advance
        self._start = start
        self._limits, self._id_field = limits, id_field
        self._raw: HashingFile | None = None
        self._offset = start.offset if start else 0
        self._line = start.line if start else 0
        self.xxh3 = ""

    def position(self) -> Position:
        """Return the position after the document that was yielded last."""
        assert self._raw is not None
        return Position(self._offset, self._line, *self._raw.so_far())

    def move_position(self, size: int) -> None:
        """Add `size` bytes to the position. Call this method after `size` bytes of a long text have
        been processed."""
        self._offset += size

    def __iter__(self) -> Iterator[Document | Problem | LongText]:
        """Yield documents and problems in order.

        Raises:
            DamagedFile: the file cannot be read or decompressed to its end.
            DataError: the file cannot be opened, or has changed since the work was planned.
        """
        try:
            expected = (start.raw_bytes, start.raw_xxh3) if (start := self._start) else None
            raw = HashingFile(self._file.name, self._advance, expected)
        except OSError as error:
            raise DataError(f"{self._file.name}: cannot be opened: {error.strerror}") from None
        self._raw = raw
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
                f"{raw.size} now; stop the program that writes to it, remove the output and "
                "start again"
            )

    def _documents(self, buffered: IO[bytes]) -> Iterator[Document | Problem | LongText]:
        name, packing = self._file.name, packing_of(self._file.name)
        if packing and self._file.size == 0:
            raise DamagedFile(1, f"damaged {packing}: the file is empty")
        if kind_of(name) == "parquet":
            assert self._raw is not None
            self._raw.drain()  # hash the file now, because `read_column` does not read in order
            yield from self._rows()
            return
        stream = unpack(buffered, name)
        try:
            if kind_of(name) == "text":
                yield self._text(stream)
                return
            self._skip(stream)
            yield from self._lines(stream)
        except DamagedStream as error:
            line, reason = self._line + 1, str(error)
            if packing == "gzip":
                line, reason = damage_of_gzip(name)
            raise DamagedFile(line, f"damaged {packing}: {reason}") from None

    def _text(self, stream: IO[bytes]) -> Document | Problem | LongText:
        """Return the document in a text file, or a Problem if the file cannot be used.

        A file above LONG_BYTES is decompressed twice: first to check the file, and again while the
        blocks of the LongText are read.
        """
        if not self._start:
            data = stream.read(LONG_BYTES + 1)
            if len(data) <= LONG_BYTES:
                if reason := self._limits.too_long(len(data)):
                    return Problem(0, reason)
                try:
                    return Document(data.decode(), data, 0)
                except UnicodeDecodeError as error:
                    line = data.count(b"\n", 0, error.start) + 1
                    reason = f"invalid UTF-8: {error.reason} (byte {error.start} of the file)"
                    return Problem(line, reason)
        with open(self._file.name, "rb") as again:
            checked = survey(unpack(again, self._file.name))
        if reason := self._limits.too_long(checked.size):
            return Problem(0, reason)
        if checked.problem:
            return Problem(*checked.problem)
        if self._start:
            self._skip(stream)
            data = b""
        blocks = itertools.chain([data], iter(functools.partial(stream.read, BLOCK_BYTES), b""))
        return LongText(checked.size, checked.xxh3, codecs.iterdecode(blocks, "utf-8"))

    def _skip(self, stream: IO[bytes]) -> None:
        """Read and discard the bytes before the start position. An earlier run has processed these
        bytes."""
        left = self._offset
        while left and (block := stream.read(min(left, READ_BYTES))):
            left -= len(block)
        if left:
            raise DataError(
                f"{self._file.name}: ends before the position that an earlier run has stored in a "
                "checkpoint; remove the output and start again"
            )

    def _lines(self, stream: IO[bytes]) -> Iterator[Document | Problem]:
        limits = self._limits
        # `readline` joins blocks, which takes twice the memory of the line. If a line has more than
        # `most` bytes, only the size of the line is determined, and its content is discarded.
        most = -1 if limits.room_bytes is None else limits.room_bytes // 2
        if limits.max_document is not None and not 0 <= most < limits.max_document:
            most = limits.max_document + 1
        while data := stream.readline(most):
            self._line += 1
            where, size = f"{self._file.name}:{self._line}", len(data)
            needs = bytes_of_line(data) if size > LONG_BYTES else 0
            if len(data) == most and not data.endswith(b"\n"):
                while not data.endswith(b"\n") and (data := stream.readline(READ_BYTES)):
                    size += len(data)
                data = b""
                needs = needs * size // most
            self._offset += size
            if reason := limits.too_long(size):
                yield Problem(self._line, "a line of " + reason)
                continue
            if size > LONG_BYTES:
                limits.refuse(where, f"a line of {size} bytes", max(3 * size, needs))
            if data.strip():
                yield _from_json(data, self._line, self._text_field, self._id_field)

    def _rows(self) -> Iterator[Document | Problem]:
        try:
            rows = read_column(
                self._file.name, self._text_field, self._id_field, self._offset, self._limits
            )
            for value, document_id, batch_bytes in rows:
                self._line += 1
                self._offset += 1
                document = self._from_row(value, document_id, batch_bytes)
                del value, document_id  # each of these objects keeps its whole batch in memory
                yield document
                del document
        except DamagedTable as error:
            raise DamagedFile(self._line + 1, f"damaged parquet: {error}") from None

    def _from_row(self, value: Any, document_id: Any, batch_bytes: int) -> Document | Problem:
        """Return the document in a row, or a Problem if the row cannot be used.

        Args:
            value: The text, as a pyarrow scalar.
            document_id: The id, as a pyarrow scalar. None: there is no id column.
            batch_bytes: Bytes of memory that are needed to read the batch that contains the row.
        """
        size = value.as_buffer().size if value.is_valid else 0
        if reason := self._limits.too_long(size):
            return Problem(self._line, "a value of " + reason)
        if size > LONG_BYTES:
            needs = batch_bytes + bytes_of_text(value.as_buffer().to_pybytes())
            where = f"{self._file.name}:{self._line}"
            self._limits.refuse(where, f"a value of {size} bytes", needs)
        try:
            text = value.as_py()
        except UnicodeDecodeError as error:
            reason = f"invalid UTF-8: {error.reason} (byte {error.start} of the value)"
            return Problem(self._line, reason)
        if text is None:
            return Problem(self._line, f"column {self._text_field!r} is null here")
        try:
            document_id = document_id.as_py() if document_id is not None else None
        except (ValueError, OverflowError) as error:  # text that is not UTF-8; a time out of range
            return Problem(self._line, f"column {self._id_field!r}: {one_line(error)}")
        return Document(text, text.encode(), self._line, document_id)


def _too_deep(data: bytes) -> bool:
    """Return True if the arrays and objects in `data`, a JSON text, are nested deeper than _DEPTH.

    The limit of json.loads is below 1000 and depends on the call stack. In a worker process,
    json.loads accepts fewer levels than in the main process. A document must be accepted or refused
    independently of the process.
    """
    if data.count(b"[") + data.count(b"{") <= _DEPTH:
        return False
    bare = data.replace(b"\\\\", b"").replace(b'\\"', b"").translate(None, _NO_STRUCTURE)
    steps = (1 if bracket in b"[{" else -1 for bracket in b"".join(bare.split(b'"')[::2]))
    return max(itertools.accumulate(steps), default=0) > _DEPTH


def _from_json(data: bytes, line: int, text_field: str, id_field: str) -> Document | Problem:
    if _too_deep(data):
        return Problem(line, "invalid JSON: nested too deeply")
    try:
        value = json.loads(data.decode())
    except UnicodeDecodeError as error:
        return Problem(line, f"invalid UTF-8: {error.reason} (byte {error.start} of the line)")
    except ValueError as error:
        return Problem(line, f"invalid JSON: {one_line(error)}")
    if not isinstance(value, dict):
        return Problem(line, f"a JSON {type(value).__name__} where an object was expected")
    if text_field not in value:
        return Problem(
            line, f"no field {text_field!r}; set --text-field to the field with the text"
        )
    text = value[text_field]
    if not isinstance(text, str):
        return Problem(line, f"field {text_field!r} is {type(text).__name__}, not a string")
    try:
        return Document(text, text.encode(), line, value.get(id_field) if id_field else None)
    except UnicodeEncodeError as error:
        return Problem(line, f"field {text_field!r} is not Unicode text: {error.reason}")
