"""Search for the placement of the model states of a rank with offload.mode = "auto"."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from optimus.chunks.placement import (
    ChunkCost,
    NoPlacement,
    SimulatedPlacement,
    TierBytes,
    Workload,
    search,
    smallest_capacity,
)
from optimus.chunks.step_time import StepTime
from optimus.config import Config
from optimus.config.checks import check
from optimus.config.machine import Links
from optimus.distributed.mesh import Coordinate, Mesh
from optimus.errors import ConfigError, DoesNotFit, counted
from optimus.parallel.pipeline.plan import schedule_of
from optimus.parallel.pipeline.simulate import bubble_ratio
from optimus.planner.memory import (
    RankMemory,
    RankProfiles,
    boundary_bytes,
    gb_text,
    input_bytes,
    peak_of_step,
    planned_microbatches,
    rank_memory,
)
from optimus.planner.segment_times import SegmentTimes
from optimus.rank.profile import StageProfile
from optimus.rank.states import PlannedRank, attach, plan_rank, staging_by_chunk


@dataclass(frozen=True)
class RankLimits:
    """Bytes of each memory that a rank may use, and the rates of its device, host and links."""

    device: int
    host: int
    links: Links
    disk: int = 0
    """Bytes that the rank may use in the directory offload.disk; 0 without this setting."""


@dataclass(frozen=True)
class Decision:
    """Placement of the states of a rank."""

    config: Config
    """The configuration with the settings that execute the placement."""
    memory: RankMemory
    limits: RankLimits
    placement: SimulatedPlacement | None = None
    """Result of the search; None if all states fit on the device, so that there was no search."""
    on_device: int = 0
    """With a `placement`: bytes that the rank would need on the device without offloading."""
    of_orders: Mapping[str, float | None] = field(default_factory=dict)
    """With several pipeline ranks: a dict from each value of `offload.order` to the predicted
    seconds of a step on the slowest rank, or to None if a rank does not fit."""
    in_cache_s: float | None = None
    """With several pipeline ranks: predicted seconds of a step on this rank with offload.order =
    "microbatch" and a cache for all chunks on the host; None if no such placement fits."""
    reserve: int = 0
    """Result of `reserve_of`."""

    @property
    def time(self) -> StepTime | None:
        """Simulated time of a step by component; None if there was no search."""
        return None if self.placement is None else self.placement.time

    def __str__(self) -> str:
        config, memory, limits = self.config, self.memory, self.limits
        device = f"{gb_text(memory.device)} of {gb_text(limits.device)} of device memory"
        if self.reserve:
            device += f" (reserve for the allocator's fragmentation: {gb_text(self.reserve)})"
        if not config.offload.host_share:
            return f"all states on the device: {device}"
        host = "" if limits.host >= 1 << 60 else f"{gb_text(limits.host)} of "
        tiers = [device, f"{gb_text(memory.host)} of {host}host memory"]
        if config.offload.disk_share:
            tiers.append(f"{gb_text(memory.disk)} on disk")
        clauses = [f"{placement_text(config)}: {', '.join(tiers)}"]
        if self.placement is not None:
            clauses.insert(
                0, f"with all states on the device, a rank needs {gb_text(self.on_device)}"
            )
            clauses.append(_time_text(self.placement))
        if self.of_orders:
            orders = (f"'{order}': {_seconds_text(s)}" for order, s in self.of_orders.items())
            clauses.append(
                f"a step on the slowest pipeline rank by order of microbatches: {', '.join(orders)}"
            )
            clauses.append(
                "with order 'microbatch' and all chunks on the host in the cache, a step on this "
                f"rank: {_seconds_text(self.in_cache_s)}"
            )
        return "; ".join(clauses)


def placement_text(config: Config) -> str:
    """Return, as text, the settings of a placement that has states on the host."""
    offload, optim = config.offload, config.optim
    cached = counted(optim.cache_chunks, "chunk") if optim.cache_chunks else "all chunks"
    on_disk = ""
    if offload.disk_share:
        on_disk = f" and the optimizer states of {offload.disk_share:.1%} of these on disk"
    return (
        f"{offload.host_share:.1%} of the chunks on the host{on_disk}, {cached} in the cache, "
        f"order of microbatches '{offload.order}', chunks of about "
        f"{counted(optim.chunk_length, 'element')}"
    )


def _seconds_text(seconds: float | None) -> str:
    return "does not fit" if seconds is None else f"{seconds:.3g} s"


def _time_text(placement: SimulatedPlacement) -> str:
    """Return the simulated time of a step as text."""
    time = placement.time
    covers = "" if placement.workload.end_s else " without collectives and updates on the device"
    text = (
        f"a step takes {placement.step_s:.4g} s{covers}, the shortest predicted time of the "
        f"compared placements: the device computes {time.compute:.3g} s, the link copies "
        f"{time.to_device:.3g} s to the device and {time.to_host:.3g} s to the host, the host "
        f"updates {time.host_adam:.3g} s"
    )
    if placement.num_disk:
        text += f", and the disk reads {time.disk_read:.3g} s and writes {time.disk_write:.3g} s"
    if time.others:
        text += f", and collectives of chunks and updates on the device take {time.others:.3g} s"
    if idle := placement.workload.idle_s:
        text += f", and the rank waits {idle:.3g} s (estimate) for other pipeline ranks"
    if placement.updates_early:
        text += f" (without early updates, as in steps that clip: {placement.late_s:.3g} s)"
    return text


def decide_placement(
    config: Config,
    mesh: Mesh,
    coordinate: Coordinate,
    num_microbatches: int,
    limits: RankLimits,
    device: str,
) -> Decision:
    """Decide if each state of the rank at `coordinate` is on the device, on the host or on disk.

    If all states, activations and temporary tensors fit on the device, nothing is offloaded.
    Otherwise, the result is the placement with the shortest simulated step. The search covers all
    numbers of chunks on the host, all sizes of the cache, the chunk lengths of `_DIVISORS`, and the
    orders of microbatches that the run permits.

    Args:
        config: The run's configuration, with `train.seq_len`.
        mesh: Sizes of all axes.
        coordinate: The rank. It must be a result of `largest_rank`, so that all ranks with the same
            pipeline index get the same decision.
        num_microbatches: Number of microbatches of the rank in a step.
        limits: The memory that the rank may use, and the rates of its links.
        device: Type of the rank's device, such as "cuda".

    Raises:
        ConfigError: The states do not fit.
    """
    return PlacementSearch(config, mesh, coordinate, num_microbatches, limits, device).decide()


class PlacementSearch:
    """The possible placements of the states of a rank. The arguments are those of
    `decide_placement`, and `times`, the times of the segments. If `times` is None, the times are
    computed from the rates `limits.links`."""

    def __init__(
        self,
        config: Config,
        mesh: Mesh,
        coordinate: Coordinate,
        num_microbatches: int,
        limits: RankLimits,
        device: str,
        times: SegmentTimes | None = None,
    ) -> None:
        # The dtype of gradients must not depend on the decision.
        dtype = "bf16" if config.offload.rounds_gradients(config.train) else "fp32"
        self._config = with_offload(config, grad_dtype=dtype)
        self._rank = mesh, coordinate, num_microbatches, device
        self._limits, self._device, self._times = limits, device, times
        self._reserve = reserve_of(limits.device, device)
        self._allowed = limits.device - self._reserve
        self._plain = _with_placement(self._config, mode="off")
        self._profiles = {"microbatch": self._profile(self._plain)}
        self._on_device = rank_memory(self._plain, *self._rank, self._profiles["microbatch"])

    @property
    def in_pipeline(self) -> bool:
        """True if the rank exchanges activations with other ranks."""
        return self._rank[0].pp > 1

    @cached_property
    def orders(self) -> tuple[str, ...]:
        """The values of `offload.order` that the run permits, the same on all ranks."""
        if self._rank[2] > 1:
            with contextlib.suppress(ConfigError):  # the model does not allow this order
                check(_with_placement(self._config, order="layer"))
                return "microbatch", "layer"
        return ("microbatch",)

    def decide(self, order: str = "") -> Decision:
        """Return the placement with the shortest step. `order` is the value of `offload.order`, or
        "" for the value with the shorter step. Raises ConfigError if no placement fits."""
        memory, limits = self._on_device, self._limits
        plain = self._plain
        if order == "layer":
            plain = _with_placement(self._config, mode="off", order=order)
            memory = rank_memory(plain, *self._rank, self._profiles_of(order))
        if memory.device <= self._allowed:
            if memory.host > limits.host:
                needs = TierBytes(memory.device, memory.host)
                raise does_not_fit("auto", self._config, needs, limits, self._device)
            return Decision(plain, memory, limits, reserve=self._reserve)
        workloads = [work for work in self._workloads if order in ("", work.order)]
        early, excess = self._config.offload.early_adam, TierBytes(0, 0)
        while True:
            capacity = self._capacity(excess)
            try:
                best = search(workloads, capacity, limits.links, early)
            except NoPlacement as problem:
                needs = TierBytes(*map(sum, zip(problem.needs, excess, self._fixed, strict=True)))
                raise does_not_fit("auto", self._config, needs, limits, self._device) from None
            chosen = self._settings_of(best)
            memory = rank_memory(chosen, *self._rank, self._profiles_of(best.workload.order))
            # The search only estimates some bytes. If the exact bytes exceed a limit, search again.
            lacking = TierBytes(
                memory.device - self._allowed, memory.host - limits.host, memory.disk - limits.disk
            )
            if max(lacking) <= 0:
                on_device = self._on_device.device
                return Decision(chosen, memory, limits, best, on_device, reserve=self._reserve)
            excess = TierBytes(*(e + max(0, n) for e, n in zip(excess, lacking, strict=True)))

    def seconds(self, decision: Decision) -> float:
        """Return the predicted seconds of a step with a decision."""
        if decision.placement is not None:
            return decision.placement.step_s
        order = decision.config.offload.order
        work = next(work for work in self._workloads if work.order == order)
        return work.estimate(0, 0, self._limits.links) + work.idle_s

    def seconds_in_cache(self) -> float | None:
        """Return the value of `Decision.in_cache_s`."""
        workloads = [work for work in self._workloads if work.order == "microbatch"]
        capacity, early = self._capacity(TierBytes(0, 0)), self._config.offload.early_adam
        with contextlib.suppress(NoPlacement):
            return search(workloads, capacity, self._limits.links, early, all_cached=True).step_s
        return None

    def smallest(self) -> RankLimits:
        """Return limits in which `device` is the smallest device memory with which a placement fits
        into the present host memory, and `host` is the smallest host memory with which a placement
        fits into the present device memory."""
        try:
            workloads = self._workloads
        except ConfigError:  # states cannot be offloaded
            device = with_reserve(self._on_device.device, self._device)
            return dataclasses.replace(self._limits, device=device, host=self._on_device.host)
        device, host = smallest_capacity(workloads, self._capacity(TierBytes(0, 0)))
        device = with_reserve(min(device, self._on_device.device), self._device)
        host += self._fixed.host
        if self._on_device.device <= self._allowed:
            host = min(host, self._on_device.host)
        return dataclasses.replace(self._limits, device=device, host=host)

    def _capacity(self, excess: TierBytes) -> TierBytes:
        """Return the bytes of each tier that the search may use. `excess` has, for each tier, the
        bytes by which a rank exceeds the estimates of the search."""
        limits = TierBytes(self._allowed, self._limits.host, self._limits.disk)
        left = zip(limits, excess, self._fixed, strict=True)
        return TierBytes(*(limit - more - fixed for limit, more, fixed in left))

    @property
    def _fixed(self) -> TierBytes:
        """Bytes of each tier for the copies of checkpoint.async_save in any placement. Copies of
        states on disk are also on disk; the workloads subtract such copies from the host memory."""
        return TierBytes(0, self._on_device.staging)

    def _settings_of(self, best: SimulatedPlacement) -> Config:
        """Return the configuration that executes a placement."""
        work = best.workload
        # The engine rounds up the number of chunks, so half a chunk is subtracted.
        on_disk = (best.num_disk - 0.5) / work.num_trained(best.num_host) if best.num_disk else 0.0
        chosen = _with_placement(
            _with_optim(self._config, chunk_length=work.chunk_length),
            host_share=(best.num_host - 0.5) / len(work.chunks),
            disk_share=on_disk,
            slots=best.slots,
            order=work.order,
        )
        if self._config.offload.early_adam == "auto":
            if not best.updates_early:
                return with_offload(chosen, early_adam="off")
            return with_offload(chosen, host_memory=str(self._limits.host))  # limits spare buffers
        return chosen

    @cached_property
    def _workloads(self) -> list[Workload]:
        """The sizes and times that the search needs, for each value of `offload.order` and each
        chunk length. Raises ConfigError if states cannot be offloaded."""
        try:
            check(_with_placement(self._config))
        except ConfigError as error:
            missing = self._on_device.device - self._allowed
            raise DoesNotFit(
                f"offload.mode = 'auto': the device lacks {counted(missing, 'byte')}, so states "
                f"must be offloaded, but {error}",
                {"device": missing},
            ) from error
        length = self._config.optim.chunk_length
        lengths = {max(1, length // divisor) for divisor in _DIVISORS}
        has_disk = self._limits.disk > 0
        return [
            _workload(
                _with_optim(self._config, chunk_length=length),
                order,
                *self._rank,
                self._profiles_of(order),
                self._times or self._limits.links,
                has_disk,
            )
            for order in self.orders
            for length in sorted(lengths, reverse=True)
        ]

    def _profile(self, config: Config) -> dict[int, StageProfile]:
        """Return the profiles of the stages for the load `offload.expert_imbalance`."""
        mesh, coordinate, _, device = self._rank
        loads = dict.fromkeys(config.model.sparse_layers, config.offload.expert_imbalance)
        return RankProfiles(config, mesh, coordinate, device).at(loads)

    def _profiles_of(self, order: str) -> Mapping[int, StageProfile]:
        if order not in self._profiles:
            self._profiles[order] = self._profile(_with_placement(self._config, order=order))
        return self._profiles[order]


def decide_together(
    searches: Sequence[PlacementSearch],
    greatest_of: Callable[[int], int] = lambda value: value,
    compares_cache: bool = True,
) -> list[Decision]:
    """Return the placements of pipeline ranks, which must have the same `offload.order`.

    If a rank offloads states, all ranks get the order with the shortest step of the slowest rank.

    Args:
        searches: Searches for ranks of the same run.
        greatest_of: Returns the maximum of an integer over all ranks that call `decide_together`.
        compares_cache: True to compute `Decision.in_cache_s`.

    Raises:
        ConfigError: The states of a rank do not fit.
    """
    if not searches[0].in_pipeline:
        return [search.decide() for search in searches]
    decisions: dict[str, list[Decision]] = {}
    costs: dict[str, int] = {}
    problem: ConfigError | None = None
    for order in searches[0].orders:
        cost, offloads = _IMPOSSIBLE, 1
        try:
            decisions[order] = [search.decide(order) for search in searches]
            shares = (decision.config.offload.host_share for decision in decisions[order])
            offloads = int(any(shares))
        except ConfigError as error:
            problem = problem or error
        if not greatest_of(offloads):
            return decisions[order]
        if order in decisions:
            pairs = zip(searches, decisions[order], strict=True)
            cost = int(1e9 * max(search.seconds(decision) for search, decision in pairs))
        costs[order] = greatest_of(cost)
    best = min(costs, key=costs.__getitem__)
    if costs[best] == _IMPOSSIBLE:
        if problem is not None:
            raise problem
        best = searches[0].orders[0]  # another rank has no placement, and raises the error
    of_orders = {order: None if c == _IMPOSSIBLE else c / 1e9 for order, c in costs.items()}
    decided = [dataclasses.replace(each, of_orders=of_orders) for each in decisions[best]]
    if not compares_cache:
        return decided
    pairs = zip(searches, decided, strict=True)
    return [dataclasses.replace(each, in_cache_s=s.seconds_in_cache()) for s, each in pairs]


_IMPOSSIBLE = 1 << 62
_DIVISORS = (1, 4, 16)
"""`decide_placement` tries chunks of `optim.chunk_length` divided by these numbers. Smaller chunks
need a smaller cache."""


def reserve_of(device_memory: int, device: str) -> int:
    """Return the bytes of device memory that a plan leaves unused. On accelerators, torch's
    allocator reserves more bytes than the tensors need, because its free memory is fragmented.
    Return 0 on a CPU."""
    return 0 if device == "cpu" else device_memory // _RESERVE


_RESERVE = 20
"""The reserve is the device memory divided by this number."""


def with_offload(config: Config, **values: Any) -> Config:
    """Return a copy of a configuration with other values of `[offload]`."""
    offload = config.offload.model_copy(update=values)
    return config.model_copy(update={"offload": offload})


def _with_optim(config: Config, **values: Any) -> Config:
    optim = config.optim.model_copy(update=values)
    return config.model_copy(update={"optim": optim})


def _with_placement(
    config: Config,
    *,
    mode: str = "manual",
    host_share: float = 1.0,
    disk_share: float = 0.0,
    slots: int = 0,
    order: str = "microbatch",
) -> Config:
    """Return a copy of `config` with a placement (by default, all chunks are on the host)."""
    is_manual = mode == "manual"
    chosen = with_offload(
        config,
        mode=mode,
        host_share=host_share if is_manual else 0.0,
        disk_share=disk_share,
        disk=config.offload.disk if disk_share else "",
        disk_memory=config.offload.disk_memory if disk_share else "",
        order=order,
    )
    return _with_optim(chosen, cache_chunks=slots)


def plan_on_host(
    config: Config, order: str, mesh: Mesh, coordinate: Coordinate, num_microbatches: int
) -> PlannedRank:
    """Create the states of the rank at `coordinate` on the meta device, with all chunks on the
    host. `order` is the value of `offload.order`; the other arguments are those of `plan_rank`."""
    on_host = _with_placement(config, order=order)
    if on_host.offload.early_adam == "auto":  # spare buffers use only the memory that is left
        on_host = with_offload(on_host, early_adam="off")
    planned = plan_rank(on_host, mesh, coordinate, num_microbatches)
    attach(planned.engine, planned.segments, planned.layout, on_host)
    return planned


def _workload(
    config: Config,
    order: str,
    mesh: Mesh,
    coordinate: Coordinate,
    num_microbatches: int,
    device: str,
    profiles: Mapping[int, StageProfile],
    times: SegmentTimes | Links,
    has_disk: bool,
) -> Workload:
    """Return the sizes and times of a rank's step with all chunks on the host, for the search."""
    ordered = _with_placement(config, order=order)
    # While a disk writes, further microbatches take no additional time, so all of them are listed.
    few = num_microbatches if has_disk else planned_microbatches(ordered, mesh, num_microbatches)
    planned = plan_on_host(config, order, mesh, coordinate, few)
    schedule = schedule_of(ordered, mesh, num_microbatches)
    activations = peak_of_step(
        schedule,
        coordinate.pp,
        profiles,
        boundary_bytes(config, planned.layout.sequence_shares),
        keeps_sent=device == "cpu",
    ).total
    engine = planned.engine
    if isinstance(times, SegmentTimes):
        seconds = times.of_rank(planned.layout)
    else:
        seconds = _seconds(profiles, len(planned.segments), times, config.train.dtype)
    work = engine.workload(
        order,
        config.optim.chunk_length,
        planned.segments,
        *seconds,
        device_bytes=activations + input_bytes(config, num_microbatches),
        reductions=num_microbatches if schedule.reduce_each else 1,
    )
    work = dataclasses.replace(work, further=num_microbatches - few)
    idle = bubble_ratio(schedule.name, mesh.pp, schedule.virtual_stages, num_microbatches)
    cached = config.optim.resident == "cache" and mesh.num_data_ranks > 1
    work = dataclasses.replace(work, idle_s=idle * work.compute_s, all_on_host=cached)
    if isinstance(times, SegmentTimes):
        elements = [chunk.elements for chunk in work.chunks]
        end_s = times.end_s(ordered, schedule, engine, elements, sum(work.forward_s))
        work = dataclasses.replace(work, gather_s=times.gathers(engine), end_s=end_s)
    if not (has_disk and config.checkpoint.async_save):
        return work
    moved = _with_placement(config, disk_share=1.0, order=order)
    on_disk = plan_rank(with_offload(moved, disk="."), mesh, coordinate, num_microbatches)
    return _with_copies(work, config, planned, on_disk)


