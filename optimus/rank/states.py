"""Creation of the model states of a rank, either for training or to compute the bytes that the rank
needs.

Model states are parameters, gradients, master weights and moments. For training, the states are on
the rank's device. To compute the memory, the same states are created on the meta device, which
allocates no memory, and their bytes are counted.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch

from optimus.checkpoint.save import RankStates, StagingBytes, staging_bytes, states_to_write
from optimus.checkpoint.slices import writer_in_paper
from optimus.checkpoint.weights import DTYPE as MODEL_DTYPE
from optimus.checkpoint.weights import masters_to_write
from optimus.chunks.buffers import FurtherUse
from optimus.chunks.engine import ChunkEngine
from optimus.chunks.groups import ParamProcessGroups
from optimus.chunks.optimizer import make_optimizer
from optimus.chunks.options import options_of
from optimus.chunks.residency import Pass, Residency, fewest_slots
from optimus.chunks.segments import ModelSegment
from optimus.config import Config, ModelConfig, OffloadConfig, OptimConfig, TrainConfig
from optimus.config.axes import UNEQUAL
from optimus.config.machine import load_links
from optimus.config.sizes import parse_bytes
from optimus.distributed.groups import Groups, plan_groups
from optimus.distributed.mesh import Coordinate, Mesh
from optimus.errors import ConfigError, counted, refuse_if
from optimus.launch.environment import read_local_size, usable_memory
from optimus.model.init import initial_value
from optimus.model.layers import Embedding
from optimus.model.moe import Experts
from optimus.model.transformer import Transformer
from optimus.observe.events import NO_RECORDER, Recorder
from optimus.parallel.apply import build_model, make_layout
from optimus.parallel.divisible import check_divisible
from optimus.parallel.layout import Layout
from optimus.parallel.pipeline.actions import passes_of
from optimus.parallel.placement import whole_model
from optimus.platform import dtype_of
from optimus.rank.segments import segments_of
from optimus_kernels import WeightGrads


def make_states(
    optim: OptimConfig,
    train: TrainConfig,
    offload: OffloadConfig,
    layout: Layout,
    groups: Groups,
    model: Transformer,
    initial: bool = False,
    poison: bool = False,
) -> ChunkEngine:
    """Create and return the parameters, gradients and optimizer states of a rank's model.

    The states are stored in chunks, which are flat buffers. The parameters of `model` become views
    of the chunks.

    Args:
        optim, train, offload: Sections of the run's configuration.
        layout: Layout of the rank.
        groups: Process groups of the rank.
        model: Model of the rank, from `build_model`.
        initial: True to initialize the parameters randomly from `train.seed`. False to leave the
            parameters NaN until a checkpoint or weights are loaded.
        poison: True to fill freed chunks with NaN, for tests.
    """
    slices, seed = layout.placements, train.seed
    engine = ChunkEngine(
        dict(model.named_parameters()),
        lambda name: groups_of_param(name, optim, layout, groups),
        make_optimizer(optim),
        initial=(lambda name: initial_value(model, name, seed, slices[name])) if initial else None,
        dtype=dtype_of(train.dtype),
        chunk_length=optim.chunk_length,
        deterministic=train.deterministic,
        reduce_dtype=dtype_of(optim.grad_reduce_dtype),
        grad_dtype=dtype_of(optim.grad_dtype),
        everyone=groups.everyone,
        compiled=train.compile,
        overlap=optim.overlap,
        residency=Residency(
            divides_gradients=optim.resident != "all" or offload.host_share > 0,
            divides_parameters=optim.resident == "cache",
            host_share=offload.host_share,
            disk_share=offload.disk_share,
            disk=offload.disk,
            slots=optim.cache_chunks,
            rounds_gradients=offload.rounds_gradients(train),
            poison=poison,
            links=load_links(offload.links) if offload.links else None,
        ),
    )
    model.separate_uses()
    for name, leaf in model.separated_uses().items():
        engine.add_use(FurtherUse(name, leaf, model.shared_uses[name], layout.stage_of(name)))
    return engine


def write_gradients_to(model: Transformer, states: ChunkEngine) -> None:
    """Make the backward of the experts and the embedding of `model` add the weight gradients to the
    gradient memory of `states`, without autograd."""
    for name, module in model.named_modules():
        if isinstance(module, Experts):
            module.write_gradients_to(partial(_gradients_of_experts, states, name))
        elif isinstance(module, Embedding):
            module.write_gradients_to(partial(states.gradient, f"{name}.weight"))


def _gradients_of_experts(states: ChunkEngine, name: str) -> WeightGrads:
    """Return the gradient memory for the weights of the module `name`."""
    gate_up, down = (states.gradient(f"{name}.{weight}") for weight in ("gate_up", "down"))
    return WeightGrads(gate_up, down, add=True)


def states_of_rank(
    model: ModelConfig, layout: Layout, groups: Groups, states: ChunkEngine
) -> RankStates:
    """Return the states of this rank as a `RankStates`, the argument of the functions of
    `optimus.checkpoint`."""
    return RankStates(
        groups,
        states.device,
        states.shards(),
        ("master", *states.optimizer.moments),
        {name: placement.intervals for name, placement in layout.placements.items()},
        {name: tuple(p.shape) for name, p in whole_model(model).named_parameters()},
        states.stage_groups,
        states.disk,
    )


def groups_of_param(
    name: str, optim: OptimConfig, layout: Layout, groups: Groups
) -> ParamProcessGroups | None:
    """Return the process groups over which the gradient of the parameter `name` is reduced and the
    states of the parameter are sharded. Return None if this rank does not have the parameter."""
    if name not in layout.placements:
        return None
    kind = layout.placements[name].kind
    # The sum over partial axes (tp) is a separate all-reduce, because no process group has the axes
    # dp, ep and tp together.
    reducing = tuple(axis for axis in kind.sum_axes if axis not in kind.partial)
    options = options_of(name, optim)
    is_whole = options.frozen and optim.resident != "cache"
    sharding = () if is_whole else kind.shard_axes(optim.sharding)
    replicas = tuple(axis for axis in reducing if axis not in sharding)
    copies = kind.copy_axes(sharding)
    return ParamProcessGroups(
        stage=layout.stage_of(name),
        reduce_group=groups.over(*reducing),
        shard_group=groups.over(*sharding),
        replica_group=groups.over(*replicas),
        partial_group=groups.over(*kind.partial),
        copy_axes=copies,
        stage_group=groups.over(*kind.stages),
        options=options,
        is_first_copy=not groups.mesh.number_of(groups.coordinate, copies),
    )


def check_slots(config: Config, mesh: Mesh) -> None:
    """Check that the parameter cache of each rank can hold the largest segment, which is the
    embedding, a block or the head.

    The cache has space for optim.cache_chunks chunks. A chunk is a flat buffer of parameters. All
    chunks of a segment are needed at the same time.

    Raises:
        ConfigError: optim.cache_chunks is too small.
    """
    slots = config.optim.cache_chunks
    least = 0
    if slots:
        least = max(plan_rank(config, mesh, rank).fewest_slots for rank in _kinds(mesh))
    if least > slots:
        raise ConfigError(
            f"optim.cache_chunks = {slots}: the largest of the embedding, the blocks and the "
            f"head needs {counted(least, 'chunk')} at once; use {least} or more, or a larger "
            "optim.chunk_length",
        )


def check_disk_memory(config: Config, mesh: Mesh) -> None:
    """Check that the states on disk of each rank have at most `offload.disk_memory` bytes. Raises
    ConfigError if a rank needs more."""
    if most := parse_bytes(config.offload.disk_memory):
        needed = max(
            _sizes_of(config, mesh, coordinate)["disk"] for coordinate in _writers(config, mesh)
        )
        refuse_if(
            needed > most,
            f"offload.disk_memory = {config.offload.disk_memory!r}: the states of a rank need "
            f"{counted(needed, 'byte')} on disk, {needed - most:,} more; use a larger "
            "offload.disk_memory, or a smaller offload.disk_share",
        )


class PlannedRank(NamedTuple):
    """Model states, layout and process groups of a rank, created to compute memory sizes. No memory
    is allocated for the states."""

    engine: ChunkEngine
    """The model states on the meta device."""
    layout: Layout
    groups: Groups
    model: Transformer
    segments: list[ModelSegment]
    fewest_slots: int
    """Smallest number of chunks in the parameter cache with which the rank can run."""


def plan_rank(
    config: Config,
    mesh: Mesh,
    coordinate: Coordinate,
    num_microbatches: int = 0,
    recorder: Recorder = NO_RECORDER,
) -> PlannedRank:
    """Create the model states of the rank at `coordinate` on the meta device, which allocates no
    memory. Return the states, the layout and the process groups of the rank.

    `num_microbatches` is the number of microbatches of a step; 0 for the number of pipeline ranks.
    This number affects only the plan of the parameter cache. `recorder` receives the collectives of
    the states.
    """
    layout = make_layout(config, mesh, coordinate, num_microbatches or mesh.pp)
    groups = plan_groups(mesh, mesh.rank_at(coordinate), recorder)
    model = build_model(config, layout, groups, torch.device("meta"))
    engine = make_states(config.optim, config.train, config.offload, layout, groups, model)
    segments = segments_of(model, layout)
    fewest = fewest_slots(engine.transient_needs(segments))
    return PlannedRank(engine, layout, groups, model, segments, fewest)


def attach(
    engine: ChunkEngine, segments: Sequence[ModelSegment], layout: Layout, config: Config
) -> None:
    """Register the hooks that provide the segments of a rank's model with parameters and gradient
    buffers, and allocate the spare buffers for early updates (`offload.early_adam`)."""
    schedule = layout.schedule
    engine.attach(
        segments,
        [Pass(*each) for each in passes_of(schedule.ranks[layout.coordinate.pp])],
        early=not (schedule.splits_backward or config.train.compile),
        reduces_each=schedule.reduce_each,
        overlap=config.optim.overlap,
    )
    engine.add_spare(_spare_limit(engine, config))


def _spare_limit(engine: ChunkEngine, config: Config) -> float:
    """Return the maximum size, in bytes, of all spare buffers for early updates on a rank."""
    offload = config.offload
    if offload.mode == "off" or offload.early_adam == "off":
        return 0
    if offload.early_adam == "on":
        return math.inf
    limit = parse_bytes(offload.host_memory) or usable_memory() // read_local_size()
    sizes = engine.state_bytes()
    others = sizes["host"]
    if config.checkpoint.async_save:  # an upper limit of the host bytes that `staging_of` returns
        others += sizes["parameters"] + sizes["masters"] + sizes["moments"]
    return (limit - others) // 2


def staging_of(config: Config, planned: PlannedRank) -> StagingBytes:
    """Return the bytes that checkpoint.async_save needs on a rank, in host memory and on disk. With
    checkpoint.async_save = false, both numbers are 0."""
    sizes = staging_by_chunk(config, planned).values()
    return StagingBytes(sum(size.host for size in sizes), sum(size.disk for size in sizes))


def staging_by_chunk(config: Config, planned: PlannedRank) -> dict[int, StagingBytes]:
    """Return a dict from the number of each chunk to the bytes that checkpoint.async_save needs on
    a rank for copies of the chunk's states. With checkpoint.async_save = false, the dict is
    empty."""
    if not config.checkpoint.async_save:
        return {}
    scatter = config.checkpoint.scatter
    of_rank = states_of_rank(config.model, planned.layout, planned.groups, planned.engine)
    copies = [(pair, torch.float32) for pair in states_to_write(of_rank, scatter)]
    if config.checkpoint.model_interval:
        copies += [(pair, MODEL_DTYPE) for pair in masters_to_write(of_rank, scatter)]
    sizes = {shard.chunk.number: StagingBytes(0, 0) for shard in of_rank.shards}
    for (state, state_slice), dtype in copies:
        number = of_rank.shards[state_slice.shard].chunk.number
        host, disk = staging_bytes(of_rank, [(state, state_slice)], dtype)
        sizes[number] = StagingBytes(sizes[number].host + host, sizes[number].disk + disk)
    return sizes


def _kinds(mesh: Mesh) -> Iterator[Coordinate]:
    """Yield the mesh coordinate with dp = ep = 0 for each pair of a pp index and a tp index."""
    # Ranks that differ only along dp or ep have states of the same size.
    sizes = (size if axis in UNEQUAL else 1 for axis, size in mesh._asdict().items())
    yield from itertools.starmap(Coordinate, itertools.product(*map(range, sizes)))


def plan_ranks(config: Config, mesh: Mesh) -> Iterator[tuple[Coordinate, dict[str, Any]]]:
    """Yield the bytes of the model states of a rank, for each pair of a pp index and a tp index.

    Ranks that differ only along dp or ep have states of the same size.

    Yields:
        The coordinate of the rank, and a dict of sizes in bytes. The dict has the keys of
        `ChunkEngine.state_bytes`, and "cache" and "staging". "cache" is the memory of gathered
        parameters with optim.resident = "cache" or with offloading. "staging" is the host memory
        for checkpoint.async_save. "disk" includes the copies of states on disk that
        checkpoint.async_save makes there. "total" is the device memory, including "cache". With
        offloading, the dict also has the key "tiers": the result of `ChunkEngine.bytes_by_tier`
        with three more sizes in each tier. These are "cache", as above; "early", the spare buffers
        for early updates; and "checkpoints", the copies that checkpoint.async_save makes. With
        offload.early_adam = "auto", spare buffers are counted only if offload.host_memory limits
        them.

    Raises:
        ConfigError: A parallel size does not divide a model dimension, optim.cache_chunks is too
            small, or the states on disk exceed offload.disk_memory.
    """
    check_divisible(config, mesh)
    check_slots(config, mesh)
    check_disk_memory(config, mesh)
    for coordinate in _writers(config, mesh):
        yield coordinate, _sizes_of(config, mesh, coordinate)


def _writers(config: Config, mesh: Mesh) -> Iterator[Coordinate]:
    """Yield a mesh coordinate for each pair of a pp index and a tp index, as `_kinds` does. With
    checkpoint.scatter = "paper", yield the coordinate of the rank that writes checkpoints, because
    only this rank has staging memory."""
    for coordinate in _kinds(mesh):
        if config.checkpoint.scatter == "paper":
            coordinate = coordinate._replace(dp=writer_in_paper(mesh, coordinate))
        yield coordinate


def _sizes_of(config: Config, mesh: Mesh, coordinate: Coordinate) -> dict[str, Any]:
    """Return the dict of sizes that `plan_ranks` yields for a rank."""
    planned = plan_rank(config, mesh, coordinate)
    sizes, cache = planned.engine.state_bytes(), planned.engine.cache_bytes
    staging = staging_of(config, planned)
    sizes |= {
        "cache": cache,
        "total": sizes["total"] + cache,
        "staging": staging.host,
        "disk": sizes["disk"] + staging.disk,
    }
    if config.offload.mode == "off":
        return sizes
    more = {
        "device": {"cache": cache, "early": 0, "checkpoints": 0},
        "host": {"cache": 0, "early": 0, "checkpoints": staging.host},
        "disk": {"cache": 0, "early": 0, "checkpoints": staging.disk},
    }
    by_tier = planned.engine.bytes_by_tier()
    if config.offload.early_adam == "on" or config.offload.host_memory:
        planned.engine.add_spare(_spare_limit(planned.engine, config))
        host = planned.engine.state_bytes()["host"]
        more["host"]["early"], sizes["host"] = host - sizes["host"], host
    return sizes | {"tiers": {tier: of_tier | more[tier] for tier, of_tier in by_tier.items()}}
