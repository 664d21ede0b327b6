"""The same id twice: found after tokenizing, from 16 bytes a document, in bounded memory.

Files and hashes: docs/formats/dataset.md, "Duplicate ids". Which of two is the later is told by
their inputs and lines: nothing depends on who tokenized what, and when.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypedDict

import numpy as np

from data_prep import layout
from data_prep.tokenize.plan import PARTS, read_plan
from data_prep.tokenize.store import ID_BYTES, read_docs, read_ids
from data_prep.tokenize.token_set import read_unit, split_of
from optimus.errors import DamageError, DataError
from optimus.io import files

_FORM = "optimus-duplicates"
MARK = "duplicates.json"
TABLE = "duplicates.npy"
_ROW_BYTES = 120
"""Memory of a document while a bucket is sorted: its row, the sort, and copies."""


def hash_of(value: Any) -> bytes:
    """What is stored of an id; zeros for none (missing, null, NaN, or an empty string)."""
    if value is None or value == "" or value != value:
        return bytes(ID_BYTES)
    if isinstance(value, str):
        content = b"s" + value.encode("utf-8", "surrogatepass")
    else:
        content = b"j" + json.dumps(value, sort_keys=True, default=str).encode()
    return hashlib.blake2b(content, digest_size=ID_BYTES).digest()


class _Mark(TypedDict):
    plan: str
    count: int
    xxh3: str


@dataclass(frozen=True)
class Duplicates:
    """Documents that are set aside because an earlier one has their id."""

    rows: np.ndarray
    """int64 [n, 4], ascending: input, line, and those of the first with that id."""

    def of_inputs(self, first: int, stop: int) -> dict[tuple[int, int], tuple[int, int]]:
        """(input, line) -> the place of the first, for inputs [first, stop)."""
        low, high = np.searchsorted(self.rows[:, 0], [first, stop])
        return {(a, b): (c, d) for a, b, c, d in self.rows[low:high].tolist()}


def read(tokens_dir: Path, plan_xxh3: str) -> Duplicates | None:
    """What was found in these token arrays, or None where that is not known, or no longer."""
    try:
        return read_whole(tokens_dir, plan_xxh3)
    except DataError:
        return None


def read_whole(tokens_dir: Path, plan_xxh3: str) -> Duplicates:
    """What was found. Raises DataError where it is missing, damaged or of another plan."""
    mark = layout.read_record(tokens_dir / MARK, _Mark, _FORM)
    if mark["plan"] != plan_xxh3:
        raise DataError(f"{tokens_dir / MARK}: belongs to other work than {layout.PLAN}")
    if not mark["count"]:
        return Duplicates(np.empty((0, 4), np.int64))
    path = tokens_dir / TABLE
    data = layout.read_bytes(path)
    if files.xxh3_bytes(data) != mark["xxh3"]:
        raise DamageError(f"{path}: its content is damaged (hash differs)")
    rows, rest = divmod(len(data) - layout.HEADER_BYTES, 4 * 8)
    layout.require(path, (rows >= 0 and not rest, "it does not hold rows of four numbers"))
    table = np.frombuffer(data, layout.little_endian("int64"), offset=layout.HEADER_BYTES)
    return Duplicates(table.reshape(-1, 4))


def require_compared(tokens_dir: Path) -> None:
    """Raises DataError where token arrays may hold an id twice, though they should not.

    DamageError where the list of those that were found is damaged. Nothing is known of a held-out
    part by itself.
    """
    plan = read_plan(tokens_dir)
    if not plan.id_field or split_of(tokens_dir) != PARTS[0]:
        return
    plan_xxh3 = files.xxh3_file(tokens_dir / layout.PLAN)
    found = None
    try:
        found = read_whole(tokens_dir, plan_xxh3)
    except DamageError:
        raise
    except DataError:  # there is none, or of another plan
        pass
    if found is not None:
        left_out = {
            unit: len(gone)
            for unit, inputs in enumerate(plan.units)
            if len(found.rows) and (gone := found.of_inputs(*inputs))
        }
        read_again = (read_unit(tokens_dir, unit, plan_xxh3, has_array=False) for unit in left_out)
        if [record.get("dropped", 0) for record in read_again] == list(left_out.values()):
            return
    raise DataError(
        f"{tokens_dir}: tokenizing did not come to its end: the ids of its documents are not "
        "compared, or some are there twice; give that command again"
    )


def write(tokens_dir: Path, plan_xxh3: str, rows: np.ndarray) -> None:
    """Say what was found."""
    head = layout.npy_header(rows.shape, "int64")
    data = head + rows.astype(layout.little_endian("int64")).tobytes()
    if len(rows):
        files.write_bytes(tokens_dir / TABLE, data)
    mark = {"format": _FORM, "version": layout.VERSION, "plan": plan_xxh3, "count": len(rows)}
    layout.write_checked_json(tokens_dir / MARK, mark | {"xxh3": files.xxh3_bytes(data)})


def find(parts: list[Path], units: Sequence[int], memory_bytes: int) -> np.ndarray:
    """Every document of these units whose id an earlier one of them has, as rows of Duplicates.

    `parts` are the folders of token arrays. Reads all ids once for each bucket of hashes, of which
    there are as many as `memory_bytes` asks for.
    """
    every = [(folder, unit) for folder in parts for unit in units]
    total = sum(len(read_docs(folder, unit)) for folder, unit in every)
    buckets = max(1, -(-total * _ROW_BYTES // memory_bytes))
    found = [_find_in_bucket(every, bucket, buckets) for bucket in range(buckets)]
    rows = np.concatenate(found)
    return rows[np.lexsort((rows[:, 1], rows[:, 0]))]


def _find_in_bucket(every: list[tuple[Path, int]], bucket: int, buckets: int) -> np.ndarray:
    """Duplicates among the hashes of one bucket, int64 [n, 4]."""
    hashes, places = [np.empty((0, 2), ">u8")], [np.empty((0, 2), np.int64)]
    for folder, unit in every:
        ids = read_ids(folder, unit)
        if ids is None:
            continue
        halves = ids.view(">u8")
        # The upper 32 bits, times the number of buckets, over 2^32: even, without a division.
        own = (halves[:, 0] >> 32).astype(np.uint64) * np.uint64(buckets) >> np.uint64(32)
        chosen = (own == bucket) & (halves != 0).any(axis=1)
        hashes.append(halves[chosen])
        places.append(read_docs(folder, unit)[chosen, 1:])
    key, place = np.concatenate(hashes), np.concatenate(places)
    upper = np.sort(key[:, 0].astype(np.uint64))  # quick, and nearly always enough
    if not (upper[1:] == upper[:-1]).any():
        return np.empty((0, 4), np.int64)
    order = np.lexsort((place[:, 1], place[:, 0], key[:, 1], key[:, 0]))
    key, place = key[order], place[order]
    again = np.zeros(len(key), bool)
    again[1:] = (key[1:] == key[:-1]).all(axis=1)
    first = np.maximum.accumulate(np.where(again, 0, np.arange(len(key))))
    return np.concatenate([place[again], place[first[again]]], axis=1)
