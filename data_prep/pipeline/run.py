"""The pipeline from text to a finished data set: tokenize, shuffle, shard, manifest.

Every step finds what earlier runs completed and does the rest, so the same command after a kill
ends with the same bytes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from data_prep import layout
from data_prep.dataset.manifest import Manifest, read_manifest
from data_prep.pipeline.begin import begin, require_tokens
from data_prep.pipeline.shard import (
    divide_memory,
    fewer_workers,
    finish,
    is_whole,
    read_shard_record,
    shard_all,
)
from data_prep.pipeline.shuffle import ShuffleRequest, as_asked, data_sets, shuffle
from data_prep.runtime.memory import Limits, bytes_for, default_bytes
from data_prep.runtime.memory import divide_memory as memory_to_tokenize
from data_prep.runtime.progress import say
from data_prep.runtime.ranks import ALONE, Team, share, together, wait_for
from data_prep.runtime.workspace import working_in
from data_prep.shuffle.blend import read_any_order
from data_prep.shuffle.gather import remove_spill
from data_prep.shuffle.order import read_order
from data_prep.sources.inputs import UNIT_BYTES, InputFile, find_inputs, group_units, require_file
from data_prep.tokenize.duplicates import make_distinct_units
from data_prep.tokenize.plan import TokenPlan, read_plan, tokens_dirs
from data_prep.tokenize.store import require_zstd
from data_prep.tokenize.token_set import (
    check_arrays,
    mark_removed,
    read_unit,
    remove_arrays,
    removed,
    sample,
    unmark_removed,
)
from data_prep.tokenize.tokenize import check_inputs
from data_prep.tokenizer.tokenizer import TokenizerFacts, read_facts
from optimus.errors import DataError, counted
from optimus.io import files


@dataclass(frozen=True)
class TokenizeRequest:
    """What `tokenize` and `run` are asked for; defaults are the command line's."""

    inputs: Sequence[str]
    tokenizer: str
    out: Path
    workers: int
    exclude: Sequence[str] = ()
    eos: str | None = None
    text_field: str = "text"
    eval_fraction: float = 0.0
    unit_bytes: int = UNIT_BYTES
    quarantine: bool = False
    memory_bytes: int | None = None
    """None: half of the machine's."""
    max_document: int | None = None
    id_field: str | None = None
    """None: `id`; none in an output that was begun without."""


@dataclass(frozen=True)
class ShardRequest:
    """What `shard`, `blend` and `run` are asked for."""

    workers: int
    memory_bytes: int
    strategy: str = "auto"


def prepare(
    request: TokenizeRequest,
    shuffle_request: ShuffleRequest,
    shard_request: ShardRequest,
    *,
    fused: bool = False,
    team: Team = ALONE,
) -> list[Manifest]:
    """From text to a finished data set in request.out; its manifests, the training part's first.

    Raises DataError and ConfigError.
    """
    divide_memory(shard_request.memory_bytes, shard_request.workers)  # before hours of tokenizing
    memory_of(request, require_file(request.tokenizer, "--tokenizer"))
    if fused:
        require_zstd()
    with together(team, request.out) as team:
        manifests = find_finished(request, shuffle_request, team)
        if not manifests:
            try:
                tokenize(request, team, packed=fused)
                shuffle(request.out, request.out, shuffle_request, team)
                manifests = shard(request.out, shard_request, team)
            except DataError:  # or did the others finish, and remove what was read here?
                manifests = find_finished(request, shuffle_request, team) if team.world > 1 else []
                if not manifests:
                    raise
        if fused and team.rank == 0:
            with working_in(request.out):  # or a rank that leaves it sweeps up temporary files
                drop_arrays(request.out)
        return manifests


def tokenize(request: TokenizeRequest, team: Team = ALONE, packed: bool = False) -> None:
    """Token arrays of all inputs under request.out, `packed` or as they are to stay.

    Raises DataError and ConfigError.
    """
    tokenizer = require_file(request.tokenizer, "--tokenizer")
    facts = read_facts(tokenizer, request.eos)
    inputs = find_inputs(request.inputs, request.exclude, request.out, team.say)
    plan = plan_of(request, facts, inputs)
    workers, limits = memory_of(request, tokenizer)
    if workers < request.workers:
        enough = bytes_for(request.workers, tokenizer)
        label, memory = team.label("tokenize"), request.memory_bytes or default_bytes()
        say(fewer_workers(label, memory, workers, request.workers, enough))
    with working_in(request.out, team.rank), together(team, request.out) as team:
        work = begin(request.out, tokenizer, plan, request.quarantine, limits)
        if request.id_field is None and not plan.id_field:
            team.say(
                f"{request.out} was started without ids of documents: duplicates are not found"
            )
        work = dataclasses.replace(work, packed=packed)
        make_distinct_units(work, workers, team)
        if not packed:  # what an earlier run with --fused removed stands again
            for folder in reversed(tokens_dirs(request.out, plan).values()):
                unmark_removed(folder)


