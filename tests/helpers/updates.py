"""What updates a model on one rank, made from a configuration without a run around it."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from optimus.chunks.engine import ChunkEngine
from optimus.config import Config, make_config
from optimus.data.batch import BatchPlan, plan_batch
from optimus.data.loader import Microbatch
from optimus.distributed.groups import Groups, join_groups
from optimus.distributed.mesh import make_mesh
from optimus.distributed.world import World, start_world
from optimus.observe.events import NO_RECORDER, Recorder
from optimus.rank.model import RankModel
from optimus.train.update import Updater
from tests.helpers.tiny import CONTEXT, VOCAB


def numbered(number: int, length: int = CONTEXT) -> Microbatch:
    """One instance of tokens made from their number."""
    generator = torch.Generator().manual_seed(number)
    return Microbatch(torch.randint(0, VOCAB, (1, length), generator=generator))


def own_batch(
    groups: Groups, count: int = 8, first: int = 0, length: int = CONTEXT
) -> list[Microbatch]:
    """This data rank's microbatches of a global batch of `count`, numbered from `first` on."""
    numbers = range(groups.data.rank, count, groups.data.size)
    return [numbered(first + number, length) for number in numbers]


class MadeShard(NamedTuple):
    config: Config
    world: World
    groups: Groups
    plan: BatchPlan
    shard: RankModel


class Made(NamedTuple):
    config: Config
    world: World
    groups: Groups
    plan: BatchPlan
    shard: RankModel
    states: ChunkEngine
    updater: Updater


def make_shard(
    tree: dict[str, Any], world: World | None = None, recorder: Recorder = NO_RECORDER
) -> MadeShard:
    """On a rank of the pool, started without a world if none is given. `recorder` receives
    collectives and pipeline actions."""
    torch.set_num_threads(1)
    config = make_config(tree)
    world, parallel = world or start_world(device="cpu"), config.parallel
    mesh = make_mesh(parallel, world.size)
    groups = join_groups(mesh, world, parallel.virtual_stages, recorder)
    plan = plan_batch(config.train, mesh.num_data_ranks)
    shard = RankModel(config, groups, plan, world.device)
    return MadeShard(config, world, groups, plan, shard)


def make_updater(
    tree: dict[str, Any],
    world: World | None = None,
    poison: bool = False,
    recorder: Recorder = NO_RECORDER,
) -> Made:
    """The same with what updates it; `poison` as in `RankModel.make_states`."""
    made = make_shard(tree, world, recorder)
    states = made.shard.make_states(poison=poison)
    updater = Updater(made.config, made.groups, made.shard, states, made.plan, made.world.device)
    return Made(*made, states, updater)
