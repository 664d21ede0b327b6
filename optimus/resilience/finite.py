"""Checks for non-finite values in large buffers and in the optimizer states of all ranks."""

from __future__ import annotations

import math
import socket
from typing import NamedTuple

import numpy
import torch
from torch import Tensor

from optimus.chunks.engine import ChunkEngine
from optimus.chunks.options import options_of
from optimus.config import OptimConfig, TrainConfig
from optimus.distributed.collectives import Group, all_gather_objects, greatest
from optimus.errors import NonFiniteError, counted
from optimus.io.workspace import Workspace
from optimus.resilience.supervision.markers import write_marker

_HUGE = 1e18
"""If the magnitude of a value is at least this number, a calculation in fp32 with the value, such
as its square, is assumed to overflow."""
_LABELS = {
    "exp_avg": "exp_avg (first moment) of",
    "exp_avg_sq": "exp_avg_sq (second moment) of",
    "master": "the fp32 master of",
}
"""Maps the name of an optimizer state to the text before the parameter's name in messages. For any
other state, the text is the state's name followed by "of"."""


def is_finite(flat: Tensor) -> bool:
    """Return True if all values of a large buffer are finite."""
    # The sum is fast to compute, but can overflow although all values are finite.
    return math.isfinite(float(flat.sum())) or bool(torch.isfinite(flat).all())


class BadState(NamedTuple):
    """The first non-finite value in a rank's shards of the optimizer states.

    Attributes:
        state: Name of the state: "master" (the fp32 copy of a parameter) or the name of a moment.
        parameter: Name of the parameter.
        element: Index of the value along each dim of the rank's slice of the parameter.
        value: The value as text, such as "nan".
        largest: Greatest magnitude of the finite values in the same shard.
        rank: The rank whose shard contains the value.
        host: Host name of the rank's machine.
    """

    state: str
    parameter: str
    element: list[int]
    value: str
    largest: float
    rank: int
    host: str


def find_bad_state(states: ChunkEngine, rank: int) -> BadState | None:
    """Return the first non-finite value in this rank's optimizer states; None if all values are
    finite."""
    for state in _search_order(states):
        shard = states.first_shard(state, lambda flat: not is_finite(flat))
        if shard is None:
            continue
        finite = torch.isfinite(shard.values)
        number = int((~finite).nonzero()[0])
        element = [int(n) for n in numpy.unravel_index(shard.start + number, shard.shape)]
        largest = float(torch.where(finite, shard.values, 0).abs().max())
        value = str(float(shard.values[number]))
        host = socket.gethostname()
        return BadState(state, shard.name, element, value, largest, rank, host)
    return None


def _search_order(states: ChunkEngine) -> list[str]:
    """Return the names of the optimizer states in the order in which they are searched.

    Moments come before the fp32 master weights, because an update spreads a NaN in a moment to the
    master weights.
    """
    return [*states.optimizer.moments, "master"]


def refuse_bad_states(
    train: TrainConfig,
    optim: OptimConfig,
    states: ChunkEngine,
    everyone: Group,
    workspace: Workspace | None,
    step: int,
    updated: int,
) -> None:
    """Raise the same NonFiniteError on all ranks if an optimizer state of any rank is not finite.

    All ranks must call this function. The rank that the error message names also writes the file
    `nonfinite-rank*.json`, a marker that describes the value.

    Args:
        train: `[train]`, for the run directory and the dtype.
        optim: `[optim]`, for the advice in the message.
        states: Optimizer states of this rank.
        everyone: Group of all ranks.
        workspace: Workspace through which the file is written; None if the file is not written.
        step: Number of the current step, for the message and the file.
        updated: Number of the last step that has updated the weights: `step` or `step` - 1.

    Raises:
        NonFiniteError: An optimizer state of a rank is not finite.
    """
    bad = find_bad_state(states, everyone.rank)
    if not greatest(int(bad is not None), everyone, states.device):
        return
    of_ranks = all_gather_objects(bad, everyone, BadState | None)
    bad_states = [state for state in of_ranks if state is not None]
    order = _search_order(states)
    bad_states.sort(key=lambda bad: (order.index(bad.state), bad.rank))
    first = bad_states[0]
    text, advice = _explanation(first, train.dtype, optim, updated)
    if first.rank == everyone.rank and workspace is not None:
        write_marker(
            workspace,
            train.run_dir,
            first.rank,
            step,
            text=text,
            host=first.host,
            device=str(states.device),
            state=first.state,
            parameter=first.parameter,
            element=tuple(first.element),
            value=first.value,
        )
    others = len({bad.rank for bad in bad_states}) - 1
    also = f" (and states of {counted(others, 'more rank')})" if others else ""
    where = f"non-finite values on rank {first.rank} ({first.host}) at step {step}: "
    if text.startswith("the update made "):
        where = f"step {updated}: "
    raise NonFiniteError(f"{where}{text}{also}; no checkpoint contains non-finite values; {advice}")


def _explanation(bad: BadState, dtype: str, optim: OptimConfig, step: int) -> tuple[str, str]:
    """Return (description of the non-finite value, advice for the user).

    Args:
        bad: The non-finite value.
        dtype: `train.dtype`.
        optim: Section `[optim]` of the configuration.
        step: Number of the last update of the weights.
    """
    is_wide = dtype == "fp32" or options_of(bad.parameter, optim).frozen
    label = (
        "parameter"
        if bad.state == "master" and is_wide
        else _LABELS.get(bad.state, f"{bad.state} of")
    )
    text = f"{label} {bad.parameter} is {bad.value} at element {bad.element}"
    if bad.state == "master" and max(optim.lr, bad.largest) >= _HUGE:
        made = f"the update made {label} {bad.parameter} non-finite on rank {bad.rank} ({bad.host})"
        value = f"{bad.value} at element {bad.element}"
        return f"{made} although gradients were finite: {value}", "lower the learning rate"
    unclipped = not optim.clips_at(step) or optim.clip_norm >= _HUGE
    if bad.state == "exp_avg_sq" and bad.value == "inf" and unclipped:
        return (
            f"{text}: the square of a gradient overflowed, or the state is damaged",
            "set optim.clip_norm and run the same command again to resume from the newest "
            "checkpoint",
        )
    return (
        f"{text}: the state is damaged, since all gradients were finite",
        "run the same command again to resume from the newest checkpoint, or from the start if "
        "there is none; if it happens again, suspect the device or the memory of "
        f"{bad.host}",
    )
