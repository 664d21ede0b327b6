"""Tokenization: a unit of input files becomes a token array T_i, its held-out documents another.

A unit is complete once both of its sidecars stand; everything else of it was written before. What
a unit holds depends on the plan alone, so any process may do any unit, in any order, again.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from data_prep import duplicates, layout, segments
from data_prep.documents import (
    NO_LIMITS,
    DamagedFile,
    Document,
    InputReader,
    Position,
    Problem,
)
from data_prep.limits import Limits
from data_prep.long_text import LongText
from data_prep.packed import is_packed, packed_path
from data_prep.pool import run_jobs
from data_prep.progress import Progress
from data_prep.sources import InputFile, group_units
from data_prep.token_arrays import (
    TokenArrayWriter,
    array_path,
    docs_path,
    ids_path,
    sidecar_path,
)
from data_prep.tokenizer import TokenizerFacts, shared_encoder
from data_prep.unit_writer import UnitWriter
from optimus import files
from optimus.errors import DataError

PARTS = ("train", "held-out")
_FORM_PLAN = "optimus-token-plan"
_FORM_UNIT = "optimus-token-array"
IMPORT_FIELD = "import "
"""In a plan of import, stands in the place of a field of text before the way ids were read."""
_SINCE_2 = ("max_document", "id_field")
"""Keys of a plan of version 2; one that has none of them is of version 1."""


@dataclass(frozen=True)
class TokenPlan:
    """What tokenizing does, settled before it starts: inputs, tokenizer, rules, units."""

    tokenizer: TokenizerFacts
    text_field: str
    eval_fraction: float
    inputs: tuple[InputFile, ...]
    units: tuple[tuple[int, int], ...]
    """Unit u holds inputs [first, stop)."""
    id_field: str = ""
    """Field of a document's own id, which no two may share; empty: ids are not looked at."""
    max_document: int | None = None
    """Documents of more bytes cannot be used. Not in the JSON where there is none."""

    @property
    def dtype(self) -> str:
        return layout.dtype_name(self.tokenizer.vocab_size)

    @property
    def parts(self) -> tuple[str, ...]:
        return PARTS if self.eval_fraction > 0 else PARTS[:1]

    def unit_bytes(self, unit: int) -> int:
        """Input bytes of a unit."""
        first, stop = self.units[unit]
        return sum(file.size for file in self.inputs[first:stop])

    def to_json(self) -> dict[str, Any]:
        value = {"format": _FORM_PLAN, "version": layout.VERSION, **dataclasses.asdict(self)}
        new = {key: value.pop(key) for key in _SINCE_2 if not value[key]}
        if len(new) < len(_SINCE_2):
            value["version"] = layout.PLAN_VERSION
        return value


def make_plan(
    inputs: Sequence[InputFile],
    tokenizer: TokenizerFacts,
    text_field: str,
    eval_fraction: float,
    unit_bytes: int,
    id_field: str = "",
    max_document: int | None = None,
) -> TokenPlan:
    """The plan of these inputs and rules. Raises DataError for a vocabulary beyond uint32."""
    layout.dtype_name(tokenizer.vocab_size)
    units = group_units(inputs, unit_bytes)
    return TokenPlan(
        tokenizer, text_field, float(eval_fraction), tuple(inputs), units, id_field, max_document
    )


def read_plan(tokens_dir: Path) -> TokenPlan:
    """The plan under `tokens_dir`. Raises DataError."""
    path = tokens_dir / layout.PLAN
    value = layout.read_checked_json(path, _FORM_PLAN, newest=layout.PLAN_VERSION)
    return TokenPlan(
        tokenizer=TokenizerFacts(**value["tokenizer"]),
        text_field=value["text_field"],
        eval_fraction=value["eval_fraction"],
        inputs=tuple(InputFile(**file) for file in value["inputs"]),
        units=tuple((first, stop) for first, stop in value["units"]),
        **{key: value[key] for key in _SINCE_2 if key in value},
    )


