"""Sidecars of token arrays, and checks and removal of the arrays.

A unit is a range of input files that becomes one token array per split. For each split, the unit
has a sidecar: a JSON file that contains the sizes and hashes of the unit's other files. A sidecar
is written after these other files. A unit is complete when the sidecars of all splits exist.

If an earlier run has written token arrays or shards, a run checks the sizes and headers of these
files. If the total size of the files is at most HASH_BYTES, the run also compares the hashes of all
files. Otherwise, the run compares the hashes of a random sample of at most HASH_BYTES.
`optimus-data verify` compares all hashes. docs/formats/dataset.md, "Commit and resume", states the
cost.

With `--fused`, arrays are removed when the shards are complete. Sidecars and tables of documents
are kept, so that `inspect` can name the input file of a document. The file MARK shows that the
arrays were removed on purpose. MARK is written after the manifest, when the arrays are no longer
needed, and before the first array is removed. If a run is killed during the removal, the next run
therefore does not report missing arrays.
"""

from __future__ import annotations

import os
import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypedDict

from data_prep import layout
from data_prep.runtime.progress import Progress, say, short
from data_prep.tokenize.plan import TokenPlan, read_plan
from data_prep.tokenize.store import (
    ID_BYTES,
    TokenArrayWriter,
    array_path,
    docs_path,
    ids_path,
    plain_arrays,
    require_array,
    sidecar_path,
)
from optimus.errors import DamageError, DataError, counted
from optimus.io import files

HASH_BYTES = 1 << 30
"""Maximum number of bytes that a run reads at its start to compare the hashes of existing files.
The limit applies separately to token arrays and to shards."""
_SEED = os.urandom(8)
"""Seed of the sample. Each process has a different seed."""


def sample(sizes: Sequence[int], seed: str | bytes | None = None) -> frozenset[int]:
    """Choose the files of an earlier run whose hashes will be compared.

    Args:
        sizes: The size of each file, in bytes.
        seed: The seed of the sample. Ranks that must choose the same files pass the same seed.
            None: use the random seed of this process.

    Returns:
        If the total size of the files is at most HASH_BYTES, the indices of all files. Otherwise,
        the indices of a random sample. The sample has at most HASH_BYTES in total, or is a single
        file that is larger than HASH_BYTES.
    """
    chosen, left = list(range(len(sizes))), HASH_BYTES
    if sum(sizes) > left:
        random.Random(_SEED if seed is None else seed).shuffle(chosen)
        count = 0
        while count < len(chosen) and (count == 0 or sizes[chosen[count]] <= left):
            left -= sizes[chosen[count]]
            count += 1
        del chosen[count:]
    return frozenset(chosen)


def say_sample(chosen: frozenset[int], sizes: Sequence[int], kind: str, dataset: Path) -> None:
    """Print a line if the hashes of only some files of an earlier run are checked.

    Args:
        chosen: The indices of the files whose hashes are checked, from `sample`.
        sizes: The size of each file, in bytes.
        kind: The noun for a file in the message: "unit" or "shard".
        dataset: The directory of the data set.
    """
    if len(chosen) < len(sizes):
        size = sum(sizes[index] for index in chosen)
        say(
            f"{dataset}: the {counted(len(sizes), kind)} of an earlier run are checked by size and "
            f"header, {len(chosen)} of them by hash ({short(size)}B of {short(sum(sizes))}B); "
            f"optimus-data verify {dataset} compares all hashes"
        )


def damaged(promised: Mapping[Path, str]) -> list[Path]:
    """Return the files whose hashes differ from the hashes in `promised`."""
    return [path for path, xxh3 in promised.items() if files.xxh3_file(path) != xxh3]


def are_whole(promised: Mapping[Path, str]) -> bool:
    """Return True if all files have the hashes in `promised`. Print a line for each file that has
    another hash."""
    paths = damaged(promised)
    for path in paths:
        say(f"{path}: its content is damaged (hash differs); the file is made again")
    return not paths


_FORM = "optimus-token-array"


class Quarantined(TypedDict):
    """Sidecar entry for a document, or a whole input, that is left out because it cannot be used.

    `input` is the number of the input in the plan. `line` is 0 if no line is known.
    """

    input: int
    line: int
    reason: str


class _Repairs(TypedDict, total=False):
    eos_added: int
    empty_documents: int


class _EveryUnit(TypedDict):
    """The keys that exist in the sidecar of every unit. Keys that no code reads are left out."""

    plan: str
    part: str
    unit: int
    tokens: int
    documents: int
    array: layout.FileRecord
    docs: layout.FileRecord
    inputs: list[str]
    set_aside: list[Quarantined]


