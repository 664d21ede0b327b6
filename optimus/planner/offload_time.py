"""Time of a training step with offloading on a machine.

A simulation runs the pipeline schedule on the resources of each pipeline rank: the device, the port
to other ranks, the two directions of the link between device and host, the host, which updates
chunks, and the reads and the writes of a disk (`TierSimulation`). A forward or backward waits for
the copies of its chunks, the update waits for all gradients, and the next step waits for the
updates of the previous step that are not complete. The updates of a step overlap with the next
step, so several steps are simulated one after the other.

The simulation leaves out:

- the competition of the ranks of a node for the bandwidth of the host memory or the disk. The rates
  in a machine file are measured on each rank while all ranks of the node run the same measurement;
- the time in which the host adds gradients;
- the early start of operations: a host starts the operations of a pass only when the pass begins,
  not while the device is busy with the previous pass;
- the competition between gathers of chunks and transfers between stages for the port of a rank;
- the placements of middle pipeline ranks. With offload.mode = "auto", the middle ranks get the
  placement of the first rank.

If a schedule divides backward, gradients are copied to the host after the action I.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

from optimus.chunks.placement import Workload
from optimus.chunks.residency import Pass, use_order
from optimus.chunks.step_time import STEPS, ResourceSpan, StepWork, TierSimulation
from optimus.config import Config, OffloadConfig
from optimus.config.machine import Links, Machine, load_links
from optimus.data.batch import plan_batch
from optimus.distributed.mesh import Mesh
from optimus.errors import ConfigError, refuse_if
from optimus.parallel.pipeline.actions import Action, Kind, Schedule
from optimus.parallel.pipeline.plan import plan_stages, schedule_of
from optimus.planner.machine_rates import Rates, is_cpu, rates_of
from optimus.planner.memory import rank_memory
from optimus.planner.offload import check_limits, host_limit, largest_rank, limits_of
from optimus.planner.placement_search import (
    Decision,
    PlacementSearch,
    RankLimits,
    decide_together,
    plan_on_host,
    reserve_of,
    with_offload,
)
from optimus.planner.play import Played
from optimus.planner.segment_times import (
    SegmentTimes,
    chunk_reductions,
    chunks_by_first_use,
    segment_times,
)
from optimus.planner.step_time import (
    Reduction,
    Step,
    StepTime,
    play_step,
    played_time,
    unless_rounding,
)
from optimus.planner.topology import Topology
from optimus.planner.workload import Works, offloaded_repeats, step_of
from optimus.rank.states import PlannedRank, staging_of

_UNKNOWN = 1 << 62
"""Limit in bytes of the disk, and of the host memory if the machine file does not have its size."""
_UNLIMITED = Links(**dict.fromkeys(Links.model_fields, 1e30))
"""Rates with which copies and updates on the host take no time."""


@dataclass(frozen=True)
class OffloadedStep:
    """Time of a step with offloading."""

    step: Step
    """Operations of the devices in a step. They are the operations of a step without offloading,
    except for the updates of the chunks that the host updates."""
    time: StepTime
    """Seconds of the step by component. `offload_s` is the number of seconds by which copies,
    updates on the host and the disk make the step longer."""
    played: Played
    """Actions and transfers of the last simulated step."""
    spans: tuple[tuple[ResourceSpan, ...], ...]
    """For each pipeline rank, the intervals in which its links, host and disk are busy during the
    last simulated step. Times are in seconds from the start of this step."""
    seconds: dict[str, float]
    """For each resource, the seconds for which the resource is busy in a step (mean over the
    simulated steps), on the rank on which the resource is busy longest."""


class Placements(NamedTuple):
    """Placements of the model states of a run on a machine, with offload.mode = "auto"."""

    searches: list[PlacementSearch]
    """Searches for the first and the last pipeline rank."""
    decisions: list[Decision]
    """Results of `searches`, in the same order."""

    def configs(self, num_ranks: int) -> list[Config]:
        """Return the configuration that each of `num_ranks` pipeline ranks executes."""
        configs = [decision.config for decision in self.decisions]
        return [configs[-1 if rank == num_ranks - 1 else 0] for rank in range(num_ranks)]


def decide_placements(
    config: Config,
    mesh: Mesh,
    machine: Machine,
    name: str,
    works: Works | None = None,
    compares_cache: bool = True,
    topology: Topology | None = None,
) -> Placements:
    """Decide on the placement of the states with offload.mode = "auto" on a machine.

    A rank may use the memory of its device and its share of the host memory of a node, unless the
    section `[offload]` sets other limits. If the machine file has no rates of products in the run's
    dtype, the time of the device's operations is computed from the rates `flops` and `memory` of
    the table `links`.

    Args:
        config, mesh, machine, name, works, topology: As for `time_offloaded`.
        compares_cache: As for `decide_together`.

    Raises:
        ConfigError: The states do not fit, or the machine has no links or no device memory.
    """
    times = segment_times(config, mesh, machine, name, works, topology)
    searches = _searches(config, mesh, machine, name, times)
    return Placements(searches, decide_together(searches, compares_cache=compares_cache))


def bytes_of_placement(config: Config, mesh: Mesh, machine: Machine, name: str) -> int:
    """Return the bytes on the device of the fullest rank, with a placement that fits. This
    placement can differ from the placement of `decide_placements`, which takes much longer to find.
    Raises ConfigError if no placement fits.

    Only the memory for the tokens of a step grows with the number of microbatches. The search
    therefore assumes a step with few microbatches.
    """
    microbatches, train = _microbatches(config, mesh), config.train
    tokens = train.microbatch_size * train.seq_len * mesh.num_data_ranks
    few = train.model_copy(update={"global_batch_tokens": min(microbatches, mesh.pp) * tokens})
    searches = _searches(config.model_copy(update={"train": few}), mesh, machine, name, None)
    device, sizes = "cpu" if is_cpu(machine) else "cuda", list[int]()
    for search, pp in zip(searches, dict.fromkeys((0, mesh.pp - 1)), strict=True):
        decision = search.decide("microbatch")
        chosen = decision.config.model_copy(update={"train": train})
        rank = mesh, largest_rank(config, mesh, pp), microbatches, device
        memory = rank_memory(chosen, *rank, imbalance=config.offload.expert_imbalance)
        check_limits(replace(decision, config=chosen, memory=memory), device)
        sizes.append(memory.device)
    return max(sizes)


def _searches(
    config: Config, mesh: Mesh, machine: Machine, name: str, times: SegmentTimes | None
) -> list[PlacementSearch]:
    """Return the searches for the first and the last pipeline rank."""
    limits = machine_limits(config, machine, name)
    refuse_if(
        not limits.device,
        f"offload.mode = 'auto': the file of {name} has no device; set offload.device_memory",
    )
    microbatches, device = _microbatches(config, mesh), "cpu" if is_cpu(machine) else "cuda"
    ends = [largest_rank(config, mesh, pp) for pp in dict.fromkeys((0, mesh.pp - 1))]
    return [PlacementSearch(config, mesh, end, microbatches, limits, device, times) for end in ends]


def manual_placements(config: Config, mesh: Mesh, machine: Machine) -> list[Decision]:
    """Return the placements of the first and of the last pipeline rank with offload.mode =
    "manual". The list is empty if the machine file and the configuration have no device memory.

    The memory of these placements is computed for the load `offload.expert_imbalance`. A run
    computes the same memory and compares it with `offload.device_memory` and `offload.host_memory`.
    This function does not check these limits.
    """
    limits = _limits(config, machine, Links())
    if not limits.device:
        return []
    # With "auto", the spare buffers for early updates use half of the free host memory.
    if config.offload.early_adam == "auto":
        config = with_offload(config, host_memory=str(limits.host))
    device, decisions = "cpu" if is_cpu(machine) else "cuda", list[Decision]()
    for pp in dict.fromkeys((0, mesh.pp - 1)):
        rank = config, mesh, largest_rank(config, mesh, pp), _microbatches(config, mesh)
        memory = rank_memory(*rank, device, imbalance=config.offload.expert_imbalance)
        reserve = reserve_of(limits.device, device)
        decisions.append(Decision(config, memory, limits, reserve=reserve))
    return decisions


def _microbatches(config: Config, mesh: Mesh) -> int:
    if not config.train.global_batch_tokens:
        return mesh.pp
    return plan_batch(config.train, mesh.num_data_ranks).microbatches_per_rank


def machine_limits(config: Config, machine: Machine, name: str) -> RankLimits:
    """Return the memory that a rank may use on a machine, and the rates of its links. The device
    memory is 0 if it is unknown. Raises ConfigError if neither the configuration nor the machine
    file has rates of links."""
    links = load_links(config.offload.links) if config.offload.links else machine.links
    if links is None:
        raise ConfigError(
            f"offload.mode = {config.offload.mode!r}: the file of {name} has no table [links]; set "
            "offload.links to a file that optimus bench links --out FILE has written on that "
            "machine"
        )
    return _limits(config, machine, links)


def _limits(config: Config, machine: Machine, links: Links) -> RankLimits:
    """Return the result of `machine_limits`, with `links` as the rates."""
    device = 0 if machine.device is None else int(machine.device.memory_bytes.value)
    memory, host = machine.host_memory_bytes, _UNKNOWN
    if memory is not None:
        host = host_limit(int(memory.value), machine.ranks_per_node)
    return limits_of(config, links, device, host, _UNKNOWN)


def _without_offloading(config: Config) -> Config:
    """Return the run with all states on the device, and with the same order and rounding of
    gradients."""
    rounds = config.offload.rounds_gradients(config.train)
    grad_dtype: Literal["bf16", "fp32"] = "bf16" if rounds else "fp32"
    return config.model_copy(
        update={
            "offload": OffloadConfig(order=config.offload.order, grad_dtype=grad_dtype),
            "optim": config.optim.model_copy(update={"cache_chunks": 0}),
        }
    )


def time_offloaded(
    config: Config,
    mesh: Mesh,
    machine: Machine,
    name: str,
    works: Works | None = None,
    imbalances: Mapping[int, float] | None = None,
    placements: Placements | None = None,
    topology: Topology | None = None,
) -> OffloadedStep:
    """Return the time of a step with offloading on a machine.

    Args:
        config: The run, with `train.seq_len` and offload.mode = "manual" or "auto".
        mesh: Sizes of all axes.
        machine: The machine.
        name: Name of the machine, for messages.
        works, imbalances, topology: As for `step_of`.
        placements: With offload.mode = "auto", the result of `decide_placements`; None to call this
            function.

    Raises:
        ConfigError: As `decide_placements`, or the machine file lacks rates for the step.
    """
    rates = rates_of(machine, config.train.dtype, name)
    limits = machine_limits(config, machine, name)
    configs = [config] * mesh.pp
    if config.offload.mode == "auto":
        run = config, mesh, machine, name, works
        configs = (placements or decide_placements(*run, topology=topology)).configs(mesh.pp)
    missing = [f"links.{key}" for key in _used_rates(configs) - limits.links.model_fields_set]
    if limits.host >= _UNKNOWN and any(c.offload.early_adam == "auto" for c in configs):
        missing.append("host_memory_bytes")
    # All ranks have the same schedule.
    first = max(configs, key=lambda each: each.offload.host_share)
    plain = _without_offloading(first)
    on_cpu = not rates.launches_queue
    step = step_of(plain, mesh, None, on_cpu, works, imbalances, topology=topology)
    schedule = schedule_of(first, mesh, step.microbatches)
    if not first.offload.host_share:  # all states are on the devices
        time, played = played_time(step, rates, schedule), play_step(step, rates, schedule)
        return OffloadedStep(step, time, played, ((),) * mesh.pp, {})
    times = SegmentTimes(plain, mesh, rates, works, imbalances, topology)
    ranks = _plan_ranks(configs, mesh, schedule, times, limits.host)
    repeats = offloaded_repeats(plain, mesh, step.microbatches)
    step = replace(
        step,
        schedule=schedule.name,
        virtual_stages=schedule.virtual_stages,
        reductions=max((rank.reductions for rank in ranks), key=times.total_s),
        update=max(
            (step.update.share(rank.updated_share, *repeats) for rank in ranks), key=rates.update_s
        ),
    )
    rates = replace(rates, runs_ahead=False)
    without = played_time(step, rates, schedule)
    exposed_s, base_s = dict(without.exposed_s), without.total_s
    if gathers_s := max(
        (rank.gathers_s for rank in ranks), key=lambda by_axes: sum(by_axes.values())
    ):
        gathered_s = _play(step, rates, schedule, ranks, _UNLIMITED).played.end
        for axes, seconds in gathers_s.items():
            share = seconds / sum(gathers_s.values()) * (gathered_s - base_s)
            exposed_s[axes] = exposed_s.get(axes, 0.0) + share
        base_s = gathered_s
    steps = _play(step, rates, schedule, ranks, limits.links)
    time = replace(
        without,
        exposed_s=exposed_s,
        offload_s=unless_rounding(steps.played.end - base_s, base_s),
        missing=(*without.missing, *sorted(missing)),
    )
    return OffloadedStep(step, time, *steps)


def _used_rates(configs: Sequence[Config]) -> set[str]:
    """Return the keys of the table `links` whose rates determine the time of a step."""
    on_disk = any(config.offload.disk_share for config in configs)
    return {"to_device", "to_host", "host_adam", *(("disk_read", "disk_write") if on_disk else ())}


class _Rank(NamedTuple):
    """A pipeline rank with chunks on the host."""

    work: StepWork
    num_uses: Mapping[tuple[int, bool], int]
    """Number of segment uses in a pass of one microbatch. A key is the pair (stage, is
    backward)."""
    updated_share: float
    """Share (0 to 1) of the trained elements whose states are on the device."""
    reductions: tuple[Reduction, ...]
    """Collectives of a step: the reductions of all gradients, and the gathers of the parameters
    whose states are on the device."""
    gathers_s: Mapping[str, float]
    """A dict from axes to the seconds in a step for the gathers of those chunks that are on the
    host."""


def _plan_ranks(
    configs: Sequence[Config], mesh: Mesh, schedule: Schedule, times: SegmentTimes, host: int
) -> list[_Rank]:
    """Return a `_Rank` for each pipeline rank. `configs` has the configuration of each rank, and
    `host` is the limit of the host memory of a rank in bytes."""
    known: dict[Any, tuple[Workload, PlannedRank]] = {}
    ranks = []
    for pp, config in enumerate(configs):
        stages = plan_stages(config, mesh.pp)[pp :: mesh.pp]
        experts = config.model.experts_by_layer
        layers = tuple(tuple(experts[layer] for layer in stage) for stage in stages)
        kind: Any = layers if not config.optim.frozen else pp
        key = id(config), kind, pp == 0, pp == mesh.pp - 1
        if key not in known:  # ranks with equal layers have equal chunks
            known[key] = _plan_chunks(config, mesh, pp, schedule, times)
        ranks.append(_plan_rank(config, pp, schedule, *known[key], times, host))
    return ranks


def _plan_chunks(
    config: Config, mesh: Mesh, pp: int, schedule: Schedule, times: SegmentTimes
) -> tuple[Workload, PlannedRank]:
    """Return the workload and the planned states of a rank, as if all chunks were on the host."""
    order, rank = config.offload.order, largest_rank(config, mesh, pp)
    planned = plan_on_host(config, order, mesh, rank, schedule.num_microbatches)
    work = planned.engine.workload(
        order,
        config.optim.chunk_length,
        planned.segments,
        *times.of_rank(planned.layout, schedule.splits_backward),
        device_bytes=0,
        reductions=schedule.num_microbatches if schedule.reduce_each else 1,
    )
    return replace(work, gather_s=times.gathers(planned.engine)), planned


def _plan_rank(
    config: Config,
    pp: int,
    schedule: Schedule,
    work: Workload,
    planned: PlannedRank,
    times: SegmentTimes,
    host: int,
) -> _Rank:
    """Return the pipeline rank `pp`. `work` and `planned` are the results of `_plan_chunks` for a
    rank with equal layers."""
    p, offload = schedule.num_ranks, config.offload
    is_backward = {Kind.F: False, Kind.B: True, Kind.I: True}
    passes = [
        Pass(action.stage // p, is_backward[action.kind])
        for action in schedule.ranks[pp]
        if action.kind in is_backward
    ]
    stages = [segment.stage // p for segment in planned.segments]
    learns = {use.segment for use in work.uses if use.backward}
    uses = use_order(passes, stages, work.needs, [n in learns for n in range(len(stages))])
    work = replace(work, uses=uses)
    num_host = math.ceil(offload.host_share * len(work.chunks))
    num_disk = math.ceil(offload.disk_share * work.num_trained(num_host))
    spare = {"on": math.inf, "off": 0.0}.get(offload.early_adam)
    if spare is None:  # the formula of `optimus.rank.states.attach`
        free = host - work.host(num_host, num_disk) - staging_of(config, planned).host
        spare = max(0, free) // 2
    num_uses = {(stage * p + pp, False): stages.count(stage) for stage in stages}
    with_backward = Counter(stages[segment] for segment in learns)
    num_uses |= {(stage * p + pp, True): with_backward[stage] for stage in stages}
    slots = min(config.optim.cache_chunks or num_host, num_host)
    step_work = work.step_work(num_host, slots, num_disk, spare)
    updated = [cost.elements for cost in work.chunks]
    first = len(updated) - num_host
    chunks = chunks_by_first_use(planned.engine)
    gathers_s = defaultdict[str, float](float)
    for step in step_work.plan.steps:
        for number in (*step.gather, *step.prefetch):
            if seconds := step_work.gather_s[number]:
                gathers_s[chunks[first + number].groups.shard_group.axes] += seconds
    return _Rank(
        step_work,
        num_uses,
        sum(updated[:first]) / max(1, sum(updated)),
        chunk_reductions(config, schedule, chunks, first),
        gathers_s,
    )


class _OffloadedDevice:
    """The device of a pipeline rank in the simulation `play`. Actions on this device wait for
    chunks."""

    def __init__(self, rank: _Rank, links: Links) -> None:
        self._num_uses = rank.num_uses
        self.simulation = TierSimulation(rank.work, links)
        self.start_s = 0.0
        """Time in seconds at which the current step starts."""
        self.norm_s = 0.0
        """Time in seconds at which all gradients of the rank are on the host and the states of the
        previous update are on the disk."""

    def run(self, action: Action, start: float, seconds: float) -> float:
        """Return the time at which an action ends, in seconds from the start of the step. The
        simulation calls this method for the actions of the rank in order.

        Args:
            action: The action.
            start: Time at which the action can begin, in seconds from the start of the step.
            seconds: Duration of the action if it waits for no chunk.
        """
        kind, now = action.kind, self.start_s + start
        if kind is Kind.F or kind is Kind.B or kind is Kind.I:
            count = self._num_uses[action.stage, kind is not Kind.F]
            return self.simulation.run(now, count) - self.start_s
        if kind is Kind.OPT_STEP:
            self.norm_s = self.simulation.end_backward(now)
            return self.norm_s - self.start_s + seconds
        return start + seconds


class _Steps(NamedTuple):
    """Values of the attributes `played`, `spans` and `seconds` of `OffloadedStep`."""

    played: Played
    spans: tuple[tuple[ResourceSpan, ...], ...]
    seconds: dict[str, float]


def _play(
    step: Step, rates: Rates, schedule: Schedule, ranks: Sequence[_Rank], links: Links
) -> _Steps:
    """Simulate `STEPS` steps, so that the duration of a step no longer changes, and return the last
    step."""
    devices = [_OffloadedDevice(rank, links) for rank in ranks]
    start_s = 0.0
    for _ in range(STEPS):
        for device in devices:
            device.start_s = start_s
        played = play_step(step, rates, schedule, devices=devices)
        norm_s = max(device.norm_s for device in devices)
        for device in devices:
            device.simulation.update(norm_s)
        start_s += played.end
    begin_s = start_s - played.end
    spans, busy_s = [], dict[str, float]()
    for device in devices:
        of_rank = defaultdict[str, float](float)
        for span in device.simulation.spans:
            of_rank[span.resource] += (span.end - span.start) / STEPS
        for resource, seconds in of_rank.items():
            busy_s[resource] = max(busy_s.get(resource, 0.0), seconds)
        spans.append(
            tuple(
                span._replace(start=max(0.0, span.start - begin_s), end=span.end - begin_s)
                for span in device.simulation.spans
                if span.end > begin_s and span.start < start_s
            )
        )
    return _Steps(played, tuple(spans), busy_s)
