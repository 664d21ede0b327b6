"""Tests of a save in the background in one process: states, errors of threads, time limits."""

from __future__ import annotations

import ast
import itertools
import threading
import time
from pathlib import Path

import pytest
import torch

from optimus.checkpoint import async_save
from optimus.checkpoint.async_save import TRANSITIONS, AsyncSave, Failure, Outcome, State, Status
from optimus.checkpoint.shard_file import Stop
from optimus.distributed.collectives import ALONE
from optimus.errors import NonFiniteError, OptimusError

IMPOSSIBLE = {
    (State.WRITING, Status.COMMITTED),
    (State.CLEANING, Status.COMMITTED),
    (State.CLEANING, Status.FAILED),
    *((State.ENDED, status) for status in Status),
}
"""Pairs (state of the save, status of a rank) that cannot occur: a commit starts only after
WRITING, CLEANING cannot fail, and ranks report no status of a save that has ended."""


class Save:
    """Wrapper of an AsyncSave in which each step waits until the test sets the event of the step.
    Then the step raises the exception in `raises`, if there is one. The wrapper records the reports
    that `commit` receives, and the cleanup."""

    def __init__(
        self, limit_s: float = 60.0, claims: bool = False, **raises: BaseException
    ) -> None:
        self.write, self.commit = threading.Event(), threading.Event()
        self.after_commit, self.clean = threading.Event(), threading.Event()
        self.after_commit.set()
        self.clean.set()
        self.reports: list[bytes] = []
        self.stop: Stop | None = None
        self._claims = claims
        self.cleaned = False
        self._raises = raises
        self.save = AsyncSave(
            "step-7",
            7,
            ALONE,
            torch.device("cpu"),
            limit_s,
            write=self._write,
            commit=self._commit,
            clean=self._clean,
            after_commit=lambda: self._wait("after_commit"),
        )

    def _write(self, stop: Stop) -> bytes:
        self.stop = stop
        self._wait("write")
        return b"written"

    def _commit(self, stop: Stop, reports: list[bytes]) -> None:
        self.reports = reports
        assert not self._claims or stop.claim()
        self._wait("commit")
        if not stop.claim():
            raise OptimusError("no longer wanted")

    def _wait(self, event: str) -> None:
        assert getattr(self, event).wait(10)
        if event in self._raises:
            raise self._raises[event]

    def _clean(self) -> None:
        self._wait("clean")
        self.cleaned = True


def poll(save: Save) -> Outcome | None:
    """Wait until the thread of the save has ended, then poll. Return the result of the poll."""
    save.save._task.wait(10)
    return save.save.poll()


def test_the_table_has_all_possible_pairs_of_state_and_status():
    pairs = set(itertools.product(State, Status))
    assert TRANSITIONS.keys() == pairs - IMPOSSIBLE and pairs >= IMPOSSIBLE


def test_all_states_are_reached_and_transitions_never_go_back():
    order = list(State)
    for (state, status), following in TRANSITIONS.items():
        assert order.index(following) >= order.index(state)
        assert status is not Status.BUSY or following is state
    reached, following = {State.WRITING}, {State.WRITING}
    while following:
        following = {TRANSITIONS[pair] for pair in TRANSITIONS if pair[0] in following} - reached
        reached |= following
    assert reached == set(State)


@pytest.mark.parametrize(("state", "status"), TRANSITIONS, ids=lambda value: value.name)
def test_a_transition_assigns_the_state_of_the_table(state, status, monkeypatch):
    """Test each row of the table, with a save whose ranks report the status of the row."""
    save = Save()
    save.write.set()
    save.save._task.wait(10)
    save.save._state, save.save._failure = state, Failure("disk")
    save.commit.set()
    monkeypatch.setattr(AsyncSave, "_local_status", lambda save: status)
    outcome = save.save.poll()
    following = TRANSITIONS[state, status]
    assert save.save._state is following and save.save.is_over == (following is State.ENDED)
    if following is State.STOPPING and state is not State.STOPPING:
        assert outcome == Outcome(7, Failure("disk")) and save.stop.is_set()
    elif (state, following) == (State.COMMITTING, State.ENDED) or (state, status) == (
        State.STOPPING,
        Status.COMMITTED,
    ):
        assert outcome == Outcome(7, None)
    else:
        assert outcome is None


