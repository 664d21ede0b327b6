"""Tokenization: a unit of input files becomes a token array T_i, its held-out documents another.

The content of a unit depends on the plan alone, so any process may do any unit, in any order,
again. After all units, the ids of documents are compared, and units with duplicates are tokenized
again.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from data_prep import layout
from data_prep.runtime.memory import Limits
from data_prep.runtime.pool import Job, run_jobs
from data_prep.runtime.progress import Progress
from data_prep.runtime.ranks import Team, do_together, wait_for
from data_prep.sources.documents import (
    NO_LIMITS,
    DamagedFile,
    Document,
    InputReader,
    LongText,
    Position,
    Problem,
)
from data_prep.tokenize import duplicates
from data_prep.tokenize.plan import PARTS, TokenPlan, held_out_below, tokens_dirs
from data_prep.tokenize.store import TokenArrayWriter, array_path, packed_path
from data_prep.tokenize.token_set import (
    are_whole,
    promises,
    read_unit,
    sample,
    say_sample,
    write_unit,
)
from data_prep.tokenize.writer import Segments, UnitWriter
from data_prep.tokenizer.tokenizer import shared_encoder
from optimus.errors import DataError
from optimus.io import files

_LEAST_BYTES_TO_COMPARE = 64 << 20
_SHOWN_CHARS = 80


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
    sample: frozenset[int] = frozenset()
    """Units of an earlier run whose hashes are compared (data_prep.tokenize.token_set)."""

    @property
    def tokens_dir(self) -> Path:
        """Where the training part's arrays are."""
        return tokens_dirs(self.out, self.plan)[PARTS[0]]

    def array_path(self, folder: Path, unit: int) -> Path:
        """Where this work writes a unit's token array."""
        return packed_path(folder, unit) if self.packed else array_path(folder, unit)

    def dropped(self) -> duplicates.Duplicates | None:
        """What is known of duplicate ids; None: nothing yet."""
        return duplicates.read(self.tokens_dir, self.plan_xxh3) if self.plan.id_field else None


def make_units(
    work: TokenizeWork, workers: int, team: Team, what: str, job: Job | None = None
) -> None:
    """Every unit, by the job or by tokenizing; ranks share the work, which they call `what`.

    Complete units of an earlier run are checked, and damaged ones made again.
    """
    sizes = [work.plan.unit_bytes(unit) for unit in range(len(work.plan.units))]
    work = dataclasses.replace(work, sample=sample(sizes))
    task = UnitTask(work, workers, team.label(what), range(len(sizes)), job or _do_unit)
    if len(task.missing()) < len(sizes) and team.rank == 0:
        say_sample(work.sample, sizes, "unit", work.out)
    do_together(team, task)


@dataclass(frozen=True)
class UnitTask:
    """Units of token arrays. Indices of items are those of `units`."""

    work: TokenizeWork
    workers: int
    label: str
    units: Sequence[int]
    job: Job

    @property
    def folder(self) -> Path:
        return self.work.out / layout.TOKENS_DIR

    def plan(self) -> list[int]:
        """Return the input bytes of each unit."""
        return [self.work.plan.unit_bytes(unit) for unit in self.units]

    def missing(self) -> list[int]:
        """Return the units without the sidecar of the training part, which is written last."""
        names = set(os.listdir(self.folder))
        return [
            i for i, unit in enumerate(self.units) if f"{layout.unit_name(unit)}.json" not in names
        ]

    def do(self, items: Sequence[int]) -> None:
        """Do each unit that is not complete, largest first, and check the complete ones."""
        sizes = {self.units[i]: self.work.plan.unit_bytes(self.units[i]) for i in items}
        order = sorted(sizes, key=lambda unit: -sizes[unit])
        with Progress(self.label, sum(sizes.values()), "B") as progress:
            run_jobs(self.job, self.work, order, self.workers, progress)

    def verify(self) -> list[int]:
        """Return the units that are not complete, without the documents that are left out."""
        dropped = self.work.dropped()
        return [i for i, unit in enumerate(self.units) if not complete(self.work, unit, dropped)]


class RepeatTask(UnitTask):
    """Units that hold duplicates, to be tokenized again without them."""

    def missing(self) -> list[int]:
        """Return the units that still hold duplicates."""
        return self.verify()

    def do(self, items: Sequence[int]) -> None:
        """Do the units that still hold duplicates."""
        if left := sorted({*items} & {*self.missing()}):
            super().do(left)


