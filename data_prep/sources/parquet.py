"""A column of text of a parquet file, a few rows at a time. Needs pyarrow (`optimus[parquet]`)."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterator, Sequence
from typing import IO, Any

from data_prep.runtime import child
from data_prep.sources.parquet_pages import GroupPages, pages_of
from optimus.errors import DataError, OptimusError, counted, one_line

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
