"""Time of a training step, computed from the operations of its stages and the rates of a machine.

The time of a step is the sum of computation, exposed communication of each mesh axis, pipeline
bubble and optimizer, on the rank that takes longest. All functions are pure. Every rate is at most
the peak in the machine file.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Literal, NamedTuple

from optimus.config.hardware import Dtype
from optimus.parallel.pipeline.actions import Action, Kind, Schedule
from optimus.parallel.pipeline.schedules import make_schedule
from optimus.parallel.pipeline.simulate import simulate
from optimus.planner.collectives import Operation, slowest_s
from optimus.planner.machine_rates import Rates, UpdateBytes
from optimus.planner.network import Network
from optimus.planner.play import Device as PlayedDevice
from optimus.planner.play import Played, play
from optimus.rank.operations import FusedAttention, Pass, Product
from optimus.rank.operations import Operation as LayerOperation

Groups = Mapping[str, Sequence[tuple[int, ...]]]
"""A dict from axes to the ranks of process groups. Of process groups that use the network in the
same way, only the first is included. The ranks have the numbers that `optimus.planner.collectives`
describes."""
Overlap = Literal["nothing", "forward", "backward", "passes"]
"""Computation with which a collective overlaps: none, the first forward, the last backward, or all
passes of all microbatches."""


class Layers(NamedTuple):
    """Equal layers of a stage."""

    forward: tuple[LayerOperation, ...]
    """Operations of one layer for one microbatch."""
    backward: tuple[LayerOperation, ...] = ()
    """Operations of the backward of one layer for one microbatch, including recomputed
    operations."""
    number: float = 1.0
    """Number of layers."""
    input_backward: tuple[LayerOperation, ...] | None = None
    """Operations of the action I, which computes the gradient of the layer's input, if the schedule
    divides the backward. None: the action I takes half of the time of `backward`."""


class Reduction(NamedTuple):
    """A collective that reduces gradients or gathers parameters."""

    axis: str
    """Key of the process groups in `Step.groups`, such as "dp"."""
    name: Operation
    size_bytes: float
    """Bytes of the full buffer of a rank."""
    overlaps: Overlap = "nothing"
    """Computation during which the collective runs."""
    repeats: int = 1
    """Number of times that the collective runs in a step."""


@dataclass(frozen=True)
class Step:
    """The operations of a step on a single rank of each pipeline stage."""

    stages: tuple[tuple[Layers, ...], ...]
    """The layers of each stage, in the order of the model. With p pipeline ranks, stage s is on
    rank s mod p."""
    microbatches: int
    """Number of microbatches of each data rank."""
    groups: Groups
    """The process groups of each axis that the operations name. A process group of "pp" has the
    ranks of a pipeline."""
    dtype: Dtype = "bf16"
    schedule: str = "1f1b"
    virtual_stages: int = 1
    transfer_bytes: float = 0.0
    """Bytes that a rank sends to the next stage for one microbatch: the output of the stage or,
    with sequence parallelism, a tp rank's share of the output."""
    transfers_block: bool = False
    """True if a rank waits for its transfers (Megatron-LM); False if transfers overlap with
    computation."""
    reductions: tuple[Reduction, ...] = ()
    update: UpdateBytes = field(default_factory=UpdateBytes)
    """Bytes of the update of a rank."""


@dataclass(frozen=True)
class StepTime:
    """Seconds of a step on the slowest rank, by component."""

    compute_s: float
    """Seconds of matrix products, element-wise operations and recomputation."""
    exposed_s: dict[str, float]
    """Seconds of communication during which the device does not compute, by mesh axis."""
    bubble_s: float
    """Seconds for which the rank waits for other ranks of the pipeline."""
    optimizer_s: float
    """Seconds of `Step.update`."""
    offload_s: float = 0.0
    """Seconds for which the device waits for copies, for updates on the host and for the disk."""
    missing: tuple[str, ...] = field(default=())
    """Keys of rates that the machine file lacks. The peak rate, or a latency of 0, is used instead,
    so that the time is a lower bound."""

    @property
    def total_s(self) -> float:
        others_s = self.bubble_s + self.optimizer_s + self.offload_s
        return self.compute_s + sum(self.exposed_s.values()) + others_s


