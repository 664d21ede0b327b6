"""Where a run's states come from at the start."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path

from optimus.checkpoint.load import load_full
from optimus.checkpoint.manager import Start
from optimus.checkpoint.rank_states import RankStates
from optimus.checkpoint.weights import open_weights
from optimus.chunks.engine import ChunkEngine
from optimus.config import Config
from optimus.distributed.collectives import broadcast_object
from optimus.distributed.world import World
from optimus.errors import CheckpointError, one_line
from optimus.parallel.layout import Layout
from optimus.train.loss_scale import LossScale
from optimus.train.preflight import Preflight, with_start
from optimus.train.spread import spread

logger = logging.getLogger(__name__)


def load_start(
    config: Config,
    world: World,
    flight: Preflight,
    layout: Layout,
    states: ChunkEngine,
    rank_states: RankStates,
    loss_scale: LossScale,
) -> Preflight:
    """Fill the states of every rank from where the run starts, and say where that was. A collective
    of all ranks.

    A checkpoint that twice proves damaged is passed over for the one before, on all ranks alike.
    Without a start the states keep what they were made with. Raises CheckpointError.
    """
    damaged: dict[Path, str] = {}
    how = config.checkpoint.distribute
    while (full := flight.start.full) is not None:
        problem = load_full(rank_states, full, how)
        if problem:  # an error of reading may pass
            if world.is_first:
                logger.warning("reading again, for %s", problem)
            problem = load_full(rank_states, full, how)
        if not problem:
            states.num_updates = full.updates
            loss_scale.restore(full.loss_scale)
            break
        damaged[full.path] = problem
        flight = _fall_back(config, world, flight, damaged)
    start = flight.start
    if full is None and start.path is not None:
        for one in states.chunks:  # a checkpoint that proved damaged may have been read in part
            one.exp_avg.zero_()
            one.exp_avg_sq.zero_()
        opening = partial(open_weights, config.model, start.path)
        spread(layout, partial(states.put, "master"), opening, world, how, start.path)
    states.publish()
    return flight


def _fall_back(
    config: Config, world: World, flight: Preflight, damaged: Mapping[Path, str]
) -> Preflight:
    """The start that is left; the first rank decides and says so."""
    refused = ""
    if world.is_first:
        problem = list(damaged.values())[-1]
        logger.warning("passing over a damaged checkpoint: %s", one_line(problem))
        try:
            flight = with_start(config, flight, damaged)
            start = flight.start
            logger.info("starting at step %d from %s", start.step, start.path)
        except CheckpointError as error:
            refused = str(error)
    start, refused = broadcast_object((flight.start, refused), world.everyone, tuple[Start, str])
    if refused:
        raise CheckpointError(refused, on_every_rank=True)
    assert start.path is not None, "nothing has initialised the parameters"
    return replace(flight, start=start)
