"""`optimus bench supervision`: measures figures of supervised runs, such as the time to restart.

Each figure (a measured value) has a bar, which is the limit for this value. This module launches
runs of a tiny model on emulated nodes, and causes failures at random times. The module reads the
times of detection and restart from the ledger, in which the supervisor records events, and the
times of the ranks' start-up phases from reports of the ranks. The module does not import torch
until the NaN check is measured.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import platform as python_platform
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from optimus.bench.launches import Launch, Shape, kill, make_data, tiny_config
from optimus.bench.probe import Plan
from optimus.config import Config
from optimus.config.sections import ResilienceConfig
from optimus.errors import ConfigError, OptimusError, counted, refuse_if
from optimus.launch.environment import available_cores
from optimus.launch.spawn import prepare_rank
from optimus.resilience.supervision.ledger import (
    AttemptEnded,
    History,
    NodeMarked,
    SupervisorStarted,
)

FIGURES = ("faults", "cold", "files", "nan-check", "false-alarms")
"""Names of the figures that the option `--only` accepts."""
EXITS = ("kill", "segv", "exit", "error", "nan")
"""Faults of one rank. kill: SIGKILL. segv: SIGSEGV. exit: a library ends the process. error: an
OSError. nan: a NaN in the output of a block."""
SILENCES = ("power", "freeze", "cut")
"""Faults of a node. power: all processes of the node are killed. freeze: all processes of the node
are suspended. cut: only the agent, which starts and observes the ranks, is suspended, so that the
ranks continue."""
_SIGNALS = {"kill": signal.SIGKILL, "segv": signal.SIGSEGV}
_SAVE_INTERVAL = 20
_ALARM_INTERVAL = 10
_DETECTION_S, _RIGHT, _WARM_S, _COLD_S, _NAN_SHARE = 1.0, 0.99, 4.0, 6.0, 0.01
"""Limits that the figures must meet: maximum seconds to detect a failed rank; minimum share of
faults after which the right node is excluded; maximum seconds from detection to the first update,
with and without a warm process; maximum time of the NaN check as a share of the time of an
update."""
_SILENCE_S = 1.0
"""A silent node must be detected within `resilience.heartbeat_s` plus this number of seconds."""
_SMALL, _LARGE = 2, 8
"""Numbers of nodes of two launches, whose numbers of created files are compared."""


class Options(NamedTuple):
    """The figures to measure, and the settings of the measurements."""

    figures: tuple[str, ...] = FIGURES
    nodes: int = 4
    ranks_per_node: int = 2
    rounds: int = 3
    """Number of faults of each kind."""
    updates: int = 40
    """Number of updates for the NaN check."""
    alarm_s: int = 60
    """Seconds for which a run without a failure is observed."""
    load: int = 8
    """Number of busy processes while the run without a failure is observed."""
    seed: int = 0


@dataclass(frozen=True)
class FaultResult:
    """A fault that the benchmark caused, the time to detect it, and the times of the restart."""

    kind: str
    detection_s: float
    is_right: bool
    """True if the supervisor excluded the node of the fault and did not mark another node."""
    seconds: dict[str, float]
    """Maps each phase, from the detection to the first update of the next launch attempt, to its
    duration in seconds."""
    imports_s: float
    """Longest time that a rank of the next launch attempt took from the start of its interpreter to
    the end of its imports; 0 if all ranks were forked from warm processes."""


def check(options: Options, folder: Path | None, has_config: bool) -> None:
    """Raise ConfigError if an option is invalid, or if the benchmark's directory `folder` does not
    exist. `has_config` is True if the user has given a configuration."""
    for name in options.figures:
        if name not in FIGURES:
            text = f"--only {name} is not a figure; use one of {', '.join(FIGURES)}"
            raise ConfigError(text)
    for name, least in (
        ("nodes", 2),
        ("ranks_per_node", 1),
        ("rounds", 1),
        ("updates", 20),
        ("alarm_s", 1),
        ("load", 0),
    ):
        value = getattr(options, name)
        text = f"--{name.replace('_', '-')} {value} must be at least {least}"
        refuse_if(value < least, text)
    if has_config and "nan-check" not in options.figures:
        raise ConfigError(
            "a configuration has an effect only on the NaN check; add --only nan-check, or remove "
            "the configuration"
        )
    if folder is not None and not folder.is_dir():
        raise ConfigError(f"--dir {folder}: no such directory; create it")


def bench_supervision(
    options: Options, config: Config | None = None, folder: Path | None = None
) -> dict[str, Any]:
    """Measure figures of supervised runs, such as the time to detect a failure.

    Args:
        options: Figures to measure, and settings of the measurements.
        config: Configuration of the update in which the NaN check is timed; None for a small model.
        folder: Folder for the run directories, which are removed at the end; None for the folder of
            temporary files.

    Returns:
        The conditions and the figures, for `format_supervision`.

    Raises:
        OptimusError: A launch has failed for a reason other than the faults of the benchmark.
    """
    began, load_before = time.monotonic(), os.getloadavg()[0]
    result: dict[str, Any] = {"figures": []}
    with tempfile.TemporaryDirectory(prefix="optimus-bench-", dir=folder) as name:
        work = Path(name)
        data = make_data(work) if {*options.figures} - {"nan-check"} else work
        if "faults" in options.figures:
            _measure_faults(options, work, data, result)
        if "cold" in options.figures:
            _measure_cold(options, work, data, result)
        if "files" in options.figures:
            _measure_files(work, data, result)
        if "nan-check" in options.figures:
            from optimus.bench.nan_check import measure_nan_check

            result["figures"].append(measure_nan_check(config, options.updates, _NAN_SHARE))
        if "false-alarms" in options.figures:
            _measure_false_alarms(options, work, data, result)
    from importlib.metadata import version

    return {
        "python": python_platform.python_version(),
        "torch": version("torch"),
        "cores": available_cores(),
        "load_average_before": round(load_before, 2),
        "seconds": round(time.monotonic() - began, 1),
        **options._asdict(),
        "measured": list(options.figures),
        **result,
    }


def figure(name: str, values: Sequence[float], bar: float, unit: str = "s") -> dict[str, Any]:
    """Return the statistics of `values` (see `summarise`) and a comparison with the upper limit
    `bar`, as a dict.

    `is_met` is True if the 95th percentile is at most `bar`, and None if `values` is empty. The
    95th percentile is the smallest element p of `values` for which at least 95 % of the elements
    are at most p.
    """
    spread = summarise(values)
    is_met = spread["p95"] <= bar if values else None
    return {"figure": name, "unit": unit, "bar": bar, "is_met": is_met, **spread}


def summarise(values: Sequence[float]) -> dict[str, Any]:
    """Return a dict with the median, 95th percentile, minimum, maximum and number of `values`. If
    `values` is empty, the number is 0 and the other entries are None."""
    ordered = sorted(values)
    if not ordered:
        return dict.fromkeys(("median", "p95", "min", "max")) | {"samples": 0}
    p95 = ordered[math.ceil(0.95 * len(ordered)) - 1]
    numbers = statistics.median(ordered), p95, ordered[0], ordered[-1]
    rounded = (round(number, 4) for number in numbers)
    return {
        **dict(zip(("median", "p95", "min", "max"), rounded, strict=True)),
        "samples": len(values),
    }


# -- Faults ---------------------------------------------------------------------------------------


def _measure_faults(options: Options, work: Path, data: Path, result: dict[str, Any]) -> None:
    """Cause faults. Measure the time to detect a fault and the time to restart, and check that the
    supervisor excludes the node of the fault. Add the figures to `result`.

    Each round is a launch, in which each kind of fault occurs once.
    """
    chance = random.Random(options.seed)
    faults: list[FaultResult] = []
    kinds = [*EXITS, *SILENCES]
    shape = Shape(options.nodes, len(kinds), options.ranks_per_node)
    for number in range(options.rounds):
        chance.shuffle(kinds)
        with _launch(work / f"faults-{number}", data, shape) as launch:
            faults += [_measure_fault(launch, kind, chance) for kind in kinds]
    heartbeat_s = ResilienceConfig().heartbeat_s
    exits = [fault.detection_s for fault in faults if fault.kind in EXITS]
    silences = [fault.detection_s for fault in faults if fault.kind in SILENCES]
    right = [fault.is_right for fault in faults]
    restarts = [fault.seconds for fault in faults]
    result["figures"] += [
        figure("detection of an exit or NaN", exits, _DETECTION_S),
        figure("detection of a cut, power loss or freeze", silences, heartbeat_s + _SILENCE_S),
        {
            "figure": "right node",
            "unit": "share",
            "bar": _RIGHT,
            "samples": len(right),
            "is_met": sum(right) / len(right) >= _RIGHT,
            "value": round(sum(right) / len(right), 4),
        },
        figure("detection to first update, warm", [sum(s.values()) for s in restarts], _WARM_S),
    ]
    result["detection_s"] = {
        kind: summarise([fault.detection_s for fault in faults if fault.kind == kind])
        for kind in sorted(kinds)
    }
    result["wrong_node"] = [fault.kind for fault in faults if not fault.is_right]
    result["restart_s"] = summarise_phases(restarts)


def summarise_phases(restarts: Sequence[dict[str, float]]) -> dict[str, dict[str, Any]]:
    """Return statistics (see `summarise`) of the seconds of each phase, by the name of the phase.
    Each dict in `restarts` maps the phases of one restart to their seconds."""
    names = dict.fromkeys(name for seconds in restarts for name in seconds)
    return {name: summarise([s[name] for s in restarts if name in s]) for name in names}


@contextlib.contextmanager
def _launch(
    folder: Path,
    data: Path,
    shape: Shape,
    interval: int = _SAVE_INTERVAL,
    evals: int = 0,
    **plan: Any,
) -> Iterator[Launch]:
    """Context manager that starts a launch, waits until the launch has committed its first
    checkpoint, and yields the launch."""
    config = tiny_config(data, folder / "run", shape.ranks, interval, evals)
    probe = Plan(str(folder / "bench"), str(folder / "run"), **plan)
    with Launch(config, shape, probe) as launch:
        launch.wait_for_checkpoint()
        yield launch


def _measure_fault(
    launch: Launch, kind: str, chance: random.Random, cold: bool = False
) -> FaultResult:
    """Cause a fault in the running attempt (launch of all ranks), and wait for the first update of
    the next attempt.

    Args:
        launch: The launch.
        kind: Kind of the fault.
        chance: Random generator that chooses the time, the node and the rank of the fault.
        cold: True to kill, before the fault, the warm process of the node that will replace the
            failed node.
    """
    history = launch.wait_for_checkpoint()
    attempt = history.running
    assert attempt is not None
    node = chance.choice(attempt.nodes)
    if cold:
        # Kill the warm process of the node that will replace the next failed node.
        nodes = next(e.nodes for e in history.events if isinstance(e, SupervisorStarted))
        unused = [n for n in nodes if n not in attempt.nodes and history.standing(n) == "good"]
        kill([launch.warm(unused[0])])
    time.sleep(chance.random())
    launch.remember()
    at = _inject(launch, kind, node, chance.randrange(launch.shape.ranks_per_node))
    launch.wait_until(lambda: attempt.attempt in launch.history().ends, "the end of an attempt")
    history = launch.history()
    if at is None:
        at = launch.plan.reports("fault")[-1]["time"]
    detection_s = history.ends[attempt.attempt].time - at
    report = launch.wait_until(
        lambda: next(
            (
                report
                for report in launch.plan.reports("first update")
                if report["attempt"] == attempt.attempt + 1
            ),
            None,
        ),
        "the first update of an attempt",
    )
    history = launch.history()
    with contextlib.suppress(OptimusError):  # raised if the agent has ended
        agent = launch.agent(node)
        kill([*agent.children(recursive=True), agent])
    marks = marks_after(history, attempt.attempt)
    is_right = {(mark.node, mark.standing) for mark in marks} == {(node, "excluded")}
    phases = restart_phases(history, attempt.attempt, report)
    starts = launch.plan.reports("imports")
    imports = [r["seconds"] for r in starts if r["attempt"] == attempt.attempt + 1]
    return FaultResult(kind, detection_s, is_right, phases, max(imports, default=0.0))


def _inject(launch: Launch, kind: str, node: str, local_rank: int) -> float | None:
    """Cause a fault on a node, and return the Unix time of the fault. Return None if the failing
    rank reports this time."""
    if kind in ("nan", "error", "exit"):
        running = launch.history().running
        assert running is not None
        rank = running.nodes.index(node) * running.ranks_per_node + local_rank
        file = launch.plan.fault_file
        text = json.dumps({"attempt": running.attempt, "rank": rank, "kind": kind})
        file.with_suffix(".new").write_text(text)
        file.with_suffix(".new").rename(file)
        return None
    agent, ranks = launch.agent(node), launch.ranks(node)
    processes = {"cut": [agent]}.get(kind, [agent, *agent.children(recursive=True)])
    if kind in _SIGNALS:
        processes = [ranks[local_rank]]
    at = time.time()
    kill(processes, _SIGNALS.get(kind, signal.SIGKILL if kind == "power" else signal.SIGSTOP))
    return at


def marks_after(history: History, attempt: int) -> list[NodeMarked]:
    """Return the events in which the supervisor marked a node, such as "excluded", between the end
    of a launch attempt and the start of the next attempt."""
    events = history.events
    marks: list[NodeMarked] = []
    for event in events[events.index(history.ends[attempt]) + 1 :]:
        if not isinstance(event, NodeMarked):
            break
        marks.append(event)
    return marks


def restart_phases(history: History, attempt: int, report: dict[str, Any]) -> dict[str, float]:
    """Return a dict that maps each phase, from the end of `attempt` to the end of the next
    attempt's first update, to its duration in seconds.

    Args:
        history: State of the run, with the events of its ledger.
        attempt: Number of the failed attempt.
        report: The report "first update" of the next attempt's first rank.
    """
    end = history.ends[attempt].time
    started = next(a.time for a in history.attempts if a.attempt == attempt + 1)
    marks = marks_after(history, attempt)
    killed = marks[0].time if marks else started
    phases, load_s = dict(report["phases"]), report["load_s"]
    process = report["time"] - sum(phases.values())  # start of the first rank's process
    phases["model and states"] -= load_s
    return {
        "kill": killed - end,
        "decision": started - killed,
        "start of ranks": process - started,
        **phases,
        "load": load_s,
    }


def _measure_cold(options: Options, work: Path, data: Path, result: dict[str, Any]) -> None:
    """Measure the time to restart if the replacement node has lost its warm process, which forks
    ranks. Add the figures to `result`."""
    chance = random.Random(options.seed)
    shape = Shape(options.nodes, options.rounds, options.ranks_per_node)
    with _launch(work / "cold", data, shape) as launch:
        faults = [_measure_fault(launch, "kill", chance, cold=True) for _ in range(options.rounds)]
    seconds = [sum(fault.seconds.values()) - fault.imports_s for fault in faults]
    name = "detection to first update, cold, without imports"
    result["figures"].append(figure(name, seconds, _COLD_S))
    imports = {"imports of the slowest rank": summarise([fault.imports_s for fault in faults])}
    result["cold_restart_s"] = summarise_phases([f.seconds for f in faults]) | imports


# -- Files ----------------------------------------------------------------------------------------


def _measure_files(work: Path, data: Path, result: dict[str, Any]) -> None:
    """Count the module files that ranks open if a warm process has forked the ranks, and the files
    that a launch attempt creates. Add the two counts to `result`."""
    small, large = (measure_files(work / f"files-{n}", data, n) for n in (_SMALL, _LARGE))
    opened = small.modules + large.modules
    result["figures"] += [
        _count("module files opened by a warm relaunch", len(opened), 0, _SMALL + _LARGE),
        _count(
            f"files created by an attempt with {_LARGE} nodes (bar: with {_SMALL} nodes)",
            len(large.created),
            len(small.created),
        ),
    ]
    result["opened_modules"] = sorted({*opened})
    result["opened_other"] = sorted({*small.opened})
    result["created"] = {str(_SMALL): small.created, str(_LARGE): large.created}


class Files(NamedTuple):
    """Files that were opened and created in a launch attempt whose ranks were forked by warm
    processes."""

    modules: list[str]
    """Names of modules that ranks imported, and paths of module files that ranks opened, from the
    start of a rank to the first checkpoint."""
    opened: list[str]
    """Files, except modules, that ranks opened before the end of the first update."""
    created: list[str]
    """Files and directories that any process created in the run directory, from the end of the
    previous attempt to the first update."""


def measure_files(folder: Path, data: Path, nodes: int) -> Files:
    """Launch a run on `nodes` nodes and kill a rank. Return the files that the next launch attempt
    opens and creates.

    Args:
        folder: Folder for the run directory and the files of the benchmark.
        data: The data set.
        nodes: Number of nodes, each of which has one rank.
    """
    interval = _SAVE_INTERVAL
    with _launch(folder, data, Shape(nodes, 1, 1), interval, interval, audits=True) as launch:
        _measure_fault(launch, "kill", random.Random(0))
        history, plan = launch.wait_for_checkpoint(), launch.plan
    begin, last = history.ends[1].time, plan.reports("first update")[-1]["time"]
    opened = [report for report in plan.reports("open") if report["attempt"] == 2]
    modules = [r["path"] for r in opened if is_module(r["path"])]
    modules += [r["module"] for r in plan.reports("import") if r["attempt"] == 2]
    others = [r["path"] for r in opened if r["time"] <= last and not is_module(r["path"])]
    created = [r["path"] for r in plan.reports("create") if begin < r["time"] <= last]
    return Files(modules, others, sorted(created))


def is_module(path: str) -> bool:
    """Return True if a path has the suffix of a Python module or an extension module.

    The result is False for the library of compiled kernels (liboptimus*). Each rank opens this
    library to check that the file has not changed since the rank's parent process loaded it.
    """
    return path.endswith((".py", ".pyc", ".so")) and not Path(path).name.startswith("liboptimus")


def _count(
    name: str, value: int, bar: int, samples: int = 1, unit: str = "files"
) -> dict[str, Any]:
    figure = {"figure": name, "unit": unit, "bar": bar, "is_met": value <= bar}
    return {**figure, "value": value, "samples": samples}


# -- False alarms ---------------------------------------------------------------------------------


def _measure_false_alarms(options: Options, work: Path, data: Path, result: dict[str, Any]) -> None:
    """Observe a run without faults on a busy machine, count the failures that the supervisor
    reports, and add the count to `result`. Some saves take ten times the median time of a save, and
    some evaluations ten times the median time of an evaluation."""
    shape = Shape(options.nodes, 1, options.ranks_per_node)
    slow = {"slowdown": 10.0, "save_interval": _ALARM_INTERVAL, "eval_interval": _ALARM_INTERVAL}
    with (
        _launch(work / "alarms", data, shape, _ALARM_INTERVAL, _ALARM_INTERVAL, **slow) as launch,
        _busy(options.load),
    ):
        end = time.monotonic() + options.alarm_s
        load = 0.0
        while time.monotonic() < end and launch.history().verdict is None:
            launch.check_running("the end of the observation")
            time.sleep(1.0)
            load = max(load, os.getloadavg()[0])
        history, plan = launch.history(), launch.plan
        alarms = [e for e in history.events if isinstance(e, (AttemptEnded, NodeMarked))]
        slow_calls = {kind: len(plan.reports(f"slow {kind}")) for kind in ("save", "evaluation")}
    name = f"false alarms in {options.alarm_s:.0f} s"
    count = _count(name, len(alarms), 0, unit="")
    if not alarms and not all(slow_calls.values()):  # observed for too short a time
        count["is_met"] = None
    result["figures"].append(count)
    result["false_alarms"] = {
        "events": [event.model_dump() for event in alarms],
        "slow_saves": slow_calls["save"],
        "slow_evaluations": slow_calls["evaluation"],
        "greatest_load_average": round(load, 2),
    }


@contextlib.contextmanager
def _busy(number: int) -> Iterator[None]:
    """Context manager that runs `number` processes, which compute without a pause."""
    command = [sys.executable, "-I", "-S", "-c", "while True: pass"]
    processes: list[subprocess.Popen[bytes]] = []
    try:
        for _ in range(number):
            begin = partial(prepare_rank, os.getpid())
            processes.append(subprocess.Popen(command, preexec_fn=begin))
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


# -- Text -----------------------------------------------------------------------------------------


def format_supervision(result: dict[str, Any]) -> str:
    """Return the result of `bench_supervision` as Markdown."""
    lines = [
        f"Python {result['python']}, torch {result['torch']}, {counted(result['cores'], 'core')}, "
        f"load average {result['load_average_before']} before; {result['nodes']} nodes x "
        f"{counted(result['ranks_per_node'], 'rank')}, {counted(result['rounds'], 'round')}, "
        f"{result['seconds']:.0f} s",
        "",
        "| figure | bar | p95 or value | median | least to greatest | samples | met |",
        "|---|---|---|---|---|---|---|",
    ]
    for entry in result["figures"]:
        value = entry["p95"] if "p95" in entry else entry["value"]
        spread = f"{_text(entry['min'])} to {_text(entry['max'])}" if "min" in entry else ""
        met = {True: "yes", False: "no", None: "not decidable here"}[entry["is_met"]]
        lines.append(
            f"| {entry['figure']} | {_text(entry['bar'])} {entry['unit']} | {_text(value)} | "
            f"{_text(entry.get('median'))} | {spread} | {entry['samples']} | {met} |"
        )
    for key, title in (
        ("detection_s", "detection"),
        ("restart_s", "detection to first update, warm"),
        ("cold_restart_s", "detection to first update, cold"),
    ):
        if key in result:
            lines += ["", f"| {title}, s | median | p95 | greatest |", "|---|---|---|---|"]
            for name, spread in result[key].items():
                texts = " | ".join(_text(spread[column]) for column in ("median", "p95", "max"))
                lines.append(f"| {name} | {texts} |")
    if result.get("wrong_node"):
        lines += [
            "",
            f"the wrong node or no node was excluded after: {', '.join(result['wrong_node'])}",
        ]
    if result.get("opened_modules"):
        lines += ["", f"a warm relaunch opened or imported: {', '.join(result['opened_modules'])}"]
    if alarms := result.get("false_alarms"):
        text = (
            f"without a failure: {counted(alarms['slow_saves'], 'slow save')}, "
            f"{counted(alarms['slow_evaluations'], 'slow evaluation')}, greatest load average "
            f"{alarms['greatest_load_average']}"
        )
        lines += ["", text]
    return "\n".join(lines)


def _text(value: float | None) -> str:
    return "" if value is None else f"{value:.3f}".rstrip("0").rstrip(".")
