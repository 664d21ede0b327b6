"""What updates a model on one rank, made from a configuration without a run around it."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from optimus.chunks.engine import ChunkEngine
from optimus.config import Config, make_config
from optimus.dist.groups import Groups, join_groups
from optimus.dist.mesh import make_mesh
from optimus.dist.world import World, start_world
from optimus.model.init import initialise_
from optimus.train.batch import BatchPlan, plan_batch
from optimus.train.shard import Shard
from optimus.train.update import Updater


class Made(NamedTuple):
    config: Config
    world: World
    groups: Groups
    plan: BatchPlan
    shard: Shard
    states: ChunkEngine
    updater: Updater


def make_updater(tree: dict[str, Any]) -> Made:
    """On a rank of the pool, started without a world; parameters are those of seed 0."""
    torch.set_num_threads(1)
    config = make_config(tree)
    world, parallel = start_world(device="cpu"), config.parallel
    mesh = make_mesh(world.size, parallel.pp, parallel.dp, parallel.ep, parallel.tp)
    groups = join_groups(mesh, world, parallel.virtual_stages)
    plan = plan_batch(config, mesh.num_data_ranks)
    shard = Shard(config, groups, plan, world.device)
    initialise_(shard.model, 0, shard.layout.placements)
    states = shard.make_states()
    updater = Updater(config, groups, shard, states, plan, world.device)
    return Made(config, world, groups, plan, shard, states, updater)