class PassTime(NamedTuple):
    """Seconds of a forward or backward pass for one microbatch."""

    compute_s: float
    """Seconds without communication: the device computes, or waits until operations are started."""
    exposed_s: dict[str, float]
    """Seconds of communication within the pass, by axis."""
    device_s: float = 0.0
    """Seconds for which the device computes."""
    launch_s: float = 0.0
    """Seconds that the host of an accelerator needs to start the operations; 0 on a CPU."""

    @property
    def total_s(self) -> float:
        """Seconds of the pass, if the host is not ahead of the device when the pass begins."""
        return self.compute_s + sum(self.exposed_s.values())

    @property
    def on_device_s(self) -> float:
        """Seconds of the pass, if the host is far ahead of the device."""
        return self.device_s + sum(self.exposed_s.values())

    def half(self) -> PassTime:
        """Return the time of half of the pass."""
        exposed_s = {axis: seconds / 2 for axis, seconds in self.exposed_s.items()}
        return PassTime(self.compute_s / 2, exposed_s, self.device_s / 2, self.launch_s / 2)


def _product_s(rates: Rates, rows: float, inner: float, columns: float) -> float:
    """Return the seconds of one product [rows, inner] x [inner, columns], limited by the FLOP/s or
    by the memory (roofline)."""
    flops = 2.0 * rows * inner * columns
    moved = rates.element_bytes * (rows * inner + inner * columns + rows * columns)
    return max(flops / rates.products.rate(rows, inner, columns), moved / rates.memory)


def _attention_s(attention: FusedAttention, rates: Rates) -> float:
    """Return the seconds of fused attention, limited by the FLOP/s or by the memory (roofline)."""
    is_backward = attention.products > 2
    rate = rates.products.attention_rate(attention.seq_len, attention.head_size, is_backward)
    return max(attention.flops / rate, attention.num_bytes / rates.memory)


def _add(
    operations: Iterable[LayerOperation], rates: Rates, groups: Groups
) -> tuple[float, float, dict[str, float]]:
    """Return a tuple: the seconds for which the device computes, the number of operations that the
    host starts, and a dict from axes to the seconds of communication."""
    device_s, launches, exposed_s = 0.0, 0.0, dict[str, float]()
    for op in operations:
        if isinstance(op, Product):
            device_s += op.repeats * _product_s(rates, op.rows, op.inner, op.columns)
            launches += op.launches
        elif isinstance(op, FusedAttention):
            device_s += _attention_s(op, rates)
            launches += op.launches
        elif isinstance(op, Pass):
            device_s += op.num_bytes / (rates.activations or rates.memory)
            launches += op.launches
        elif op.num_bytes:
            of_axis = groups[op.axis]
            seconds = slowest_s(op.name, op.num_bytes, of_axis, rates.links, rates.algorithm)
            exposed_s[op.axis] = exposed_s.get(op.axis, 0.0) + seconds
            launches += 1
    return device_s, launches, exposed_s


def pass_time(
    operations: Iterable[LayerOperation], rates: Rates, groups: Groups, number: float = 1.0
) -> PassTime:
    """Return the time of the forward or the backward of `number` equal layers for one microbatch.

    On an accelerator, the host starts operations while the device runs earlier operations. A pass
    therefore takes the longer of two times: the time in which the host starts the operations, and
    the time in which the device runs them.
    """
    device_s, launches, exposed_s = _add(operations, rates, groups)
    waiting_s = sum(exposed_s.values())
    launch_s = launches * rates.launch_s
    if rates.launches_queue:
        compute_s = max(device_s, launch_s - waiting_s)
    else:  # the cores of the device start the operations
        compute_s, device_s, launch_s = device_s + launch_s, device_s + launch_s, 0.0
    scaled = {axis: seconds * number for axis, seconds in exposed_s.items()}
    return PassTime(compute_s * number, scaled, device_s * number, launch_s * number)


class PassTimes:
    """Cache of the times of passes. Most stages have the same tuples of operations. The key of a
    time is the `id` of the tuple of operations, so callers must keep the tuples as long as this
    object."""

    def __init__(self, rates: Rates, groups: Groups) -> None:
        self._rates, self._groups = rates, groups
        self._known: dict[tuple[int, float], PassTime] = {}

    def __call__(self, operations: tuple[LayerOperation, ...], number: float) -> PassTime:
        """Return `pass_time` of `number` layers with these operations."""
        key = id(operations), number
        if key not in self._known:
            self._known[key] = pass_time(operations, self._rates, self._groups, number)
        return self._known[key]


