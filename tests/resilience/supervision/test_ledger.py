"""Tests of the ledger: durability, damage, and supervisors that take over."""

from __future__ import annotations

import json
import os

import pytest

from optimus.errors import ConfigError
from optimus.io import files
from optimus.io.workspace import Workspace
from optimus.resilience.supervision.ledger import (
    LEDGER,
    NODES,
    AttemptEnded,
    AttemptStarted,
    Ledger,
    NodeMarked,
    Progress,
    SupervisorStarted,
    VerdictReached,
    read_history,
)

EVENTS = [
    SupervisorStarted(time=1, host="a", pid=7, job="12", nodes=("a", "b", "c"), settings="f0"),
    AttemptStarted(time=2, attempt=1, nodes=("a", "b"), ranks_per_node=2, port=29500),
    Progress(time=3, attempt=1, milestone="checkpoint", step=4),
    AttemptEnded(time=4, attempt=1, outcome="failed", step=5, failure="hard", nodes=("b",)),
    NodeMarked(time=5, node="b", standing="excluded", reason='SIGSEGV: "\n\u2028"'),
    AttemptStarted(time=6, attempt=2, nodes=("a", "c"), ranks_per_node=2, port=29501),
]


def open_ledger(run_dir):
    return Ledger(run_dir, Workspace.open(run_dir / ".supervisor"))


def write(run_dir, events=EVENTS):
    ledger = open_ledger(run_dir)
    for event in events:
        ledger.add(event)
    ledger.close()
    return (run_dir / LEDGER).read_text()


def test_history_is_the_same_after_it_is_read_again(tmp_path):
    write(tmp_path)
    history = read_history(tmp_path)
    assert history.events == EVENTS and history.job == "12" and history.first_of_job == 0
    assert history.running == EVENTS[-1] and history.failures() == [EVENTS[3]]
    assert history.standing("b") == "excluded" and history.standing("a") == "good"
    assert history.checkpoints == {1: 4}
    summary = json.loads((tmp_path / NODES).read_text())
    assert summary["nodes"]["b"]["standing"] == "excluded" and summary["verdict"] is None
    assert summary["attempt"] == 2


def test_job_of_a_run_begins_at_another_job_or_after_a_verdict(tmp_path):
    write(tmp_path)
    start = EVENTS[0]
    for events, attempts in (
        ([start], 2),  # the supervisor was killed, and continues
        ([start.model_copy(update={"job": "13"})], 0),
        ([VerdictReached(time=7, verdict="continue", reason="", status=3), start], 0),
    ):
        write(tmp_path, events)
        history = read_history(tmp_path)
        assert len(history.attempts) - history.first_of_job == attempts
        assert history.verdict is None
        os.unlink(tmp_path / LEDGER)
        write(tmp_path)


def test_line_that_a_crash_cut_short_is_left_out(tmp_path):
    write(tmp_path, EVENTS[:-1])
    summary = (tmp_path / NODES).read_bytes()
    text = write(tmp_path, EVENTS[-1:])
    (tmp_path / NODES).write_bytes(summary)  # it is written after the event
    for size in range(len(text) - 1, len(text) - 60, -7):
        (tmp_path / LEDGER).write_text(text[:size])
        assert read_history(tmp_path).events == EVENTS[:-1]
    write(tmp_path, EVENTS[-1:])
    assert (tmp_path / LEDGER).read_text() == text


def test_any_other_damage_is_refused(tmp_path):
    text = write(tmp_path)
    lines = text.splitlines(keepends=True)
    damaged = [text[:at] + chr(ord(text[at]) ^ 1) + text[at + 1 :] for at in range(0, len(text), 5)]
    damaged += ["".join(lines[:2] + lines[3:]), "".join(lines[::-1]), lines[0] + text, "\n" + text]
    damaged += ["", "".join(lines[:-1]), text[:-1], text[:100] + 50 * "\0" + text[150:]]
    for content in damaged:
        (tmp_path / LEDGER).write_text(content)
        with pytest.raises(
            ConfigError, match=r"events.jsonl: (line \d+ is damaged|event 6, which)"
        ):
            read_history(tmp_path)
        with pytest.raises(ConfigError):
            open_ledger(tmp_path)


@pytest.mark.parametrize("events", ["1e999", '"6"', "null", "-1", "[6]", "6.5"])
def test_damaged_summary_is_no_evidence(tmp_path, events):
    write(tmp_path)
    path = tmp_path / NODES
    path.write_text(path.read_text().replace('"events": 6', f'"events": {events}'))
    assert read_history(tmp_path).events == EVENTS


@pytest.mark.parametrize(
    ("name", "value"), [("unknown", 1), ("attempt", "2"), ("outcome", "great"), ("kind", "none")]
)
def test_event_with_another_field_or_type_is_refused(tmp_path, name, value):
    """A line with a correct hash can still contain an event that this version does not know,
    because another version of Optimus may have written the line."""
    fields = json.loads(EVENTS[3].model_dump_json()) | {name: value}
    body = json.dumps(fields)[:-1]
    line = f'{body}, "hash": "{files.xxh3_bytes(f"{chr(10)}{body}".encode())}"}}'
    (tmp_path / LEDGER).write_text(f"{line}\n")
    with pytest.raises(ConfigError, match=r"line 1 is damaged \(not an event of format 1\)"):
        read_history(tmp_path)


