"""Reader of a text column of a Parquet file. Needs pyarrow.

The reader reads a few rows at a time, so that the memory is bounded. The bound is computed for each
row group from the sizes in the metadata of the file. A column chunk contains the values of a column
in a row group. A value or a page is at most as large as the uncompressed column chunk. Several
values together can be larger than the column chunk, because the chunk stores repeated values, and
repeated beginnings of values, only once.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from data_prep.runtime import child
from data_prep.runtime.memory import Limits
from optimus.errors import DataError, OptimusError, counted, one_line

_ROWS = 256
_BATCH_BYTES = 8 << 20
"""Bytes of text to read at a time. The number of rows to read at a time is _BATCH_BYTES divided by
the mean size of a row."""
_TEXT_FACTOR = 2
"""Memory of an ASCII text and its copy in UTF-8, as a multiple of the bytes of the text."""
_NO_LIMITS = Limits()
_CHECK_S = 300.0
"""Time limit of `_check_metadata` in seconds. A million columns take a few seconds."""


class DamagedTable(Exception):
    """Raised if a Parquet file cannot be read to its end. The message gives the reason."""


@dataclass(frozen=True)
class RowGroup:
    """Description of a row group of a Parquet file, with the sizes of the columns to read."""

    number: int
    """Index of the row group in the file, from 0."""
    first: int
    """Number of the first row of the row group in the file, from 1."""
    rows: int
    sizes: tuple[int, ...]
    """Decompressed size in bytes of each column to read, the text column first."""

    def needs(self, rows: int) -> int:
        """Return the bytes of memory that are needed to read `rows` rows at a time.

        The result includes the compressed column, a decompressed page, and the array of decoded
        values, but not the texts that the reader returns. In measurements with more than one row,
        the array of decoded values took up to 4 times the bytes of its values: the array is
        reallocated while it grows, and the allocator does not reuse all freed memory.
        """
        times = 2 if rows == 1 else 4 * rows
        return sum((2 + times) * size for size in self.sizes)


def read_column(
    name: str,
    column: str,
    id_column: str = "",
    skip: int = 0,
    limits: Limits = _NO_LIMITS,
) -> Iterator[tuple[Any, Any, int]]:
    """Read a column of text and the ids of its rows.

    Args:
        name: The path of the file.
        column: The name of the text column.
        id_column: The name of the id column. If the table has no such column, each id is None.
        skip: The number of rows to skip at the start of the table.
        limits: Limits on the size of a document and on the memory to read it.

    Yields:
        For each row: (text as pyarrow scalar, id as pyarrow scalar, bytes of memory that are needed
        to read the batch that contains the row).

    Raises:
        DamagedTable: the table cannot be read to its end.
        DataError: pyarrow is not installed; the table has no text column `column`, or several
            columns with the name of a column to read; or a row group does not fit in memory.
        OptimusError: the metadata cannot be checked, because memory is too small or no process can
            be started.
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
            pyarrow.OSFile(os.fsencode(name)) as file,  # pyarrow may interpret a name as a URI
            # Without a buffer, pyarrow reads the compressed bytes of a column chunk at once. With a
            # buffer, pyarrow allocates the size in the header of a page, which may be any number in
            # a damaged file.
            parquet.ParquetFile(file, pre_buffer=False, buffer_size=0) as table,
        ):
            wanted = _columns(name, table.schema_arrow, column, id_column)
            _check_metadata(name, table.metadata)
            first = 1
            for number in range(table.num_row_groups):
                group = _group(table.metadata, number, first, wanted)
                first += group.rows
                if skip < group.rows:
                    rows = _rows_at_once(name, group, limits)
                    batches = table.iter_batches(rows, row_groups=[number], columns=wanted)
                    ids = id_column if id_column in wanted else None
                    for value, row_id in _read_group(group, batches, column, ids, skip):
                        yield value, row_id, group.needs(rows)
                        del value, row_id  # each of these objects keeps its whole batch in memory
                skip = max(0, skip - group.rows)
    except (pyarrow.ArrowException, OSError, UnicodeDecodeError) as error:
        raise DamagedTable(one_line(error)) from None