def _sum(times: Iterable[PassTime]) -> PassTime:
    compute_s, device_s, launch_s, exposed_s = 0.0, 0.0, 0.0, dict[str, float]()
    for time in times:
        compute_s += time.compute_s
        device_s += time.device_s
        launch_s += time.launch_s
        for axis, seconds in time.exposed_s.items():
            exposed_s[axis] = exposed_s.get(axis, 0.0) + seconds
    return PassTime(compute_s, exposed_s, device_s, launch_s)


def pipeline_s(
    schedule: str,
    num_ranks: int,
    virtual_stages: int,
    num_microbatches: int,
    forward_s: Sequence[float],
    backward_s: Sequence[float],
    weights_s: Sequence[float] = (),
) -> float:
    """Return the seconds of a pipeline step without transfers.

    For gpipe, 1f1b and interleaved, the result is computed by a formula: the time in which the
    busiest rank runs all microbatches, plus the time in which one microbatch passes through the
    other ranks. The formula is exact if all stages take equal times; the bubble is then the time of
    (p-1)/v microbatches (arXiv 2104.04473). For zb-h1 with m >= p, ranks run the action W during
    the bubble, which is then (p-1) (F + I - W), with the seconds F, I and W of the actions of a
    stage (arXiv 2401.10241, table 2). If m < p, zb-h1 is simulated.

    Args:
        schedule: Name of the schedule.
        num_ranks: p.
        virtual_stages: v.
        num_microbatches: m.
        forward_s, backward_s: Seconds of each stage for one microbatch, p*v values.
        weights_s: Seconds of the action W of each stage. `backward_s` includes these seconds. By
            default, W takes half of `backward_s`.
    """
    p, v, m = num_ranks, virtual_stages, num_microbatches
    if schedule == "gpipe":
        return _filled(forward_s, p, v, m) + _filled(backward_s, p, v, m)
    if p == 1 or schedule in ("1f1b", "interleaved"):
        both = [f + b for f, b in zip(forward_s, backward_s, strict=True)]
        return _filled(both, p, v, m)
    if schedule == "zb-h1" and m >= p:
        both = [f + b for f, b in zip(forward_s, backward_s, strict=True)]
        weights = weights_s or [seconds / 2 for seconds in backward_s]
        busiest = both.index(max(both))
        idle = sum(both) - both[busiest] - 2 * (sum(weights) - weights[busiest])
        return m * both[busiest] + max(0.0, idle)
    return simulate(make_schedule(schedule, p, v, m), _costs(forward_s, backward_s)).end


def _filled(stage_s: Sequence[float], p: int, v: int, m: int) -> float:
    """Return the seconds of m microbatches on the busiest rank, plus the seconds in which one
    microbatch passes through one of the v stages of each other rank."""
    of_ranks = [sum(stage_s[rank::p]) for rank in range(p)]
    busiest = max(of_ranks)
    return m * busiest + (sum(of_ranks) - busiest) / v


def _costs(forward_s: Sequence[float], backward_s: Sequence[float]) -> Callable[[Action], float]:
    """Return a function from an action to its seconds on the device. The two halves of a divided
    backward pass take equal times."""

    def cost(action: Action) -> float:
        if action.kind is Kind.F:
            return forward_s[action.stage]
        if action.kind is Kind.B:
            return backward_s[action.stage]
        return backward_s[action.stage] / 2 if action.kind in (Kind.I, Kind.W) else 0.0

    return cost


MAX_PLAYED = 100_000
"""Largest number of actions of a schedule for which `played_time` simulates a step. With this
number, the three simulations of `played_time` take two to five seconds."""


