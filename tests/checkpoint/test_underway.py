"""A save under way in one process: what its threads raise, when it is over, who cleans up."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest
import torch

from optimus.checkpoint.underway import Failure, Outcome, Underway
from optimus.dist.collectives import ALONE
from optimus.errors import NonFiniteError, OptimusError


class Save:
    """A save whose steps wait to be let, and what became of it."""

    def __init__(self, limit_s: float = 60.0, **raises: BaseException) -> None:
        self.write, self.seal = threading.Event(), threading.Event()
        self.reports: list[Any] = []
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
        )

    def _write(self, stop: threading.Event) -> str:
        self._go("write")
        return "written"

    def _seal(self, stop: threading.Event, reports: list[Any]) -> None:
        self.reports = reports
        self._go("seal")

    def _go(self, what: str) -> None:
        assert getattr(self, what).wait(10)
        if what in self._raises:
            raise self._raises[what]

    def _clean(self) -> None:
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
    assert save.reports == ["written"]
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
    assert save.under_way.drain() is None and not save.under_way.is_over
    save.write.set()
    save.seal.set()
    assert poll(save) is None
    assert save.cleaned and save.under_way.is_over