def _read_group(
    group: RowGroup, batches: Iterator[Any], column: str, id_column: str | None, skip: int
) -> Iterator[tuple[Any, Any]]:
    """Yield the text and the id of each row of a row group, except the first `skip` rows."""
    left = group.rows
    while (batch := next(batches, None)) is not None:
        left -= len(batch)
        rest = batch.slice(skip)
        skip -= min(skip, len(batch))
        values = rest.column(column)
        ids = rest.column(id_column) if id_column else itertools.repeat(None)
        yield from zip(values, ids, strict=False)
        del batch, rest, values, ids  # free before the next batch is read
    if left:
        raise DamagedTable(
            f"only {group.rows - left} of {counted(group.rows, 'row')} of row group "
            f"{group.number} can be read"
        )


def _rows_at_once(name: str, group: RowGroup, limits: Limits) -> int:
    """Return the number of rows of `group` to read at a time, so that these rows fit in memory.

    A value that is larger than --max-document is read to get its size, but not converted to text.
    Raises DataError if a single row could need more memory than a worker has.
    """
    size = group.sizes[0]
    rows = max(1, min(_ROWS, group.rows * _BATCH_BYTES // max(1, size)))
    text = _TEXT_FACTOR * min(size, limits.max_document or size)
    if limits.room_bytes is not None:
        while rows > 1 and group.needs(rows) + text > limits.room_bytes:
            rows //= 2
    limits.refuse(
        f"{name}:{group.first}",
        f"row group {group.number} (rows {group.first} to {group.first + group.rows - 1}), "
        f"whose texts have {size} bytes,",
        group.needs(rows) + text,
        "write the table with smaller row groups",
    )
    return rows


def _columns(name: str, schema: Any, column: str, id_column: str) -> list[str]:
    """Return the names of the columns to read, the text column first.

    Raises DataError if `column` is missing or is not text, or if a name belongs to several columns.
    """
    from pyarrow import types

    if column not in schema.names:
        raise DataError(
            f"{name}: has no column {column!r}, only {', '.join(schema.names)}; "
            "set --text-field to the column with the text"
        )
    wanted = [column]
    if id_column in schema.names and id_column != column:
        wanted.append(id_column)
    for label in wanted:
        if schema.names.count(label) > 1:
            raise DataError(f"{name}: has several columns {label!r}; rename all but one")
    kind = schema.field(column).type
    if not (types.is_string(kind) or types.is_large_string(kind)):
        raise DataError(f"{name}: column {column!r} is {kind}, not text; write it as string")
    return wanted


def _check_metadata(name: str, metadata: Any) -> None:
    """Check that the metadata of each column chunk can be read, and that the numbers of rows are
    consistent. pyarrow does not check this when it opens a file.

    A child process reads the metadata of the column chunks, because for some damaged statistics
    pyarrow throws a C++ exception that is not caught and ends the process.

    Raises:
        DamagedTable: the metadata of a column chunk cannot be read, or the rows of the row groups
            do not add up to the rows of the table.
        OptimusError: the child process cannot be started, or does not return a result, for a reason
            other than the metadata.
    """

    def read_all() -> None:
        for number in range(metadata.num_row_groups):
            group = metadata.row_group(number)
            for index in range(group.num_columns):
                group.column(index)

    try:
        is_damaged = child.run(read_all, limit_s=_CHECK_S) is not None
    except child.CrashError:
        is_damaged = True
    except child.UnfinishedError as error:
        raise OptimusError(
            f"{name}: cannot check the metadata of its columns: {error}; make more memory "
            "available or end other processes, and run the same command again"
        ) from None
    if is_damaged:
        raise DamagedTable("the description of its columns cannot be read")
    rows = [metadata.row_group(number).num_rows for number in range(metadata.num_row_groups)]
    if min(rows, default=0) < 0 or sum(rows) != metadata.num_rows:
        raise DamagedTable(
            f"its row groups have {counted(sum(rows), 'row')}, but its metadata counts "
            f"{metadata.num_rows}"
        )


def _group(metadata: Any, number: int, first: int, wanted: Sequence[str]) -> RowGroup:
    """Return the description of row group `number`. Its `sizes` has an entry for each leaf column
    of the columns `wanted`."""
    group = metadata.row_group(number)
    chunks = [group.column(index) for index in range(group.num_columns)]
    sizes = tuple(
        max(0, chunk.total_uncompressed_size)
        for name in wanted
        for chunk in chunks
        if chunk.path_in_schema == name or chunk.path_in_schema.startswith(f"{name}.")
    )
    return RowGroup(number, first, group.num_rows, sizes)
