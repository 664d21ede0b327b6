"""Load the states that a run starts with."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from functools import partial
from pathlib import Path

from optimus.checkpoint.load import load_full
from optimus.checkpoint.rank_states import RankStates
from optimus.checkpoint.weights import open_weights
from optimus.chunks.engine import ChunkEngine
from optimus.config import Config
from optimus.distributed.collectives import broadcast_object
from optimus.distributed.world import World
from optimus.errors import CheckpointError, one_line
from optimus.parallel.layout import Layout
from optimus.train.loss_scale import LossScale
from optimus.train.resolve import ResolvedStart, RunPlan, find_start
from optimus.train.spread import spread

logger = logging.getLogger(__name__)


def load_start(
    config: Config,
    world: World,
    plan: RunPlan,
    layout: Layout,
    states: ChunkEngine,
    rank_states: RankStates,
    loss_scale: LossScale,
) -> RunPlan:
    """Fill the states of every rank from the start of the plan, and return the plan.

    A checkpoint that proves damaged twice cannot be loaded: the result is then the plan of a start
    from the checkpoint before it, the same on all ranks. Without a start the states keep their
    initial values. A collective of all ranks.

    Raises:
        CheckpointError: No checkpoint can be loaded.
    """
    damaged: dict[Path, str] = {}
    distribute = config.checkpoint.distribute
    while (full := plan.start.full) is not None:
        problem = load_full(rank_states, full, distribute)
        if problem:  # a read error may be temporary
            if world.is_first:
                logger.warning("reading again, for %s", problem)
            problem = load_full(rank_states, full, distribute)
        if not problem:
            states.num_updates = full.updates
            loss_scale.restore(full.loss_scale)
            break
        damaged[full.path] = problem
        plan = _resolve_without(damaged, config, world, plan)
    if full is None and (path := plan.start.path) is not None:
        for chunk in states.chunks:  # a damaged checkpoint may have been read in part
            chunk.exp_avg.zero_()
            chunk.exp_avg_sq.zero_()
        opening = partial(open_weights, config.model, path)
        spread(layout, partial(states.put, "master"), opening, world, distribute, path)
    states.publish()
    return plan


def _resolve_without(
    damaged: Mapping[Path, str], config: Config, world: World, plan: RunPlan
) -> RunPlan:
    """Return the plan of a start from another checkpoint than the damaged ones; the first rank
    decides and logs it. A collective of all ranks."""
    start, refused = ResolvedStart(plan.start, plan.changes), ""
    if world.is_first:
        problem = list(damaged.values())[-1]
        logger.warning("passing over a damaged checkpoint: %s", one_line(problem))
        try:
            start = find_start(config, plan.batch, plan.data.training, damaged)
            logger.info("starting at step %d from %s", start.start.step, start.start.path)
        except CheckpointError as error:
            refused = str(error)
    kind = tuple[ResolvedStart, str]
    start, refused = broadcast_object((start, refused), world.everyone, kind)
    if refused:
        raise CheckpointError(refused)
    assert start.start.path is not None, "nothing has initialised the parameters"
    return RunPlan(plan.mesh, plan.batch, plan.data, *start)