def play_step(
    step: Step,
    rates: Rates,
    schedule: Schedule,
    sends: bool = True,
    collectives: bool = True,
    devices: Sequence[PlayedDevice] = (),
) -> Played:
    """Return the start and end times of the actions and transfers of a step in seconds.

    Args:
        step: The step.
        rates: The rates of the machine.
        schedule: The schedule of the step.
        sends: False if transfers between stages take no time.
        collectives: False if collectives of gradients and parameters take no time.
        devices: As for `play`.
    """
    times = PassTimes(rates, step.groups)
    forward, backward = _pass_times(step, times)
    inputs = _input_times(step, backward, times)
    network = Network(step.groups, rates.links, rates.algorithm)
    reduce, gather, blocking_s = [], [], 0.0
    ahead_s = -step.microbatches * _busiest(forward, backward, schedule.num_ranks).total_s
    reductions = step.reductions if collectives else ()
    times_of_all = collective_times(reductions, step.groups, rates)
    for reduction, (_, seconds, overlaps) in zip(reductions, times_of_all, strict=True):
        if overlaps == "nothing":
            blocking_s += seconds
        elif overlaps == "passes":
            ahead_s += seconds
        else:
            transfer = network.collective(reduction.name, reduction.size_bytes, reduction.axis)
            if overlaps == "forward":
                gather.append(transfer.times(reduction.repeats))
            else:
                reduce.append(transfer.times(reduction.repeats / step.virtual_stages))
    optimizer_s = rates.update_s(step.update) + blocking_s + max(0.0, ahead_s)

    # Collectives within a pass compete with transfers. The simulation ignores this competition on a
    # device that waits for chunks, and for a divided backward.
    passes = {} if devices else {Kind.F: forward, Kind.B: backward}
    exposed_s = {kind: [time.exposed_s for time in times] for kind, times in passes.items()}
    transfer_bytes = step.transfer_bytes if sends else 0.0
    transfers = network.transfers(transfer_bytes, schedule.num_stages, reduce, gather, exposed_s)

    def seconds_of(time: PassTime) -> float:
        return time.on_device_s if rates.runs_ahead else time.total_s

    costs = _by_kind(forward, backward, inputs, seconds_of)
    launches = _by_kind(forward, backward, inputs, lambda time: time.launch_s)
    for (kind, stage), transfer in transfers.exchanges.items():
        costs[kind][stage] -= transfer.seconds
    if sends:
        for stage, seconds in enumerate(_host_transfers_s(step, rates)):
            for kind in (Kind.F, Kind.B, Kind.I):
                costs[kind][stage] += seconds

    def cost(action: Action) -> float:
        if action.kind in costs:
            return costs[action.kind][action.stage]
        return optimizer_s if action.kind is Kind.OPT_STEP else 0.0

    def launch(action: Action) -> float:
        return launches[action.kind][action.stage] if action.kind in launches else 0.0

    if not (rates.runs_ahead and any(map(any, launches.values()))):
        return play(schedule, cost, transfers, devices)
    return play(schedule, cost, transfers, devices, launch)


def _by_kind(
    forward: Sequence[PassTime],
    backward: Sequence[PassTime],
    inputs: Sequence[PassTime],
    seconds_of: Callable[[PassTime], float],
) -> dict[Kind, list[float]]:
    """Return, for each kind of action that computes, the seconds of each stage. `inputs` has the
    times of the action I; the action W takes the remaining time of the backward."""
    forward_s, backward_s, inputs_s = (
        [seconds_of(time) for time in times] for times in (forward, backward, inputs)
    )
    weights_s = [whole_s - input_s for whole_s, input_s in zip(backward_s, inputs_s, strict=True)]
    return {Kind.F: forward_s, Kind.B: backward_s, Kind.I: inputs_s, Kind.W: weights_s}


def _input_times(step: Step, backward: Sequence[PassTime], of_pass: PassTimes) -> list[PassTime]:
    """Return the time of the action I of each stage."""
    times = []
    for stage, whole in zip(step.stages, backward, strict=True):
        if any(layers.input_backward is None for layers in stage):
            times.append(whole.half())
            continue
        of_layers = (of_pass(layers.input_backward or (), layers.number) for layers in stage)
        inputs = _sum(of_layers)
        assert inputs.total_s <= whole.total_s * (1 + 1e-9), (inputs, whole)
        times.append(inputs)
    return times


