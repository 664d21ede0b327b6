"""Search for the fastest layout of a run on a number of ranks.

A search evaluates all layouts of a space. A layout is rejected if a check of the configuration
refuses it, or if it needs more memory than a rank has. The rejected layouts are counted by reason.
A check or a number of bytes that is the same for several layouts is computed once. With
offload.mode = "auto", layouts that do not fit on the device are then evaluated with offloading
(`optimus.planner.search_offload`).
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import math
import multiprocessing
import pickle
import signal
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from multiprocessing.connection import Connection, wait
from typing import Any, NamedTuple

from optimus.config import Config
from optimus.config.machine import Machine
from optimus.errors import ConfigError, OptimusError, counted, refuse_if
from optimus.planner.layouts import (
    Layout,
    LayoutChecks,
    Space,
    layout_changes,
    layout_of,
    override,
    reason_of,
    space_of,
)
from optimus.planner.machine_rates import rates_of
from optimus.planner.search_memory import LayoutMemory
from optimus.planner.search_offload import Candidate, OffloadedLayouts
from optimus.planner.search_time import ComputeBound, StepSeconds
from optimus.planner.states import check_names
from optimus.rank.profile import Profiled

logger = logging.getLogger(__name__)

_Share = Sequence[Any]
"""Elements that one process evaluates: meshes with all their layouts, or candidates for
offloading."""
_Report = Callable[[int], object]
"""Function that is called with the number of layouts that were evaluated since the previous
call."""


class Evaluation(NamedTuple):
    """A layout that the search has evaluated."""

    time: float
    """Predicted seconds of a step or, if the machine has no rates, the FLOPs of `ComputeBound`."""
    memory: int
    """Predicted bytes on the fullest rank."""
    layout: Layout


class Ranking(NamedTuple):
    """Result of a search, or of a process that evaluates some of the layouts of a search."""

    evaluations: list[Evaluation]
    """The layouts that fit, sorted by `time`. Layouts with equal times are sorted by these keys in
    turn: the number of ranks of a replica, `resident` ("all" first), and the memory."""
    rejected: Counter[str]
    """Number of rejected layouts by reason."""
    candidates: list[Candidate]
    """Layouts that remain to be evaluated with offloading; empty in the result of a search."""

    @property
    def pareto(self) -> list[Evaluation]:
        """The layouts for which no other layout is both faster and smaller in memory, the fastest
        layout first."""
        front: list[Evaluation] = []
        for evaluation in sorted(self.evaluations, key=lambda e: e[:2]):
            if not front or evaluation.memory < front[-1].memory:
                front.append(evaluation)
        return front


def search(
    config: Config,
    world_size: int,
    space: Space,
    memory: Callable[[Layout], int],
    time: Callable[[Layout], float],
    checks: LayoutChecks,
    limit_bytes: int | None = None,
    processes: int = 1,
    report: Callable[[int, int], object] = lambda done, total: None,
    offloaded: OffloadedLayouts | None = None,
) -> Ranking:
    """Evaluate all layouts of a space.

    Args:
        config: The configuration. Settings that are not in `Layout` apply to all layouts.
        world_size: Number of ranks.
        space: The values to combine.
        memory: Function that returns the bytes of a layout on the fullest rank. If it raises
            ConfigError, the layout is rejected.
        time: Function that returns the time of a step of a layout. If it raises ConfigError, the
            layout is rejected.
        checks: Checks of the layouts of `config`.
        limit_bytes: Memory of a rank; None for no limit.
        processes: Number of processes that evaluate the layouts. The result does not depend on this
            number.
        report: Function that is called with the number of evaluated layouts and the number of all
            layouts, before the first evaluation and regularly during the search.
        offloaded: The layouts with offload.mode = "auto"; None if `config` has another mode.

    Raises:
        OptimusError: A process that evaluates layouts has ended without a result.
        ConfigError: `config` has no train.seq_len or no train.global_batch_tokens; offload.mode is
            "manual"; or a pattern of optim.groups or optim.frozen matches no parameter.
    """
    for key in ("seq_len", "global_batch_tokens"):
        refuse_if(
            not getattr(config.train, key),
            f"train.{key} = 0: a search compares steps with the same number of tokens, so it needs "
            f"this value; set train.{key}",
        )
    refuse_if(
        config.offload.mode == "manual",
        "offload.mode = 'manual': a search chooses the placement of the states; set offload.mode = "
        "'auto', or 'off' for layouts with all states on the device",
    )
    check_names(config.optim, config.model)
    meshes = [
        (pp, world_size // (pp * ep * tp), ep, tp)
        for pp, ep, tp in itertools.product(space.pp, space.ep, space.tp)
        if world_size % (pp * ep * tp) == 0
    ]
    inner = math.prod(map(len, (space.microbatch_sizes, space.recompute, space.states)))
    ranking = Ranking([], Counter(), [])
    if others := len(space.pp) * len(space.ep) * len(space.tp) - len(meshes):
        reason = "parallel.pp * ep * tp does not divide the number of ranks"
        ranking.rejected[reason] = others * len(space.schedules) * inner
    evaluate = partial(_evaluate, space, memory, time, checks, limit_bytes, offloaded)
    # Meshes with the same ep and tp have the same profiles of activations.
    meshes.sort(key=lambda mesh: (mesh[2:], mesh[0]))
    groups = [[*group] for _, group in itertools.groupby(meshes, key=lambda mesh: mesh[2:])]
    shares: list[list[tuple[int, int, int, int]]] = [[] for _ in range(processes)]
    for group in sorted(groups, key=len, reverse=True):
        min(shares, key=len).extend(group)
    done = ranking.rejected.total()
    total = done + len(meshes) * len(space.schedules) * inner

    def add(count: int) -> None:
        nonlocal done
        done += count
        report(done, total)

    add(0)
    evaluate_all = _in_processes if processes > 1 else _in_this_process
    for result in evaluate_all(evaluate, shares, add):
        _add_result(ranking, result)
    if offloaded is not None:
        _evaluate_candidates(ranking, offloaded, evaluate_all)
    ranking.evaluations.sort(key=_rank_key)
    return ranking


def _add_result(ranking: Ranking, result: Ranking) -> None:
    ranking.evaluations.extend(result.evaluations)
    ranking.rejected.update(result.rejected)
    ranking.candidates.extend(result.candidates)


MOST_PLACEMENTS = 48
"""Maximum number of layouts for which a search looks for a placement with offloading."""
_AT_ONCE = 4
"""Number of layouts that are evaluated with offloading before the best time is updated. This number
is fixed, so that the result does not depend on the number of processes."""


def _evaluate_candidates(
    ranking: Ranking, offloaded: OffloadedLayouts, evaluate_all: Callable[..., list[Ranking]]
) -> None:
    """Evaluate the candidates of a ranking with offloading, and remove them from `candidates`."""
    candidates = [*ranking.candidates]
    ranking.candidates.clear()
    best_s, number = min((e.time for e in ranking.evaluations), default=math.inf), 0
    if candidates:
        most = counted(min(len(candidates), MOST_PLACEMENTS), "layout")
        logger.info("evaluating at most %s with offloading", most)
    while candidates:
        slower = [c for c in candidates if c.least_s >= best_s]
        ranking.rejected[_SLOWER] += len(slower)
        candidates = [c for c in candidates if c.least_s < best_s]
        if best_s == math.inf:  # no layout fits so far; `least_s` does not show which layouts fit
            candidates.sort(key=lambda c: (c.activations, c))
        else:
            candidates.sort()
        chosen = candidates[: min(_AT_ONCE, MOST_PLACEMENTS - number)]
        if not chosen:
            break
        candidates, number = candidates[len(chosen) :], number + len(chosen)
        evaluate = partial(_evaluate_offloaded, offloaded)
        for result in evaluate_all(evaluate, [[c] for c in chosen], lambda count: None):
            _add_result(ranking, result)
        best_s = min((e.time for e in ranking.evaluations), default=math.inf)
    ranking.rejected[_TOO_MANY] += len(candidates)
    for reason in (_SLOWER, _TOO_MANY):
        ranking.rejected[reason] or ranking.rejected.pop(reason)


TOO_LARGE = "more memory than a rank has"
"""Reason in `Ranking.rejected`, as are the texts below."""
_SLOWER = f"{TOO_LARGE}, and with offloading slower than the best layout"
_IMPOSSIBLE = f"{TOO_LARGE}, and with offloading {{}} do not fit"
_ONE_RANK = f"{TOO_LARGE}, and all values of optim.sharding are equal with a single data rank"
_TOO_MANY = f"{TOO_LARGE}, and offloading is evaluated for {MOST_PLACEMENTS} layouts at most"
_EQUAL = f"{TOO_LARGE}, and offloading is evaluated with optim.resident = 'all'"


def _evaluate_offloaded(
    offloaded: OffloadedLayouts, candidates: Sequence[Candidate], report: _Report
) -> Ranking:
    result = Ranking([], Counter(), [])
    for candidate in candidates:
        try:
            evaluation = *offloaded.evaluate(candidate.layout), candidate.layout
            result.evaluations.append(Evaluation(*evaluation))
        except ConfigError as error:
            result.rejected[reason_of(error)] += 1
    return result


def _rank_key(evaluation: Evaluation) -> tuple:
    layout = evaluation.layout
    resident = ("all", "parameters", "cache").index(layout.resident)
    return evaluation.time, layout.pp * layout.ep * layout.tp, resident, *evaluation[1:]


def _evaluate(
    space: Space,
    memory: Callable[[Layout], int],
    time: Callable[[Layout], float],
    checks: LayoutChecks,
    limit_bytes: int | None,
    offloaded: OffloadedLayouts | None,
    meshes: Sequence[tuple[int, int, int, int]],
    report: _Report,
) -> Ranking:
    """Evaluate the layouts of `meshes`. The result is not sorted. `report` is called with the
    number of layouts that were evaluated since the previous call."""
    rejected: Counter[str] = Counter()
    evaluations: list[Evaluation] = []
    candidates: list[Candidate] = []
    inner = list(itertools.product(space.microbatch_sizes, space.recompute, space.states))
    one_sharding = min((sharding for sharding, resident in space.states if resident == "all"))
    for mesh, schedule in itertools.product(meshes, space.schedules):
        if refusal := checks.refusal_of_mesh(Layout(*mesh, *schedule, 1, (), "none", "all")):
            rejected[refusal] += len(inner)
            report(len(inner))
            continue
        for size, modules, states in inner:
            layout = Layout(*mesh, *schedule, size, modules, *states)
            if refusal := checks.refusal(layout):
                rejected[refusal] += 1
                continue
            try:
                used = memory(layout)
                if limit_bytes is None or used <= limit_bytes:
                    evaluations.append(Evaluation(time(layout), used, layout))
                elif offloaded is None:
                    rejected[TOO_LARGE] += 1
                # With offloading, optim.resident has no effect on chunks on the host.
                elif layout.resident != "all":
                    rejected[_EQUAL] += 1
                elif refusal := checks.refusal(layout._replace(offload="auto")):
                    rejected[refusal] += 1
                elif layout.dp * layout.ep == 1 and layout.sharding != one_sharding:
                    rejected[_ONE_RANK] += 1
                elif isinstance(candidate := offloaded.candidate(layout), Candidate):
                    candidates.append(candidate)
                else:
                    rejected[_IMPOSSIBLE.format(candidate)] += 1
            except ConfigError as error:
                rejected[reason_of(error)] += 1
        report(len(inner))
    return Ranking(evaluations, rejected, candidates)


def _in_this_process(
    evaluate: Callable[[_Share, _Report], Ranking], shares: Sequence[_Share], report: _Report
) -> list[Ranking]:
    return [evaluate(share, report) for share in shares]


def _in_processes(
    evaluate: Callable[[_Share, _Report], Ranking], shares: Sequence[_Share], report: _Report
) -> list[Ranking]:
    """Return the result of `evaluate` for each element of `shares`, in the same order. Each element
    is evaluated in a separate process.

    Raises:
        OptimusError: A process has ended without a result.
    """
    context = multiprocessing.get_context("fork")  # `evaluate` cannot be pickled
    results: dict[int, Ranking] = {}
    processes: dict[Connection, Any] = {}
    try:
        for share in shares:
            receiver, sender = context.Pipe(duplex=False)
            arguments = evaluate, share, sender, [*processes, receiver]
            process = context.Process(target=_send, args=arguments, daemon=True)
            process.start()
            sender.close()
            processes[receiver] = process
        receivers = [*processes]
        while len(results) < len(shares):
            waiting = [r for index, r in enumerate(receivers) if index not in results]
            ready = wait(waiting)
            for receiver in waiting:
                if receiver not in ready:
                    continue
                message = _receive(receiver, processes[receiver])
                if isinstance(message, int):
                    report(message)
                else:
                    results[receivers.index(receiver)] = message
    finally:
        for process in processes.values():
            process.kill()
            process.join()
    return [results[index] for index in range(len(shares))]


def _receive(receiver: Connection, process: Any) -> int | Ranking:
    """Return the next message of a process. Raise the exception that the process sends, or
    OptimusError if the process has ended without a result."""
    try:
        message = receiver.recv()
    except (EOFError, OSError):
        process.join()
        code = process.exitcode
        if code >= 0:
            raise OptimusError(
                f"a process of the search ended with exit status {code}; its error is above"
            ) from None
        raise OptimusError(
            f"a process of the search ended (signal {-code}, probably out of memory); use fewer "
            "nodes, or run the search on a machine with more memory"
        ) from None
    if isinstance(message, Exception):
        raise message
    return message


def _send(
    evaluate: Callable[[_Share, _Report], Ranking],
    share: _Share,
    sender: Connection,
    receivers: Sequence[Connection],
) -> None:
    """Evaluate `share`, the meshes or candidates of this process. Send to the first process the
    numbers of evaluated layouts, then the result or the exception. Each process of `_in_processes`
    runs this function."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # the first process prints the message
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    # If these connections stayed open, `send` would not fail after the first process has ended.
    for receiver in receivers:
        receiver.close()
    message: Any
    try:
        message = evaluate(share, sender.send)
    except Exception as error:
        error.add_note(traceback.format_exc())  # pickle does not keep the traceback
        message = error
        try:
            pickle.loads(pickle.dumps(error))
        except Exception:  # pickle cannot restore some exceptions
            message = RuntimeError(traceback.format_exc())
    with contextlib.suppress(BrokenPipeError):  # the first process has ended
        sender.send(message)


