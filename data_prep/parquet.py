"""A column of text of a parquet file, a few rows at a time. Needs pyarrow (`optimus[parquet]`)."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

from optimus.errors import DataError, one_line

_ROWS = 256
_BATCH_BYTES = 8 << 20
"""Rows are read so many at a time that they take about this much, if they are alike."""
_PAGE_BYTES = 1 << 20


class DamagedTable(Exception):
    """The table cannot be read to its end. The message says why."""


def read_column(
    name: str,
    column: str,
    id_column: str = "",
    skip: int = 0,
    check: Callable[[int, int, int], None] = lambda first, last, size: None,
) -> Iterator[tuple[Any, Any]]:
    """The values of `column` behind the first `skip`, in order, as scalars of pyarrow, with ids.

    An id is the value of `id_column`, a scalar, None where the table has no such column. `check` is
    told of rows `first` to `last`, from 1, and the unpacked bytes of their column before any of it
    is read.

    Raises DamagedTable, and DataError where pyarrow or a column of text with that name is missing.
    """
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError:
        raise DataError(
            f"{name}: .parquet files need the pyarrow package: pip install pyarrow"
        ) from None
    try:
        with parquet.ParquetFile(name, pre_buffer=False, buffer_size=_PAGE_BYTES) as table:
            schema = table.schema_arrow
            if column not in schema.names:
                raise DataError(
                    f"{name}: has no column {column!r}, only {', '.join(schema.names)}; "
                    "--text-field names the right one"
                )
            twice = [name for name in (column, id_column) if schema.names.count(name) > 1]
            if twice:
                raise DataError(f"{name}: has several columns {twice[0]!r}; rename all but one")
            kind = schema.field(column).type
            text = (pyarrow.types.is_string, pyarrow.types.is_large_string)
            if not any(is_kind(kind) for is_kind in text):
                raise DataError(
                    f"{name}: column {column!r} is {kind}, not text; write it as string"
                )
            has_ids = id_column in schema.names
            wanted = list(dict.fromkeys([column, id_column])) if has_ids else [column]
            first = 1
            for group in range(table.num_row_groups):
                rows = table.metadata.row_group(group).num_rows
                first += rows
                if skip >= rows:
                    skip -= rows
                    continue
                held = _bytes_of(table.metadata.row_group(group), column)
                check(first - rows, first - 1, held)
                at_once = max(1, min(_ROWS, rows * _BATCH_BYTES // max(1, held)))
                for batch in table.iter_batches(at_once, row_groups=[group], columns=wanted):
                    rest = batch.slice(skip)
                    skip -= min(skip, len(batch))
                    values = rest.column(column)
                    ids = rest.column(id_column) if has_ids else itertools.repeat(None)
                    yield from zip(values, ids, strict=False)
    except (pyarrow.ArrowException, OSError) as error:
        raise DamagedTable(one_line(error)) from None


def _bytes_of(group: Any, column: str) -> int:
    """Unpacked bytes of a column in a group of rows."""
    chunks = [group.column(number) for number in range(group.num_columns)]
    return sum(c.total_uncompressed_size for c in chunks if c.path_in_schema == column)