def is_import(plan: TokenPlan) -> bool:
    """Whether its arrays come from token files, whose text is not known, and not from text."""
    return plan.text_field.startswith(IMPORT_FIELD)


def held_out_below(eval_fraction: float) -> int:
    """A document is held out if xxh3_64 of its text is below this: h < f * 2^64, exactly."""
    return math.ceil(eval_fraction * 2.0**64)


def parts_dirs(out: Path, plan: TokenPlan) -> dict[str, Path]:
    """The folders of token arrays of each part that the plan makes."""
    places = {
        PARTS[0]: out / layout.TOKENS_DIR,
        PARTS[1]: out / layout.EVAL_DIR / layout.TOKENS_DIR,
    }
    return {part: places[part] for part in plan.parts}


@dataclass(frozen=True)
class TokenizeWork:
    """What a worker needs to do any unit."""

    plan: TokenPlan
    plan_xxh3: str
    out: Path
    tokenizer_file: Path
    quarantine: bool
    limits: Limits = NO_LIMITS
    packed: bool = False
    """Whether arrays are written packed, for `--fused`; complete ones may then be either."""

    @property
    def tokens_dir(self) -> Path:
        """Where the training part's arrays are."""
        return parts_dirs(self.out, self.plan)[PARTS[0]]

    def array_path(self, folder: Path, unit: int) -> Path:
        """Where this work writes a unit's token array."""
        return packed_path(folder, unit) if self.packed else array_path(folder, unit)

    def dropped(self) -> duplicates.Duplicates | None:
        """What is known of duplicate ids; None: nothing yet."""
        return duplicates.read(self.tokens_dir, self.plan_xxh3) if self.plan.id_field else None


def tokenize_all(
    work: TokenizeWork, workers: int, units: Sequence[int] | None = None, label: str = "tokenize"
) -> None:
    """Do every unit, or these, that is not complete, largest first; check the complete ones."""
    units = range(len(work.plan.units)) if units is None else units
    sizes = {unit: work.plan.unit_bytes(unit) for unit in units}
    order = sorted(sizes, key=lambda unit: -sizes[unit])
    with Progress(label, sum(sizes.values()), "B") as progress:
        run_jobs(_do_unit, work, order, workers, progress)


def _do_unit(work: TokenizeWork, unit: int, advance: Callable[[int], None]) -> None:
    written_by = f"{work.plan_xxh3} packed" if work.packed else work.plan_xxh3
    checkpoints = segments.Segments(work.tokens_dir, unit, written_by)
    dropped = work.dropped()
    while True:
        if (records := _complete(work, unit, dropped)) is None:
            _tokenize_unit(work, unit, dropped, checkpoints, advance)
        else:
            _check_inputs(work, unit, records, advance)
        checkpoints.remove()
        # If others compared all ids meanwhile, from this unit as they had made it, it may be wrong
        # now; if they do so later, they tokenize it after us.
        before, dropped = dropped, work.dropped()
        if (before is None) == (dropped is None):
            return


def is_complete(
    work: TokenizeWork, unit: int, dropped: duplicates.Duplicates | None = None
) -> bool:
    """Whether every part of the unit stands, without documents that were dropped."""
    return _complete(work, unit, dropped) is not None


def _dropped_of(
    work: TokenizeWork, unit: int, dropped: duplicates.Duplicates | None
) -> dict[tuple[int, int], tuple[int, int]]:
    return dropped.of_inputs(*work.plan.units[unit]) if dropped else {}


def missing_units(work: TokenizeWork, deep: bool) -> list[int]:
    """Units without a sidecar; where all have one and `deep`, those whose sidecar is wrong."""
    folder = work.out / layout.TOKENS_DIR  # the training part's sidecar is written last
    there = set(os.listdir(folder))
    units = range(len(work.plan.units))
    left = [unit for unit in units if f"{layout.unit_name(unit)}.json" not in there]
    if not deep or left:
        return left
    dropped = work.dropped()
    return [unit for unit in units if not is_complete(work, unit, dropped)]


