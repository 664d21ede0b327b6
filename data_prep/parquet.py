"""A column of text of a parquet file, a few rows at a time. Needs pyarrow (`optimus[parquet]`)."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

from optimus.errors import DataError, one_line

_ROWS = 256
_BATCH_BYTES = 8 << 20
"""Rows are read so many at a time that they take about this much, if they are alike."""
_PAGE_BYTES = 1 << 20


class DamagedTable(Exception):
    """The table cannot be read to its end. The message says why."""


def read_column(
    name: str, column: str, id_column: str = "", skip: int = 0
) -> Iterator[tuple[Any, Any]]:
    """The values of `column` behind the first `skip`, in order, as scalars of pyarrow, with ids.

    An id is the value of `id_column`, None where the table has no such column.

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
            has_ids = id_column in schema.names and id_column != column
            wanted = [column, id_column] if has_ids else [column]
            for group in range(table.num_row_groups):
                rows = table.metadata.row_group(group).num_rows
                if skip >= rows:
                    skip -= rows
                    continue
                held = _bytes_of(table.metadata.row_group(group), column)
                at_once = max(1, min(_ROWS, rows * _BATCH_BYTES // max(1, held)))
                for batch in table.iter_batches(at_once, row_groups=[group], columns=wanted):
                    rest = batch.slice(skip)
                    skip -= min(skip, len(batch))
                    values = rest.column(column)
                    ids = rest.column(id_column).to_pylist() if len(wanted) > 1 else [None]
                    yield from zip(values, itertools.cycle(ids), strict=False)
    except (pyarrow.ArrowException, OSError, UnicodeDecodeError) as error:
        raise DamagedTable(one_line(error)) from None


def _bytes_of(group: Any, column: str) -> int:
    """Unpacked bytes of a column in a group of rows."""
    chunks = [group.column(number) for number in range(group.num_columns)]
    return sum(c.total_uncompressed_size for c in chunks if c.path_in_schema == column)