class _UnitRecord(_EveryUnit, total=False):
    """Content of the sidecar of a unit, including keys that exist only in some sidecars."""

    ids: layout.FileRecord
    dropped: int
    mended: _Repairs


def write_unit(
    folders: Mapping[str, Path],
    unit: int,
    plan_xxh3: str,
    writers: Mapping[str, TokenArrayWriter],
    inputs: Sequence[str],
    set_aside: Sequence[Quarantined],
    more: Mapping[str, Mapping[str, Any]],
    arrays: Mapping[str, Mapping[str, Any]],
) -> None:
    """Write the remaining files of a unit whose arrays exist: for each split, the table of
    documents, the hashes of document ids, and the sidecar.

    The unit is then complete. The files of the training split are written last.

    Args:
        folders: The folder of token arrays of each split.
        unit: The number of the unit.
        plan_xxh3: The hash of the plan.
        writers: The writer of the array of each split.
        inputs: The hashes of the inputs of the unit.
        set_aside: The quarantined documents and inputs of the unit.
        more: Maps each split to additional keys of its sidecar. The sidecar has version 2 if these
            keys include `dropped`, the number of excluded documents, or if documents have ids.
        arrays: Size and hash of the array of each split.
    """
    for split in reversed(list(folders)):
        folder, writer, extra = folders[split], writers[split], more.get(split, {})
        docs, ids = writer.docs_bytes(), writer.ids_bytes()
        files.write_bytes(docs_path(folder, unit), docs)
        if ids:
            files.write_bytes(ids_path(folder, unit), ids)
        else:  # an earlier run may have written the ids of documents that are now excluded
            ids_path(folder, unit).unlink(missing_ok=True)
        is_new = bool(ids) or "dropped" in extra
        record = {
            "format": _FORM,
            "version": layout.PLAN_VERSION if is_new else layout.VERSION,
            "plan": plan_xxh3,
            "part": split,
            "unit": unit,
            "tokens": writer.tokens,
            "documents": writer.documents,
            "array": arrays[split],
            "docs": _described(docs),
            "inputs": inputs,
            "set_aside": set_aside if split == layout.SPLITS[0] else [],
            **({"ids": _described(ids)} if ids else {}),
            **extra,
        }
        layout.write_checked_json(sidecar_path(folder, unit), record)


def _described(data: bytes) -> dict[str, Any]:
    return {"size": len(data), "xxh3": files.xxh3_bytes(data)}


def read_unit(tokens_dir: Path, unit: int, plan_xxh3: str, has_array: bool = True) -> _UnitRecord:
    """Read the sidecar of a unit, and check the sizes and headers of its files.

    Args:
        tokens_dir: The folder of token arrays.
        unit: The number of the unit.
        plan_xxh3: The hash of the plan.
        has_array: False: a missing array is not an error, because `--fused` removes arrays.

    Raises:
        DataError: a file is missing, or the sidecar was written for another plan or unit.
        DamageError: a file is damaged.
    """
    path = sidecar_path(tokens_dir, unit)
    record = layout.read_record(path, _UnitRecord, _FORM, newest=layout.PLAN_VERSION)
    repairs: Mapping[str, Any] = record.get("mended", {})
    layout.require(
        path,
        (
            layout.are_counts([record["tokens"], record["documents"]]),
            "tokens or documents is negative or too large",
        ),
        (
            layout.are_counts(
                [
                    record.get("dropped", 0),
                    *(repairs.get(key, 0) for key in _Repairs.__annotations__),
                ]
            ),
            "dropped, eos_added or empty_documents is negative or too large",
        ),
        (record["part"] in layout.SPLITS, f"part is none of {', '.join(layout.SPLITS)}"),
    )
    if record["plan"] != plan_xxh3 or record["unit"] != unit:
        raise DataError(
            f"{path}: was written for another unit, or for another plan than "
            f"{tokens_dir / layout.PLAN}"
        )
    documents = record["documents"]
    if has_array:
        require_array(tokens_dir, unit, record["tokens"], record["array"]["size"])
    header = layout.npy_header((documents, 3), "int64")
    layout.require_npy(docs_path(tokens_dir, unit), record["docs"]["size"], header)
    if ids := record.get("ids"):
        header = layout.npy_header((documents, ID_BYTES), "uint8")
        layout.require_npy(ids_path(tokens_dir, unit), ids["size"], header)
    return record


def promises(tokens_dir: Path, unit: int, record: Mapping[str, Any]) -> dict[Path, str]:
    """Return a dict that maps each existing file of a unit, except packed arrays, to its hash in
    the sidecar."""
    paths = {"array": array_path, "docs": docs_path, "ids": ids_path}
    return {
        path(tokens_dir, unit): record[key]["xxh3"]
        for key, path in paths.items()
        if key in record and path(tokens_dir, unit).exists()
    }