def check_inputs(work: TokenizeWork, units: Sequence[int]) -> None:
    """Raises DataError where an input of these units, whose arrays may be gone, has changed."""
    folder = parts_dirs(work.out, work.plan)[PARTS[0]]
    with Progress("check inputs", sum(map(work.plan.unit_bytes, units)), "B") as progress:
        for unit in units:
            record = read_unit(folder, unit, work.plan_xxh3, has_array=False)
            _check_inputs(work, unit, record, progress.advance)


def _check_inputs(
    work: TokenizeWork, unit: int, records: dict[str, Any], advance: Callable[[int], None]
) -> None:
    first, stop = work.plan.units[unit]
    for source, xxh3 in zip(range(first, stop), records["inputs"], strict=True):
        _check_unchanged(work, source, xxh3, advance)
    _accept_set_aside(work, records["set_aside"])


def _accept_set_aside(work: TokenizeWork, items: Sequence[Mapping[str, Any]]) -> None:
    """Raises DataError for what an earlier run set aside, where this one is to fail at it."""
    if items and not work.quarantine:
        item = items[0]
        raise DataError(_complaint(work.plan, item["input"], Problem(item["line"], item["reason"])))


def _check_unchanged(
    work: TokenizeWork, source: int, xxh3: str, advance: Callable[[int], None]
) -> None:
    file = work.plan.inputs[source]
    if files.xxh3_file(file.name) != xxh3:
        raise DataError(
            f"{file.name}: changed since {work.out} was begun; choose another --out, or remove "
            f"{work.out} to start again"
        )
    advance(file.size)


def _complete(
    work: TokenizeWork, unit: int, dropped: duplicates.Duplicates | None
) -> dict[str, Any] | None:
    """The training part's sidecar if every part of the unit stands, else None."""
    records = {}
    for part, folder in parts_dirs(work.out, work.plan).items():
        try:
            records[part] = read_unit(folder, unit, work.plan_xxh3)
        except DataError:
            return None
        if not work.packed and not array_path(folder, unit).exists():
            return None  # a run with --fused was ended, and now the arrays are to stay
    record = records[PARTS[0]]
    # A list that was lost is made again from units with all of their documents.
    if record.get("dropped", 0) != len(_dropped_of(work, unit, dropped)):
        return None
    return record


def read_unit(
    tokens_dir: Path, unit: int, plan_xxh3: str, has_array: bool = True
) -> dict[str, Any]:
    """A unit's sidecar, if it is of the plan and its files have their sizes, else DataError.

    `has_array` False: the array itself may be gone, for `--fused` removed it.
    """
    path = sidecar_path(tokens_dir, unit)
    record = layout.read_checked_json(path, _FORM_UNIT, newest=layout.PLAN_VERSION)
    if record["plan"] != plan_xxh3 or record["unit"] != unit:
        raise DataError(f"{path}: belongs to other work than {tokens_dir / layout.PLAN}")
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
        if size != record[key]["size"]:
            raise DataError(
                f"{file}: has size {size}, not the {record[key]['size']} of its sidecar"
            )
    return record


