"""A column of text of a parquet file, a few rows at a time. Needs pyarrow (`optimus[parquet]`)."""

from __future__ import annotations

from collections.abc import Iterator

from optimus.errors import DataError, one_line

_ROWS = 256


class DamagedTable(Exception):
    """The table cannot be read to its end. The message says why."""


def read_column(name: str, column: str, skip: int = 0) -> Iterator[str | None]:
    """The values of `column` behind the first `skip`, in order.

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
        with parquet.ParquetFile(name) as table:
            schema = table.schema_arrow
            if column not in schema.names:
                raise DataError(
                    f"{name}: has no column {column!r}, only {', '.join(schema.names)}; "
                    "--text-field names the right one"
                )
            kind = schema.field(column).type
            text = (pyarrow.types.is_string, pyarrow.types.is_large_string)
            if not any(is_kind(kind) for is_kind in text):
                raise DataError(f"{name}: column {column!r} is {kind}, not text")
            for group in range(table.num_row_groups):
                rows = table.metadata.row_group(group).num_rows
                if skip >= rows:
                    skip -= rows
                    continue
                for batch in table.iter_batches(_ROWS, row_groups=[group], columns=[column]):
                    values = batch.column(0)[skip:] if skip < len(batch) else []
                    skip -= min(skip, len(batch))
                    for value in values:
                        yield value.as_py()
    except (pyarrow.ArrowException, OSError, UnicodeDecodeError) as error:
        raise DamagedTable(one_line(error)) from None
