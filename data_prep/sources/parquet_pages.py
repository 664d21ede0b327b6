"""What reading a column of a parquet file takes, by the headers of its pages, before any is read.

A page is unpacked as a whole, so no value of it can be larger, but for what a dictionary or shared
beginnings repeat. The header of a page is a `PageHeader` of parquet.thrift in Thrift's compact
protocol: https://parquet.apache.org/docs/file-format/data-pages/. pyarrow does not give them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import IO, Any

import numpy as np

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
