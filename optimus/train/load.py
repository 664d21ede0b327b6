"""Loading of a run's first parameters and optimizer states, from a full checkpoint or from weights
without optimizer states."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path

import numpy
import torch
from torch import Tensor

from optimus import errors
from optimus.checkpoint.load import Distribute, broadcast_from_first, load_full
from optimus.checkpoint.save import RankStates
from optimus.checkpoint.slices import BATCH_ELEMENTS, ParamSlice, intersect
from optimus.checkpoint.weights import Weights, open_weights
from optimus.chunks.engine import ChunkEngine
from optimus.config import Config
from optimus.distributed.collectives import Group, broadcast_object
from optimus.distributed.world import World
from optimus.errors import CheckpointError, OptimusError, one_line
from optimus.parallel.layout import Layout
from optimus.resilience.finite import is_finite
from optimus.train.loss_scale import LossScale
from optimus.train.resolve import ResolvedStart, RunPlan, find_start

logger = logging.getLogger(__name__)

PutValues = Callable[[str, Tensor, int], None]
"""Function that stores values of a parameter on this rank. Its arguments are the parameter's name,
the values, and the index of the first value in this rank's flattened slice of the parameter."""


def load_start(
    config: Config,
    world: World,
    plan: RunPlan,
    layout: Layout,
    states: ChunkEngine,
    rank_states: RankStates,
    loss_scale: LossScale,
) -> RunPlan:
    """Load the model states of every rank from the checkpoint or the weights at `plan.start.path`.

    If a full checkpoint is damaged, an older checkpoint is loaded instead. If `plan.start.path` is
    None, the states keep their initial values. All ranks must call this function.

    Returns:
        `plan`, or a copy with another `start` if the checkpoint of `plan.start` is damaged. The
        result is the same on all ranks.

    Raises:
        CheckpointError: The checkpoint of `plan.start` is damaged and no older checkpoint can be
            loaded, or the weights cannot be used.
    """
    damaged: dict[Path, str] = {}
    distribute = config.checkpoint.distribute
    while (full := plan.start.full) is not None:
        problem = load_full(rank_states, full, distribute)
        if problem:  # a read error may be temporary
            if world.is_first:
                logger.warning("reading the checkpoint again after an error: %s", problem)
            problem = load_full(rank_states, full, distribute)
        if not problem:
            states.optimizer.num_updates = full.updates
            loss_scale.restore(full.loss_scale)
            break
        damaged[full.path] = problem
        plan = _resolve_without(damaged, config, world, plan)
    if full is None and (path := plan.start.path) is not None:
        states.clear_moments()  # a damaged checkpoint may have filled some moments
        opening = partial(open_weights, config.model, path)
        load_weights(layout, partial(states.put, "master"), opening, world, distribute, path)
    states.sync_params()
    return plan


def _resolve_without(
    damaged: Mapping[Path, str], config: Config, world: World, plan: RunPlan
) -> RunPlan:
    """Choose a checkpoint that is not in `damaged`, and return a copy of `plan` that starts from
    this checkpoint. All ranks must call this function. Raises CheckpointError if no other
    checkpoint can be used."""
    start, refused = ResolvedStart(plan.start, plan.changes, plan.skipped_steps), ""
    if world.is_first:
        problem = list(damaged.values())[-1]
        logger.warning("skipping a damaged checkpoint: %s", one_line(problem))
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


