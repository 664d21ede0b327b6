"""`optimus bench step --nproc N`: measures an update on several ranks.

The results are the time of an update on the slowest rank, the traffic and the pipeline bubble.
Traffic is the payload of collectives in bytes, on the rank with the largest payload. The pipeline
bubble is computed from the measured times of the pipeline actions, such as the forward of a
microbatch. The schedule is also simulated twice: first with the measured mean time of each action,
then with the same time for each stage and a backward that takes twice as long as the forward. For
1F1B with p pipeline ranks, m microbatches and v stages per rank, the second simulation gives the
bubble ratio (p-1)/(m*v).
"""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch

from optimus import platform
from optimus.bench.step import make_rank
from optimus.config import Config
from optimus.distributed.collectives import all_gather_objects, barrier
from optimus.distributed.groups import Groups
from optimus.distributed.world import World, end_run, end_world, start_world
from optimus.errors import OptimusError, counted
from optimus.launch.environment import LaunchEnv
from optimus.observe.chrome_trace import TracedAction, write_trace
from optimus.observe.events import ActionEvent, ActionTrace, Recorders, TrafficMeter
from optimus.parallel.pipeline.actions import COMPUTE, Action, Kind, Schedule
from optimus.parallel.pipeline.simulate import simulate, unit_costs
from optimus.planner.states import check_slots
from optimus.train.autotune import autotune_dispatch, autotune_kernels
from optimus.train.resolve import divide

_WARMUP = 2

Traffic = dict[str, dict[str, list[int]]]
"""traffic[axes][operation] is [number of calls, payload bytes] in one update. `axes` names the mesh
axes of a process group, such as `dp x ep`."""


def bench_layout(
    config: Config, steps: int, launch: LaunchEnv, trace: Path | None = None
) -> dict[str, Any] | None:
    """Measure the time of updates on random tokens. All ranks of the run must call this function.

    Args:
        config: Configuration of the run.
        steps: Number of timed updates.
        launch: Rank of this process, world size and rendezvous address.
        trace: File to which rank 0 writes the pipeline actions of all ranks in the last update;
            None if no file is written.

    Returns:
        On rank 0, a dict with the conditions and the results, for `format_layout`. None on all
        other ranks.

    Raises:
        RunEnded: A rank raised an OptimusError. Every rank raises RunEnded.
    """
    failure: OptimusError | None = None
    try:
        check_slots(config, divide(config, launch.world_size)[0])
    except OptimusError as error:
        failure = error
    world = start_world(launch, config.parallel.timeout_s, config.train.device, failure)
    try:
        result = _measure(config, steps, world, trace)
    except Exception as error:
        raise end_run(error, launch, world.agreement, "benchmark") from error
    end_world()
    return result if launch.is_first else None


