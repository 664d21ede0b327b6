"""Tests of the phases of the start-up."""

from __future__ import annotations

import time

import pytest

from optimus.launch.environment import COMMAND_STARTED, STARTED
from optimus.observe.events import StartUpRecord
from optimus.train.startup import StartUp


def record_of(start_up: StartUp) -> StartUpRecord:
    start_up.done("autotune")
    return start_up.record()


@pytest.mark.parametrize("launch", [2.5, None, "soon", "nan", -1e9, 1e9])
def test_phases_add_up_from_the_start_of_the_command(monkeypatch, launch):
    """The seconds of the phases of the start-up add up to the total. The first phase is `launch` if
    the start time of the command is known and valid, and otherwise `imports`."""
    monkeypatch.delenv(COMMAND_STARTED, raising=False)
    if launch is not None:
        value = STARTED - launch if isinstance(launch, float) else launch
        monkeypatch.setenv(COMMAND_STARTED, str(value))
    record = record_of(StartUp(STARTED))
    names, seconds = zip(*record.phases_s, strict=True)
    assert record.total_s == pytest.approx(sum(seconds))
    if launch == 2.5:
        assert names == ("launch", "imports", "autotune")
        assert seconds[0] == pytest.approx(2.5)
    else:
        assert names == ("imports", "autotune")


def test_a_run_within_a_longer_process_starts_with_itself(monkeypatch):
    monkeypatch.setenv(COMMAND_STARTED, str(STARTED - 2.5))
    before = time.monotonic()
    assert record_of(StartUp()).total_s <= time.monotonic() - before + 0.01
