"""A set of token arrays: the sidecars that complete its units, written and read.

A unit is complete once both of its sidecars stand; everything else of it was written before.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypedDict

from data_prep import layout
from data_prep.tokenize.packed import is_packed
from data_prep.tokenize.start_check import Promise, require_header
from data_prep.tokenize.token_arrays import (
    ID_BYTES,
    TokenArrayWriter,
    array_path,
    docs_path,
    ids_path,
    sidecar_path,
)
from data_prep.tokenize.token_plan import PARTS, TokenPlan, read_plan
from optimus.errors import DamageError, DataError
from optimus.io import files

_FORM = "optimus-token-array"


class _SetAside(TypedDict):
    input: int
    line: int
    reason: str


class _Mended(TypedDict, total=False):
    eos_added: int
    empty_documents: int


class _EveryUnit(TypedDict):
    """The keys of every sidecar of a unit that are read again."""

    plan: str
    part: str
    unit: int
    tokens: int
    documents: int
    array: layout.FileRecord
    docs: layout.FileRecord
    inputs: list[str]
    set_aside: list[_SetAside]


class _UnitRecord(_EveryUnit, total=False):
    """A sidecar of a unit, with the keys that only some have."""

    ids: layout.FileRecord
    dropped: int
    mended: _Mended


def write_unit(
    folders: Mapping[str, Path],
    unit: int,
    plan_xxh3: str,
    writers: Mapping[str, TokenArrayWriter],
    inputs: Sequence[str],
    set_aside: Sequence[Mapping[str, Any]],
    more: Mapping[str, Mapping[str, Any]],
    arrays: Mapping[str, Mapping[str, Any]],
) -> None:
    """Complete a unit whose arrays, of the sizes and hashes `arrays`, stand: documents, ids and
    sidecars, the training part's last.

    `inputs` are hashes. `more` of a part's sidecar is what only some units have: `dropped` by
    duplicate ids, which version 1 does not know, and `mended` by import.
    """
    for part in reversed(list(folders)):
        folder, writer, own = folders[part], writers[part], more.get(part, {})
        docs, ids = writer.docs_bytes(), writer.ids_bytes()
        files.write_bytes(docs_path(folder, unit), docs)
        if ids:
            files.write_bytes(ids_path(folder, unit), ids)
        is_new = bool(ids) or "dropped" in own
        record = {
            "format": _FORM,
            "version": layout.PLAN_VERSION if is_new else layout.VERSION,
            "plan": plan_xxh3,
            "part": part,
            "unit": unit,
            "tokens": writer.tokens,
            "documents": writer.documents,
            "array": arrays[part],
            "docs": _described(docs),
            "inputs": inputs,
            "set_aside": set_aside if part == PARTS[0] else [],
            **({"ids": _described(ids)} if ids else {}),
            **own,
        }
        layout.write_checked_json(sidecar_path(folder, unit), record)


def _described(data: bytes) -> dict[str, Any]:
    return {"size": len(data), "xxh3": files.xxh3_bytes(data)}


def read_unit(tokens_dir: Path, unit: int, plan_xxh3: str, has_array: bool = True) -> _UnitRecord:
    """A unit's sidecar, if it is of the plan and its files have their sizes.

    Raises DataError where one is missing or of other work, DamageError where one is damaged.
    `has_array` False: the array itself may be gone, for `--fused` removed it.
    """
    path = sidecar_path(tokens_dir, unit)
    record = layout.read_record(path, _UnitRecord, _FORM, newest=layout.PLAN_VERSION)
    layout.require(
        path,
        (
            layout.are_counts([record["tokens"], record["documents"]]),
            "a count is negative or too large",
        ),
        (record["part"] in PARTS, f"part is none of {', '.join(PARTS)}"),
    )
    if record["plan"] != plan_xxh3 or record["unit"] != unit:
        raise DataError(f"{path}: belongs to other work than {tokens_dir / layout.PLAN}")
    described: Mapping[str, Any] = record
    for key, file in (
        ("array", array_path(tokens_dir, unit)),
        ("docs", docs_path(tokens_dir, unit)),
        ("ids", ids_path(tokens_dir, unit)),
    ):
        if key not in record or (key == "array" and not has_array):
            continue
        size = os.path.getsize(file) if file.exists() else None
        if key == "array" and size is None and is_packed(tokens_dir, unit, record["tokens"]):
            continue
        if size != described[key]["size"]:
            kind = DataError if size is None else DamageError
            raise kind(f"{file}: has size {size}, not the {described[key]['size']} of its sidecar")
        require_header(file, *_headers(key, record))
    return record


def _headers(key: str, record: Mapping[str, Any]) -> list[bytes]:
    """What a file of a unit begins with; the sidecar does not name the dtype of token arrays."""
    tokens, documents = record["tokens"], record["documents"]
    if key == "array":
        return [layout.npy_header((tokens,), dtype) for dtype in ("uint16", "uint32")]
    if key == "docs":
        return [layout.npy_header((documents, 3), "int64")]
    return [layout.npy_header((documents, ID_BYTES), "uint8")]


def promises(tokens_dir: Path, unit: int, record: Mapping[str, Any]) -> list[Promise]:
    """The files of a unit with the hashes that its sidecar gives; of a packed array nothing."""
    paths = {"array": array_path, "docs": docs_path, "ids": ids_path}
    return [
        Promise(path(tokens_dir, unit), record[key]["xxh3"])
        for key, path in paths.items()
        if key in record and path(tokens_dir, unit).exists()
    ]


def part_of(tokens_dir: Path) -> str:
    """Which part of a data set these token arrays are: one of PARTS. Raises DataError."""
    plan_xxh3 = files.xxh3_file(tokens_dir / layout.PLAN)
    return read_unit(tokens_dir, 0, plan_xxh3, has_array=False)["part"]


def read_token_set(tokens_dir: Path) -> tuple[TokenPlan, str, list[_UnitRecord]]:
    """Plan, hash of the plan and sidecars of a complete set of token arrays, else DataError."""
    plan = read_plan(tokens_dir)
    plan_xxh3 = files.xxh3_file(tokens_dir / layout.PLAN)
    records = [read_unit(tokens_dir, unit, plan_xxh3) for unit in range(len(plan.units))]
    for unit, ((first, stop), record) in enumerate(zip(plan.units, records, strict=True)):
        layout.require(
            sidecar_path(tokens_dir, unit),
            (
                len(record["inputs"]) == stop - first
                and all(first <= item["input"] < stop for item in record["set_aside"]),
                "its inputs are not those of its unit",
            ),
        )
    return plan, plan_xxh3, records
