"""Tests of `optimus status`, for ledgers that another user may have written."""

from __future__ import annotations

import time

import pytest

from optimus.io.workspace import Workspace
from optimus.resilience.supervision.ledger import (
    AttemptEnded,
    AttemptStarted,
    History,
    Ledger,
    NodeMarked,
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