def load_weights(
    layout: Layout,
    put: PutValues,
    open_weights: Callable[[], Weights],
    world: World,
    distribute: Distribute = "broadcast",
    origin: object = "the weights",
) -> None:
    """Read weights on the first rank and distribute them to all ranks. All ranks must call this
    function.

    Args:
        layout: The slices of the parameters that this rank has.
        put: Function that stores values of these slices.
        open_weights: Function that opens the weights. Only the first rank calls this function.
        world: All ranks.
        distribute: Value of the setting `checkpoint.distribute`.
        origin: Name of the weights in error messages.

    Raises:
        OptimusError: The first rank cannot read the weights, or a value is not finite. All ranks
            raise the same error.
    """
    everyone = world.everyone
    with contextlib.ExitStack() as files:
        weights, problem = None, None
        if everyone.rank == 0:
            try:
                weights = files.enter_context(open_weights())
            except OptimusError as error:
                problem = error
        slices = weights.slices if weights else []
        _raise_on_all(problem, everyone)
        batches = [
            *_batches(broadcast_object(slices, everyone, list[ParamSlice])),
            [],
        ]  # at the empty batch, the first rank checks that all weights have been read
        values, memory = iter(weights or ()), torch.empty(BATCH_ELEMENTS + 1, device=world.device)
        for batch in batches:
            flat = memory[: sum(map(_size, batch)) + 1].zero_()
            if everyone.rank == 0:
                problem = _read(batch, values, flat) or _nonfinite(batch, flat, origin)
                flat[-1] = float(bool(problem))
            broadcast_from_first(flat.view(torch.int32), everyone, distribute)
            if flat[-1]:
                _raise_on_all(problem, everyone)
            for param in batch:
                _put_slice(put, layout, param, flat[: _size(param)])
                flat = flat[_size(param) :]


def _put_slice(put: PutValues, layout: Layout, param: ParamSlice, values: Tensor) -> None:
    """Store those elements of `values` that belong to this rank's slice of the parameter. `values`
    has all elements of the slice `param`."""
    if param.name not in layout.placements:
        return
    ranges = intersect(layout.placements[param.name].intervals, param)
    gaps = numpy.flatnonzero(ranges[1:, 0] != ranges[:-1, 0] + ranges[:-1, 2]) + 1
    # Each call of `put` stores a contiguous range of the slice.
    for adjacent in numpy.split(ranges, gaps) if len(ranges) else ():
        first, start, length = adjacent.T
        selected = values[start[0] : start[0] + length[0]]
        if len(adjacent) > 1:
            index = numpy.repeat(start - numpy.cumsum(length) + length, length)
            index += numpy.arange(len(index))
            selected = values[torch.from_numpy(index).to(values.device)]
        put(param.name, selected, int(first[0]))


def _size(param: ParamSlice) -> int:
    return param.stop - param.start


def _batches(slices: Sequence[ParamSlice]) -> Iterator[list[ParamSlice]]:
    """Yield lists of consecutive slices. Each list has at most BATCH_ELEMENTS elements in total."""
    batch: list[ParamSlice] = []
    filled = 0
    for param in slices:
        if batch and filled + _size(param) > BATCH_ELEMENTS:
            yield batch
            batch, filled = [], 0
        batch.append(param)
        filled += _size(param)
    yield batch


def _read(
    batch: Sequence[ParamSlice], values: Iterator[tuple[ParamSlice, Tensor]], flat: Tensor
) -> OptimusError | None:
    """Read the values of all slices in `batch` from the iterator `values` and copy them to `flat`,
    in order. Return the error if a read fails, else None."""
    try:
        for param in batch:
            flat[: _size(param)].copy_(next(values)[1])
            flat = flat[_size(param) :]
        # At the empty batch, which is the last, all values must have been read.
        assert batch or next(values, None) is None
    except OptimusError as error:
        return error
    return None


def _nonfinite(batch: Sequence[ParamSlice], flat: Tensor, origin: object) -> CheckpointError | None:
    """Return an error that names the first non-finite value in `flat`; None if all values are
    finite."""
    if is_finite(flat):
        return None
    for param in batch:
        values, flat = flat[: _size(param)], flat[_size(param) :]
        bad = (~torch.isfinite(values)).nonzero()
        if len(bad):
            at, value = param.start + int(bad[0]), float(values[bad[0]])
            return CheckpointError(
                f"{origin}: {param.name} is {value} at element {at}; "
                "use weights that are all finite"
            )
    return None


def _raise_on_all(problem: OptimusError | None, everyone: Group) -> None:
    """Broadcast rank 0's error `problem` and raise it on all ranks; do nothing if rank 0's
    `problem` is None. All ranks must call this function."""
    received = (type(problem).__name__, str(problem)) if problem else None
    if received := broadcast_object(received, everyone, tuple[str, str] | None):
        raise getattr(errors, received[0])(received[1])
