"""Tests of `optimus status`. Another user can have written the ledger that the command reads."""

from __future__ import annotations

import signal
import subprocess
import sys
import time

import pytest

from optimus.io.workspace import Workspace
from optimus.resilience.supervision.ledger import (
    AttemptEnded,
    AttemptStarted,
    History,
    Ledger,
    NodeMarked,
    Progress,
    SupervisorStarted,
    VerdictReached,
)
from optimus.resilience.supervision.status import format_status, goodput, read_status


def started(at):
    return SupervisorStarted(time=at, host="a", pid=1, job="", nodes=("a",), settings="")


def attempt(at, number):
    return AttemptStarted(time=at, attempt=number, nodes=("a",), ranks_per_node=1, port=1)


def test_uses_of_time_add_up():
    phases = {"start": 2.0, "load": 1.0, "update": 4.0}
    failed = AttemptEnded(time=20, attempt=1, outcome="failed", step=4, updates=4, seconds=phases)
    done = AttemptEnded(time=60, attempt=2, outcome="done", step=8, updates=8, seconds=phases)
    verdict = VerdictReached(time=30, verdict="continue", reason="", status=3)
    last = verdict.model_copy(update={"time": 61.0, "verdict": "done"})
    events = [started(10), attempt(12, 1), started(15), failed, verdict]
    events += [started(40), attempt(41, 2), done, last]
    uses = goodput(History(events), now=100)
    assert sum(uses.values()) == pytest.approx(51)
    assert uses["repeated"] == uses["step"] == 4  # the failed attempt saved no checkpoint
    assert uses["queue"] == 10 and uses["load"] == 2
    assert uses["start"] == 2 + 2 + (30 - 20) + (41 - 40) + 2 + (61 - 60)
    running = goodput(History([started(10), attempt(12, 1)]), now=20)
    assert running["start"] == 2 and running["step"] == 8


def test_days_without_a_job_are_no_detection():
    """A job was killed with all its processes, and another job continues the run two days later.
    The two days must count as time in the queue, not as time to detect the failure."""

    def reached(at, milestone, step):
        return Progress(time=at, attempt=1, milestone=milestone, step=step)

    two_days = 172_800.0
    events = [started(10), attempt(12, 1), reached(20, "first update", 1)]
    events += [reached(50, "checkpoint", 9), started(two_days)]
    events.append(AttemptEnded(time=two_days + 1, attempt=1, outcome="interrupted", step=0))
    uses = goodput(History(events), now=two_days + 4)
    assert sum(uses.values()) == pytest.approx(two_days + 4 - 10)
    assert uses["start"] == 2 + 8 + 3 and uses["step"] == 30 and uses["detection"] == 0
    assert uses["queue"] == pytest.approx(two_days + 1 - 50)


def test_status_of_a_run_without_events_for_hours_says_so(tmp_path):
    ledger = Ledger(tmp_path, Workspace.open(tmp_path / ".supervisor"))
    for event in (started(10), attempt(12, 1)):
        ledger.add(event)
    ledger.close()
    assert "last event" not in format_status(read_status(tmp_path, now=3000.0))
    text = format_status(read_status(tmp_path, now=12.0 + 2 * 3600))
    assert "last event  120 min ago; if the run has no job any more, submit it again" in text


def test_closed_output_ends_watching(tmp_path):
    ledger = Ledger(tmp_path, Workspace.open(tmp_path / ".supervisor"))
    ledger.add(started(10))
    ledger.close()
    command = [sys.executable, "-P", "-m", "optimus.cli", "status", str(tmp_path), "--watch"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as watching:
        assert watching.stdout is not None and watching.stderr is not None
        assert watching.stdout.readline()
        watching.stdout.close()
        assert watching.wait(30) == 128 + signal.SIGPIPE and not watching.stderr.read()


def test_status_of_a_long_ledger_is_quick():
    events = [started(number) for number in range(3000)]
    start = time.process_time()
    goodput(History(events), now=2)
    assert time.process_time() - start < 1


def test_control_characters_of_the_ledger_are_not_printed(tmp_path):
    ledger = Ledger(tmp_path, Workspace.open(tmp_path / ".supervisor"))
    text = "\x1b]0;title\x07\ntwo"
    ledger.add(started(1))
    ledger.add(NodeMarked(time=2, node=f"node{text}", standing="excluded", reason=text))
    ledger.add(VerdictReached(time=3, verdict="stop", reason=text, status=6))
    ledger.close()
    printed = format_status(read_status(tmp_path))
    assert "\x1b" not in printed and len(printed.splitlines()) == 7