def _measure(config: Config, steps: int, world: World, path: Path | None) -> dict[str, Any]:
    """Measure the time of the updates. Return on every rank the dict that `bench_layout` returns on
    rank 0."""
    mesh, plan = divide(config, world.size)
    threads = platform.set_threads(
        config.train.threads, config.train.deterministic, world.launch.local_world_size
    )
    autotune_kernels(config, world, None)
    meter, trace = TrafficMeter(), ActionTrace()
    rank = make_rank(config, world, Recorders(meter, trace))
    groups, schedule = rank.groups, rank.local.layout.schedule
    dispatch = autotune_dispatch(config, groups, rank.local.model, rank.states, None)
    updater, microbatches = rank.updater(), rank.microbatches()
    seconds, bubbles, costs = [], [], defaultdict(list)
    for step in range(1, steps + 1 + _WARMUP):
        meter.clear()
        trace.events.clear()
        barrier(world.everyone)
        start_ns = time.perf_counter_ns()
        updater.run(step, microbatches)
        platform.synchronize(world.device)
        elapsed_s = (time.perf_counter_ns() - start_ns) / 1e9
        if step <= _WARMUP:
            continue
        seconds.append(max(all_gather_objects(elapsed_s, world.everyone, float)))
        bubbles.append(_measured_bubble(trace.events, groups))
        for event in trace.events:
            costs[Kind[event.kind], event.stage].append(event.busy_ns / 1e9)
    if path is not None:
        actions = [_traced(event, start_ns) for event in trace.events if event.kind in _TRACED]
        ranks = all_gather_objects(actions, world.everyone, list[TracedAction])
        if world.is_first:
            write_trace(path, ranks, "measured")
    by_axes: Traffic = {}
    for (axes, operation), count in meter.counts.items():
        by_axes.setdefault(axes, {})[operation] = list(count)
    traffic = all_gather_objects(by_axes, groups.everyone, Traffic)
    means = [(*key, statistics.fmean(values)) for key, values in costs.items()]
    by_stage = all_gather_objects(means, groups.over("pp"), list[tuple[int, int, float]])
    all_means = {(kind, stage): mean for stages in by_stage for kind, stage, mean in stages}
    ordered = sorted(seconds)
    return {
        "device": str(world.device),
        "torch": torch.__version__,
        "threads": threads,
        "dtype": config.train.dtype,
        "settled": [str(dispatch)] if dispatch.reason else [],
        "mesh": mesh._asdict(),
        "schedule": schedule.name,
        "microbatches": schedule.num_microbatches,
        "virtual_stages": schedule.virtual_stages,
        "tokens_per_update": plan.tokens,
        "updates": steps,
        "step_s": statistics.median(seconds),
        "step_s_quartiles": [ordered[steps // 4], ordered[-1 - steps // 4]],
        "traffic": max(
            traffic,
            key=lambda rank: sum(size for calls in rank.values() for _, size in calls.values()),
        ),
        "bubble": _bubbles(schedule, bubbles, all_means),
    }


_TRACED = {kind.name for kind in (*COMPUTE, Kind.REDUCE_GRAD, Kind.OPT_STEP)}
"""The kinds of actions that also exist in a simulation of the schedule."""


def _traced(event: ActionEvent, start_ns: int) -> TracedAction:
    """Return the event as an action of a trace that begins at `start_ns`. The event begins with the
    time for which the action waited; the returned action starts after this time."""
    begin, end = (
        ns / 1e9 for ns in (event.end_ns - event.busy_ns - start_ns, event.end_ns - start_ns)
    )
    return TracedAction(event.kind, event.stage, event.microbatch, begin, end)


def _measured_bubble(events: list[ActionEvent], groups: Groups) -> float:
    """Return the ratio of pipeline idle time to compute time in an update. All ranks must call this
    function.

    The compute time is the mean over pipeline ranks. The idle time is the duration of the update
    minus the compute time. The duration of the update is measured on the slowest pipeline rank,
    from its first action to its last action, without gradient reductions and the optimizer update.
    """
    others = (Kind.REDUCE_GRAD, Kind.OPT_STEP)
    busy = sum(event.busy_ns for event in events if Kind[event.kind] in COMPUTE)
    last = max(event.end_ns for event in events if Kind[event.kind] not in others)
    within = (event for event in events if event.end_ns <= last)
    reducing = sum(event.busy_ns for event in within if Kind[event.kind] is Kind.REDUCE_GRAD)
    times = (last - events[0].start_ns - reducing, busy)
    of_ranks = all_gather_objects(times, groups.over("pp"), tuple[int, int])
    span = max(span for span, _ in of_ranks)
    return span / statistics.fmean([busy for _, busy in of_ranks]) - 1


def _bubbles(
    schedule: Schedule, measured: list[float], means: dict[tuple[Kind, int], float]
) -> dict[str, float]:
    """Return bubble ratios (idle time / compute time) and the measured bubble fraction.

    Args:
        schedule: The pipeline schedule.
        measured: Measured bubble ratio of each update.
        means: Mean seconds of the actions of each kind and stage.

    Returns:
        A dict with the median of the measured ratios, this median as a fraction (idle time / total
        time), the ratios of two simulations (with `means`, and with stages of equal time), and the
        ratio (p-1)/(m*v) of 1F1B (see the module docstring).
    """

    def cost(action: Action) -> float:
        return means.get((action.kind, action.stage), 0.0) if action.kind in COMPUTE else 0.0

    ratio = statistics.median(measured)
    return {
        "measured_ratio": ratio,
        "measured_fraction": ratio / (1 + ratio),
        "simulated_ratio": simulate(schedule, cost).bubble_ratio,
        "even_stages_ratio": simulate(schedule, unit_costs(schedule.virtual_stages)).bubble_ratio,
        "formula_ratio": (schedule.num_ranks - 1)
        / (schedule.num_microbatches * schedule.virtual_stages),
    }


def format_layout(result: dict[str, Any]) -> str:
    """Return the result of `bench_layout` as a few lines of text."""
    mesh = " ".join(f"{axis}={size}" for axis, size in result["mesh"].items() if size > 1)
    low, high = result["step_s_quartiles"]
    lines = [
        f"{result['device']}, torch {result['torch']}, "
        f"{counted(result['threads'], 'thread')} a rank, "
        f"{result['dtype']}, {mesh or 'one rank'}, {result['tokens_per_update']} tokens an update, "
        f"{counted(result['updates'], 'update')}",
        *result["settled"],
        f"step {result['step_s']:.4f} s (quartiles {low:.4f} to {high:.4f})",
    ]
    for axes, operations in result["traffic"].items():
        texts = (f"{name} {size:,} bytes in {n} calls" for name, (n, size) in operations.items())
        lines.append(f"{axes}: {', '.join(texts)}")
    if result["mesh"]["pp"] > 1:
        bubble = result["bubble"]
        lines.append(
            f"bubble_ratio of {result['schedule']}, "
            f"{counted(result['microbatches'], 'microbatch', 'microbatches')}, "
            f"{counted(result['virtual_stages'], 'stage')} a rank: measured "
            f"{bubble['measured_ratio']:.3f}, "
            f"simulated {bubble['simulated_ratio']:.3f}, with equal stage times "
            f"{bubble['even_stages_ratio']:.3f}, (p-1)/(m*v) {bubble['formula_ratio']:.3f}; "
            f"bubble_fraction {bubble['measured_fraction']:.3f}"
        )
    return "\n".join(lines)