def _with_copies(
    work: Workload, config: Config, on_host: PlannedRank, on_disk: PlannedRank
) -> Workload:
    """Return a workload for a run with checkpoint.async_save. If states are on disk, their copies
    are also on disk and need no host memory. `on_host` has all states on the host, and `on_disk`
    has as many states on disk as possible."""
    before, after = (staging_by_chunk(config, planned) for planned in (on_host, on_disk))
    chunks: list[ChunkCost] = []
    for number, cost in zip(on_host.engine.numbers_by_first_use, work.chunks, strict=True):
        if number in before:
            saved = before[number].host - after[number].host
            cost = cost._replace(moved=cost.moved + saved, saved=after[number].disk)
        chunks.append(cost)
    return dataclasses.replace(work, chunks=chunks)


def _seconds(
    profiles: Mapping[int, StageProfile], num_segments: int, links: Links, dtype: str
) -> tuple[list[float], list[float]]:
    """Return two lists: the seconds of the forward and of the backward of each segment. `dtype` is
    the dtype of matrix products."""
    forward, backward = [0.0] * num_segments, [0.0] * num_segments
    for profile in profiles.values():
        for use in (*profile.forward, *profile.backward):
            times = backward if use.backward else forward
            times[use.segment] += use.flops / links.flops_of(dtype) + use.moved / links.memory
    return forward, backward