def _tokenize_unit(
    work: TokenizeWork,
    unit: int,
    dropped: duplicates.Duplicates | None,
    checkpoints: segments.Segments,
    advance: Callable[[int], None],
) -> None:
    gone = _dropped_of(work, unit, dropped)
    if gone:
        checkpoints.remove()  # they may hold what is dropped
    plan, folders = work.plan, parts_dirs(work.out, work.plan)
    first, stop = plan.units[unit]
    with contextlib.ExitStack() as stack:
        writers = {
            part: TokenArrayWriter(
                stack.enter_context(files.atomic_writer(work.array_path(folder, unit))),
                plan.tokenizer.vocab_size,
                plan.dtype,
                plan.tokenizer.eos_id,
                work.packed,
            )
            for part, folder in folders.items()
        }
        unit_writer = UnitWriter(
            shared_encoder(str(work.tokenizer_file)),
            writers,
            held_out_below(plan.eval_fraction),
            checkpoints,
            first,
            work.limits,
        )
        _accept_set_aside(work, unit_writer.set_aside)
        for source in range(first, unit_writer.source):
            _check_unchanged(work, source, unit_writer.hashes[source - first], advance)
        for source in range(unit_writer.source, stop):
            start = unit_writer.start if source == unit_writer.source else None
            unit_writer.hashes.append(_read_input(work, source, start, unit_writer, gone, advance))
            if unit_writer.due and source + 1 < stop:
                unit_writer.save(source + 1, None)
        unit_writer.flush()
        arrays = {part: writer.finish() for part, writer in writers.items()}
    for part in reversed(plan.parts):  # the training part's sidecar last
        if not work.packed:
            packed_path(folders[part], unit).unlink(missing_ok=True)
        writer, docs = writers[part], writers[part].docs_bytes()
        files.write_bytes(docs_path(folders[part], unit), docs)
        if ids := writer.ids_bytes():
            files.write_bytes(ids_path(folders[part], unit), ids)
        record = {
            "format": _FORM_UNIT,
            "version": layout.VERSION,
            "plan": work.plan_xxh3,
            "part": part,
            "unit": unit,
            "tokens": writer.tokens,
            "documents": writer.documents,
            "array": arrays[part],
            "docs": {"size": len(docs), "xxh3": files.xxh3_bytes(docs)},
            "inputs": unit_writer.hashes,
            "set_aside": unit_writer.set_aside if part == PARTS[0] else [],
        }
        if ids:
            record["version"] = layout.PLAN_VERSION
            record["ids"] = {"size": len(ids), "xxh3": files.xxh3_bytes(ids)}
        if gone and part == PARTS[0]:
            record["version"] = layout.PLAN_VERSION
            record["dropped"] = len(gone)
        layout.write_checked_json(sidecar_path(folders[part], unit), record)


def _read_input(
    work: TokenizeWork,
    source: int,
    start: Position | None,
    unit_writer: UnitWriter,
    gone: Mapping[tuple[int, int], tuple[int, int]],
    advance: Callable[[int], None],
) -> str:
    """Write an input's documents from `start` on; the hash of the whole input."""
    file = work.plan.inputs[source]
    reader = InputReader(
        file,
        work.plan.text_field,
        advance,
        start,
        limits=work.limits,
        long_texts=True,
        id_field=work.plan.id_field,
    )
    try:
        for item in reader:
            if isinstance(item, Document) and (first := gone.get((source, item.line))):
                unit_writer.note(
                    source, Problem(item.line, duplicate_of(work.plan, item.id, *first))
                )
            elif isinstance(item, Document):
                unit_writer.add(source, item, f"{file.name}:{item.line}")
                if unit_writer.due and item.line:  # line 0: the file is one document
                    unit_writer.save(source, reader.position())
            elif isinstance(item, LongText):
                unit_writer.add_long(source, item, reader, f"{file.name}:0")
            elif work.quarantine:
                unit_writer.note(source, item)
            else:
                raise DataError(_complaint(work.plan, source, item))
    except DamagedFile as error:
        if not work.quarantine:
            raise DataError(_complaint(work.plan, source, error.problem)) from None
        unit_writer.set_input_aside(source, error.problem)
    return reader.xxh3


def duplicate_of(plan: TokenPlan, own_id: object, source: int, line: int) -> str:
    """What is wrong with a document whose id an earlier one has."""
    shown = "" if own_id is None else f" {own_id!r}"
    return f"duplicate id{shown}: {plan.inputs[source].name}:{line} has it"


def _complaint(plan: TokenPlan, source: int, problem: Problem) -> str:
    return (
        f"{plan.inputs[source].name}:{problem.line}: {problem.reason}; mend it, or set such text "
        "aside with --on-error quarantine"
    )