def split_of(tokens_dir: Path) -> str:
    """Return the split of a folder of token arrays, "train" or "held-out", from the sidecar of unit
    0. Raises the errors of `read_unit`."""
    plan_xxh3 = files.xxh3_file(tokens_dir / layout.PLAN)
    return read_unit(tokens_dir, 0, plan_xxh3, has_array=False)["part"]


def read_token_set(
    tokens_dir: Path, has_arrays: bool = True
) -> tuple[TokenPlan, str, list[_UnitRecord]]:
    """Read a complete set of token arrays.

    Args:
        tokens_dir: The folder.
        has_arrays: False: missing arrays are not an error, because `--fused` removes arrays.

    Returns:
        The plan, the hash of the plan, and the sidecar of each unit.

    Raises:
        DataError: a file is missing or damaged, or belongs to another plan.
    """
    plan = read_plan(tokens_dir)
    plan_xxh3 = files.xxh3_file(tokens_dir / layout.PLAN)
    units = range(len(plan.units))
    records = [read_unit(tokens_dir, unit, plan_xxh3, has_arrays) for unit in units]
    for unit, ((first, stop), record) in enumerate(zip(plan.units, records, strict=True)):
        layout.require(
            sidecar_path(tokens_dir, unit),
            (record["part"] == records[0]["part"], "part differs from the part of unit 0"),
            (
                len(record["inputs"]) == stop - first
                and all(first <= entry["input"] < stop for entry in record["set_aside"]),
                "inputs or set_aside does not match the inputs of the unit in the plan",
            ),
        )
    return plan, plan_xxh3, records


FORM = "optimus-tokens-removed"
MARK = "removed.json"


def removed(tokens_dir: Path) -> bool:
    """Return True if the file MARK shows that `--fused` has removed the token arrays of a
    folder."""
    try:
        mark = layout.read_checked_json(tokens_dir / MARK, FORM)
        return mark.get("plan") == files.xxh3_file(tokens_dir / layout.PLAN)
    except (DataError, OSError):
        return False


def mark_removed(tokens_dir: Path) -> None:
    """Write the file MARK, which shows that the arrays of a finished data set were removed on
    purpose."""
    plan_xxh3 = files.xxh3_file(tokens_dir / layout.PLAN)
    if not removed(tokens_dir):
        value = {"format": FORM, "version": layout.VERSION, "plan": plan_xxh3}
        layout.write_checked_json(tokens_dir / MARK, value)


def check_arrays(tokens_dir: Path) -> None:
    """Compare the hashes of .npy token arrays with the hashes in the sidecars. Call this function
    before the arrays are removed.

    Shards that were made from a damaged array are wrong. After the removal of the arrays, such
    damage could not be detected. The hashes of packed arrays are not compared, because every read
    of a packed array checks the data.

    Raises:
        DamageError: the hash of an array differs.
    """
    plan_xxh3 = files.xxh3_file(tokens_dir / layout.PLAN)
    paths = plain_arrays(tokens_dir, range(len(read_plan(tokens_dir).units)))
    with Progress("check token arrays", sum(p.stat().st_size for p in paths.values()), "B") as bar:
        for unit, path in paths.items():
            if files.xxh3_file(path) != read_unit(tokens_dir, unit, plan_xxh3)["array"]["xxh3"]:
                shards = tokens_dir.parent / layout.SHARDS_DIR
                raise DamageError(
                    f"{path}: its content is damaged (hash differs), so shards that were made from "
                    f"this file may be wrong; remove this file, {shards} and "
                    f"{tokens_dir.parent / layout.MANIFEST}, and run the same command again"
                )
            bar.advance(path.stat().st_size)


def remove_arrays(tokens_dir: Path) -> None:
    """Remove the token arrays that still exist in a folder."""
    for unit in range(len(read_plan(tokens_dir).units)):
        for packed in (False, True):
            array_path(tokens_dir, unit, packed).unlink(missing_ok=True)


def unmark_removed(tokens_dir: Path) -> None:
    """Remove the file MARK. The next run then writes the removed arrays again."""
    (tokens_dir / MARK).unlink(missing_ok=True)


def require_arrays(tokens_dir: Path) -> None:
    """Raise DataError if `--fused` has removed the token arrays of a folder. The message states the
    remedy."""
    if removed(tokens_dir):
        raise DataError(
            f"{tokens_dir}: its arrays were removed by --fused; make them again with optimus-data "
            "tokenize"
        )