def test_only_the_transition_assigns_the_state():
    tree = ast.parse(Path(async_save.__file__).read_text())
    assigning = [
        function.name
        for function in ast.walk(tree)
        if isinstance(function, ast.FunctionDef)
        for node in ast.walk(function)
        if isinstance(node, ast.Attribute)
        if node.attr == "_state" and isinstance(node.ctx, ast.Store)
    ]
    assert sorted(assigning) == ["__init__", "_transition"]


def test_polling_returns_none_until_the_commit():
    save = Save()
    assert save.save.poll() is None
    save.write.set()
    assert poll(save) is None and save.save.poll() is None
    save.commit.set()
    outcome = poll(save)
    assert (outcome.step, outcome.failure) == (7, None) and save.save.is_over
    assert save.reports == [b"written"]
    assert not save.cleaned


@pytest.mark.parametrize("where", ["write", "commit"])
@pytest.mark.parametrize("error", [OptimusError("no room"), NonFiniteError("a NaN")])
def test_a_failure_is_reported_once_and_cleaned(where, error):
    save = Save(**{where: error})
    save.write.set()
    save.commit.set()
    outcome = save.save.drain()
    assert outcome.failure == Failure(str(error), isinstance(error, NonFiniteError))
    assert save.cleaned and save.save.is_over
    assert save.stop.is_set()  # the threads of other ranks can stop


@pytest.mark.parametrize("where", ["write", "commit"])
def test_other_errors_are_raised_where_they_happened(where):
    save = Save(**{where: ZeroDivisionError()})
    save.write.set()
    save.commit.set()
    with pytest.raises(ZeroDivisionError):
        save.save.drain()


@pytest.mark.parametrize("where", ["write", "commit"])
def test_a_hanging_thread_fails_in_time_and_is_cleaned_after_it_ends(where):
    save = Save(limit_s=0.2)
    if where == "commit":
        save.write.set()
    start = time.monotonic()
    outcome = save.save.drain()
    assert time.monotonic() - start < 5
    assert "step-7 not written within checkpoint.timeout_s = 0.2" in outcome.failure.message
    assert not save.cleaned and not save.save.is_over  # the thread can still write
    assert save.stop.is_set() and not save.stop.claim()  # the thread cannot rename the directory
    assert save.save.drain() is None and not save.save.is_over
    save.write.set()
    save.commit.set()
    assert poll(save) is None and not save.save.is_over
    assert poll(save) is None
    assert save.cleaned and save.save.is_over


def test_time_of_training_between_two_polls_is_not_counted():
    """The first poll comes after the time limit of the save, but the write ended before the limit.
    The save is committed."""
    save = Save(limit_s=0.3)
    save.write.set()
    time.sleep(0.5)
    assert poll(save) is None  # the commit starts now
    assert save.save.poll() is None
    save.commit.set()
    assert poll(save) == Outcome(7, None) and save.save.is_over


def test_a_committed_save_is_reported_though_the_removal_of_old_checkpoints_hangs():
    save = Save(limit_s=0.2)
    save.after_commit.clear()
    save.write.set()
    save.commit.set()
    assert save.save.drain() == Outcome(7, None) and save.save.is_over
    save.after_commit.set()


def test_a_rename_that_ends_just_after_the_limit_is_reported_as_committed():
    save = Save(limit_s=0.2, claims=True)
    save.write.set()
    threading.Timer(0.6, save.commit.set).start()
    assert save.save.drain() == Outcome(7, None) and save.save.is_over
    assert not save.stop.is_set() and not save.cleaned


def test_a_rename_that_ends_after_the_failure_is_reported_as_committed(monkeypatch):
    """The rename hangs until after the save is reported as failed."""
    monkeypatch.setattr(async_save, "_GRACE_S", 0.2)
    save = Save(limit_s=0.2, claims=True)
    save.write.set()
    assert save.save.drain().failure is not None
    save.commit.set()
    assert poll(save) == Outcome(7, None)
    assert poll(save) is None and save.save.is_over


def test_a_hanging_removal_does_not_delay_the_end(monkeypatch):
    monkeypatch.setattr(async_save, "_GRACE_S", 0.3)
    save = Save(write=OptimusError("no room"))
    save.clean.clear()
    save.write.set()
    start = time.monotonic()
    assert save.save.drain().failure.message == "no room"
    assert save.save.is_over and 0.3 < time.monotonic() - start < 5
    save.clean.set()
