"""The model states of a rank: made here for training, and on the meta device for plans.

There is one description: a plan makes the very engine that a run would, of tensors without memory,
and counts their bytes.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import NamedTuple

import torch

from optimus.checkpoint.pieces import writer_in_paper
from optimus.checkpoint.rank_states import RankStates
from optimus.checkpoint.save_model import DTYPE as MODEL_DTYPE
from optimus.checkpoint.save_model import model_parts
from optimus.checkpoint.staging import share_of, staging_bytes
from optimus.chunks.engine import ChunkEngine, Use
from optimus.chunks.optimizer import make_optimizer
from optimus.chunks.residency import Residency, fewest_slots
from optimus.chunks.setting import check_patterns, setting_of
from optimus.chunks.states import Home
from optimus.config import Config
from optimus.config.axes import UNEQUAL
from optimus.distributed.groups import Groups, plan_groups
from optimus.distributed.mesh import Mesh, Place
from optimus.distributed.rules import copy_axes, shard_axes, sum_axes
from optimus.errors import ConfigError, counted
from optimus.model.transformer import Transformer
from optimus.parallel.apply import build_model, make_layout
from optimus.parallel.divisible import check_divisible
from optimus.parallel.layout import FURTHER_USES, Layout
from optimus.parallel.placement import whole_model
from optimus.platform import dtype_of
from optimus.rank.segments import units_of


def make_states(
    config: Config, layout: Layout, groups: Groups, model: Transformer, poison: bool = False
) -> ChunkEngine:
    """The states of this rank's `model`, from the values its parameters have now; they become views
    of chunks. `poison`: as in Residency."""
    optim = config.optim
    engine = ChunkEngine(
        dict(model.named_parameters()),
        lambda name: home_of(name, config, layout, groups),
        make_optimizer(optim),
        dtype=dtype_of(config.train.dtype),
        chunk_length=optim.chunk_length,
        deterministic=config.train.deterministic,
        reduce_dtype=dtype_of(optim.grad_reduce_dtype),
        grad_dtype=dtype_of(optim.grad_dtype),
        everyone=groups.everyone,
        compiled=config.train.compile,
        overlap=optim.overlap,
        residency=Residency(
            divides_gradients=optim.resident != "all",
            divides_parameters=optim.resident == "cache",
            slots=optim.cache_chunks,
            poison=poison,
        ),
    )
    model.separate_tied_uses()
    for name, leaf in model.tied_uses().items():
        engine.add_use(Use(name, leaf, FURTHER_USES[name]))
    return engine


def states_of_rank(
    config: Config, layout: Layout, groups: Groups, states: ChunkEngine
) -> RankStates:
    """What this rank holds, as checkpoints see it."""
    tied = config.model.tie_embeddings and groups.mesh.pp > 1
    return RankStates(
        groups,
        states.shards(),
        {name: one.intervals for name, one in layout.placements.items()},
        {name: tuple(p.shape) for name, p in whole_model(config.model).named_parameters()},
        on_both_ends=("embed.weight",) if tied else (),
    )


def home_of(name: str, config: Config, layout: Layout, groups: Groups) -> Home | None:
    """Whose the gradient of a parameter is, or of a further use of one; None for other names."""
    owner = layout.owner_of(name)
    if not owner:
        return None
    kind, place = layout.placements[owner].kind, groups.place
    adding = tuple(axis for axis in sum_axes(kind) if axis not in kind.partial)
    setting = setting_of(owner, config.optim)
    sharding = () if setting.frozen else shard_axes(kind, config.optim.sharding)
    spread = tuple(axis for axis in adding if axis not in sharding)
    copies = copy_axes(kind, sharding)
    return Home(
        stage=layout.stage_of(name),
        adders=groups.over(*adding),
        shards=groups.over(*sharding),
        spread=groups.over(*spread),
        partial_over=groups.over(*kind.partial),
        copies=copies,
        far_copy=layout.is_far_copy(owner),
        setting=setting,
        first_copy=not groups.mesh.number_of(place, copies),
    )


def check_names(config: Config) -> None:
    """Raise ConfigError for patterns of `[optim]` that name none of the model's parameters."""
    optim = config.optim
    if optim.groups or optim.frozen:
        check_patterns(optim, dict(whole_model(config.model).named_parameters()))


def check_slots(config: Config, mesh: Mesh) -> None:
    """Raise ConfigError unless each unit of each rank finds its chunks together in the cache."""
    slots = config.optim.cache_chunks
    least = 0
    if slots:
        least = max(plan_rank(config, mesh, place).fewest_slots for place in _kinds(mesh))
    if least > slots:
        raise ConfigError(
            f"optim.cache_chunks = {slots}: some block (or the embedding, or the head) needs "
            f"{counted(least, 'chunk')} at once; use {least} or more, or a larger "
            "optim.chunk_length",
        )


class PlannedRank(NamedTuple):
    """A rank's states without memory."""

    engine: ChunkEngine
    layout: Layout
    groups: Groups
    fewest_slots: int
    """With which its cache of parameters could do."""


def plan_rank(config: Config, mesh: Mesh, place: Place) -> PlannedRank:
    """The rank at `place`, of which nothing is computed."""
    # How many microbatches there are changes no state.
    layout = make_layout(config, mesh, place, num_microbatches=mesh.pp)
    groups = plan_groups(mesh, mesh.rank_at(place))
    model = build_model(config, layout, groups, torch.device("meta"))
    engine = make_states(config, layout, groups, model)
    fewest = fewest_slots(engine.needs(units_of(model, layout)))
    return PlannedRank(engine, layout, groups, fewest)


def _kinds(mesh: Mesh) -> Iterator[Place]:
    """A rank of each kind. Along dp and ep ranks hold as much as each other: shards are of one
    length, and ep divides experts evenly."""
    sizes = (size if axis in UNEQUAL else 1 for axis, size in mesh._asdict().items())
    yield from itertools.starmap(Place, itertools.product(*map(range, sizes)))


def plan_ranks(config: Config, mesh: Mesh) -> Iterator[tuple[Place, dict[str, int]]]:
    """Bytes on one rank of each kind, with "cache" in their total: chunks of parameters that are
    whole at a time under optim.resident = "cache". Host memory for checkpoint.async_save is
    "staging", not in the total; along dp and ep it differs by the padding of pieces, and with
    checkpoint.scatter = "paper" only those that write have it.

    Raises ConfigError where the mesh does not divide the model, a pattern names no parameter or the
    cache is too small.
    """
    check_divisible(config, mesh)
    check_names(config)
    check_slots(config, mesh)
    scatter = config.checkpoint.scatter
    for place in _kinds(mesh):
        if scatter == "paper":
            place = place._replace(dp=writer_in_paper(mesh, place))
        planned = plan_rank(config, mesh, place)
        sizes, cache = planned.engine.bytes_held(), planned.engine.cache_bytes
        staging = 0
        if config.checkpoint.async_save:
            of_rank = states_of_rank(config, planned.layout, planned.groups, planned.engine)
            staging = staging_bytes(share_of(of_rank, scatter))
            if config.checkpoint.model_interval:
                staging += staging_bytes(model_parts(of_rank, scatter), MODEL_DTYPE)
        yield place, sizes | {"cache": cache, "total": sizes["total"] + cache, "staging": staging}
