"""Placement of the model states of a rank with offload.mode = "auto", and its explanation."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from optimus.checkpoint.slices import writer_in_paper
from optimus.chunks.placement import (
    Capacity,
    ChunkCost,
    NoPlacement,
    Placement,
    Workload,
    search,
    smallest_capacity,
)
from optimus.chunks.state_file import free_bytes
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
    RankProfiles,
    boundary_bytes,
    host_memory,
    input_bytes,
    peak_of_step,
    rank_memory,
)
from optimus.planner.rates import find_links
from optimus.platform import device_memory, dtype_of, limit_device_memory
from optimus.rank.profile import StageProfile
from optimus.rank.states import PlannedRank, attach, plan_rank, staging_by_chunk


@dataclass(frozen=True)
class Limits:
    """Memory that a rank may use, in bytes, and its rates."""

    device: int
    host: int
    links: Links
    disk: int = 0
    """Bytes in the directory offload.disk; 0 without it."""


@dataclass(frozen=True)
class Decision:
    """Placement of the states of a rank."""

    config: Config
    """The configuration with the settings that execute the placement."""
    memory: RankMemory
    limits: Limits
    placement: Placement | None = None
    """The result of the search, if states are on the host by decision of `decide_placement`."""
    on_device: int = 0
    """Bytes on the device if all states were there, if they are on the host by this decision."""

    @property
    def time(self) -> StepTime | None:
        """Simulated time of a step, if there was a search."""
        return None if self.placement is None else self.placement.time

    def __str__(self) -> str:
        config, memory, limits = self.config, self.memory, self.limits
        device = f"{_gb(memory.device)} of {_gb(limits.device)} of device memory"
        if not config.offload.host_share:
            return f"all states on the device: {device}"
        cache = config.optim.cache_chunks
        cached = f"{counted(cache, 'chunk')}" if cache else "all chunks"
        tiers = [
            device,
            f"{_gb(memory.host)} of "
            + ("host memory" if limits.host >= 1 << 60 else f"{_gb(limits.host)} of host memory"),
        ]
        on_disk = ""
        if config.offload.disk_share:
            on_disk = (
                f" and the optimizer states of {config.offload.disk_share:.1%} of these on disk"
            )
            tiers.append(f"{_gb(memory.disk)} on disk")
        clauses = [
            f"{config.offload.host_share:.1%} of the chunks on the host{on_disk}, {cached} in the "
            f"cache, order of microbatches '{config.offload.order}', chunks of about "
            f"{counted(config.optim.chunk_length, 'element')}: {', '.join(tiers)}"
        ]
        if self.placement is not None:
            clauses.insert(0, f"with all states on the device, a rank needs {_gb(self.on_device)}")
            clauses.append(_time_text(self.placement))
        return "; ".join(clauses)


def _time_text(placement: Placement) -> str:
    """Return the simulated time of a step as text."""
    time = placement.time
    text = (
        f"a step takes {time.step:.3g} s, the shortest predicted time of the placements that fit: "
        f"the device computes {time.compute:.3g} s, the link copies {time.to_device:.3g} s to the "
        f"device and {time.to_host:.3g} s to the host, the host updates {time.host_adam:.3g} s"
    )
    if placement.num_disk:
        text += f", and the disk reads {time.disk_read:.3g} s and writes {time.disk_write:.3g} s"
    if placement.updates_early:
        text += f" (without early updates, as in steps that clip: {placement.late_s:.3g} s)"
    return text


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
    if offload.mode == "off":
        return config
    everyone = groups.everyone
    largest = largest_rank(config, groups.mesh, groups.coordinate.pp)
    rank = groups.mesh, largest, num_microbatches
    host = host_limit(usable_memory(), ranks_per_node)
    host = -greatest(-host, everyone, device)
    if offload.mode == "manual" and not (offload.device_memory or offload.host_memory):
        needed = host_memory(config, *rank)
        if needed > host:
            limits = Limits(0, host, Links())
            raise _does_not_fit("manual", Capacity(0, needed), limits, device.type)
        return config
    links = None
    if offload.links:
        links = load_links(offload.links)
    elif everyone.rank == 0:
        disk = Path(offload.disk) if offload.disk and offload.mode == "auto" else None
        links = find_links(device, dtype_of(config.train.dtype), log, ranks_per_node, disk)
    rates = broadcast_object(None if links is None else links.model_dump(), everyone, dict)
    local = device_memory(device) // (ranks_per_node if device.type == "cpu" else 1)
    smallest = -greatest(-local, everyone, device)
    for key, available in (("device_memory", smallest), ("host_memory", host)):
        asked = parse_bytes(getattr(offload, key))
        refuse_if(
            asked > available,
            f"offload.{key} = {getattr(offload, key)!r} is {counted(asked - available, 'byte')} "
            f"more than the states of a rank may use; use at most {counted(available, 'byte')}, or "
            "leave it out",
        )
    free = 0
    if offload.disk and offload.mode == "auto":
        free = -greatest(-free_bytes(Path(offload.disk)) // ranks_per_node, everyone, device)
    limits = limits_of(config, Links.model_validate(rates), smallest, host, free)
    if offload.mode == "auto":
        decision = decide_placement(config, *rank, limits, device.type)
        if device.type != "cpu":  # there, the rates of the file are only for the decision
            decision = dataclasses.replace(decision, config=_with(decision.config, links=""))
    else:
        imbalance = config.offload.expert_imbalance
        memory = rank_memory(config, *rank, device.type, imbalance=imbalance)
        decision = Decision(config, memory, limits)
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


def limits_of(config: Config, links: Links, device: int, host: int, disk: int = 0) -> Limits:
    """Return the limits of a rank. `device`, `host` and `disk` are the limits without settings."""
    offload = config.offload
    return Limits(
        parse_bytes(offload.device_memory) or device,
        parse_bytes(offload.host_memory) or host,
        links,
        min(disk, parse_bytes(offload.disk_memory) or disk) if offload.disk else 0,
    )


def check_limits(decision: Decision, device: str) -> None:
    """Raise ConfigError if a placement does not fit."""
    memory, limits = decision.memory, decision.limits
    allowed = limits.device - reserve_of(limits.device, device)
    if memory.device > allowed or memory.host > limits.host:
        mode = decision.config.offload.mode
        raise _does_not_fit(mode, Capacity(memory.device, memory.host), limits, device)


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
    return PlacementSearch(config, mesh, coordinate, num_microbatches, limits, device).decide()


class PlacementSearch:
    """The possible placements of the states of a rank. The arguments are those of
    `decide_placement`."""

    def __init__(
        self,
        config: Config,
        mesh: Mesh,
        coordinate: Coordinate,
        num_microbatches: int,
        limits: Limits,
        device: str,
    ) -> None:
        # The dtype of gradients must not depend on the decision.
        dtype = "bf16" if config.offload.rounds_gradients(config.train) else "fp32"
        self._config = _with(config, grad_dtype=dtype)
        self._rank = mesh, coordinate, num_microbatches, device
        self._limits, self._device = limits, device
        self._allowed = limits.device - reserve_of(limits.device, device)
        self._plain = _with_placement(self._config, mode="off")
        self._profiles = {"microbatch": self._profile(self._plain)}
        self._on_device = rank_memory(self._plain, *self._rank, self._profiles["microbatch"])

    def decide(self) -> Decision:
        """Return the best placement. Raises ConfigError if none fits."""
        memory, limits = self._on_device, self._limits
        if memory.device <= self._allowed:
            if memory.host > limits.host:
                needs = Capacity(memory.device, memory.host)
                raise _does_not_fit("auto", needs, limits, self._device)
            return Decision(self._plain, memory, limits)
        excess = Capacity(0, 0)
        while True:
            capacity = self._capacity(excess)
            try:
                best = search(
                    self._workloads, capacity, limits.links, self._config.offload.early_adam
                )
            except NoPlacement as problem:
                needs = Capacity(*map(sum, zip(problem.needs, excess, self._fixed, strict=True)))
                raise _does_not_fit("auto", needs, limits, self._device) from None
            chosen = self._settings_of(best)
            memory = rank_memory(chosen, *self._rank, self._profiles[best.workload.order])
            # The search estimates some bytes, such as those of reductions.
            lacking = Capacity(
                memory.device - self._allowed, memory.host - limits.host, memory.disk - limits.disk
            )
            if max(lacking) <= 0:
                return Decision(chosen, memory, limits, best, self._on_device.device)
            excess = Capacity(*(e + max(0, n) for e, n in zip(excess, lacking, strict=True)))

    def smallest(self) -> Limits:
        """Return the smallest limit of the device memory with which a placement fits into the host
        memory, and the smallest limit of the host memory with which one fits on the device."""
        device, host = smallest_capacity(self._workloads, self._capacity(Capacity(0, 0)))
        device = with_reserve(min(device, self._on_device.device), self._device)
        host += self._fixed.host
        if self._on_device.device <= self._allowed:
            host = min(host, self._on_device.host)
        return dataclasses.replace(self._limits, device=device, host=host)

    def _profile(self, config: Config) -> dict[int, StageProfile]:
        """Profile the rank with the load of experts for which memory is left free."""
        mesh, coordinate, _, device = self._rank
        loads = dict.fromkeys(config.model.sparse_layers, config.offload.expert_imbalance)
        return RankProfiles(config, mesh, coordinate, device).at(loads)

    def _capacity(self, excess: Capacity) -> Capacity:
        """Return the memory for states and activations. `excess` is memory that the search does not
        know of."""
        limits = Capacity(self._allowed, self._limits.host, self._limits.disk)
        left = zip(limits, excess, self._fixed, strict=True)
        return Capacity(*(limit - more - fixed for limit, more, fixed in left))

    @property
    def _fixed(self) -> Capacity:
        """Memory that no placement changes, except that states on disk are copied there."""
        return Capacity(0, self._on_device.staging)

    def _settings_of(self, best: Placement) -> Config:
        """Return the configuration that executes a placement."""
        work = best.workload
        # The engine rounds up.
        on_disk = (best.num_disk - 0.5) / work.num_trained(best.num_host) if best.num_disk else 0.0
        chosen = _with_placement(
            _with_length(self._config, work.chunk_length),
            host_share=(best.num_host - 0.5) / len(work.chunks),
            disk_share=on_disk,
            slots=best.slots,
            order=work.order,
        )
        if self._config.offload.early_adam == "auto":
            if not best.updates_early:
                return _with(chosen, early_adam="off")
            return _with(chosen, host_memory=str(self._limits.host))  # for the spare buffers
        return chosen

    @cached_property
    def _workloads(self) -> list[Workload]:
        """The work of the rank with each order of microbatches and each length of chunks. Raises
        ConfigError if states cannot be offloaded."""
        mesh, _, num_microbatches, _ = self._rank
        try:
            check(_with_placement(self._config))
        except ConfigError as error:
            missing = counted(self._on_device.device - self._allowed, "byte")
            raise ConfigError(
                f"offload.mode = 'auto': the device lacks {missing}, so states must be offloaded, "
                f"but {error}"
            ) from error
        if mesh.pp * self._config.parallel.virtual_stages == 1 and num_microbatches > 1:
            by_layer = _with_placement(self._config, order="layer")
            with contextlib.suppress(ConfigError):  # the model does not allow this order
                check(by_layer)
                self._profiles["layer"] = self._profile(by_layer)
        length = self._config.optim.chunk_length
        lengths = {max(1, length // divisor) for divisor in _DIVISORS}
        has_disk = self._limits.disk > 0
        return [
            _workload(
                _with_length(self._config, length),
                order,
                *self._rank,
                of_order,
                self._limits.links,
                has_disk,
            )
            for order, of_order in self._profiles.items()
            for length in sorted(lengths, reverse=True)
        ]


_DIVISORS = (1, 4, 16)
"""`decide_placement` tries chunks of `optim.chunk_length` divided by these numbers. Smaller chunks
need a smaller cache."""


def reserve_of(device_memory: int, device: str) -> int:
    """Return the device memory that a plan leaves unused. The allocators of accelerators reserve
    more bytes than tensors have, because their free memory is divided into pieces."""
    return 0 if device == "cpu" else device_memory // _RESERVE


_RESERVE = 20
"""The unused memory is this fraction of the device memory."""


def host_limit(memory: int, ranks_per_node: int) -> int:
    """Return the host memory that the states of a rank may use without `offload.host_memory`.

    The rest is for Python and its libraries, the loader, messages and the page cache: 2 GiB and 5 %
    of the memory of a rank, but at most a quarter. A rank on a CPU has 0.25 GB before it has
    states; the libraries of accelerators add 1 to 2 GB.

    Args:
        memory: Bytes of a node that its processes can use.
        ranks_per_node: Number of ranks that share them.
    """
    share = memory // ranks_per_node
    return share - min(share // 4, (2 << 30) + share // _RESERVE)


def _with_length(config: Config, length: int) -> Config:
    optim = config.optim.model_copy(update={"chunk_length": length})
    return config.model_copy(update={"optim": optim})


def _with(config: Config, **values: Any) -> Config:
    """Return a copy of a configuration with other values of `[offload]`."""
    offload = config.offload.model_copy(update=values)
    return config.model_copy(update={"offload": offload})


def _with_placement(
    config: Config,
    *,
    mode: str = "manual",
    host_share: float = 1.0,
    disk_share: float = 0.0,
    slots: int = 0,
    order: str = "microbatch",
) -> Config:
    """Return a copy of a configuration with a placement. By default, all chunks are on the host."""
    is_manual = mode == "manual"
    chosen = _with(
        config,
        mode=mode,
        host_share=host_share if is_manual else 0.0,
        disk_share=disk_share,
        disk=config.offload.disk if disk_share else "",
        disk_memory=config.offload.disk_memory if disk_share else "",
        order=order,
    )
    optim = chosen.optim.model_copy(update={"cache_chunks": slots})
    return chosen.model_copy(update={"optim": optim})


def _workload(
    config: Config,
    order: str,
    mesh: Mesh,
    coordinate: Coordinate,
    num_microbatches: int,
    device: str,
    profiles: Mapping[int, StageProfile],
    links: Links,
    has_disk: bool,
) -> Workload:
    """Return the work of a rank whose chunks are all on the host."""
    on_host = _with_placement(config, order=order)
    if on_host.offload.early_adam == "auto":  # its spare buffers use memory that is left over
        on_host = _with(on_host, early_adam="off")
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
    work = engine.workload(
        order,
        config.optim.chunk_length,
        planned.segments,
        *seconds,
        device_bytes=activations + input_bytes(config, num_microbatches),
        reductions=num_microbatches if schedule.reduce_each else 1,
    )
    if not (has_disk and config.checkpoint.async_save):
        return work
    moved = _with_placement(config, disk_share=1.0, order=order)
    on_disk = plan_rank(_with(moved, disk="."), mesh, coordinate, num_microbatches)
    return _with_copies(work, config, planned, on_disk)


def _with_copies(
    work: Workload, config: Config, on_host: PlannedRank, on_disk: PlannedRank
) -> Workload:
    """Return a workload in which the copies of checkpoint.async_save are on disk if the states are
    there. `on_host` has all states on the host, and `on_disk` all that may be on disk."""
    before, after = (staging_by_chunk(config, planned) for planned in (on_host, on_disk))
    chunks: list[ChunkCost] = []
    for number, cost in zip(on_host.engine.numbers_by_first_use, work.chunks, strict=True):
        if number in before:
            saved = before[number].host - after[number].host
            cost = cost._replace(moved=cost.moved + saved, saved=after[number].disk)
        chunks.append(cost)
    return dataclasses.replace(work, chunks=chunks)


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


def with_reserve(needed: int, device: str) -> int:
    """Return the smallest limit of device memory with which `needed` bytes may be used."""
    least = needed
    while least - reserve_of(least, device) < needed:
        least += needed - (least - reserve_of(least, device))
    return least


def _does_not_fit(mode: str, needs: Capacity, limits: Limits, device: str) -> ConfigError:
    """Return the error for a run that needs more memory than it may use."""
    missing = []
    least = with_reserve(needs.device, device)
    for name, size, limit in (("device", least, limits.device), ("host", needs.host, limits.host)):
        if size > limit:
            missing.append(
                f"offload.{name}_memory must be at least {counted(size, 'byte')}, "
                f"{counted(size - limit, 'byte')} more than now"
            )
    remedy = "use more ranks"
    if needs.host > limits.host and mode == "auto":
        remedy = "set offload.disk to a directory on a local disk, use more ranks"
        if limits.disk:
            remedy = (
                f"let offload.disk have more than {counted(limits.disk, 'byte')}, use more ranks"
            )
    return ConfigError(
        f"offload.mode = {mode!r}: the run does not fit: {', and '.join(missing)}; {remedy}, a "
        "smaller train.microbatch_size, a smaller optim.chunk_length, or recompute.modules = "
        "['block']"
    )


def _gb(size: int) -> str:
    return f"{size / 1e9:.4g} GB"