def memory_of(request: TokenizeRequest, tokenizer: Path) -> tuple[int, Limits]:
    """Workers at once, and what a document may take. Raises ConfigError for too little."""
    return memory_to_tokenize(
        request.memory_bytes, request.workers, tokenizer, request.max_document
    )


def plan_of(
    request: TokenizeRequest, facts: TokenizerFacts, inputs: Sequence[InputFile]
) -> TokenPlan:
    """The plan of what was asked for."""
    id_field = request.id_field
    if id_field is None:
        tokens_dir = request.out / layout.TOKENS_DIR
        begun_without = (tokens_dir / layout.PLAN).exists() and not read_plan(tokens_dir).id_field
        id_field = "" if begun_without else "id"
    return TokenPlan(
        facts,
        request.text_field,
        float(request.eval_fraction),
        tuple(inputs),
        group_units(inputs, request.unit_bytes),
        id_field,
        request.max_document,
    )


def shard(out: Path, request: ShardRequest, team: Team = ALONE) -> list[Manifest]:
    """Shards and manifest of every shuffled part of `out`, the training part's manifest last.

    Gives the manifests, the training part's first. Raises DataError and ConfigError.
    """
    manifests: list[Manifest] = []
    with working_in(out, team.rank), together(team, out) as team:
        for dataset in (out / layout.EVAL_DIR, out):
            if dataset == out or (dataset / layout.ORDER).exists():
                manifests.insert(0, _shard_part(dataset, request, team))
    return manifests


def _shard_part(dataset: Path, request: ShardRequest, team: Team) -> Manifest:
    order = read_any_order(dataset)
    for source in order.sources:
        tokens_dir = dataset / source.tokens_dir
        read_plan(tokens_dir, source.plan)  # first: nothing else is read of other folders
        require_tokens(tokens_dir)
    shard_all(dataset, order, request.workers, request.memory_bytes, request.strategy, team)
    order_xxh3 = files.xxh3_file(dataset / layout.ORDER)

    def done() -> bool:
        try:
            return read_manifest(dataset).order_xxh3 == order_xxh3
        except DataError:
            return False

    wait_for(team, done, lambda: finish(dataset, order))
    remove_spill(dataset)
    return read_manifest(dataset)


def drop_arrays(out: Path) -> None:
    """`--fused`: remove the token arrays of a finished data set, all marked before the first goes.

    The training part's mark, which is looked for, is written first and taken back last. Raises
    DataError where an array is damaged.
    """
    folders = [dataset / layout.TOKENS_DIR for dataset in data_sets(out)]
    for folder in folders:
        if not removed(folder):
            check_arrays(folder)
    for folder in folders:
        mark_removed(folder)
    for folder in folders:
        remove_arrays(folder)


def find_finished(
    request: TokenizeRequest, shuffle_request: ShuffleRequest, team: Team = ALONE
) -> list[Manifest]:
    """The manifests of `request.out` if it was finished with `--fused`, else nothing.

    Its inputs are hashed again, each rank its share. Where a part of it is lost, the removal of the
    arrays is forgotten, so that the run makes them again. Raises DataError as the steps would.
    """
    out = request.out
    if not removed(out / layout.TOKENS_DIR):
        return []
    tokenizer = require_file(request.tokenizer, "--tokenizer")
    inputs = find_inputs(request.inputs, request.exclude, out)
    plan = plan_of(request, read_facts(tokenizer, request.eos), inputs)
    with working_in(out, team.rank):
        work = begin(out, tokenizer, plan, request.quarantine)
        places = data_sets(out)
        try:
            manifests = [_whole(place) for place in places]
        except DataError as error:
            team.say(f"{error}; its token arrays, removed by --fused, are made again to repair it")
            for place in reversed(places):
                unmark_removed(place / layout.TOKENS_DIR)
            return []
        for place in places:
            as_asked(place, shuffle_request, held_out=place != out)
        sizes = [plan.unit_bytes(unit) for unit in range(len(plan.units))]
        check_inputs(work, share(sizes, team.rank, team.world))
        return manifests


def _whole(dataset: Path) -> Manifest:
    """The manifest, if all shards and what stays of units are as their sidecars say, else
    DataError."""
    manifest, order = read_manifest(dataset), read_order(dataset)
    for number in range(order.num_shards):
        read_shard_record(dataset, order, manifest.order_xxh3, number)
    for unit in range(len(order.units)):
        read_unit(dataset / layout.TOKENS_DIR, unit, order.plan, has_array=False)
    # All ranks decide alone whether the data set is finished, and must decide the same.
    chosen = sample([shard.size for shard in manifest.shards], seed=manifest.identity)
    if damaged := [shard for shard in sorted(chosen) if not is_whole(dataset, shard)]:
        raise DataError(f"{dataset}: {counted(len(damaged), 'damaged shard')}")
    return manifest
