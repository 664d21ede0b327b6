"""`optimus-data import`: foreign token files become token arrays, as if they had been tokenized.

docs/formats/dataset.md, "Token files of other programs".
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import xxhash

from data_prep import layout
from data_prep.begin import begin
from data_prep.importers.foreign import Foreign, index_of, open_foreign
from data_prep.pool import run_jobs
from data_prep.progress import Progress
from data_prep.ranks import ALONE, Team, do_together, together
from data_prep.sources import InputFile, find_inputs, require_file
from data_prep.token_plan import IMPORT_FIELD, PARTS, TokenPlan, held_out_below, parts_dirs
from data_prep.token_set import UnitIdentity, read_unit, write_unit
from data_prep.tokenize import TokenizeWork, is_complete, missing_units, open_writers
from data_prep.tokenizer import TokenizerFacts, read_facts
from data_prep.workspace import working_in
from optimus import files
from optimus.errors import DataError

_BLOCK_TOKENS = 1 << 20
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


@dataclass(frozen=True)
class _ImportWork:
    base: TokenizeWork
    dtype: str | None


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
        work = _ImportWork(begin(request.out, tokenizer, plan, quarantine=False), request.dtype)
        folder = request.out / layout.TOKENS_DIR
        sizes = [plan.unit_bytes(unit) for unit in range(len(plan.units))]

        def do(units: list[int]) -> None:
            order = sorted(units, key=lambda unit: -sizes[unit])
            with Progress(team.label("import"), sum(sizes[unit] for unit in units), "B") as bar:
                run_jobs(_do_unit, work, order, request.workers, bar)

        def missing() -> list[int]:
            return missing_units(work.base, deep=team.rank == 0)

        do_together(team, sizes, do, missing, folder, request.workers)
        records = [read_unit(folder, unit, work.base.plan_xxh3) for unit in range(len(sizes))]
    mended = [record["mended"] for record in records]
    return {key: sum(one[key] for one in mended) for key in ("eos_added", "empty_documents")}


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
    how = IMPORT_FIELD + (request.dtype or "as described")  # another reading is another plan
    return TokenPlan(facts, how, float(request.eval_fraction), tuple(inputs), tuple(units))


def _do_unit(work: _ImportWork, unit: int, advance: Callable[[int], None]) -> None:
    plan, folder = work.base.plan, parts_dirs(work.base.out, work.base.plan)[PARTS[0]]
    first, stop = plan.units[unit]
    hashes = [files.xxh3_file(file.name) for file in plan.inputs[first:stop]]
    if not is_complete(work.base, unit):
        _import_unit(work, unit, hashes)
    if read_unit(folder, unit, work.base.plan_xxh3)["inputs"] != hashes:
        raise DataError(
            f"{plan.inputs[first].name}: changed since {work.base.out} was begun; choose another "
            f"--out, or remove {work.base.out} to start again"
        )
    advance(plan.unit_bytes(unit))


def _import_unit(work: _ImportWork, unit: int, hashes: list[str]) -> None:
    plan, folders = work.base.plan, parts_dirs(work.base.out, work.base.plan)
    source, facts = plan.units[unit][0], plan.tokenizer
    name = plan.inputs[source].name
    foreign = open_foreign(name, work.dtype)
    with contextlib.ExitStack() as stack:
        writers = open_writers(work.base, unit, stack)
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
    for part in reversed(plan.parts):  # the training part's sidecar last
        identity = UnitIdentity(work.base.plan_xxh3, part, unit, hashes, [])
        more = {"mended": mended if part == PARTS[0] else {}}
        write_unit(folders[part], identity, writers[part], arrays[part], more)


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
    ids, held, seen_eos = foreign.ids, [], len(foreign.ends) > 0 or len(foreign.ids) == 0
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
            f"{name}: holds no {facts.eos_token} (id {facts.eos_id}), so its documents cannot be "
            "told apart; give the tokenizer that made it, and its end of document as --eos"
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
            f"{name}: id {int(block[place])} at token {start + place} lies outside the vocabulary "
            f"of {vocab_size}; give the tokenizer that made it, or its real --dtype"
        )
    return block.astype(np.uint32)
