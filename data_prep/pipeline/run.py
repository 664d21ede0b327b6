"""The pipeline that makes a data set from text: tokenize, shuffle, shard, and write the manifest.

Each step skips the work that earlier runs completed. If a run is killed, the same command continues
the run. The data set then has the same bytes as after a run that was not killed.
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
from data_prep.pipeline.shuffle import (
    ShuffleRequest,
    data_sets,
    read_requested_order,
    shuffle,
)
from data_prep.runtime.memory import Limits, bytes_for, default_bytes
from data_prep.runtime.memory import divide_memory as memory_to_tokenize
from data_prep.runtime.progress import say
from data_prep.runtime.ranks import ALONE, WorkerGroup, failure_scope, share, wait_for
from data_prep.runtime.workspace import working_in
from data_prep.shuffle.blend import read_any_order
from data_prep.shuffle.gather import remove_spill
from data_prep.shuffle.order import read_order
from data_prep.sources.inputs import UNIT_BYTES, InputFile, find_inputs, group_units, require_file
from data_prep.tokenize.duplicates import make_distinct_units
from data_prep.tokenize.packed import require_zstd
from data_prep.tokenize.plan import TokenPlan, read_plan, tokens_dirs
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
    """The parameters of `tokenize` and `run`, with the defaults of the command line."""

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
    """Memory limit of this rank. None: half of the usable memory, but at least 2 GB."""
    max_document: int | None = None
    id_field: str | None = None
    """Field with the ids of documents. "": ids are not read. None: the field is "id". If `out`
    contains the plan of an earlier run that did not read ids, None has the meaning of ""."""


@dataclass(frozen=True)
class ShardRequest:
    """The parameters of sharding, for `shard`, `blend` and `run`."""

    workers: int
    memory_bytes: int
    strategy: str = "auto"


def prepare(
    request: TokenizeRequest,
    shuffle_request: ShuffleRequest,
    shard_request: ShardRequest,
    *,
    fused: bool = False,
    group: WorkerGroup = ALONE,
) -> list[Manifest]:
    """Tokenize, shuffle and shard the inputs, and write the data set to `request.out`.

    Args:
        request: The inputs, the output directory, and the parameters of tokenization.
        shuffle_request: The length and order of the instances, and the size of the shards.
        shard_request: The workers, the memory and the strategy for writing shards.
        fused: True: compress the token arrays, and remove the arrays when the shards are complete.
        group: The ranks that share the work.

    Returns:
        The manifest of each split, the training split first.

    Raises:
        ConfigError: a parameter is wrong, or the memory is not enough.
        DataError: an input cannot be used, or `request.out` contains another data set.
    """
    # Check the limits of memory now, before hours of tokenization.
    divide_memory(shard_request.memory_bytes, shard_request.workers)
    memory_of(request, require_file(request.tokenizer, "--tokenizer"))
    if fused:
        require_zstd()
    with failure_scope(group, request.out) as group:
        manifests = find_finished(request, shuffle_request, group)
        if not manifests:
            try:
                tokenize(request, group, packed=fused)
                shuffle(request.out, request.out, shuffle_request, group)
                manifests = shard(request.out, shard_request, group)
            except DataError:  # other ranks may have finished and removed files in use here
                manifests = (
                    find_finished(request, shuffle_request, group) if group.world > 1 else []
                )
                if not manifests:
                    raise
        if fused and group.rank == 0:
            # `working_in` takes the lock, so that other runs do not remove this run's temporary
            # files.
            with working_in(request.out):
                drop_arrays(request.out)
        return manifests


def tokenize(request: TokenizeRequest, group: WorkerGroup = ALONE, packed: bool = False) -> None:
    """Tokenize all inputs, and write the token arrays to the directory `request.out`.

    Args:
        request: The inputs, the output directory, and the parameters of tokenization.
        group: The ranks that share the work.
        packed: True: compress the arrays, as for a run with `--fused`.

    Raises:
        ConfigError: a parameter is wrong, or the memory is not enough.
        DataError: an input cannot be used, or `request.out` contains the plan of a different run.
    """
    tokenizer = require_file(request.tokenizer, "--tokenizer")
    facts = read_facts(tokenizer, request.eos)
    inputs = find_inputs(request.inputs, request.exclude, request.out, group.say)
    plan = plan_of(request, facts, inputs)
    workers, limits = memory_of(request, tokenizer)
    if workers < request.workers:
        enough = bytes_for(request.workers, tokenizer)
        label, memory = group.label("tokenize"), request.memory_bytes or default_bytes()
        say(fewer_workers(label, memory, workers, request.workers, enough))
    with working_in(request.out, group.rank), failure_scope(group, request.out) as group:
        work = begin(request.out, tokenizer, plan, request.quarantine, limits)
        if request.id_field is None and not plan.id_field:
            group.say(
                f"{request.out} was started without ids of documents, so duplicate documents are "
                "not detected"
            )
        work = dataclasses.replace(work, packed=packed)
        make_distinct_units(work, workers, group)
        if not packed:  # the arrays exist again, if an earlier run with --fused removed them
            for folder in reversed(tokens_dirs(request.out, plan).values()):
                unmark_removed(folder)


def memory_of(request: TokenizeRequest, tokenizer: Path) -> tuple[int, Limits]:
    """Return (number of workers that fit in the memory, limits of a document).

    Raises ConfigError if the memory is not enough for one worker.
    """
    return memory_to_tokenize(
        request.memory_bytes, request.workers, tokenizer, request.max_document
    )


def plan_of(
    request: TokenizeRequest, facts: TokenizerFacts, inputs: Sequence[InputFile]
) -> TokenPlan:
    """Return the plan of tokenization for `inputs`. The plan contains all values that determine the
    token arrays."""
    id_field = request.id_field
    if id_field is None:
        tokens_dir = request.out / layout.TOKENS_DIR
        without_ids = (tokens_dir / layout.PLAN).exists() and not read_plan(tokens_dir).id_field
        id_field = "" if without_ids else "id"
    return TokenPlan(
        facts,
        request.text_field,
        float(request.eval_fraction),
        tuple(inputs),
        group_units(inputs, request.unit_bytes),
        id_field,
        request.max_document,
    )


def shard(out: Path, request: ShardRequest, group: WorkerGroup = ALONE) -> list[Manifest]:
    """Write the shards and the manifest of each split that has an order.json.

    The held-out split is written first.

    Args:
        out: The directory of the data set.
        request: The workers, the memory and the strategy for writing shards.
        group: The ranks that share the work.

    Returns:
        The manifest of each split, the training split first.

    Raises:
        ConfigError: the memory is not enough for one worker.
        DataError: an order.json or a token array is missing or damaged.
    """
    manifests: list[Manifest] = []
    with working_in(out, group.rank), failure_scope(group, out) as group:
        for dataset in (out / layout.EVAL_DIR, out):
            if dataset == out or (dataset / layout.ORDER).exists():
                manifests.insert(0, _shard_split(dataset, request, group))
    return manifests


def _shard_split(dataset: Path, request: ShardRequest, group: WorkerGroup) -> Manifest:
    order = read_any_order(dataset)
    for source in order.sources:
        tokens_dir = dataset / source.tokens_dir
        read_plan(tokens_dir, source.plan)  # first, because order.json may name a wrong folder
        require_tokens(tokens_dir)
    shard_all(dataset, order, request.workers, request.memory_bytes, request.strategy, group)
    order_xxh3 = files.xxh3_file(dataset / layout.ORDER)

    def done() -> bool:
        try:
            return read_manifest(dataset).order_xxh3 == order_xxh3
        except DataError:
            return False

    wait_for(group, done, lambda: finish(dataset, order))
    remove_spill(dataset)
    return read_manifest(dataset)


def drop_arrays(out: Path) -> None:
    """Remove the token arrays of a finished data set. Called for the option `--fused`.

    A mark file (removed.json) in each folder of arrays records the removal. All mark files are
    written before any array is removed. The mark file of the training split is written first,
    because `find_finished` reads only this mark file. Raises DataError if an array is damaged.
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
    request: TokenizeRequest, shuffle_request: ShuffleRequest, group: WorkerGroup = ALONE
) -> list[Manifest]:
    """Return the manifest of each split if a run with `--fused` has finished the data set, else [].

    When the shards are complete, a run with `--fused` writes removed.json to the folders of token
    arrays and removes the arrays. If a file of the data set is missing or damaged, this function
    deletes removed.json and returns [], so that the present run makes the arrays again. Each rank
    checks the hashes of its share of the inputs. Raises the errors of `tokenize` and `shuffle`.
    """
    out = request.out
    if not removed(out / layout.TOKENS_DIR):
        return []
    tokenizer = require_file(request.tokenizer, "--tokenizer")
    inputs = find_inputs(request.inputs, request.exclude, out)
    plan = plan_of(request, read_facts(tokenizer, request.eos), inputs)
    with working_in(out, group.rank):
        work = begin(out, tokenizer, plan, request.quarantine)
        splits = data_sets(out)
        try:
            manifests = [_check_finished(dataset) for dataset in splits]
        except DataError as error:
            group.say(
                f"{error}; the token arrays that --fused removed are made again for the repair"
            )
            for dataset in reversed(splits):
                unmark_removed(dataset / layout.TOKENS_DIR)
            return []
        for dataset in splits:
            read_requested_order(dataset, shuffle_request, held_out=dataset != out)
        sizes = [plan.unit_bytes(unit) for unit in range(len(plan.units))]
        check_inputs(work, share(sizes, group.rank, group.world))
        return manifests


def _check_finished(dataset: Path) -> Manifest:
    """Check a split: the sidecars, the sizes and headers of all shards, and the hashes of a sample
    of the shards.

    Return the manifest of the split. Raises DataError if a file is missing or damaged.
    """
    manifest, order = read_manifest(dataset), read_order(dataset)
    for number in range(order.num_shards):
        read_shard_record(dataset, order, manifest.order_xxh3, number)
    for unit in range(len(order.units)):
        read_unit(dataset / layout.TOKENS_DIR, unit, order.plan, has_array=False)
    # All ranks check the same sample of shards, so that all ranks get the same result.
    chosen = sample([shard.size for shard in manifest.shards], seed=manifest.identity)
    if damaged := [shard for shard in sorted(chosen) if not is_whole(dataset, shard)]:
        raise DataError(f"{dataset}: {counted(len(damaged), 'damaged shard')}")
    return manifest
