"""Placement of the model states of a rank with offload.mode = "auto", and its explanation."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from optimus.checkpoint.slices import writer_in_paper
from optimus.chunks.placement import NoPlacement, Workload, search
from optimus.chunks.step_time import StepTime
from optimus.config import Config
from optimus.config.checks import check
from optimus.config.machine import Links, load_links
from optimus.config.sizes import parse_bytes
from optimus.distributed.collectives import broadcast_object, greatest
from optimus.distributed.groups import Groups
from optimus.distributed.mesh import Coordinate, Mesh
from optimus.errors import ConfigError, counted, refuse_if
from optimus.launch.environment import usable_memory
from optimus.planner.memory import (
    RankMemory,
    boundary_bytes,
    input_bytes,
    peak_of_step,
    rank_memory,
)
from optimus.planner.rates import find_links
from optimus.platform import device_memory, dtype_of, limit_device_memory
from optimus.rank.profile import StageProfile, profile_stages
from optimus.rank.states import attach, plan_rank


@dataclass(frozen=True)
class Limits:
    """Memory that a rank may use, in bytes, and its rates."""

    device: int
    host: int
    links: Links


@dataclass(frozen=True)
class Decision:
    """Placement of the states of a rank."""

    config: Config
    """The configuration with the settings that execute the placement."""
    memory: RankMemory
    limits: Limits
    time: StepTime | None = None
    """Simulated time of a step, if states are on the host by decision of `decide_placement`."""

    def __str__(self) -> str:
        config, memory, limits = self.config, self.memory, self.limits
        device = f"{_gb(memory.device)} of {_gb(limits.device)} of device memory"
        if not config.offload.host_share:
            return f"all states on the device: {device}"
        cache = config.optim.cache_chunks
        cached = f"{counted(cache, 'chunk')}" if cache else "all chunks"
        clauses = [
            f"{config.offload.host_share:.1%} of the chunks on the host, {cached} in the cache, "
            f"order of microbatches '{config.offload.order}', chunks of about "
            f"{counted(config.optim.chunk_length, 'element')}: {device}, {_gb(memory.host)} of "
            + ("host memory" if limits.host >= 1 << 60 else f"{_gb(limits.host)} of host memory")
        ]
        if self.time is not None:
            step, compute, up, down, update, *_ = (
                f"{s:.3g}" for s in dataclasses.astuple(self.time)
            )
            clauses.append(
                f"a step takes {step} s, of which the device computes {compute} s, the link copies "
                f"{up} s to the device and {down} s to the host, and the host updates {update} s"
            )
        return "; ".join(clauses)


def autotune_placement(
    config: Config,
    groups: Groups,
    num_microbatches: int,
    device: torch.device,
    ranks_per_node: int,
    log: Callable[[str], None],
) -> Config:
    """Return the configuration with the placement of the states that this rank uses.

    With offload.mode = "auto", decide on the placement. With other modes, check the limits of
    memory. On an accelerator, `offload.device_memory` then limits the allocations of torch. All
    ranks must call this function.

    Args:
        config: The run's configuration.
        groups: Process groups of this rank.
        num_microbatches: Number of microbatches of a rank in a step.
        device: Device of this rank.
        ranks_per_node: Number of ranks that share the memory of this machine.
        log: Function that writes one line to the log.

    Raises:
        ConfigError: The run does not fit.
    """
    offload = config.offload
    if offload.mode == "off" or (
        offload.mode == "manual" and not (offload.device_memory or offload.host_memory)
    ):
        return config
    links, everyone = None, groups.everyone
    if offload.links:
        links = load_links(offload.links)
    elif everyone.rank == 0:
        links = find_links(device, dtype_of(config.train.dtype), log, ranks_per_node)
    rates = broadcast_object(None if links is None else links.model_dump(), everyone, dict)
    local = device_memory(device) // (ranks_per_node if device.type == "cpu" else 1)
    smallest = -greatest(-local, everyone, device)
    host = -greatest(-usable_memory() // ranks_per_node, everyone, device)
    for key, available in (("device_memory", smallest), ("host_memory", host)):
        asked = parse_bytes(getattr(offload, key))
        refuse_if(
            asked > available,
            f"offload.{key} = {getattr(offload, key)!r} is {counted(asked - available, 'byte')} "
            f"more than a rank has; use at most {counted(available, 'byte')}, or leave it out",
        )
    limits = limits_of(config, Links.model_validate(rates), smallest, host)
    largest = largest_rank(config, groups.mesh, groups.coordinate.pp)
    rank = groups.mesh, largest, num_microbatches
    if offload.mode == "auto":
        decision = decide_placement(config, *rank, limits, device.type)
        if device.type != "cpu":  # there, the rates of the file are only for the decision
            decision = dataclasses.replace(decision, config=_without_links(decision.config))
    else:
        decision = Decision(config, rank_memory(config, *rank, device.type), limits)
        check_limits(decision, device.type)
    if offload.device_memory:
        limit_device_memory(device, limits.device)
    log(f"offload.mode = {offload.mode!r}: {decision}")
    return decision.config


def largest_rank(config: Config, mesh: Mesh, pp: int) -> Coordinate:
    """Return the rank with the most memory of the ranks with pipeline index `pp`. A placement that
    fits there fits on all of them, and they must have the same placement."""
    # If tp does not divide a size, the last rank has the largest share. With checkpoint.scatter =
    # "paper", only a rank that writes checkpoints has staging memory.
    coordinate = Coordinate(pp, 0, 0, mesh.tp - 1)
    if config.checkpoint.scatter == "paper":
        coordinate = coordinate._replace(dp=writer_in_paper(mesh, coordinate))
    return coordinate


def _without_links(config: Config) -> Config:
    offload = config.offload.model_copy(update={"links": ""})
    return config.model_copy(update={"offload": offload})


def limits_of(config: Config, links: Links, device: int, host: int) -> Limits:
    """Return the limits of a rank. `device` and `host` are the limits without settings."""
    offload = config.offload
    return Limits(
        parse_bytes(offload.device_memory) or device,
        parse_bytes(offload.host_memory) or host,
        links,
    )


def check_limits(decision: Decision, device: str) -> None:
    """Raise ConfigError if a placement does not fit."""
    memory, limits = decision.memory, decision.limits
    allowed = limits.device - reserve_of(limits.device, device)
    if memory.device > allowed or memory.host > limits.host:
        mode = decision.config.offload.mode
        raise _does_not_fit(mode, memory.device, memory.host, limits, device)


def decide_placement(
    config: Config,
    mesh: Mesh,
    coordinate: Coordinate,
    num_microbatches: int,
    limits: Limits,
    device: str,
) -> Decision:
    """Decide where the states of the rank at `coordinate` are.

    If all states, activations and temporary tensors fit on the device, nothing is offloaded.
    Otherwise, the placement with the shortest simulated step is chosen, of all numbers of chunks on
    the host, sizes of the cache, some lengths of chunks, and the possible orders of microbatches.

    Args:
        config: The run's configuration, with `train.seq_len`.
        mesh: Sizes of all axes.
        coordinate: The rank, a result of `largest_rank`, so that ranks that exchange states get the
            same decision.
        num_microbatches: Number of microbatches of the rank in a step.
        limits: The memory that the rank may use, and its rates.
        device: Type of the rank's device.

    Raises:
        ConfigError: The states do not fit.
    """
    rank = mesh, coordinate, num_microbatches, device
    # The dtype of gradients must not depend on the decision.
    dtype = "bf16" if config.offload.rounds_gradients(config.train) else "fp32"
    offload = config.offload.model_copy(update={"grad_dtype": dtype})
    config = config.model_copy(update={"offload": offload})
    plain = _with_offload(config, "off", 0.0, 0, "microbatch")
    profiles = {"microbatch": profile_stages(plain, mesh, coordinate)}
    memory = rank_memory(plain, *rank, profiles["microbatch"])
    decision = Decision(plain, memory, limits)
    allowed = limits.device - reserve_of(limits.device, device)
    if memory.device <= allowed:
        if memory.host > limits.host:
            raise _does_not_fit("auto", memory.device, memory.host, limits, device)
        return decision
    try:
        check(_with_offload(config, "manual", 1.0, 0, "microbatch"))
    except ConfigError as error:
        missing = counted(memory.device - allowed, "byte")
        raise ConfigError(
            f"offload.mode = 'auto': the device lacks {missing}, so states must be offloaded, but "
            f"{error}"
        ) from error
    if mesh.pp * config.parallel.virtual_stages == 1 and num_microbatches > 1:
        by_layer = _with_offload(config, "manual", 1.0, 0, "layer")
        with contextlib.suppress(ConfigError):  # the model does not allow this order
            check(by_layer)
            profiles["layer"] = profile_stages(by_layer, mesh, coordinate)
    lengths = {max(1, config.optim.chunk_length // divisor) for divisor in _DIVISORS}
    workloads = [
        _workload(_with_length(config, length), order, *rank, of_order, limits.links)
        for order, of_order in profiles.items()
        for length in sorted(lengths, reverse=True)
    ]
    staging = memory.staging
    excess = 0
    while True:
        try:
            best = search(workloads, allowed - excess, limits.host - staging, limits.links)
        except NoPlacement as problem:
            needs = problem.device + excess, problem.host + staging
            raise _does_not_fit("auto", *needs, limits, device) from None
        share = (best.num_host - 0.5) / len(best.workload.chunks)  # rounded up by the engine
        of_length = _with_length(config, best.workload.chunk_length)
        chosen = _with_offload(of_length, "manual", share, best.slots, best.workload.order)
        memory = rank_memory(chosen, *rank, profiles[best.workload.order])
        if memory.device <= allowed:
            return Decision(chosen, memory, limits, best.time)
        excess += memory.device - allowed


_DIVISORS = (1, 4, 16)
"""`decide_placement` tries chunks of `optim.chunk_length` divided by these numbers. Smaller chunks
need a smaller cache."""


def reserve_of(device_memory: int, device: str) -> int:
    """Return the device memory that a plan leaves unused. The allocators of accelerators reserve
    more bytes than tensors have, because their free memory is divided into pieces."""
    return 0 if device == "cpu" else device_memory // _RESERVE


_RESERVE = 20
"""The unused memory is this fraction of the device memory."""


def _with_length(config: Config, length: int) -> Config:
    optim = config.optim.model_copy(update={"chunk_length": length})
    return config.model_copy(update={"optim": optim})


def _with_offload(config: Config, mode: str, share: float, slots: int, order: str) -> Config:
    """Return a copy of a configuration with these settings of offloading."""
    values = {"mode": mode, "host_share": share, "order": order}
    return config.model_copy(
        update={
            "offload": config.offload.model_copy(update=values),
            "optim": config.optim.model_copy(update={"cache_chunks": slots}),
        }
    )


def _workload(
    config: Config,
    order: str,
    mesh: Mesh,
    coordinate: Coordinate,
    num_microbatches: int,
    device: str,
    profiles: Mapping[int, StageProfile],
    links: Links,
) -> Workload:
    """Return the work of a rank whose chunks are all on the host."""
    on_host = _with_offload(config, "manual", 1.0, 0, order)
    if on_host.offload.early_adam == "auto":  # its spare buffers use memory that is left over
        offload = on_host.offload.model_copy(update={"early_adam": "off"})
        on_host = on_host.model_copy(update={"offload": offload})
    planned = plan_rank(on_host, mesh, coordinate, num_microbatches)
    attach(planned.engine, planned.segments, planned.layout, on_host)
    schedule = planned.layout.schedule
    activations = peak_of_step(
        schedule,
        coordinate.pp,
        profiles,
        boundary_bytes(on_host, planned.layout.sequence_shares),
        keeps_sent=device == "cpu",
    ).total
    engine = planned.engine
    seconds = _seconds(profiles, len(planned.segments), links)
    return engine.workload(
        order,
        config.optim.chunk_length,
        planned.segments,
        *seconds,
        device_bytes=activations + input_bytes(config, num_microbatches),
        reductions=num_microbatches if schedule.reduce_each else 1,
    )


def _seconds(
    profiles: Mapping[int, StageProfile], num_segments: int, links: Links
) -> tuple[list[float], list[float]]:
    """Return the seconds of the forward and of the backward of each segment."""
    forward, backward = [0.0] * num_segments, [0.0] * num_segments
    for profile in profiles.values():
        for use in (*profile.forward, *profile.backward):
            times = backward if use.backward else forward
            times[use.segment] += use.flops / links.flops + use.moved / links.memory
    return forward, backward


def _does_not_fit(
    mode: str, on_device: int, on_host: int, limits: Limits, device: str
) -> ConfigError:
    """Return the error for a run that needs `on_device` and `on_host` bytes of memory."""
    needs = []
    least = on_device
    while least - reserve_of(least, device) < on_device:
        least += on_device - (least - reserve_of(least, device))
    for name, size, limit in (("device", least, limits.device), ("host", on_host, limits.host)):
        if size > limit:
            needs.append(
                f"offload.{name}_memory must be at least {counted(size, 'byte')}, "
                f"{counted(size - limit, 'byte')} more than now"
            )
    return ConfigError(
        f"offload.mode = {mode!r}: the run does not fit: {', and '.join(needs)}; use more ranks, a "
        "smaller train.microbatch_size, a smaller optim.chunk_length, or recompute.modules = "
        "['block']"
    )


def _gb(size: int) -> str:
    return f"{size / 1e9:.4g} GB"
