"""`optimus-data import`: foreign token files become token arrays, as if they had been tokenized.

docs/formats/dataset.md, "Token files of other programs".
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

from data_prep.pipeline.begin import begin
from data_prep.runtime.ranks import ALONE, Team, together
from data_prep.runtime.workspace import working_in
from data_prep.sources.foreign import Foreign, index_of, open_foreign
from data_prep.sources.inputs import InputFile, find_inputs, require_file
from data_prep.tokenize.plan import IMPORT_FIELD, PARTS, TokenPlan, held_out_below, tokens_dirs
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
_COMPANIONS = (".idx", ".csv.gz")  # beside .bin; dolma's list of documents, which EOS tells too


@dataclass(frozen=True)
class ImportRequest:
    """What `import` is asked for."""

    inputs: Sequence[str]
    tokenizer: str
    out: Path
    workers: int
    exclude: Sequence[str] = ()
    eos: str | None = None
    dtype: str | None = None
    eval_fraction: float = 0.0


def import_tokens(request: ImportRequest, team: Team = ALONE) -> dict[str, int]:
    """Token arrays of all inputs under request.out; what had to be mended, by kind.

    Raises DataError for files that cannot be taken as they are, ids outside the vocabulary above
    all.
    """
    tokenizer = require_file(request.tokenizer, "--tokenizer")
    facts = read_facts(tokenizer, request.eos)
    found = find_inputs(request.inputs, request.exclude, request.out, team.say)
    plan = _make_plan(found, facts, request)
    with working_in(request.out, team.rank), together(team, request.out) as team:
        work = begin(request.out, tokenizer, plan, quarantine=False)
        make_units(_ImportTask, work, request.workers, team, "import")
        units = range(len(plan.units))
        records = [read_unit(work.tokens_dir, unit, work.plan_xxh3) for unit in units]
    mended: list[Mapping[str, Any]] = [record.get("mended", {}) for record in records]
    keys = ("eos_added", "empty_documents")
    return {key: sum(counts.get(key, 0) for counts in mended) for key in keys}


def _make_plan(
    found: Sequence[InputFile], facts: TokenizerFacts, request: ImportRequest
) -> TokenPlan:
    """A .bin and its .idx, or a .npy, is a unit."""
    inputs: list[InputFile] = []
    units: list[tuple[int, int]] = []
    for file in found:
        own_ids = file.name.removesuffix(".idx") + ".bin"
        if file.name.endswith(".idx") and not os.path.exists(own_ids):
            raise DataError(f"{file.name}: {own_ids} is missing; copy it, or --exclude the index")
        if file.name.endswith(_COMPANIONS):
            continue
        if not file.name.endswith((".bin", ".npy")):
            raise DataError(
                f"{file.name}: neither a Megatron-LM .bin nor a .npy of ids; --exclude it"
            )
        own = [file]
        if file.name.endswith(".bin"):
            index = require_file(index_of(file.name), f"the index of {file.name},")
            own.append(InputFile(str(index), os.path.getsize(index)))
        units.append((len(inputs), len(inputs) + len(own)))
        inputs += own
    if not units:
        raise DataError("--input names no .bin and no .npy file; check the path")
    how = IMPORT_FIELD + (request.dtype or _AS_DESCRIBED)  # another reading is another plan
    return TokenPlan(facts, how, float(request.eval_fraction), tuple(inputs), tuple(units))


class _ImportTask(UnitTask):
    """Units of token files."""

    @staticmethod
    def job(work: TokenizeWork, unit: int, advance: Callable[[int], None]) -> None:
        """Import a token file."""
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
            for part, numbers in _deal(block, below).items():
                sources = [(source, line + number) for number in numbers]
                writers[part].append([block[number] for number in numbers], sources)
            line += len(block)
        arrays = {part: writer.finish() for part, writer in writers.items()}
    tokens = sum(writer.tokens for writer in writers.values())
    mended = {
        "eos_added": tokens - len(foreign.ids),
        "empty_documents": int((np.diff(foreign.ends, prepend=0) == 0).sum()),
    }
    more = {part: {"mended": mended if part == PARTS[0] else {}} for part in folders}
    write_unit(folders, unit, work.plan_xxh3, writers, hashes, [], more, arrays)


def _deal(block: list[np.ndarray], below: int) -> dict[str, list[int]]:
    """Which of these documents, uint32 each, go to each part; parts without any are left out."""
    if not below:
        return {PARTS[0]: list(range(len(block)))}
    dealt: dict[str, list[int]] = {}
    for number, ids in enumerate(block):
        content = np.ascontiguousarray(ids, "<u4")
        held_out = xxhash.xxh3_64_intdigest(content.data) < below
        dealt.setdefault(PARTS[held_out], []).append(number)
    return dealt


def _blocks(name: str, foreign: Foreign, facts: TokenizerFacts) -> Iterator[list[np.ndarray]]:
    """Documents' ids without EOS, uint32 each, a block of them at a time: they end where the source
    says and behind every EOS."""
    ids, seen_eos = foreign.ids, len(foreign.ends) > 0 or len(foreign.ids) == 0
    held: list[np.ndarray] = []
    for start in range(0, len(ids), _BLOCK_TOKENS):
        block = _checked(name, ids, start, facts.vocab_size)
        after_eos = np.flatnonzero(block == facts.eos_id) + 1
        seen_eos = seen_eos or after_eos.size > 0
        told = foreign.ends[np.searchsorted(foreign.ends, start, side="right") :]
        told = told[: np.searchsorted(told, start + len(block), side="right")] - start
        ends = np.unique(np.concatenate([after_eos, told]))
        documents = np.split(block, ends)
        rest = documents.pop()
        if documents:
            documents[0] = np.concatenate([*held, documents[0]])
            held = []
            yield [one[:-1] if one[-1] == facts.eos_id else one for one in documents]
        held.append(rest)
    if not seen_eos:
        raise DataError(
            f"{name}: has no {facts.eos_token} (id {facts.eos_id}), so its documents cannot be "
            "separated; give the tokenizer that made it, and its end-of-document token as --eos"
        )
    if sum(map(len, held)):
        yield [np.concatenate(held)]


def _checked(name: str, ids: np.ndarray, start: int, vocab_size: int) -> np.ndarray:
    """A block of ids as uint32, each compared with the vocabulary in its own type first."""
    block = ids[start : start + _BLOCK_TOKENS]
    wrong = (block < 0) | (block >= vocab_size)
    if wrong.any():
        place = int(wrong.argmax())
        raise DataError(
            f"{name}: id {int(block[place])} at token {start + place} is outside the vocabulary "
            f"of {vocab_size}; give the tokenizer that made it, or its real --dtype"
        )
    return block.astype(np.uint32)