class FittingLayout(NamedTuple):
    """A layout that fits on a machine and differs in few settings from a configuration that does
    not fit."""

    changes: dict[str, Any]
    """A dict from the keys of the settings that differ, such as "optim.sharding", to the values of
    the layout."""
    evaluation: Evaluation

    def __str__(self) -> str:
        """Return the changes as overrides `section.key=value`."""
        return " ".join(f"{key}={override(value)}" for key, value in self.changes.items())


def nearest_fitting(
    config: Config,
    machine: Machine,
    nodes: int,
    limit: int = 3,
    profiled: Profiled | None = None,
) -> Iterator[FittingLayout]:
    """Yield layouts that fit on nodes of a machine and differ little from a configuration.

    Layouts with fewer changed settings come first. Layouts with the same number of changes are
    sorted by time. parallel.dp is determined by the other axes and is not counted. At most
    `_MOST_CHANGES` settings differ; if no such layout fits, nothing is yielded. Layouts with more
    changes are evaluated only when the caller requests the next layout.

    Args:
        config: The configuration, with its global batch.
        machine: The machine, with the memory of its device. If its file has no rates for the dtype
            of the run, layouts are sorted by `ComputeBound`.
        nodes: Number of nodes.
        limit: Maximum number of layouts.
        profiled: Known profiles of segments, to which this function adds the profiles that it
            computes.
    """
    assert machine.device is not None, "the machine has no device"
    checks = LayoutChecks(config)
    memory_bytes = int(machine.device.memory_bytes.value)
    profiled = Profiled() if profiled is None else profiled
    memory = LayoutMemory(config, checks, memory_bytes, profiled)
    time: Callable[[Layout], float] = ComputeBound(config, checks)
    if config.train.dtype in machine.device.products and machine.device.memory_rate is not None:
        time = StepSeconds(config, checks, rates_of(machine, config.train.dtype), profiled)
    world_size = nodes * machine.ranks_per_node
    present = layout_of(config, world_size)
    space = space_of(config, world_size)
    num_fitting = 0
    for count in range(1, _MOST_CHANGES + 1):
        fitting = []
        for layout in _changed_layouts(present, space, world_size, count):
            if checks.refusal_of_mesh(layout) or checks.refusal(layout):
                continue
            with contextlib.suppress(ConfigError):
                if (used := memory(layout)) <= memory_bytes:
                    fitting.append(Evaluation(time(layout), used, layout))
        fitting.sort(key=_rank_key)
        for evaluation in fitting[: limit - num_fitting]:
            yield FittingLayout(layout_changes(present, evaluation.layout), evaluation)
        num_fitting += len(fitting)
        if num_fitting >= limit or (num_fitting and count > 1):
            return


