"""A save under way in one process: what its threads raise, when it is over, who cleans up."""

from __future__ import annotations

import threading
import time

import pytest
import torch

from optimus.checkpoint import async_save
from optimus.checkpoint.async_save import Failure, Outcome, Underway
from optimus.checkpoint.shard_file import Stop
from optimus.distributed.collectives import ALONE
from optimus.errors import NonFiniteError, OptimusError


class Save:
    """A save whose steps wait to be let, and what became of it."""

    def __init__(
        self, limit_s: float = 60.0, claims: bool = False, **raises: BaseException
    ) -> None:
        self.write, self.seal = threading.Event(), threading.Event()
        self.behind, self.clean = threading.Event(), threading.Event()
        self.behind.set()
        self.clean.set()
        self.reports: list[bytes] = []
        self.stop: Stop | None = None
        self._claims = claims
        self.cleaned = False
        self._raises = raises
        self.under_way = Underway(
            "step-7",
            7,
            ALONE,
            torch.device("cpu"),
            limit_s,
            write=self._write,
            seal=self._seal,
            clean=self._clean,
            after_seal=lambda: self._go("behind"),
        )

    def _write(self, stop: Stop) -> bytes:
        self.stop = stop
        self._go("write")
        return b"written"

    def _seal(self, stop: Stop, reports: list[bytes]) -> None:
        self.reports = reports
        assert not self._claims or stop.claim()
        self._go("seal")
        if not stop.claim():
            raise OptimusError("no longer wanted")

    def _go(self, what: str) -> None:
        assert getattr(self, what).wait(10)
        if what in self._raises:
            raise self._raises[what]

    def _clean(self) -> None:
        self._go("clean")
        self.cleaned = True


def poll(save: Save) -> Outcome | None:
    """Behind what its thread was let do."""
    save.under_way._task.wait(10)
    return save.under_way.poll()


def test_training_goes_on_until_it_is_sealed():
    save = Save()
    assert save.under_way.poll() is None
    save.write.set()
    assert poll(save) is None and save.under_way.poll() is None
    save.seal.set()
    outcome = poll(save)
    assert (outcome.step, outcome.failure) == (7, None) and save.under_way.is_over
    assert save.reports == [b"written"]
    assert not save.cleaned


@pytest.mark.parametrize("where", ["write", "seal"])
@pytest.mark.parametrize("error", [OptimusError("no room"), NonFiniteError("a NaN")])
def test_what_fails_is_told_once_and_cleaned(where, error):
    save = Save(**{where: error})
    save.write.set()
    save.seal.set()
    outcome = save.under_way.drain()
    assert outcome.failure == Failure(str(error), isinstance(error, NonFiniteError))
    assert save.cleaned and save.under_way.is_over
    assert save.stop.is_set()  # the other ranks' threads need not go on


@pytest.mark.parametrize("where", ["write", "seal"])
def test_other_errors_are_raised_where_they_happened(where):
    save = Save(**{where: ZeroDivisionError()})
    save.write.set()
    save.seal.set()
    with pytest.raises(ZeroDivisionError):
        save.under_way.drain()


@pytest.mark.parametrize("where", ["write", "seal"])
def test_what_hangs_is_told_in_time_and_cleaned_once_it_ends(where):
    save = Save(limit_s=0.2)
    if where == "seal":
        save.write.set()
    start = time.monotonic()
    outcome = save.under_way.drain()
    assert time.monotonic() - start < 5
    assert "step-7 not written within checkpoint.timeout_s = 0.2" in outcome.failure.what
    assert not save.cleaned and not save.under_way.is_over  # something may still be written there
    assert save.stop.is_set() and not save.stop.claim()  # but it never gets its name
    assert save.under_way.drain() is None and not save.under_way.is_over
    save.write.set()
    save.seal.set()
    assert poll(save) is None and not save.under_way.is_over
    assert poll(save) is None
    assert save.cleaned and save.under_way.is_over


def test_what_training_does_between_two_looks_is_not_counted():
    """An update takes longer than the limit; the disk was quick."""
    save = Save(limit_s=0.3)
    save.write.set()
    time.sleep(0.5)
    assert poll(save) is None  # sealing begins now
    assert save.under_way.poll() is None
    save.seal.set()
    assert poll(save) == Outcome(7, None) and save.under_way.is_over


def test_what_is_sealed_is_told_so_though_the_removal_of_older_ones_hangs():
    save = Save(limit_s=0.2)
    save.behind.clear()
    save.write.set()
    save.seal.set()
    assert save.under_way.drain() == Outcome(7, None) and save.under_way.is_over
    save.behind.set()


def test_a_seal_that_gets_its_name_as_the_limit_passes_is_told_as_sealed():
    save = Save(limit_s=0.2, claims=True)
    save.write.set()
    threading.Timer(0.6, save.seal.set).start()
    assert save.under_way.drain() == Outcome(7, None) and save.under_way.is_over
    assert not save.stop.is_set() and not save.cleaned


def test_a_name_that_comes_behind_a_failure_is_told_after_all(monkeypatch):
    """A disk hung for long in the last call of all."""
    monkeypatch.setattr(async_save, "_GRACE_S", 0.2)
    save = Save(limit_s=0.2, claims=True)
    save.write.set()
    assert save.under_way.drain().failure is not None
    save.seal.set()
    assert poll(save) == Outcome(7, None)
    assert poll(save) is None and save.under_way.is_over


def test_nobody_waits_for_a_removal_that_hangs(monkeypatch):
    monkeypatch.setattr(async_save, "_GRACE_S", 0.3)
    save = Save(write=OptimusError("no room"))
    save.clean.clear()
    save.write.set()
    start = time.monotonic()
    assert save.under_way.drain().failure.what == "no room"
    assert save.under_way.is_over and 0.3 < time.monotonic() - start < 5
    save.clean.set()