def with_reserve(needed: int, device: str) -> int:
    """Return the smallest memory in bytes of which `needed` bytes remain after `reserve_of`."""
    least = needed
    while least - reserve_of(least, device) < needed:
        least += needed - (least - reserve_of(least, device))
    return least


def does_not_fit(
    mode: str, config: Config, needs: TierBytes, limits: RankLimits, device: str
) -> DoesNotFit:
    """Return the error for a run that needs more memory than it may use. For each memory that is
    too small, the message has the number of missing bytes and remedies. `mode` is the value of
    offload.mode."""
    offload, missing, remedies = config.offload, list[str](), list[str]()
    lacking: dict[str, int] = {}
    least = with_reserve(needs.device, device)
    if least > limits.device:
        missing.append(_too_small("device", least, limits.device))
        lacking["device"] = least - limits.device
        if offload.device_memory:
            remedies.append("set a larger offload.device_memory")
        if mode == "manual" and offload.host_share < 1:
            remedies.append("set a larger offload.host_share")
        if config.train.microbatch_size > 1:
            remedies.append("set a smaller train.microbatch_size")
        if "block" not in config.recompute.modules:
            remedies.append("set recompute.modules = ['block']")
        remedies.append("set a smaller optim.chunk_length")
    if needs.host > limits.host:
        missing.append(_too_small("host", needs.host, limits.host))
        lacking["host"] = needs.host - limits.host
        if offload.host_memory:
            remedies.append("set a larger offload.host_memory")
        if mode == "manual" and offload.host_share:
            remedies.append("set a smaller offload.host_share")
        if offload.disk:
            size = counted(limits.disk, "byte")
            remedies.append(f"make more than {size} available in offload.disk")
        else:
            share = " and offload.disk_share" if mode == "manual" else ""
            remedies.append(f"set offload.disk to a directory on a local disk{share}")
    text = ", ".join([*remedies, "or use more ranks"]) if remedies else "use more ranks"
    return DoesNotFit(
        f"offload.mode = {mode!r}: the run does not fit: {', and '.join(missing)}; {text}", lacking
    )


def _too_small(tier: str, size: int, limit: int) -> str:
    more = counted(size - limit, "byte")
    return f"offload.{tier}_memory must be at least {counted(size, 'byte')}, {more} more than now"
