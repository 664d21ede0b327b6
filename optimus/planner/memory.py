"""Device memory of a rank in a training step, computed from three objects: the model states of the
rank, the profiles of its stages, and the pipeline schedule."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import torch

from optimus.config import Config
from optimus.distributed.mesh import Coordinate, Mesh
from optimus.parallel.expert_load import arrivals, largest_imbalance
from optimus.parallel.pipeline.actions import Kind, Schedule
from optimus.parallel.pipeline.plan import schedule_of
from optimus.planner.peaks import StageBytes
from optimus.planner.states import stages_of
from optimus.platform import dtype_of
from optimus.rank.operations import Product
from optimus.rank.profile import Profiled, StageProfile, UseProfile, profile_stages
from optimus.rank.states import PlannedRank, attach, plan_rank, staging_of


@dataclass(frozen=True)
class RankMemory:
    """Largest memory of a rank in a training step, in bytes.

    `states`, `cache`, `gradients`, `activations`, `copies` and `code` are on the device, and
    `device` is their sum. The peaks of gradients and activations can be at different times, so the
    sum is an upper limit.
    """

    states: int
    """Parameters, gradients and optimizer states that have memory between steps."""
    cache: int
    """Parameters that are gathered or copied to the device before use, with optim.resident =
    "cache" or with offloading."""
    gradients: int
    """Gradients that are allocated only during a backward, and temporary tensors of reductions."""
    activations: int
    """Activations of all microbatches in progress, and temporary tensors of operations."""
    temporary: int
    """Bytes of `activations` that are temporary tensors and messages between stages."""
    states_on_host: int
    """Model states in host memory, and the host buffers to which gradients are copied."""
    staging: int
    """Host memory for the copies of checkpoint.async_save."""
    disk: int = 0
    """Model states on disk, and their copies for checkpoint.async_save."""
    copies: int = 0
    """Memory that copies by gloo need in addition to `activations`. On a CPU, gloo copies gradients
    and parameters during collectives. This field is max(0, s - `activations`), where s is the
    largest number of bytes that copies and activations together need at a moment."""
    code: int = 0
    """On a CPU: bytes of the machine code that oneDNN generates for matrix products."""

    @property
    def device(self) -> int:
        """Bytes on the device."""
        tensors = self.states + self.cache + self.gradients + self.activations
        return tensors + self.copies + self.code

    @property
    def host(self) -> int:
        """Bytes of host memory for states and checkpoint copies."""
        return self.states_on_host + self.staging


def rank_memory(
    config: Config,
    mesh: Mesh,
    coordinate: Coordinate,
    num_microbatches: int,
    device: str = "cuda",
    profiles: Mapping[int, StageProfile] | None = None,
    imbalance: float = 1.0,
    product_code: float = 0.0,
) -> RankMemory:
    """Return the memory of the rank at `coordinate`.

    Args:
        config: The run's configuration, with `train.seq_len` and `train.microbatch_size`.
        mesh: Sizes of all axes.
        coordinate: The rank.
        num_microbatches: Number of microbatches of the rank in a step.
        device: Type of the rank's device.
        profiles: Result of `RankProfiles.at`; None to compute it. In the sections `[optim]` and
            `[offload]`, only `offload.order` changes the profiles.
        imbalance: In each MoE layer, the number of rows that the experts of the rank compute,
            divided by the mean over the ep ranks. This argument has no effect if `profiles` is
            given.
        product_code: Bytes of machine code for each shape of a matrix product: `product_code_bytes`
            of the machine's device.
    """
    few = planned_microbatches(config, mesh, num_microbatches)
    planned = _plan_attached(config, mesh, coordinate, few)
    if profiles is None:
        imbalances = dict.fromkeys(config.model.sparse_layers, imbalance)
        profiles = RankProfiles(config, mesh, coordinate, device).at(imbalances)
    # On a CPU, the tensors that a rank sends remain in memory until the end of the step.
    schedule = schedule_of(config, mesh, num_microbatches)
    settings = config, mesh, schedule, coordinate.pp, profiles
    memory = _memory_of(config, planned, activations_of(*settings, num_microbatches, device))
    if device != "cpu":
        return memory
    copied = _copied_bytes(config, planned, profiles)
    return replace(
        memory,
        copies=max(0, copied - memory.activations),
        code=round(product_code * _num_products(profiles)),
    )


def planned_microbatches(config: Config, mesh: Mesh, num_microbatches: int) -> int:
    """Return the number of microbatches whose uses of segments are listed, for a plan of the memory
    or for a search for a placement. With some schedules, such as 1f1b, the uses of later
    microbatches only repeat earlier uses. Only the uses of the first microbatches are then listed.
    Otherwise, the result is `num_microbatches`."""
    repeats = mesh.pp == 1 or config.parallel.schedule == "1f1b"
    if config.offload.order == "layer" or config.parallel.virtual_stages > 1 or not repeats:
        return num_microbatches
    return min(num_microbatches, 2 * mesh.pp + 8)


def states_memory(
    config: Config, mesh: Mesh, coordinate: Coordinate, num_microbatches: int
) -> RankMemory:
    """Return the result of `rank_memory` for the rank at `coordinate`, but with 0 bytes of
    activations, so that no profile is needed. The arguments are those of `rank_memory`."""
    few = planned_microbatches(config, mesh, num_microbatches)
    return _memory_of(config, _plan_attached(config, mesh, coordinate, few), (0, 0))


def _plan_attached(
    config: Config, mesh: Mesh, coordinate: Coordinate, num_microbatches: int
) -> PlannedRank:
    planned = plan_rank(config, mesh, coordinate, num_microbatches)
    attach(planned.engine, planned.segments, planned.layout, config)
    return planned


def _memory_of(config: Config, planned: PlannedRank, activations: tuple[int, int]) -> RankMemory:
    """Return the memory of a rank. `activations` is the result of `activations_of`."""
    engine, sizes = planned.engine, planned.engine.state_bytes()
    staging = staging_of(config, planned)
    return RankMemory(
        sizes["total"],
        engine.cache_bytes,
        engine.temporary_bytes,
        *activations,
        sizes["host"],
        staging.host,
        sizes["disk"] + staging.disk,
    )


def _num_products(profiles: Mapping[int, StageProfile]) -> int:
    """Return the number of different shapes of matrix products. A shape that occurs both in forward
    and in backward counts twice, because backward transposes operands."""
    return len(
        {
            (backward, *op[:3])
            for profile in profiles.values()
            for backward, uses in enumerate(profile[:2])
            for use in uses
            for op in use.operations
            if isinstance(op, Product)
        }
    )


def _copied_bytes(
    config: Config, planned: PlannedRank, profiles: Mapping[int, StageProfile]
) -> int:
    """Return the largest number of bytes that activations and copies by gloo together need at a
    moment. gloo copies gradients and parameters during collectives.

    A reduce_scatter copies its input, and an all_gather its output. Gradients of a chunk are
    reduced after the last backward of its first segment or, if they are not reduced segment by
    segment, after the last backward of the stage. At this time, no other microbatch has
    activations. After the update, all parameters are gathered: with optim.overlap all chunks at the
    same time, otherwise one chunk after the other.
    """
    optim, chunks = config.optim, planned.engine.chunks
    sharded = [c for c in chunks if c.groups.shard_group.size > 1]
    gathered = [c.params.nbytes for c in sharded if not c.is_transient]
    most = (sum if optim.overlap else max)(gathered or [0])
    if config.train.deterministic:  # all_to_all makes no copy
        return most
    first = {
        name: index
        for index, segment in reversed([*enumerate(planned.segments)])
        for name in segment.parameters
    }
    copied: dict[int, list[int]] = {}
    for chunk in sharded:
        segment = min(first[slot.name] for slot in chunk.chunk.slots)
        size = len(chunk.grads) * dtype_of(optim.grad_reduce_dtype).itemsize
        copied.setdefault(segment, []).append(size)
    keeps_all = optim.resident == "all"
    in_flight = 2 if optim.overlap and keeps_all else 1
    by_segment = (optim.overlap or not keeps_all) and not planned.layout.schedule.splits_backward
    for profile in profiles.values():
        live, sizes = sum(use.kept for use in profile.forward), list[int]()
        for use in profile.backward:
            if by_segment:
                most = max(most, live + use.peak + sum(sizes[-in_flight:]) * keeps_all)
            live += use.kept
            for size in copied.get(use.segment, ()):
                sizes.append(size)
                most = max(most, sum(sizes[-in_flight:]) + live * by_segment)
    return most


class RankProfiles:
    """Profiles of the stages of a rank for one microbatch, for any load of its experts.

    The bytes are linear in the number of tokens that the rank receives and in the number of rows
    that its experts compute. The bytes for a given load are therefore interpolated between two
    profiles: in the first, all ep ranks have equal loads, and in the second, all tokens choose
    experts of this rank.

    Args:
        config, mesh, coordinate, device: As for `rank_memory`.
        balanced, concentrated: Known profiles of segments with equal loads, and with all tokens on
            this rank (argument `profiled` of `profile_stages`).
    """

    def __init__(
        self,
        config: Config,
        mesh: Mesh,
        coordinate: Coordinate,
        device: str = "cuda",
        balanced: Profiled | None = None,
        concentrated: Profiled | None = None,
    ) -> None:
        self._rank, self._device, self._known = (config, mesh, coordinate), device, concentrated
        on_cpu = device == "cpu"
        self._balanced = profile_stages(*self._rank, balanced, on_cpu)
        stages = stages_of(config, mesh)
        self._layers = {number: stages[number] for number in self._balanced}
        in_order = sorted(layer for layers in self._layers.values() for layer in layers)
        self._segments = {layer: n + (coordinate.pp == 0) for n, layer in enumerate(in_order)}

    @cached_property
    def _concentrated(self) -> dict[int, StageProfile]:
        on_cpu = self._device == "cpu"
        return profile_stages(*self._rank, self._known, on_cpu, concentrated=True)

    def at(self, imbalances: Mapping[int, float]) -> dict[int, StageProfile]:
        """Return the profile of each stage. `imbalances` has, for each MoE layer, the number of
        rows that the experts of the rank compute, divided by the mean over the ep ranks."""
        config, mesh, _ = self._rank
        weights = {
            layer: concentration(config, mesh, layer, imbalances[layer], self._device)
            for layer in self._segments.keys() & imbalances.keys()
        }
        if not any(weights.values()):
            return self._balanced
        result = {}
        for number, profile in self._balanced.items():
            layers = self._layers[number]
            of_segment = {self._segments[n]: weights[n] for n in layers if n in weights}
            other = self._concentrated[number]
            result[number] = interpolate(profile, other, of_segment, len(layers))
        return result


def interpolate(
    balanced: StageProfile,
    concentrated: StageProfile,
    weights: Mapping[int, float],
    num_layers: int,
) -> StageProfile:
    """Return the profile of a stage for a load, interpolated between the two profiles of
    `RankProfiles`.

    Args:
        balanced, concentrated: The profiles.
        weights: The result of `concentration` for each segment with experts.
        num_layers: Number of layers of the stage.
    """
    forward, backward = (
        [_between(a, b, weights.get(a.segment, 0.0)) for a, b in zip(uses, others, strict=True)]
        for uses, others in zip(balanced[:2], concentrated[:2], strict=True)
    )
    live, action = sum(use.kept for use in (*forward, *backward)), None
    if balanced.weights is not None and concentrated.weights is not None:
        mean = sum(weights.values()) / num_layers  # the action W computes gradients of all layers
        action = _between(balanced.weights, concentrated.weights, mean)._replace(kept=-live)
    else:  # no rounding errors: a microbatch frees exactly the bytes that it keeps
        last = (backward or forward)[-1]
        (backward or forward)[-1] = last._replace(kept=last.kept - live)
    return StageProfile(tuple(forward), tuple(backward), action)


def depends_on_load(config: Config, mesh: Mesh, device: str) -> bool:
    """Return True if the memory of a rank depends on the load of its experts. On accelerators, the
    buffers of the dispatcher `allgather` always have enough rows for the tokens of all ep ranks, so
    their size does not depend on the load."""
    if mesh.ep == 1 or not config.model.sparse_layers:
        return False
    return device == "cpu" or config.parallel.ep_dispatch == "alltoall"


def concentration(config: Config, mesh: Mesh, layer: int, imbalance: float, device: str) -> float:
    """Return the weight of the second profile of `RankProfiles` in an interpolation: 0 for equal
    loads, 1 if all tokens choose experts of the rank, and a value between 0 and 1 for other
    loads."""
    if not depends_on_load(config, mesh, device):
        return 0.0
    model = config.model
    kind = model.experts_by_layer[layer], model.num_experts_per_tok, mesh.ep
    imbalance = min(imbalance, largest_imbalance(*kind))
    if device == "cpu":  # the memory is proportional to the rows of the rank
        return (imbalance - 1) / (mesh.ep - 1)
    equal = arrivals(*kind)
    return (arrivals(*kind, imbalance) - equal) / (1 - equal) if equal < 1 else 0.0


def _between(a: UseProfile, b: UseProfile, weight: float) -> UseProfile:
    """Return a profile whose bytes and FLOPs are interpolated between two profiles: equal to `a`
    for weight 0 and to `b` for weight 1."""
    names = ("kept", "peak", "flops", "moved")
    values = ((name, getattr(a, name), getattr(b, name)) for name in names)
    return a._replace(**{name: round(x + weight * (y - x)) for name, x, y in values})


def library_bytes(config: Config, mesh: Mesh, pp: int) -> int:
    """Return the bytes by which the memory of a process on a CPU grows in the first updates,
    without the bytes of tensors. The result does not depend on the size of the model.

    Args:
        config: The run's configuration.
        mesh: Sizes of all axes.
        pp: Index of the rank along pp.
    """
    has_only_last_stage = pp == len(stages_of(config, mesh)) - 1
    return _LIBRARY_BYTES + (0 if has_only_last_stage else _SYMPY_BYTES)


_LIBRARY_BYTES = 36_000_000
"""Pages of torch's libraries (24 MB), which the operating system maps when their code runs for the
first time, and memory of autograd, oneDNN and gloo. Median of nine runs of tiny models with 1 and 2
ranks (x86-64, torch 2.13), which needed 31 to 42 MB. A run that has timed kernels before it creates
its model needs half of this memory."""
_SYMPY_BYTES = 30_000_000
"""Bytes of the library sympy. torch imports sympy when a backward begins with a given gradient, as
in each pipeline stage except the last. Measured in a single run."""


def activations_of(
    config: Config,
    mesh: Mesh,
    schedule: Schedule,
    pp: int,
    profiles: Mapping[int, StageProfile],
    num_microbatches: int,
    device: str,
) -> tuple[int, int]:
    """Return the pair `RankMemory.activations` and `RankMemory.temporary`, in bytes, of the
    pipeline rank `pp`. `profiles` has the profile of each stage of this rank."""
    sequence_shares = mesh.tp if config.parallel.sequence_parallel else 1
    peak = peak_of_step(
        schedule,
        pp,
        profiles,
        boundary_bytes(config, sequence_shares),
        keeps_sent=device == "cpu",
    )
    return peak.total + input_bytes(config, num_microbatches), peak.temporary


def input_bytes(config: Config, num_microbatches: int) -> int:
    """Return the bytes of three kinds of tensors: the tokens of a step, the loss terms of a step
    with the number of tokens of each expert, and the tables of the rotary embedding."""
    train, model = config.train, config.model
    tokens = train.microbatch_size * train.seq_len * torch.int64.itemsize
    counts = sum(model.experts_by_layer) * torch.int64.itemsize
    others = (2 * model.num_layers + _SCALARS) * torch.float64.itemsize
    tables = train.seq_len * model.head_size * torch.float32.itemsize
    return num_microbatches * (tokens + counts + others) + tables


_SCALARS = 64
"""Upper limit of the scalars of a microbatch that are in memory at the same time."""


def boundary_bytes(config: Config, sequence_shares: int) -> int:
    """Return the bytes of the tensor that a pipeline stage sends to the next stage.
    `sequence_shares` is the number of ranks over which sequences are divided."""
    train = config.train
    elements = train.microbatch_size * (train.seq_len // sequence_shares) * config.model.hidden_size
    return elements * dtype_of(train.dtype).itemsize


class Peak(NamedTuple):
    """Bytes of activations and temporary tensors at the time when their sum is largest."""

    total: int
    temporary: int
    """Bytes of `total` that exist only during an operation or a message between stages."""


def peak_of_step(
    schedule: Schedule,
    rank: int,
    profiles: Mapping[int, StageProfile],
    boundary: int,
    keeps_sent: bool = False,
) -> Peak:
    """Return the largest number of bytes that activations and temporary tensors of a rank need in a
    training step.

    Args:
        schedule: The pipeline schedule.
        rank: Index of the rank along pp.
        profiles: The profile of each stage of the rank. A profile counts a received tensor from the
            time at which the stage begins to use the tensor. A profile also counts the gradient
            that the stage sends.
        boundary: Bytes of a tensor between stages.
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
                live += boundary  # the sent output
            if stage > 0:  # the gradient waits until it is sent, or until the previous stage runs
                live += boundary
                # The previous stage, which is on this rank, also keeps the input of this stage.
                if schedule.rank_of(stage - 1) == rank:
                    live += boundary
        elif kind is Kind.W:
            weights = profiles[stage].weights
            assert weights is not None
            run((weights,))
        elif kind is Kind.SEND_GRADIENT and not keeps_sent:
            live -= boundary
        peak = max(peak, Peak(live, 0))
    sends = any(action.kind is Kind.SEND_GRADIENT for action in schedule.ranks[rank])
    # The last gradient that the rank sends is freed only after the other rank has received it.
    sent = boundary * sends
    return Peak(peak.total + sent, peak.temporary + sent)


def bytes_of_stage(profile: StageProfile) -> StageBytes:
    """Return the bytes of a stage for one microbatch. The backward (or the actions I and W) of a
    microbatch frees all bytes that the forward keeps."""
    (kept, forward), (freed, backward) = map(_sum_and_peak, profile[:2])
    weights = 0 if profile.weights is None else profile.weights.peak
    return StageBytes(kept, kept + freed, forward, backward, weights)


def _sum_and_peak(uses: Iterable[UseProfile]) -> tuple[int, int]:
    """Return two numbers of bytes, relative to the bytes before the first of the uses: the bytes
    after the last use, and the largest number of bytes during the uses."""
    live = peak = 0
    for use in uses:
        peak, live = max(peak, live + use.peak), live + use.kept
    return live, peak


def gb_text(size: int) -> str:
    """Return a size as text, such as `1.5 GB`."""
    return f"{size / 1e9:.4g} GB"
