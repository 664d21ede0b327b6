"""`optimus status`: the state of a supervised run, read from the files of the run.

The command works on a login node, with or without a running supervisor. This module does not import
torch.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from optimus.checkpoint import store
from optimus.errors import ConfigError, counted, printable
from optimus.resilience.supervision.ledger import (
    LEDGER,
    AttemptEnded,
    AttemptStarted,
    History,
    Progress,
    SupervisorStarted,
    VerdictReached,
    read_history,
)

CATEGORIES = ("step", "repeated", "save", "start", "load", "detection", "queue")
"""Categories into which the time of a run is divided. step: evaluations, and updates whose results
were kept. repeated: updates that a later attempt computed again. save, load: saving and loading the
states. start: from the launch of an attempt to its first update, without load. detection: from the
end of the last complete phase to the end of the attempt. queue: between two jobs. If an attempt
ended together with its job, the time after the attempt's last event in the ledger also belongs to
queue, because no later time is known."""


_QUIET_S = 3600.0
"""If the last event is older than this number of seconds, `format_status` prints the event's age,
because the job may have ended."""


def goodput(history: History, now: float) -> dict[str, float]:
    """Return the seconds that a run has spent in each of CATEGORIES.

    The sum of the seconds is the time from the first event of the run to `now`.

    Args:
        history: The state of the run.
        now: Unix time. After a verdict, the time of the verdict is used instead.
    """
    seconds = dict.fromkeys(CATEGORIES, 0.0)
    events = history.events
    if not events:
        return seconds
    at, category, committed = events[0].time, "start", 0
    is_idle = True  # no attempt runs
    milestones: list[Progress] = []
    for event in events:
        if isinstance(event, Progress):
            milestones.append(event)
        elif isinstance(event, AttemptEnded):
            if event.outcome == "interrupted" and not event.seconds:
                _add_interrupted(seconds, milestones, at, event.time)
            else:
                newest = max(committed, history.checkpoints.get(event.attempt, 0))
                # No later attempt repeats the updates of an attempt that is done.
                kept = event.step if event.outcome == "done" else newest
                _add_attempt(seconds, event, event.time - at, kept)
            milestones = []
            committed = max(committed, history.checkpoints.get(event.attempt, 0))
            at, category, is_idle = event.time, "start", True
        elif isinstance(event, (AttemptStarted, SupervisorStarted, VerdictReached)):
            if is_idle:
                seconds[category] += event.time - at
                at = event.time
                category = "queue" if isinstance(event, VerdictReached) else "start"
            is_idle = is_idle and not isinstance(event, AttemptStarted)
    end = max(now, at) if history.verdict is None else at
    running = history.running
    seconds["step" if running is not None else category] += end - at
    return seconds


def _add_interrupted(
    seconds: dict[str, float], milestones: Sequence[Progress], began: float, ended: float
) -> None:
    """Add to `seconds` the time of a launch attempt whose ranks ended without a report.

    A milestone is the first update or a checkpoint. The time after the last milestone is added to
    the category `queue`, because the true end of the attempt is unknown: a later supervisor may
    have stored `ended`, perhaps days later.
    """
    times = [began, *(milestone.time for milestone in milestones)]
    first = times[1] if milestones else began
    seconds["start"] += first - began
    seconds["step"] += times[-1] - first
    seconds["queue"] += ended - times[-1]


def _add_attempt(
    seconds: dict[str, float], end: AttemptEnded, wall_s: float, kept_step: int
) -> None:
    """Divide the time `wall_s` of a launch attempt into categories, and add it to `seconds`.
    `kept_step` is the last step whose update no later attempt repeats."""
    phases = dict(end.seconds)
    updates = phases.get("update", 0.0)
    repeated = min(end.updates, max(0, end.step - kept_step))
    lost = updates * repeated / end.updates if end.updates else 0.0
    shares = {
        "repeated": lost,
        "step": updates - lost + phases.get("evaluation", 0.0),
        "save": phases.get("save", 0.0),
        "load": phases.get("load", 0.0),
        "start": phases.get("start", 0.0),
    }
    for name, value in shares.items():
        seconds[name] += value
    seconds["detection"] += wall_s - sum(shares.values())


def read_status(run_dir: Path, now: float | None = None) -> dict[str, Any]:
    """Return the state of a run as a dict for JSON output.

    Raises:
        ConfigError: The run has no ledger, or the ledger is damaged.
    """
    if not (run_dir / LEDGER).exists():
        raise ConfigError(
            f"{run_dir}: no supervised run here ({LEDGER} is missing); name the run directory of "
            "optimus launch"
        )
    history = read_history(run_dir)
    now = time.time() if now is None else now
    uses, running = goodput(history, now), history.running
    total = sum(uses.values())
    last = history.attempts[-1] if history.attempts else None
    checkpoints = store.find_all(run_dir)
    names = [path.name for path in checkpoints if path.name.startswith("step-")]
    return {
        "run_dir": str(run_dir),
        "last_event_s": round(max(0.0, now - history.events[-1].time), 1)
        if history.events
        else None,
        "state": "running" if running else (history.verdict.verdict if history.verdict else "idle"),
        "reason": history.verdict.reason if history.verdict else "",
        "attempt": last.attempt if last else 0,
        "nodes": list(last.nodes) if last else [],
        "standings": {node: history.standing(node) for node in sorted(history.standings)},
        "failures": [
            {
                "attempt": end.attempt,
                "step": end.step,
                "failure": end.failure,
                "nodes": list(end.nodes),
                "evidence": list(end.evidence),
            }
            for end in history.failures()
        ],
        "checkpoint": max(names, default=None),
        "next": _next_decision(history),
        "next_job": history.next_job.job if history.next_job else "",
        "next_job_problem": history.next_job.problem if history.next_job else "",
        "seconds": {name: round(value, 3) for name, value in uses.items()},
        "total_s": round(total, 3),
        "goodput": round(uses["step"] / total, 4) if total > 0 else None,
    }


def _next_decision(history: History) -> str:
    """Return a phrase that describes the next event of the run, according to its files."""
    if history.verdict is not None:
        return {
            "done": "nothing: the run is complete",
            "continue": "the next job, or the same command in another job, continues the run",
            "stop": "the run waits for the user",
        }[history.verdict.verdict]
    if history.running is not None:
        return "the supervisor waits for the end or a failure of the attempt"
    return "the supervisor starts an attempt; without a supervisor, run the same command again"


def format_status(status: dict[str, Any]) -> str:
    """Format the result of `read_status` as the text that `optimus status` prints."""
    nodes = ", ".join(status["nodes"]) or "none"
    lines = [
        f"{status['run_dir']}: {status['state']}"
        + (f" ({status['reason']})" if status["reason"] else ""),
        f"  attempt     {status['attempt']} on {nodes}",
        f"  checkpoint  {status['checkpoint'] or 'none'}",
        f"  next        {status['next']}",
    ]
    if status["state"] == "running" and status["last_event_s"] > _QUIET_S:
        minutes = status["last_event_s"] / 60
        lines.append(
            f"  last event  {minutes:,.0f} min ago; if the run has no job any more, submit it again"
        )
    if status["next_job"]:
        lines.append(f"  next job    {status['next_job']}")
    elif status["next_job_problem"]:
        lines.append(f"  next job    none: {status['next_job_problem']}")
    for node, standing in status["standings"].items():
        lines.append(f"  {node}  {standing}")
    for failure in status["failures"][-5:]:
        evidence = "; ".join(failure["evidence"][:2])
        lines.append(f"  attempt {failure['attempt']} failed at step {failure['step']}: {evidence}")
    uses = [f"{name} {value:.1f}" for name, value in status["seconds"].items() if value >= 0.05]
    share = f", {status['goodput']:.1%} of it in steps" if status["goodput"] is not None else ""
    lines.append(f"  time        {status['total_s']:.1f} s{share}: {', '.join(uses)} s")
    number = len(status["failures"])
    lines.append(f"  failures    {counted(number, 'failed attempt') if number else 'none'}")
    return "\n".join(map(printable, lines))
