"""Device memory of a rank in a training step, from the objects that the step executes: its model
states, the profile of its stages and its schedule."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch

from optimus.config import Config
from optimus.distributed.mesh import Coordinate, Mesh
from optimus.parallel.layout import Layout
from optimus.parallel.pipeline.actions import Kind, Schedule
from optimus.platform import dtype_of
from optimus.rank.profile import StageProfile, UseProfile, profile_stages
from optimus.rank.states import attach, plan_rank, staging_of


@dataclass(frozen=True)
class RankMemory:
    """Largest memory of a rank in a training step, in bytes.

    `states` to `activations` are on the device, and `device` is their sum. The peaks of gradients
    and activations may be at different times, so the sum is an upper limit.
    """

    states: int
    """Parameters, gradients and optimizer states that have memory between steps."""
    cache: int
    """Gathered parameters with optim.resident = "cache" or with offloading."""
    gradients: int
    """Gradients that have memory only during a backward, and temporary tensors of reductions."""
    activations: int
    """Activations of all microbatches in progress, and temporary tensors of operations."""
    temporary: int
    """Bytes of `activations` that are temporary tensors and messages between stages."""
    states_on_host: int
    """Model states in host memory, and the memory to which gradients are copied."""
    staging: int
    """Host memory for the copies of checkpoint.async_save."""

    @property
    def device(self) -> int:
        """Bytes on the device."""
        return self.states + self.cache + self.gradients + self.activations

    @property
    def host(self) -> int:
        """Bytes of page-locked host memory."""
        return self.states_on_host + self.staging


def rank_memory(
    config: Config,
    mesh: Mesh,
    coordinate: Coordinate,
    num_microbatches: int,
    device: str = "cuda",
    profiles: Mapping[int, StageProfile] | None = None,
) -> RankMemory:
    """Return the memory of the rank at `coordinate`.

    Args:
        config: The run's configuration, with `train.seq_len` and `train.microbatch_size`.
        mesh: Sizes of all axes.
        coordinate: The rank.
        num_microbatches: Number of microbatches of the rank in a step.
        device: Type of the rank's device.
        profiles: Result of `profile_stages`, if it is known. It does not depend on the settings of
            `[optim]` and `[offload]`, except `offload.order`.
    """
    planned = plan_rank(config, mesh, coordinate, num_microbatches)
    attach(planned.engine, planned.segments, planned.layout, config)
    profiles = profiles or profile_stages(config, mesh, coordinate)
    engine, sizes = planned.engine, planned.engine.state_bytes()
    return RankMemory(
        sizes["total"],
        engine.cache_bytes,
        engine.temporary_bytes,
        *_activations(config, planned.layout, profiles, num_microbatches, device),
        sizes["host"],
        staging_of(config, planned).host,
    )


def _activations(
    config: Config,
    layout: Layout,
    profiles: Mapping[int, StageProfile],
    num_microbatches: int,
    device: str,
) -> tuple[int, int]:
    """Return `RankMemory.activations` and `RankMemory.temporary`."""
    peak = peak_of_step(
        layout.schedule,
        layout.coordinate.pp,
        profiles,
        boundary_bytes(config, layout.sequence_shares),
        keeps_sent=device == "cpu",
    )
    return peak.total + input_bytes(config, num_microbatches), peak.temporary


def input_bytes(config: Config, num_microbatches: int) -> int:
    """Return the size of the tokens and the loss terms of a step, and of the tables of the rotary
    embedding. The number of tokens of each expert is a loss term."""
    train, model = config.train, config.model
    tokens = train.microbatch_size * train.seq_len * torch.int64.itemsize
    counts = sum(model.experts_by_layer) * torch.int64.itemsize
    others = (2 * model.num_layers + _SCALARS) * torch.float64.itemsize
    tables = train.seq_len * model.head_size * torch.float32.itemsize
    return num_microbatches * (tokens + counts + others) + tables


_SCALARS = 64
"""Upper limit of the scalars of a microbatch that are in memory at the same time."""


def boundary_bytes(config: Config, sequence_shares: int) -> int:
    """Return the size of the tensor that a pipeline stage sends to the next one."""
    train = config.train
    elements = train.microbatch_size * (train.seq_len // sequence_shares) * config.model.hidden_size
    return elements * dtype_of(train.dtype).itemsize


class Peak(NamedTuple):
    """Bytes of activations and temporary tensors at the time at which they are most."""

    total: int
    temporary: int
    """Bytes of `total` that an operation or a message between stages needs for its duration."""


def peak_of_step(
    schedule: Schedule,
    rank: int,
    profiles: Mapping[int, StageProfile],
    boundary: int,
    keeps_sent: bool = False,
) -> Peak:
    """Return the most bytes of activations and temporary tensors of a rank in a training step.

    Args:
        schedule: The pipeline schedule.
        rank: Index of the rank along pp.
        profiles: The profile of each stage of the rank. It contains the tensors that the stage
            receives and the gradient that it sends, as if each was received when it is needed.
        boundary: Size of a tensor between stages.
        keeps_sent: True if sent tensors are freed only at the end of the step, as with gloo, which
            does not report that a tensor has been sent.
    """
    live = 0
    peak = Peak(0, 0)

    def run(uses: Iterable[UseProfile]) -> None:
        nonlocal live, peak
        for use in uses:
            peak = max(peak, Peak(live + use.peak, use.peak))
            live += use.kept

    last = schedule.num_stages - 1
    for kind, stage, *_ in schedule.ranks[rank]:
        if kind in (Kind.RECV_ACTIVATION, Kind.RECV_GRADIENT):
            live += boundary
        elif kind is Kind.F:
            # The input has been received, or is the output of another stage of this rank.
            live -= boundary * (stage > 0)
            run(profiles[stage].forward)
        elif kind in (Kind.B, Kind.I):
            live -= boundary * (stage < last)
            run(profiles[stage].backward)
            if stage < last and keeps_sent and schedule.rank_of(stage + 1) != rank:
                live += boundary  # the output
            if stage > 0:  # the gradient waits until it is sent, or until the previous stage runs
                live += boundary
                if schedule.rank_of(stage - 1) == rank:  # which also has the input of this stage
                    live += boundary
        elif kind is Kind.W:
            weights = profiles[stage].weights
            assert weights is not None
            run((weights,))
        elif kind is Kind.SEND_GRADIENT and not keeps_sent:
            live -= boundary
        peak = max(peak, Peak(live, 0))
    sends = any(action.kind is Kind.SEND_GRADIENT for action in schedule.ranks[rank])
    sent = boundary * sends  # the last gradient that was sent is freed after its arrival
    return Peak(peak.total + sent, peak.temporary + sent)