def played_time(step: Step, rates: Rates, schedule: Schedule) -> StepTime:
    """Return the time of a step by component, from a simulation of its actions and transfers. If
    the schedule has more than `MAX_PLAYED` actions, or if ranks wait for their transfers
    (`Step.transfers_block`), return the result of `step_time`.

    The components are computed from three simulations: without transfers, with the transfers
    between stages, and with all transfers and collectives. The bubble is the idle time in the first
    simulation. The exposed communication of pp is the time of the second simulation minus the time
    of the first. The time of the third simulation minus the time of the second is divided over the
    axes of the collectives, in proportion to the seconds of the collectives of each axis. The
    computation includes the time for which the device waits for the host.
    """
    time = step_time(step, rates)
    if sum(map(len, schedule.ranks)) > MAX_PLAYED or step.transfers_block:
        return time
    plays = [
        play_step(step, rates, schedule, *included)
        for included in ((False, False), (True, False), (True, True))
    ]
    bare, sent, whole = (played.end for played in plays)
    forward, backward = _pass_times(step, PassTimes(rates, step.groups))
    p = schedule.num_ranks
    m, busiest = step.microbatches, _busiest(forward, backward, p)
    exposed_s = {axis: m * seconds for axis, seconds in busiest.exposed_s.items()}
    busy_s, compute_s = m * busiest.total_s, m * busiest.compute_s
    if any(plays[0].hosts):
        busy_s = max(map(plays[0].busy, range(p)))
        compute_s = busy_s - sum(exposed_s.values())
    if p > 1:
        exposed_s["pp"] = sent - bare
    together = list(collective_times(step.reductions, step.groups, rates))
    total = sum(seconds for _, seconds, _ in together)
    for axis, seconds, _ in together:
        if seconds:
            share = seconds / total * max(0.0, whole - sent)
            exposed_s[axis] = exposed_s.get(axis, 0.0) + share
    bubble_s = max(0.0, unless_rounding(bare - busy_s - time.optimizer_s, bare))
    return replace(time, compute_s=compute_s, exposed_s=exposed_s, bubble_s=bubble_s)


def unless_rounding(seconds: float, step_s: float) -> float:
    """Return `seconds`, a difference of simulated times of a step, or 0.0 if the difference is a
    rounding error: less than 1e-9 of the seconds `step_s` of the step."""
    return seconds if abs(seconds) >= 1e-9 * step_s else 0.0


def collective_times(
    reductions: Iterable[Reduction], groups: Groups, rates: Rates
) -> Iterator[tuple[str, float, Overlap]]:
    """Yield a tuple for each element of `reductions`: the axis, the seconds of all repeats, and the
    computation with which the collective overlaps. On a CPU, collectives run on the cores that
    compute, so they do not overlap with computation."""
    for reduction in reductions:
        of_axis = groups[reduction.axis]
        seconds = slowest_s(
            reduction.name, reduction.size_bytes, of_axis, rates.links, rates.algorithm
        )
        overlaps = reduction.overlaps if rates.launches_queue else "nothing"
        yield reduction.axis, seconds * reduction.repeats, overlaps


def step_time(step: Step, rates: Rates) -> StepTime:
    """Return the time of a step by component, from closed formulas."""
    optimizer_s = rates.update_s(step.update)
    collectives = collective_times(step.reductions, step.groups, rates)
    return pipeline_time(step, rates).with_update(collectives, optimizer_s, rates.missing)


class PipelineTime(NamedTuple):
    """Components of the time of all passes in a step, on the rank whose passes and transfers take
    longest."""

    compute_s: float
    exposed_s: Mapping[str, float]
    bubble_s: float
    window_s: Mapping[Overlap, float]
    """Seconds of computation during which collectives with each `Overlap` can run."""

    def with_update(
        self,
        collectives: Iterable[tuple[str, float, Overlap]],
        optimizer_s: float,
        missing: tuple[str, ...],
    ) -> StepTime:
        """Return the time of the step. `collectives` is the result of `collective_times`,
        `optimizer_s` is the number of seconds of the optimizer, and `missing` is
        `Rates.missing`."""
        exposed_s, window_s = dict(self.exposed_s), dict(self.window_s)
        for axis, seconds, overlaps in collectives:
            hidden_s = min(seconds, window_s[overlaps])
            window_s[overlaps] -= hidden_s
            exposed_s[axis] = exposed_s.get(axis, 0.0) + seconds - hidden_s
        return StepTime(self.compute_s, exposed_s, self.bubble_s, optimizer_s, missing=missing)


