"""A column of text of a Parquet file, a few rows at a time, in bounded memory. Needs pyarrow.

A page is unpacked as a whole, so no value of it is larger, except that a dictionary or shared
beginnings repeat values. The header of a page is a `PageHeader` of parquet.thrift in Thrift's
compact protocol: https://parquet.apache.org/docs/file-format/data-pages/. pyarrow does not give
them.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import IO, Any

import numpy as np

from data_prep.runtime import child
from optimus.errors import DataError, OptimusError, counted, one_line

_HEADER_BYTES = 4096
"""Read at once for a header: those without large statistics are shorter."""
_DICTIONARY_PAGE, _DATA_PAGE_V2 = 2, 3
_DEEPEST = 8
"""Structs within one another; headers have three."""
_PLAIN, _DELTA_LENGTH = 0, 6
_DICTIONARIES = (2, 8)
"""Encodings of values as numbers in the dictionary page."""


class _NotWalked(Exception):
    """The headers are not what they should be; whoever reads the pages will say more."""


@dataclass(frozen=True)
class ColumnPages:
    """The data pages of a column in a group of rows, n of them."""

    values: np.ndarray
    """int64 [n]: how many values each has; rows, but for lists."""
    sizes: np.ndarray
    """int64 [n]: unpacked bytes of each."""
    most: np.ndarray
    """int64 [n]: the most bytes that one of its values can have."""
    repeats: np.ndarray
    """bool [n]: whether several of its values can have them at once."""
    dictionary: int = 0
    """Unpacked bytes of the dictionary page."""

    @property
    def held(self) -> int:
        """The most unpacked bytes of pages that are there at a time."""
        return int(self.sizes.max(initial=0)) + self.dictionary

    @property
    def largest(self) -> int:
        """No value has more bytes."""
        return int(self.most.max(initial=0))

    def bytes_of(self, rows: int) -> int:
        """No `rows` values behind one another have more bytes."""
        if not len(self.sizes):
            return 0
        own = np.where(self.repeats, np.minimum(self.values, rows) * self.most, self.sizes)
        before = np.concatenate([[0], np.cumsum(own)])
        # Most pages are met by rows that begin with the last one of a page.
        ends = np.cumsum(self.values)
        last = np.searchsorted(ends, ends + rows - 2, side="right").clip(max=len(ends) - 1)
        return int((before[last + 1] - before[:-1]).max())


@dataclass(frozen=True)
class GroupPages:
    """The columns of a group of rows that are read."""

    number: int
    """Of the group, from 0."""
    first: int
    """Its first row, from 1."""
    rows: int
    columns: tuple[ColumnPages, ...]
    """That of the text is the first."""

    @property
    def largest(self) -> int:
        """The most bytes that a text can have."""
        return self.columns[0].largest

    def needs(self, rows: int) -> int:
        """Memory of reading so many rows at a time, before a text is made of any: pages, packed
        and unpacked, and values while their array grows; that of several values is measured at up
        to 4 times their bytes, for what an array leaves free is not always taken by the next."""
        times = 2 if rows == 1 else 4
        return sum(2 * column.held + times * column.bytes_of(rows) for column in self.columns)


def pages_of(file: IO[bytes], chunk: Any, rows: int) -> ColumnPages:
    """The pages of a column in a group of `rows` rows; `chunk` is its ColumnChunkMetaData.

    Headers that are damaged count as one page of all, which is never less than what is read.
    """
    try:
        pages = _walk(file, chunk)
        if int(pages.values.sum()) == rows:
            return pages
    except (_NotWalked, OverflowError, ValueError):  # a number or place that cannot be
        pass
    size = np.array([chunk.total_uncompressed_size], np.int64)
    return ColumnPages(np.array([rows], np.int64), size, size, np.array([False]))


def _walk(file: IO[bytes], chunk: Any) -> ColumnPages:
    start, dictionary = chunk.data_page_offset, 0
    if chunk.has_dictionary_page and 0 < (chunk.dictionary_page_offset or 0) < start:
        start = chunk.dictionary_page_offset
    stop = start + chunk.total_compressed_size
    pages: list[tuple[int, int, int, bool]] = []
    while start < stop:
        header = _Header(file, start)
        fields = header.struct()
        kind, size = fields.get(1), fields.get(2)
        packed = fields.get(3)
        if not isinstance(size, int) or not isinstance(packed, int) or packed < 0:
            raise _NotWalked
        if not 0 <= size <= chunk.total_uncompressed_size:
            raise _NotWalked
        if kind == _DICTIONARY_PAGE:
            dictionary = size
        elif isinstance(own := fields.get(8 if kind == _DATA_PAGE_V2 else 5), dict):
            count, encoding = own.get(1), own.get(4 if kind == _DATA_PAGE_V2 else 2)
            if not isinstance(count, int) or count < 0:
                raise _NotWalked
            coded = encoding in _DICTIONARIES
            repeats = encoding not in (_PLAIN, _DELTA_LENGTH)
            pages.append((count, size, dictionary if coded else size, repeats))
        start = header.place + packed
    columns: list[tuple[Any, ...]] = list(zip(*pages, strict=True)) if pages else [()] * 4
    values, sizes, most = (np.array(column, np.int64) for column in columns[:3])
    return ColumnPages(values, sizes, most, np.array(columns[3], bool), dictionary)


class _Header:
    """Reads the fields of a struct in Thrift's compact protocol, of the types that headers have."""

    def __init__(self, file: IO[bytes], place: int):
        self._file, self._start = file, place
        file.seek(place)
        self._data, self._at = file.read(_HEADER_BYTES), 0

    @property
    def place(self) -> int:
        """Where the next byte lies in the file."""
        return self._start + self._at

    def struct(self, depth: int = 0) -> dict[int, Any]:
        """The fields of a struct by their numbers; texts are passed by."""
        if depth > _DEEPEST:
            raise _NotWalked
        fields: dict[int, Any] = {}
        number = 0
        while head := self._byte():
            kind, step = head & 15, head >> 4
            number = number + step if step else self._integer()
            fields[number] = self._value(kind, depth)
        return fields

    def _value(self, kind: int, depth: int) -> Any:
        if kind in (1, 2):
            return kind == 1
        if kind == 3:
            return self._byte()
        if kind in (4, 5, 6):
            return self._integer()
        if kind == 12:
            return self.struct(depth + 1)
        if kind not in (7, 8):
            raise _NotWalked
        length = self._unsigned() if kind == 8 else 8
        self._at += length
        return None

    def _integer(self) -> int:
        value = self._unsigned()
        return value >> 1 ^ -(value & 1)

    def _unsigned(self) -> int:
        value = shift = 0
        while (byte := self._byte()) & 128:
            value |= (byte & 127) << shift
            shift += 7
            if shift > 63:
                raise _NotWalked
        return value | byte << shift

    def _byte(self) -> int:
        if self._at >= len(self._data):  # long texts were passed by
            self._start, self._at = self.place, 0
            self._file.seek(self._start)
            self._data = self._file.read(_HEADER_BYTES)
            if not self._data:
                raise _NotWalked
        self._at += 1
        return self._data[self._at - 1]