def _do_unit(work: TokenizeWork, unit: int, advance: Callable[[int], None]) -> None:
    dropped = work.dropped()
    while True:
        checkpoints = _checkpoints(work, unit, dropped)
        if (record := complete_and_whole(work, unit, dropped)) is None:
            _tokenize_unit(work, unit, dropped, checkpoints, advance)
        else:
            check_inputs_of(work, unit, record, advance)
        checkpoints.remove()
        _remove_packed(work, unit)
        if work.plan.id_field and dropped is None and not work.quarantine:
            _compare_early(work, unit)
        # If others compared all ids meanwhile, from this unit as they had made it, it may be wrong
        # now; if they do so later, they tokenize it after us.
        before, dropped = dropped, work.dropped()
        if (before is None) == (dropped is None):
            return


def _compare_early(work: TokenizeWork, unit: int) -> None:
    """Raises DataError where an id is twice in a unit and those beside it in the plan that stand.

    All ids are compared only once every unit stands (compare_ids.py), which may be hours from now;
    this tells by then of a field that is no id, and of files that count from the same number.
    """
    beside = {unit - 1, unit + 1} & set(range(len(work.plan.units)))
    units = [unit, *(other for other in beside if complete(work, other))]
    folders = list(tokens_dirs(work.out, work.plan).values())
    rows = duplicates.find(folders, units, memory_to_compare(work.limits))
    if len(rows):
        raise duplicate_error(work.plan, *rows[0].tolist())


def memory_to_compare(limits: Limits) -> int:
    """Bytes for sorting the hashes of ids."""
    return max(_LEAST_BYTES_TO_COMPARE, limits.room_bytes or 0)


def _checkpoints(work: TokenizeWork, unit: int, dropped: duplicates.Duplicates | None) -> Segments:
    """Those without the documents that are dropped; any others do not count."""
    gone = sorted(_dropped_of(work, unit, dropped).items())
    facts = json.dumps([work.plan_xxh3, work.packed, gone]).encode()
    return Segments(work.tokens_dir, unit, files.xxh3_bytes(facts))


def _remove_packed(work: TokenizeWork, unit: int) -> None:
    """What a run with `--fused` left of a unit whose arrays are to stay, and stand."""
    if not work.packed:
        for folder in tokens_dirs(work.out, work.plan).values():
            packed_path(folder, unit).unlink(missing_ok=True)


def _dropped_of(
    work: TokenizeWork, unit: int, dropped: duplicates.Duplicates | None
) -> dict[tuple[int, int], tuple[int, int]]:
    return dropped.of_inputs(*work.plan.units[unit]) if dropped else {}


def check_inputs(work: TokenizeWork, units: Sequence[int]) -> None:
    """Raises DataError where an input of these units, whose arrays may be gone, has changed."""
    folder = tokens_dirs(work.out, work.plan)[PARTS[0]]
    with Progress("check inputs", sum(map(work.plan.unit_bytes, units)), "B") as progress:
        for unit in units:
            record = read_unit(folder, unit, work.plan_xxh3, has_array=False)
            check_inputs_of(work, unit, record, progress.advance)


def check_inputs_of(
    work: TokenizeWork, unit: int, record: Mapping[str, Any], advance: Callable[[int], None]
) -> None:
    """The same of one unit, whose sidecar this is."""
    first, stop = work.plan.units[unit]
    for source, xxh3 in zip(range(first, stop), record["inputs"], strict=True):
        _check_unchanged(work, source, xxh3, advance)
    _accept_set_aside(work, record["set_aside"])


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
            f"{file.name}: changed since {work.out} was started; choose another --out, or remove "
            f"{work.out} to start again"
        )
    advance(file.size)


def complete_and_whole(
    work: TokenizeWork, unit: int, dropped: duplicates.Duplicates | None = None
) -> Mapping[str, Any] | None:
    """`complete`, with the hashes of the unit's files compared where it is in the sample."""
    record = complete(work, unit, dropped)
    if record is None or unit not in work.sample:
        return record
    for folder in tokens_dirs(work.out, work.plan).values():
        if not are_whole(promises(folder, unit, read_unit(folder, unit, work.plan_xxh3))):
            return None
    return record


def complete(
    work: TokenizeWork, unit: int, dropped: duplicates.Duplicates | None = None
) -> Mapping[str, Any] | None:
    """The training part's sidecar if every part of the unit stands, without documents that were
    dropped, else None."""
    records = {}
    for part, folder in tokens_dirs(work.out, work.plan).items():
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


def open_writers(
    work: TokenizeWork, unit: int, stack: contextlib.ExitStack
) -> dict[str, TokenArrayWriter]:
    """The arrays of a unit by part; files that stand once `stack` is left without an error."""
    facts = work.plan.tokenizer
    return {
        part: TokenArrayWriter(
            stack.enter_context(files.atomic_writer(work.array_path(folder, unit))),
            facts.vocab_size,
            work.plan.dtype,
            facts.eos_id,
            work.packed,
        )
        for part, folder in tokens_dirs(work.out, work.plan).items()
    }