def pipeline_time(step: Step, rates: Rates, times: PassTimes | None = None) -> PipelineTime:
    """Return the time of the passes of a step.

    Args:
        step: The step. `reductions` and `update` of the step have no effect.
        rates: The rates of the machine.
        times: Cache of the times of passes, which other steps with the same ep and tp groups can
            share; None for a new cache.
    """
    p, v, m = len(step.groups.get("pp", [(0,)])[0]), step.virtual_stages, step.microbatches
    assert len(step.stages) == p * v, (len(step.stages), p, v)
    times = PassTimes(rates, step.groups) if times is None else times
    forward, backward = _pass_times(step, times)
    transfer_s = _transfer_s(step, rates)
    blocking_s = transfer_s if step.transfers_block else 0.0
    host_s = _host_transfers_s(step, rates)
    weights_s: Sequence[float] = ()
    if step.schedule == "zb-h1":
        inputs = _input_times(step, backward, times)
        weights_s = [b.total_s - i.total_s for b, i in zip(backward, inputs, strict=True)]
    span_s = pipeline_s(
        step.schedule,
        p,
        v,
        m,
        [time.total_s + blocking_s + s for time, s in zip(forward, host_s, strict=True)],
        [time.total_s + blocking_s + s for time, s in zip(backward, host_s, strict=True)],
        weights_s,
    )
    of_ranks = [
        (_sum((*forward[rank::p], *backward[rank::p])), 2 * sum(host_s[rank::p]))
        for rank in range(p)
    ]
    busiest, on_host_s = max(of_ranks, key=lambda times: times[0].total_s + times[1])
    exposed_s = {axis: m * seconds for axis, seconds in busiest.exposed_s.items()}
    of_transfers_s = 2 * v * blocking_s + on_host_s
    busy_s = m * (busiest.total_s + of_transfers_s)
    bubble_s = max(0.0, span_s - busy_s)  # without rounding errors
    if p > 1:
        filling_s = 2 * (p - 1) * transfer_s if not step.transfers_block else 0.0
        exposed_s["pp"] = m * of_transfers_s + filling_s
    window_s: dict[Overlap, float] = {
        "nothing": 0.0,
        "forward": sum(time.total_s for time in forward[0::p]),
        "backward": sum(time.total_s for time in backward[0::p]),
        "passes": m * busiest.total_s,
    }
    return PipelineTime(m * busiest.compute_s, exposed_s, bubble_s, window_s)


def _pass_times(step: Step, times: PassTimes) -> tuple[list[PassTime], list[PassTime]]:
    """Return two lists: the times of the forward and of the backward of each stage for one
    microbatch."""
    stages = step.stages
    forward = [_sum(times(layers.forward, layers.number) for layers in s) for s in stages]
    backward = [_sum(times(layers.backward, layers.number) for layers in s) for s in stages]
    return forward, backward


def _busiest(forward: Sequence[PassTime], backward: Sequence[PassTime], p: int) -> PassTime:
    """Return the sum of the times of the passes of a microbatch on the pipeline rank where this sum
    is largest. `forward` and `backward` have the times of all stages of p pipeline ranks."""
    of_ranks = [_sum((*forward[rank::p], *backward[rank::p])) for rank in range(p)]
    return max(of_ranks, key=lambda time: time.total_s)


def _host_transfers_s(step: Step, rates: Rates) -> list[float]:
    """Return, for each stage, the seconds for which the transfers of a forward (or of a backward)
    occupy the cores of the rank. On a CPU, this is half of the time of each transfer that the rank
    sends or receives. On an accelerator, the result is 0, since transfers overlap with
    computation."""
    last = len(step.stages) - 1
    if rates.launches_queue or step.transfers_block or not last:
        return [0.0] * (last + 1)
    half_s = _transfer_s(step, rates) / 2
    return [half_s * ((stage > 0) + (stage < last)) for stage in range(last + 1)]


def _transfer_s(step: Step, rates: Rates) -> float:
    pipelines = step.groups.get("pp", [(0,)])
    hops = {pair for ranks in pipelines for pair in pairwise(ranks)}
    return slowest_s("send", step.transfer_bytes, tuple(hops), rates.links) if hops else 0.0
