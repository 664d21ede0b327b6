"""`optimus-data import`: convert token files of other programs to token arrays.

See docs/formats/dataset.md, "Token files of other programs".
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from data_prep import layout
from data_prep.pipeline.begin import begin
from data_prep.runtime.ranks import ALONE, WorkerGroup, failure_scope
from data_prep.runtime.workspace import working_in
from data_prep.sources.foreign import Foreign, index_of, open_foreign
from data_prep.sources.inputs import InputFile, find_inputs, require_file
from data_prep.tokenize.plan import IMPORT_FIELD, TokenPlan, held_out_below, tokens_dirs
from data_prep.tokenize.token_set import read_unit, write_unit
from data_prep.tokenize.tokenize import (
    TokenizeWork,
    UnitTask,
    check_inputs_of,
    complete_and_whole,
    make_units,
    open_writers,
)
from data_prep.tokenizer.tokenizer import TokenizerFacts, read_facts
from optimus.errors import DataError
from optimus.io import files

_BLOCK_TOKENS = 1 << 20
_AS_DESCRIBED = "as described"
# Suffixes of files that do not become a unit. An .idx file belongs to the unit of the .bin file of
# the same stem. dolma's lists of documents (.csv.gz) are not read, because each document ends with
# EOS.
_SIDECARS = (".idx", ".csv.gz")


@dataclass(frozen=True)
class ImportRequest:
    """The parameters of `optimus-data import`: the values of its options."""

    inputs: Sequence[str]
    tokenizer: str
    out: Path
    workers: int
    exclude: Sequence[str] = ()
    eos: str | None = None
    dtype: str | None = None
    eval_fraction: float = 0.0


def import_tokens(request: ImportRequest, group: WorkerGroup = ALONE) -> dict[str, int]:
    """Convert all input token files to token arrays in the directory `request.out`.

    Returns:
        A dict of two counts: `eos_added`, the number of documents to which EOS was added, and
        `empty_documents`, the number of empty documents that were left out.

    Raises:
        DataError: a file is not a token file, or contains an id outside the vocabulary.
    """
    tokenizer = require_file(request.tokenizer, "--tokenizer")
    facts = read_facts(tokenizer, request.eos)
    inputs = find_inputs(request.inputs, request.exclude, request.out, group.say)
    plan = _make_plan(inputs, facts, request)
    with working_in(request.out, group.rank), failure_scope(group, request.out) as group:
        work = begin(request.out, tokenizer, plan, quarantine=False)
        make_units(_ImportTask, work, request.workers, group, "import")
        units = range(len(plan.units))
        records = [read_unit(work.tokens_dir, unit, work.plan_xxh3) for unit in units]
    repairs: list[Mapping[str, Any]] = [record.get("mended", {}) for record in records]
    keys = ("eos_added", "empty_documents")
    return {key: sum(counts.get(key, 0) for counts in repairs) for key in keys}


def _make_plan(
    token_files: Sequence[InputFile], facts: TokenizerFacts, request: ImportRequest
) -> TokenPlan:
    """Return the plan of the import. Each unit of the plan is either a .npy file, or a .bin file
    together with the .idx file of the same stem."""
    inputs: list[InputFile] = []
    units: list[tuple[int, int]] = []
    for file in token_files:
        ids = file.name.removesuffix(".idx") + ".bin"
        if file.name.endswith(".idx") and not os.path.exists(ids):
            raise DataError(f"{file.name}: {ids} is missing; copy it, or --exclude the index")
        if file.name.endswith(_SIDECARS):
            continue
        if not file.name.endswith((".bin", ".npy")):
            raise DataError(
                f"{file.name}: is neither a .bin file of Megatron-LM nor a .npy file of ids; "
                "--exclude it"
            )
        unit = [file]
        if file.name.endswith(".bin"):
            index = require_file(index_of(file.name), f"the index of {file.name},")
            unit.append(InputFile(str(index), os.path.getsize(index)))
        units.append((len(inputs), len(inputs) + len(unit)))
        inputs += unit
    if not units:
        raise DataError("--input matches no .bin or .npy file; check the path")
    # The dtype is in the plan, so that a run with another --dtype is detected.
    how = IMPORT_FIELD + (request.dtype or _AS_DESCRIBED)
    return TokenPlan(facts, how, float(request.eval_fraction), tuple(inputs), tuple(units))


class _ImportTask(UnitTask):
    """Task that converts token files to token arrays. Each work item is one token file."""

    @staticmethod
    def job(work: TokenizeWork, unit: int, advance: Callable[[int], None]) -> None:
        """Convert a token file to token arrays. If the arrays of this file already exist and are
        complete, only check that the file has not changed."""
        if (record := complete_and_whole(work, unit)) is None:
            _import_unit(work, unit)
            advance(work.plan.unit_bytes(unit))
        else:
            check_inputs_of(work, unit, record, advance)


def _import_unit(work: TokenizeWork, unit: int) -> None:
    plan, folders = work.plan, tokens_dirs(work.out, work.plan)
    (source, stop), facts = plan.units[unit], plan.tokenizer
    name = plan.inputs[source].name
    hashes = [files.xxh3_file(file.name) for file in plan.inputs[source:stop]]
    dtype = plan.text_field.removeprefix(IMPORT_FIELD)
    foreign = open_foreign(name, None if dtype == _AS_DESCRIBED else dtype)
    with contextlib.ExitStack() as stack:
        writers = open_writers(work, unit, stack)
        below, line = held_out_below(plan.eval_fraction), 1
        for block in _blocks(name, foreign, facts):
            for split, numbers in _divide(block, below).items():
                sources = [(source, line + number) for number in numbers]
                writers[split].append([block[number] for number in numbers], sources)
            line += len(block)
        arrays = {split: writer.finish() for split, writer in writers.items()}
    tokens = sum(writer.tokens for writer in writers.values())
    repairs = {
        "eos_added": tokens - len(foreign.ids),
        "empty_documents": int((np.diff(foreign.ends, prepend=0) == 0).sum()),
    }
    more = {split: {"mended": repairs if split == layout.SPLITS[0] else {}} for split in folders}
    write_unit(folders, unit, work.plan_xxh3, writers, hashes, [], more, arrays)


def _divide(block: list[np.ndarray], below: int) -> dict[str, list[int]]:
    """Divide the documents in `block` between the splits. Return a dict that maps the name of a
    split to the indices, in `block`, of the split's documents.

    A document is held out if the hash of its ids is less than `below`. A split without documents in
    `block` is left out.
    """
    if not below:
        return {layout.SPLITS[0]: list(range(len(block)))}
    by_split: dict[str, list[int]] = {}
    for number, ids in enumerate(block):
        content = np.ascontiguousarray(ids, "<u4")
        held_out = xxhash.xxh3_64_intdigest(content.data) < below
        by_split.setdefault(layout.SPLITS[held_out], []).append(number)
    return by_split


def _blocks(name: str, foreign: Foreign, facts: TokenizerFacts) -> Iterator[list[np.ndarray]]:
    """Yield lists of consecutive documents of a token file. Each document is a uint32 array without
    EOS.

    A document ends at each EOS token, and at each document end that the token file lists.
    """
    ids, seen_eos = foreign.ids, len(foreign.ends) > 0 or len(foreign.ids) == 0
    unfinished: list[np.ndarray] = []
    for start in range(0, len(ids), _BLOCK_TOKENS):
        block = _checked(name, ids, start, facts.vocab_size)
        after_eos = np.flatnonzero(block == facts.eos_id) + 1
        seen_eos = seen_eos or after_eos.size > 0
        listed = foreign.ends[np.searchsorted(foreign.ends, start, side="right") :]
        listed = listed[: np.searchsorted(listed, start + len(block), side="right")] - start
        ends = np.unique(np.concatenate([after_eos, listed]))
        documents = np.split(block, ends)
        rest = documents.pop()
        if documents:
            documents[0] = np.concatenate([*unfinished, documents[0]])
            unfinished = []
            yield [d[:-1] if d[-1] == facts.eos_id else d for d in documents]
        unfinished.append(rest)
    if not seen_eos:
        raise DataError(
            f"{name}: has no {facts.eos_token} (id {facts.eos_id}), so its documents cannot be "
            "separated; set --tokenizer to the tokenizer of this file, and --eos to the token at "
            "the end of its documents"
        )
    if sum(map(len, unfinished)):
        yield [np.concatenate(unfinished)]


def _checked(name: str, ids: np.ndarray, start: int, vocab_size: int) -> np.ndarray:
    """Return the ids from index `start`, at most _BLOCK_TOKENS ids, as uint32. Raises DataError if
    one of these ids is outside the vocabulary."""
    block = ids[start : start + _BLOCK_TOKENS]
    wrong = (block < 0) | (block >= vocab_size)
    if wrong.any():
        index = int(wrong.argmax())
        raise DataError(
            f"{name}: id {int(block[index])} at token {start + index} is outside the vocabulary "
            f"of {vocab_size}; set --tokenizer to the tokenizer of this file, or --dtype to the "
            "type of its ids"
        )
    return block.astype(np.uint32)