def _tokenize_unit(
    work: TokenizeWork,
    unit: int,
    dropped: duplicates.Duplicates | None,
    checkpoints: Segments,
    advance: Callable[[int], None],
) -> None:
    gone = _dropped_of(work, unit, dropped)
    plan, folders = work.plan, tokens_dirs(work.out, work.plan)
    first, stop = plan.units[unit]
    with contextlib.ExitStack() as stack:
        writers = open_writers(work, unit, stack)
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
    more = {PARTS[0]: {"dropped": len(gone)}} if gone else {}
    hashes, set_aside = unit_writer.hashes, unit_writer.set_aside
    write_unit(folders, unit, work.plan_xxh3, writers, hashes, set_aside, more, arrays)


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
        id_field=work.plan.id_field,
    )
    try:
        for item in reader:
            if isinstance(item, Document) and (first := gone.get((source, item.line))):
                unit_writer.quarantine(
                    source, Problem(item.line, duplicate_of(work.plan, item.id, *first))
                )
            elif isinstance(item, Document):
                unit_writer.add(source, item, f"{file.name}:{item.line}")
                if unit_writer.due and item.line:  # line 0: the file is one document
                    unit_writer.save(source, reader.position())
            elif isinstance(item, LongText):
                unit_writer.add_long(source, item, reader, f"{file.name}:0")
            elif work.quarantine:
                unit_writer.quarantine(source, item)
            else:
                raise DataError(_complaint(work.plan, source, item))
            del item  # a long text is gone before the next one is read
    except DamagedFile as error:
        if not work.quarantine:
            raise DataError(_complaint(work.plan, source, error.problem)) from None
        unit_writer.quarantine_input(source, error.problem)
    return reader.xxh3


def duplicate_error(
    plan: TokenPlan, source: int, line: int, first: int, first_line: int
) -> DataError:
    """The complaint about one document; its id is read once more to be shown."""
    file, own_id = plan.inputs[source], None
    with contextlib.suppress(DamagedFile):
        reader = InputReader(file, plan.text_field, lambda count: None, id_field=plan.id_field)
        for item in reader:
            if item.line == line and isinstance(item, Document):
                own_id = item.id
                break
    return DataError(
        f"{file.name}:{line}: {duplicate_of(plan, own_id, first, first_line)}; skip later ones "
        f"with --on-error quarantine, or, if {plan.id_field!r} need not be unique, start "
        "again with --id-field ''"
    )


def duplicate_of(plan: TokenPlan, own_id: object, source: int, line: int) -> str:
    """What is wrong with a document whose id an earlier one has."""
    shown = "" if own_id is None else f" {own_id!r}"
    shown = shown if len(shown) <= _SHOWN_CHARS else shown[: _SHOWN_CHARS - 3] + "..."
    return f"duplicate id{shown}: {plan.inputs[source].name}:{line} has it"


def _complaint(plan: TokenPlan, source: int, problem: Problem) -> str:
    return (
        f"{plan.inputs[source].name}:{problem.line}: {problem.reason}; fix it, or skip such "
        "text with --on-error quarantine"
    )


def drop_duplicates(work: TokenizeWork, workers: int, team: Team) -> None:
    """See to it that complete token arrays hold no id twice.

    One rank compares for all. Raises DataError for the first duplicate, by file and line of both,
    unless such documents are set aside: then units that hold some are tokenized again without them.
    """
    wait_for(team, lambda: work.dropped() is not None, lambda: _compare(work))
    dropped = work.dropped()
    assert dropped is not None
    if len(dropped.rows) and not work.quarantine:
        raise duplicate_error(work.plan, *dropped.rows[0].tolist())
    units = [
        unit
        for unit, inputs in enumerate(work.plan.units)
        if len(dropped.rows) and dropped.of_inputs(*inputs)
    ]
    label = team.label("leave out duplicate ids")
    do_together(team, RepeatTask(work, workers, label, units, _do_unit))


def _compare(work: TokenizeWork) -> None:
    if work.dropped() is not None:
        return
    memory = memory_to_compare(work.limits)
    folders = list(tokens_dirs(work.out, work.plan).values())
    rows = duplicates.find(folders, range(len(work.plan.units)), memory)
    if len(rows) and not work.quarantine:
        raise duplicate_error(work.plan, *rows[0].tolist())
    duplicates.write(work.tokens_dir, work.plan_xxh3, rows)
