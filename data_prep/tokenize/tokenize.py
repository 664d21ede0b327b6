"""Tokenization of units of input files.

A unit is a range of consecutive input files. Unit i becomes the token array T_i of the training
split. The held-out documents of the unit become a second array. The content of these arrays depends
only on the plan and on the excluded documents. Therefore any process can tokenize any unit, in any
order, and can tokenize a unit again.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from data_prep import layout
from data_prep.runtime.memory import Limits
from data_prep.runtime.pool import run_jobs
from data_prep.runtime.progress import Progress, say
from data_prep.runtime.ranks import WorkerGroup, run_task
from data_prep.sources.documents import (
    NO_LIMITS,
    DamagedFile,
    Document,
    InputReader,
    LongText,
    Position,
    Problem,
)
from data_prep.tokenize.plan import TokenPlan, held_out_below, tokens_dirs
from data_prep.tokenize.store import TokenArrayWriter, array_path
from data_prep.tokenize.token_set import (
    Quarantined,
    are_whole,
    promises,
    read_unit,
    removed,
    sample,
    say_sample,
    sidecar_path,
    write_unit,
)
from data_prep.tokenize.writer import Segments, UnitWriter
from data_prep.tokenizer.tokenizer import shared_encoder
from optimus.errors import DataError
from optimus.io import files


class Exclusions(Protocol):
    """Protocol of a set of documents that are excluded from a unit although they can be read."""

    @property
    def documents(self) -> Mapping[tuple[int, int], tuple[int, int]]:
        """Return a dict that maps each excluded document to the document that it repeats. A
        document is given as (number of the input, line)."""

    def reason(self, source: int, document: Document) -> str | None:
        """Return the reason to exclude `document` of the input `source`; None if the document is
        kept."""


@dataclass(frozen=True)
class TokenizeWork:
    """Settings that worker processes use to tokenize units. A unit is a range of input files."""

    plan: TokenPlan
    plan_xxh3: str
    out: Path
    tokenizer_file: Path
    quarantine: bool
    limits: Limits = NO_LIMITS
    packed: bool = False
    """True: write compressed arrays (`packed.py`), as for `--fused`. Existing .npy arrays are kept
    and used."""
    sample: frozenset[int] = frozenset()
    """Result of `token_set.sample`: the units whose hashes are compared if an earlier run wrote the
    units."""

    @property
    def tokens_dir(self) -> Path:
        """Return the folder of token arrays of the training split."""
        return tokens_dirs(self.out, self.plan)[layout.SPLITS[0]]


@dataclass(frozen=True)
class UnitTask(ABC):
    """PrepTask (a step whose items are distributed over ranks) that writes token arrays. Item i of
    the task is the unit `units[i]`."""

    work: TokenizeWork
    workers: int
    label: str
    units: Sequence[int]

    @staticmethod
    @abstractmethod
    def job(work: TokenizeWork, unit: int, advance: Callable[[int], None]) -> None:
        """Write the token arrays of a unit. If the unit is complete, only check the arrays.

        Called in a worker process.

        Args:
            work: The settings of the tokenization.
            unit: The number of the unit.
            advance: Function that is called with the number of input bytes that were read.
        """

    @property
    def folder(self) -> Path:
        """Return the folder of token arrays of the training split."""
        return self.work.tokens_dir

    def plan(self) -> list[int]:
        """Return, for each unit, the total size of its inputs in bytes."""
        return [self.work.plan.unit_bytes(unit) for unit in self.units]

    def missing(self) -> list[int]:
        """Return the indices, in `units`, of the units without a sidecar in the folder of the
        training split. This sidecar is the last file that is written for a unit."""
        names = set(os.listdir(self.folder))
        return [
            i for i, unit in enumerate(self.units) if f"{layout.unit_name(unit)}.json" not in names
        ]

    def do(self, items: Sequence[int]) -> None:
        """Write the token arrays of the units with the indices `items`, largest units first.

        A unit that is already complete is only checked.
        """
        sizes = {self.units[i]: self.work.plan.unit_bytes(self.units[i]) for i in items}
        order = sorted(sizes, key=lambda unit: -sizes[unit])
        with Progress(self.label, sum(sizes.values()), "B") as progress:
            run_jobs(self.job, self.work, order, self.workers, progress)

    def verify(self) -> list[int]:
        """Return the indices, in `units`, of the units that are not complete."""
        return [i for i, unit in enumerate(self.units) if not complete(self.work, unit)]


def make_units(
    task_type: type[UnitTask], work: TokenizeWork, workers: int, group: WorkerGroup, label: str
) -> None:
    """Write the token arrays of all units, and check complete units of an earlier run.

    The ranks of `group` share the work.

    Args:
        task_type: The task whose `job` writes the token arrays of a unit.
        work: The settings of the tokenization.
        workers: The number of worker processes of this rank.
        group: The ranks.
        label: Name of this step, for the progress lines.

    Raises:
        DataError: an input cannot be used or has changed.
    """
    sizes = [work.plan.unit_bytes(unit) for unit in range(len(work.plan.units))]
    work = dataclasses.replace(work, sample=sample(sizes))
    task = task_type(work, workers, group.label(label), range(len(sizes)))
    if len(task.missing()) < len(sizes) and group.rank == 0:
        say_sample(work.sample, sizes, "unit", work.out)
    run_task(group, task)


def make_unit(
    work: TokenizeWork, unit: int, exclusions: Exclusions, advance: Callable[[int], None]
) -> None:
    """Tokenize a unit without the excluded documents. A unit that is complete is only checked.

    Args:
        work: The settings of the tokenization.
        unit: The number of the unit.
        exclusions: The documents to leave out.
        advance: Function that is called with the number of input bytes that were read.

    Raises:
        DataError: an input cannot be used or has changed.
    """
    # A run with other exclusions has another hash, so its checkpoints are ignored.
    values = json.dumps([work.plan_xxh3, work.packed, sorted(exclusions.documents.items())])
    hash_of_work = files.xxh3_bytes(values.encode())
    checkpoints = Segments(work.tokens_dir, unit, hash_of_work, work.limits)
    if (record := complete_and_whole(work, unit, len(exclusions.documents))) is None:
        _tokenize_unit(work, unit, exclusions, checkpoints, advance)
    else:
        check_inputs_of(work, unit, record, advance)
    checkpoints.remove()
    if not work.packed:  # remove the packed array of a run with `--fused`, if it exists
        for folder in tokens_dirs(work.out, work.plan).values():
            array_path(folder, unit, packed=True).unlink(missing_ok=True)


def check_inputs(work: TokenizeWork, units: Sequence[int]) -> None:
    """Check that the input files of `units` still have the hashes in the sidecars of the units.

    Missing arrays are not an error.

    Raises:
        DataError: an input has changed, or an earlier run quarantined a document but this
            run does not use --on-error quarantine.
    """
    with Progress("check inputs", sum(map(work.plan.unit_bytes, units)), "B") as progress:
        for unit in units:
            record = read_unit(work.tokens_dir, unit, work.plan_xxh3, has_array=False)
            check_inputs_of(work, unit, record, progress.advance)


def check_inputs_of(
    work: TokenizeWork, unit: int, record: Mapping[str, Any], advance: Callable[[int], None]
) -> None:
    """Check that the input files of a unit still have the hashes in the sidecar.

    Args:
        work: The settings of the tokenization.
        unit: The number of the unit.
        record: The sidecar of the training split of the unit.
        advance: Function that is called with the number of input bytes that were read.

    Raises:
        DataError: an input has changed, or an earlier run quarantined a document but this
            run does not use --on-error quarantine.
    """
    first, stop = work.plan.units[unit]
    for source, xxh3 in zip(range(first, stop), record["inputs"], strict=True):
        _check_unchanged(work, source, xxh3, advance)
    _check_quarantined(work, record["set_aside"])


def _check_quarantined(work: TokenizeWork, entries: Sequence[Quarantined]) -> None:
    """Raise DataError if an earlier run has quarantined documents (`entries`), but this run does
    not use --on-error quarantine."""
    if entries and not work.quarantine:
        first = entries[0]
        problem = Problem(first["line"], first["reason"])
        raise DataError(_message(work.plan, first["input"], problem))


def _check_unchanged(
    work: TokenizeWork, source: int, xxh3: str, advance: Callable[[int], None]
) -> None:
    file = work.plan.inputs[source]
    if files.xxh3_file(file.name) != xxh3:
        raise DataError(
            f"{file.name}: changed since the first run that wrote to {work.out}; choose another "
            f"--out, or remove {work.out} to start again"
        )
    advance(file.size)


def complete_and_whole(
    work: TokenizeWork, unit: int, num_excluded: int = 0
) -> Mapping[str, Any] | None:
    """Return the result of `complete`; None if a file of the unit has another hash than the hash in
    the sidecar.

    Hashes are compared only if the unit is in `work.sample`. For each damaged file, a line is
    printed.
    """
    record = complete(work, unit, num_excluded, report=True)
    if record is None or unit not in work.sample:
        return record
    for folder in tokens_dirs(work.out, work.plan).values():
        if not are_whole(promises(folder, unit, read_unit(folder, unit, work.plan_xxh3))):
            return None
    return record


def complete(
    work: TokenizeWork, unit: int, num_excluded: int = 0, report: bool = False
) -> Mapping[str, Any] | None:
    """Return the training split's sidecar of a unit; None if the unit is not complete.

    A unit also counts as incomplete if this run needs a .npy file but the unit has only a packed
    array, or if the number of documents that were excluded from the unit is not `num_excluded`. If
    `report` is True and a file of the unit is damaged or missing, a line is printed.
    """
    records = {}
    for split, folder in tokens_dirs(work.out, work.plan).items():
        try:
            records[split] = read_unit(folder, unit, work.plan_xxh3)
        except DataError as error:
            arrays = [array_path(folder, unit, packed) for packed in (False, True)]
            is_removed = work.packed or removed(folder)  # --fused removes the arrays of all units
            is_removed = is_removed and not any(path.exists() for path in arrays)
            if report and sidecar_path(folder, unit).exists() and not is_removed:
                say(f"{error}; the unit is made again")
            return None
        if not work.packed and not array_path(folder, unit).exists():
            return None  # the array is packed: a run with --fused did not run to its end
    record = records[layout.SPLITS[0]]
    return record if record.get("dropped", 0) == num_excluded else None


def open_writers(
    work: TokenizeWork, unit: int, stack: contextlib.ExitStack
) -> dict[str, TokenArrayWriter]:
    """Open the token array of each split of a unit for writing.

    Args:
        work: The settings of the tokenization.
        unit: The number of the unit.
        stack: Context that closes the files. If the context exits without an error, the files get
            their final names.

    Returns:
        The writer of the array of each split.
    """
    facts = work.plan.tokenizer
    return {
        split: TokenArrayWriter(
            stack.enter_context(files.atomic_writer(array_path(folder, unit, work.packed))),
            facts.vocab_size,
            work.plan.dtype,
            facts.eos_id,
            work.packed,
        )
        for split, folder in tokens_dirs(work.out, work.plan).items()
    }


def _tokenize_unit(
    work: TokenizeWork,
    unit: int,
    exclusions: Exclusions,
    checkpoints: Segments,
    advance: Callable[[int], None],
) -> None:
    plan, folders = work.plan, tokens_dirs(work.out, work.plan)
    first, stop = plan.units[unit]
    with contextlib.ExitStack() as stack:
        writers = open_writers(work, unit, stack)
        unit_writer = UnitWriter(
            shared_encoder(str(work.tokenizer_file)),
            writers,
            held_out_below(plan.eval_fraction),
            checkpoints,
            range(first, stop),
            work.limits,
        )
        _check_quarantined(work, unit_writer.set_aside)
        for source in range(first, unit_writer.source):
            _check_unchanged(work, source, unit_writer.hashes[source - first], advance)
        for source in range(unit_writer.source, stop):
            start = unit_writer.start if source == unit_writer.source else None
            xxh3 = _read_input(work, source, start, unit_writer, exclusions, advance)
            unit_writer.hashes.append(xxh3)
            if unit_writer.due and source + 1 < stop:
                unit_writer.save(source + 1, None)
        unit_writer.flush()
        arrays = {split: writer.finish() for split, writer in writers.items()}
    num_excluded = len(exclusions.documents)
    more = {layout.SPLITS[0]: {"dropped": num_excluded}} if num_excluded else {}
    hashes, set_aside = unit_writer.hashes, unit_writer.set_aside
    write_unit(folders, unit, work.plan_xxh3, writers, hashes, set_aside, more, arrays)


def _read_input(
    work: TokenizeWork,
    source: int,
    start: Position | None,
    unit_writer: UnitWriter,
    exclusions: Exclusions,
    advance: Callable[[int], None],
) -> str:
    """Read the documents of the input `source`. Add the documents that are not excluded to
    `unit_writer`.

    Args:
        work: The settings of the tokenization.
        source: The number of the input in the plan.
        start: The position at which to start. None: the beginning of the input.
        unit_writer: The writer of the arrays of the unit.
        exclusions: The documents to leave out.
        advance: Function that is called with the number of input bytes that were read.

    Returns:
        The hash of the whole input file.
    """
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
        for document in reader:
            if isinstance(document, LongText):
                unit_writer.add_long(source, document, reader, f"{file.name}:0")
            elif isinstance(document, Problem):
                if not work.quarantine:
                    raise DataError(_message(work.plan, source, document))
                unit_writer.quarantine(source, document)
            elif reason := exclusions.reason(source, document):
                unit_writer.quarantine(source, Problem(document.line, reason))
            else:
                unit_writer.add(source, document, f"{file.name}:{document.line}")
                if unit_writer.due and document.line:  # line 0: the file is one document
                    unit_writer.save(source, reader.position())
            del document  # frees a long text before the next text is read
    except DamagedFile as error:
        if not work.quarantine:
            raise DataError(_message(work.plan, source, error.problem)) from None
        unit_writer.quarantine_input(source, error.problem)
    return reader.xxh3


def _message(plan: TokenPlan, source: int, problem: Problem) -> str:
    where = problem.at(plan.inputs[source].name)
    return f"{where}; fix it, or skip such text with --on-error quarantine"
