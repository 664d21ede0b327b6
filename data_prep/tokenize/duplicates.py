"""Exclusion of documents that have the id of an earlier document.

The ids are compared after tokenization, by hashes of 16 bytes and in bounded memory. The inputs
have an order. Document A is earlier than document B if the input of A comes before the input of B,
or if A and B are in the same input and the line of A comes before the line of B. Therefore the
result does not depend on the ranks. docs/formats/dataset.md, "Duplicate ids", describes the files
and hashes.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypedDict

import numpy as np

from data_prep import layout
from data_prep.runtime.ranks import WorkerGroup, run_task, wait_for
from data_prep.sources.documents import DamagedFile, Document, InputReader
from data_prep.tokenize.plan import TokenPlan, read_plan, tokens_dirs
from data_prep.tokenize.store import read_docs, read_ids
from data_prep.tokenize.token_set import read_unit, split_of
from data_prep.tokenize.tokenize import (
    TokenizeWork,
    UnitTask,
    complete,
    make_unit,
    make_units,
)
from optimus.errors import DamageError, DataError
from optimus.io import files

_FORM = "optimus-duplicates"
_MARK = "duplicates.json"
_TABLE = "duplicates.npy"
_ROW_BYTES = 120
"""Bytes of memory per document that are needed to sort a bucket of hashes of document ids."""
_LEAST_BYTES_TO_COMPARE = 64 << 20
_SHOWN_CHARS = 80


def make_distinct_units(work: TokenizeWork, workers: int, group: WorkerGroup) -> None:
    """Tokenize all inputs, and exclude documents that have the id of an earlier document.

    All units (ranges of inputs) are tokenized first. Then rank 0 compares the ids of all documents.
    If `work.quarantine` is True, units with duplicates are tokenized again without the duplicates.
    If `work.quarantine` is False, a duplicate is an error.

    Raises:
        DataError: a document cannot be used or is a duplicate, or an input has changed.
    """
    make_units(_DistinctTask, work, workers, group, "tokenize")
    if not work.plan.id_field:
        return
    wait_for(group, lambda: _read(work) is not None, lambda: _compare(work))
    rows = _read(work)
    assert rows is not None
    if len(rows) and not work.quarantine:
        raise _error(work.plan, *rows[0].tolist())
    units = [unit for unit, inputs in enumerate(work.plan.units) if _of_inputs(rows, inputs)]
    run_task(group, _RepeatTask(work, workers, group.label("leave out duplicate ids"), units))


@dataclass(frozen=True)
class _Duplicates:
    """Duplicates of a unit: the documents of the unit that have the id of an earlier document.

    `documents` maps each duplicate to the first document with the same id. Documents are given as
    (input, line).
    """

    plan: TokenPlan
    documents: Mapping[tuple[int, int], tuple[int, int]]

    def reason(self, source: int, document: Document) -> str | None:
        """Return the reason to exclude `document` of the input `source`; None if the document is
        not a duplicate."""
        first = self.documents.get((source, document.line))
        return _reason(self.plan, document.id, *first) if first else None


def _duplicates_of(work: TokenizeWork, unit: int, rows: np.ndarray | None) -> _Duplicates:
    inputs = work.plan.units[unit]
    return _Duplicates(work.plan, {} if rows is None else _of_inputs(rows, inputs))


class _DistinctTask(UnitTask):
    """Task that tokenizes units (ranges of input files). Documents in the list of duplicates are
    excluded, if this list exists already."""

    @staticmethod
    def job(work: TokenizeWork, unit: int, advance: Callable[[int], None]) -> None:
        """Tokenize a unit without the documents in the list of duplicates, if this list exists."""
        rows = _read(work)
        while True:
            make_unit(work, unit, _duplicates_of(work, unit, rows), advance)
            if work.plan.id_field and rows is None and not work.quarantine:
                _compare_neighbours(work, unit)
            # If the list of duplicates was written while this unit was tokenized, the unit may
            # contain duplicates. This loop then tokenizes the unit again. If the list is written
            # later, `_RepeatTask` tokenizes the unit again.
            before, rows = rows, _read(work)
            if (before is None) == (rows is None):
                return

    def verify(self) -> list[int]:
        """Return the indices of units that are not complete, or that contain a document in the list
        of duplicates."""
        work, rows = self.work, _read(self.work)
        return [
            index
            for index, unit in enumerate(self.units)
            if not complete(work, unit, len(_duplicates_of(work, unit, rows).documents))
        ]


class _RepeatTask(_DistinctTask):
    """Task that repeats the tokenization of units that contain duplicates, and excludes these
    duplicates."""

    def missing(self) -> list[int]:
        """Return the indices of units that still contain duplicates."""
        return self.verify()

    def do(self, items: Sequence[int]) -> None:
        """Tokenize again the units with the indices `items`, if they still contain duplicates."""
        if left := sorted({*items} & {*self.missing()}):
            super().do(left)


def _compare(work: TokenizeWork) -> None:
    """Compare the ids of all documents, and write the list of duplicates if it does not exist.

    Raises:
        DataError: there are duplicates, but `work.quarantine` is False.
    """
    if _read(work) is not None:
        return
    rows = _find(work, range(len(work.plan.units)))
    if len(rows) and not work.quarantine:
        raise _error(work.plan, *rows[0].tolist())
    header = layout.npy_header(rows.shape, "int64")
    data = header + rows.astype(layout.little_endian("int64")).tobytes()
    if len(rows):
        files.write_bytes(work.tokens_dir / _TABLE, data)
    mark = {"format": _FORM, "version": layout.VERSION, "plan": work.plan_xxh3, "count": len(rows)}
    layout.write_checked_json(work.tokens_dir / _MARK, mark | {"xxh3": files.xxh3_bytes(data)})


def _compare_neighbours(work: TokenizeWork, unit: int) -> None:
    """Compare the document ids of a unit and of the complete units next to it.

    The comparison of the ids of all units is only possible after tokenization, which may take
    hours. The comparison of neighbours detects early that the values of the id field are not
    unique, for example because the ids of each file start with the same number.

    Raises:
        DataError: two documents have the same id.
    """
    neighbours = {unit - 1, unit + 1} & set(range(len(work.plan.units)))
    rows = _find(work, [unit, *(other for other in neighbours if complete(work, other))])
    if len(rows):
        raise _error(work.plan, *rows[0].tolist())


def _find(work: TokenizeWork, units: Sequence[int]) -> np.ndarray:
    folders = list(tokens_dirs(work.out, work.plan).values())
    return find(folders, units, max(_LEAST_BYTES_TO_COMPARE, work.limits.room_bytes or 0))


def find(folders: Sequence[Path], units: Sequence[int], memory_bytes: int) -> np.ndarray:
    """Find the documents of `units` that have the id of an earlier document of `units`.

    Args:
        folders: The folders of token arrays of all splits.
        units: The units to compare.
        memory_bytes: Memory for the comparison. Less memory needs more buckets of hashes, and all
            ids are read once for each bucket.

    Returns:
        int64 [n, 4], sorted by input and line. A row contains the input and line of a duplicate,
        and then the input and line of the first document with the same id.
    """
    unit_files = [(folder, unit) for folder in folders for unit in units]
    total = sum(len(read_docs(folder, unit)) for folder, unit in unit_files)
    buckets = max(1, -(-total * _ROW_BYTES // memory_bytes))
    rows = np.concatenate(
        [_find_in_bucket(unit_files, bucket, buckets) for bucket in range(buckets)]
    )
    return rows[np.lexsort((rows[:, 1], rows[:, 0]))]


def _find_in_bucket(unit_files: list[tuple[Path, int]], bucket: int, buckets: int) -> np.ndarray:
    """Return the duplicates in one bucket of hashes, int64 [n, 4] as in `find`."""
    hashes, positions = [np.empty((0, 2), ">u8")], [np.empty((0, 2), np.int64)]
    for folder, unit in unit_files:
        ids = read_ids(folder, unit)
        if ids is None:
            continue
        halves = ids.view(">u8")
        # bucket = (upper 32 bits of the hash) * buckets / 2^32. The buckets have similar sizes. The
        # division by 2^32 is a shift, which is faster than the remainder of a division by
        # `buckets`.
        buckets_of = (halves[:, 0] >> 32).astype(np.uint64) * np.uint64(buckets) >> np.uint64(32)
        chosen = (buckets_of == bucket) & (halves != 0).any(axis=1)
        hashes.append(halves[chosen])
        positions.append(read_docs(folder, unit)[chosen, 1:])
    key, position = np.concatenate(hashes), np.concatenate(positions)
    # Fast test: usually all hashes already differ in their upper halves.
    upper = np.sort(key[:, 0].astype(np.uint64))
    if not (upper[1:] == upper[:-1]).any():
        return np.empty((0, 4), np.int64)
    order = np.lexsort((position[:, 1], position[:, 0], key[:, 1], key[:, 0]))
    key, position = key[order], position[order]
    again = np.zeros(len(key), bool)
    again[1:] = (key[1:] == key[:-1]).all(axis=1)
    first = np.maximum.accumulate(np.where(again, 0, np.arange(len(key))))
    return np.concatenate([position[again], position[first[again]]], axis=1)


def _error(plan: TokenPlan, source: int, line: int, first: int, first_line: int) -> DataError:
    """Return the error for a duplicate. The document is read again, because the message contains
    the id of the document."""
    file, document_id = plan.inputs[source], None
    with contextlib.suppress(DamagedFile):
        reader = InputReader(file, plan.text_field, lambda count: None, id_field=plan.id_field)
        for document in reader:
            if document.line == line and isinstance(document, Document):
                document_id = document.id
                break
    return DataError(
        f"{file.name}:{line}: {_reason(plan, document_id, first, first_line)}; skip duplicates "
        f"with --on-error quarantine, or, if {plan.id_field!r} need not be unique, start "
        "again with --id-field ''"
    )


def _reason(plan: TokenPlan, document_id: object, source: int, line: int) -> str:
    """Return the reason to exclude a duplicate. The first document with the same id is at line
    `line` of the input `source`."""
    shown = "" if document_id is None else f" {document_id!r}"
    shown = shown if len(shown) <= _SHOWN_CHARS else shown[: _SHOWN_CHARS - 3] + "..."
    return f"duplicate id{shown}: {plan.inputs[source].name}:{line} has it"


class _Mark(TypedDict):
    plan: str
    count: int
    xxh3: str


def duplicates_files(tokens_dir: Path) -> list[Path]:
    """Return the paths of the two files that contain the list of duplicates: a JSON file and a
    table."""
    return [tokens_dir / _MARK, tokens_dir / _TABLE]


def read_duplicates(tokens_dir: Path, plan: TokenPlan, plan_xxh3: str) -> np.ndarray:
    """Read the list of duplicates from a folder of token arrays.

    Returns:
        int64 [n, 4], in the format of the result of `find`.

    Raises:
        DataError: the list is missing or was made for another plan.
        DamageError: the list is damaged.
    """
    mark = layout.read_record(tokens_dir / _MARK, _Mark, _FORM)
    if mark["plan"] != plan_xxh3:
        raise DataError(f"{tokens_dir / _MARK}: was written for another plan than {layout.PLAN}")
    if not mark["count"]:
        empty = layout.npy_header((0, 4), "int64")
        is_empty = mark["xxh3"] == files.xxh3_bytes(empty)
        layout.require(
            tokens_dir / _MARK, (is_empty, "count is 0, but xxh3 is not the hash of an empty list")
        )
        return np.empty((0, 4), np.int64)
    path = tokens_dir / _TABLE
    data = layout.read_bytes(path)
    if files.xxh3_bytes(data) != mark["xxh3"]:
        raise DamageError(f"{path}: its content is damaged (hash differs)")
    shape = (mark["count"], 4)
    size = layout.HEADER_BYTES + 4 * 8 * mark["count"]
    is_whole = size == len(data) and data.startswith(layout.npy_header(shape, "int64"))
    layout.require(path, (is_whole, f"its number of rows differs from the count in {_MARK}"))
    table = np.frombuffer(data, layout.little_endian("int64"), offset=layout.HEADER_BYTES)
    table = table.reshape(shape)
    # The rows must be in the order of the duplicates. Each duplicate must be later than the first
    # document with the same id.
    inputs, lines, first_inputs, first_lines = table.T
    steps = np.diff(inputs)
    is_sorted = (steps > 0) | ((steps == 0) & (np.diff(lines) > 0))
    is_later = (first_inputs < inputs) | ((first_inputs == inputs) & (first_lines < lines))
    is_possible = (table >= 0).all() and (inputs < len(plan.inputs)).all()
    layout.require(
        path,
        (bool(is_possible), "names a document that does not exist"),
        (
            bool(is_sorted.all() and is_later.all()),
            "duplicates are not in the order of the documents, or precede the first document with "
            "their id",
        ),
    )
    return table


def _read(work: TokenizeWork) -> np.ndarray | None:
    """Return the list of duplicates, int64 [n, 4] as in `find`; None if there is no valid list for
    `work.plan`."""
    try:
        if not work.plan.id_field:
            return None
        return read_duplicates(work.tokens_dir, work.plan, work.plan_xxh3)
    except DataError:
        return None


def _of_inputs(rows: np.ndarray, inputs: tuple[int, int]) -> dict[tuple[int, int], tuple[int, int]]:
    """Select the duplicates in `rows` that are in the range `inputs`. Return the selected
    duplicates in the format of `_Duplicates.documents`."""
    low, high = np.searchsorted(rows[:, 0], inputs)
    return {(a, b): (c, d) for a, b, c, d in rows[low:high].tolist()}


def require_distinct(tokens_dir: Path) -> None:
    """Check that the documents of token arrays have different ids, if the plan has an id field.

    Only the folder of the training split is checked, because only this folder has the list of
    duplicates.

    Raises:
        DataError: the ids were not compared, or duplicates have not been excluded yet.
        DamageError: the list of duplicates is damaged.
    """
    plan = read_plan(tokens_dir)
    if not plan.id_field or split_of(tokens_dir) != layout.SPLITS[0]:
        return
    plan_xxh3 = files.xxh3_file(tokens_dir / layout.PLAN)
    try:
        rows = read_duplicates(tokens_dir, plan, plan_xxh3)
    except DamageError:
        raise
    except DataError:  # there is no list, or it is of another plan
        rows = None
    if rows is not None:
        dropped = [len(_of_inputs(rows, inputs)) for inputs in plan.units]
        units = range(len(plan.units))
        records = (read_unit(tokens_dir, unit, plan_xxh3, has_array=False) for unit in units)
        if [record.get("dropped", 0) for record in records] == dropped:
            return
    raise DataError(
        f"{tokens_dir}: tokenization is not complete: document ids were not compared, or documents "
        "with the same id remain; run optimus-data tokenize or optimus-data run again"
    )