def test_missing_or_damaged_summary_is_written_again(tmp_path):
    write(tmp_path)
    summary = (tmp_path / NODES).read_text()
    for damaged in (None, "", "{", "[]", '{"events": "x", "last_hash": 3}', "[" * 100_000):
        (tmp_path / NODES).unlink()
        if damaged is not None:
            (tmp_path / NODES).write_text(damaged)
        assert read_history(tmp_path).events == EVENTS
        open_ledger(tmp_path).close()
        assert (tmp_path / NODES).read_text() == summary


def test_user_may_forget_or_cut_the_ledger(tmp_path):
    text = write(tmp_path)
    (tmp_path / LEDGER).write_text("".join(text.splitlines(keepends=True)[:3]))
    with pytest.raises(ConfigError, match=r"remove nodes.json to continue with the first 3 events"):
        read_history(tmp_path)
    (tmp_path / NODES).unlink()
    assert read_history(tmp_path).events == EVENTS[:3]
    (tmp_path / LEDGER).unlink()
    write(tmp_path, EVENTS[:1])
    assert read_history(tmp_path).events == EVENTS[:1]
    os.unlink(tmp_path / LEDGER)
    open_ledger(tmp_path).close()
    assert read_history(tmp_path).events == []


def test_earlier_supervisor_cannot_write_to_the_ledger(tmp_path):
    earlier = open_ledger(tmp_path)
    earlier.add(EVENTS[0])
    later = open_ledger(tmp_path)
    assert later.history.events == EVENTS[:1]
    before = (tmp_path / LEDGER).read_text()
    with pytest.raises(FileNotFoundError):
        earlier.add(EVENTS[1])
    assert (tmp_path / LEDGER).read_text() == before
    later.add(EVENTS[1])
    earlier.close()
    later.close()
    assert read_history(tmp_path).events == EVENTS[:2]


def test_text_that_is_not_utf_8_is_replaced(tmp_path):
    write(tmp_path, [EVENTS[4].model_copy(update={"reason": "a\udcffb"})])
    assert read_history(tmp_path).standings["b"].reason == "a?b"


def seal(events):
    """Return the text of a ledger with the events `events` and with correct hashes."""
    text, last = "", ""
    for event in events:
        body = event if isinstance(event, str) else json.dumps(event)[:-1]
        last = files.xxh3_bytes(f"{last}\n{body}".encode())
        text += f'{body}, "hash": "{last}"}}\n'
    return text


STARTED, ATTEMPT, PROGRESS, ENDED, MARKED, _ = (event.model_dump() for event in EVENTS)
HOSTILE = {
    "no nodes": [STARTED, ATTEMPT | {"nodes": []}],
    "no ranks": [STARTED, ATTEMPT | {"ranks_per_node": 0}],
    "attempt": [STARTED, ATTEMPT | {"attempt": -1}],
    "port": [STARTED, ATTEMPT | {"port": 1 << 16}],
    "workspace": [STARTED, ATTEMPT | {"workspace": "../../home"}],
    "step": [STARTED, ATTEMPT, PROGRESS | {"step": -1}],
    "time": [STARTED | {"time": float("nan")}],
    "seconds": [STARTED, ATTEMPT, ENDED | {"seconds": {"update": float("inf")}}],
    "other attempt": [STARTED, ATTEMPT, ENDED | {"attempt": 7}],
    "two ends": [STARTED, ATTEMPT, ENDED, ENDED],
    "two attempts": [STARTED, ATTEMPT, ATTEMPT | {"attempt": 2}],
    "repeated attempt": [STARTED, ATTEMPT, ENDED, ATTEMPT],
    "progress before": [STARTED, PROGRESS],
    "depth": [STARTED, '{"kind": "verdict", "x": ' + "[" * 100_000],
    "digits": [STARTED, '{"kind": "verdict", "time": ' + "1" * 10_000],
}


@pytest.mark.parametrize("name", HOSTILE)
def test_events_that_no_supervisor_stores_are_refused(tmp_path, name):
    (tmp_path / LEDGER).write_text(seal([STARTED, ATTEMPT, PROGRESS, ENDED, MARKED]))
    assert len(read_history(tmp_path).events) == 5
    (tmp_path / LEDGER).write_text(seal(HOSTILE[name]))
    with pytest.raises(ConfigError, match=rf"line {len(HOSTILE[name])} is damaged") as caught:
        read_history(tmp_path)
    assert len(str(caught.value)) < 500 and "\n" not in str(caught.value)


def test_ledger_that_is_not_a_regular_file_is_refused(tmp_path):
    os.mkfifo(tmp_path / LEDGER)
    with pytest.raises(ConfigError, match="not a regular file, so .*restore the file"):
        read_history(tmp_path)