_ROWS = 256
_BATCH_BYTES = 8 << 20
"""Rows are read so many at a time that they take about this much, if they are alike."""
_PAGE_BYTES = 1 << 20
_CHECK_S = 300.0
"""Limit of the check of descriptions; those of a million columns take some seconds."""


class DamagedTable(Exception):
    """The table cannot be read to its end. The message says why."""


def read_column(
    name: str,
    column: str,
    id_column: str = "",
    skip: int = 0,
    rows_at_once: Callable[[GroupPages, int], int] = lambda group, usual: usual,
) -> Iterator[tuple[Any, Any]]:
    """The values of `column` behind the first `skip`, in order, as scalars of pyarrow, with ids.

    An id is the value of `id_column`, a scalar, None where the table has no such column.
    `rows_at_once` is asked before any page of a group is read, and is given how many are usual.

    Raises DamagedTable, DataError where pyarrow or a column of text with that name is missing, and
    OptimusError where the machine lacks what the check of the table needs.
    """
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError:
        raise DataError(
            f"{name}: .parquet files need the pyarrow package: pip install pyarrow"
        ) from None
    try:
        with (
            pyarrow.OSFile(os.fsencode(name)) as file,  # by its name it might be taken for a URI
            parquet.ParquetFile(file, pre_buffer=False, buffer_size=_PAGE_BYTES) as table,
            open(name, "rb") as headers,
        ):
            wanted = _columns(name, table.schema_arrow, column, id_column)
            _check_columns(name, table.metadata)
            _check_counts(table.metadata)
            first = 1
            for number in range(table.num_row_groups):
                group = _group(headers, table.metadata, number, first, wanted)
                first += group.rows
                if skip >= group.rows:
                    skip -= group.rows
                    continue
                size = int(group.columns[0].sizes.sum())
                usual = max(1, min(_ROWS, group.rows * _BATCH_BYTES // max(1, size)))
                at_once = rows_at_once(group, usual)
                batches = table.iter_batches(at_once, row_groups=[number], columns=wanted)
                left = group.rows
                while (batch := next(batches, None)) is not None:
                    left -= len(batch)
                    rest = batch.slice(skip)
                    skip -= min(skip, len(batch))
                    values = rest.column(column)
                    has_ids = id_column in wanted
                    ids = rest.column(id_column) if has_ids else itertools.repeat(None)
                    yield from zip(values, ids, strict=False)
                    del batch, rest, values, ids  # gone before the next one is read
                if left:
                    given = group.rows - left
                    raise DamagedTable(
                        f"row group {number} gives {given} of {counted(group.rows, 'row')}"
                    )
    except (pyarrow.ArrowException, OSError, UnicodeDecodeError) as error:
        raise DamagedTable(one_line(error)) from None


def _columns(name: str, schema: Any, column: str, id_column: str) -> list[str]:
    """The columns to read, that of the text first. Raises DataError where it is none."""
    from pyarrow import types

    if column not in schema.names:
        raise DataError(
            f"{name}: has no column {column!r}, only {', '.join(schema.names)}; "
            "--text-field names the right one"
        )
    wanted = [column]
    if id_column in schema.names and id_column != column:
        wanted.append(id_column)
    for one in wanted:
        if schema.names.count(one) > 1:
            raise DataError(f"{name}: has several columns {one!r}; rename all but one")
    kind = schema.field(column).type
    if not (types.is_string(kind) or types.is_large_string(kind)):
        raise DataError(f"{name}: column {column!r} is {kind}, not text; write it as string")
    return wanted


def _check_columns(name: str, metadata: Any) -> None:
    """Raise DamagedTable if the description of a column cannot be read.

    A child process tries it: pyarrow throws C++ exceptions for some damaged statistics that end the
    process, because nothing between them and Python catches them. Raise OptimusError if the child
    cannot be started, or ends without a result for another reason.
    """

    def read_all() -> None:
        for number in range(metadata.num_row_groups):
            group = metadata.row_group(number)
            for index in range(group.num_columns):
                group.column(index)

    try:
        if child.run(read_all, limit_s=_CHECK_S) is None:
            return
    except child.CrashError:
        pass
    except child.UnfinishedError as error:
        raise OptimusError(
            f"{name}: cannot check the description of its columns: {error}; free memory or "
            "processes and give the command again"
        ) from None
    raise DamagedTable("the description of its columns cannot be read")


def _check_counts(metadata: Any) -> None:
    """Raises DamagedTable where groups of rows are not the table: pyarrow reads what they say."""
    rows = [metadata.row_group(number).num_rows for number in range(metadata.num_row_groups)]
    if min(rows, default=0) < 0 or sum(rows) != metadata.num_rows:
        raise DamagedTable(
            f"row groups of {counted(sum(rows), 'row')} in a table of {metadata.num_rows}"
        )


def _group(
    headers: IO[bytes], metadata: Any, number: int, first: int, wanted: Sequence[str]
) -> GroupPages:
    """A group of rows and the pages of the wanted columns, or of the parts of such columns."""
    group = metadata.row_group(number)
    chunks = [group.column(index) for index in range(group.num_columns)]
    columns = tuple(
        pages_of(headers, chunk, group.num_rows)
        for name in wanted
        for chunk in chunks
        if chunk.path_in_schema == name or chunk.path_in_schema.startswith(f"{name}.")
    )
    return GroupPages(number, first, group.num_rows, columns)