_MOST_CHANGES = 3
"""Maximum number of settings that differ in a result of `nearest_fitting`."""


def _changed_layouts(
    present: Layout, space: Space, world_size: int, count: int
) -> Iterator[Layout]:
    """Yield the layouts of a space that differ from `present` in `count` settings."""
    values: list[Sequence[tuple[tuple[str, Any], ...]]] = [
        [(("pp", pp),) for pp in space.pp],
        [(("ep", ep),) for ep in space.ep],
        [(("tp", tp),) for tp in space.tp],
        [(("schedule", s), ("virtual_stages", v)) for s, v in space.schedules],
        [(("microbatch_size", size),) for size in space.microbatch_sizes],
        [(("recompute", modules),) for modules in space.recompute],
        [(("sharding", s), ("resident", r)) for s, r in space.states],
    ]
    for chosen in itertools.chain(
        *(itertools.combinations(values, n) for n in range(1, count + 1))
    ):
        for settings in itertools.product(*chosen):
            layout = present._replace(**dict(itertools.chain(*settings)))
            if world_size % (layout.pp * layout.ep * layout.tp):
                continue
            data = world_size // (layout.pp * layout.ep * layout.tp)
            layout = layout._replace(dp=data)
            differs = sum(
                a != b
                for name, a, b in zip(Layout._fields, present, layout, strict=True)
                if name != "dp"
            )
            each = all(any(getattr(present, k) != v for k, v in of_key) for of_key in settings)
            if differs == count and each:
                yield layout
