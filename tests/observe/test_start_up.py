from __future__ import annotations

import re
import time

import pytest

from optimus.launch.environment import COMMAND_STARTED, STARTED
from optimus.observe.start_up import StartUp


def told_parts(start_up: StartUp) -> list[float]:
    """Seconds of the whole and of its parts."""
    start_up.done("settling")
    words = r"(?:up|launch|imports|settling) ([-\w.]+)"
    return [float(seconds) for seconds in re.findall(words, start_up.told())]


@pytest.mark.parametrize("launch", [2.5, None, "soon", "nan", -1e9, 1e9])
def test_its_parts_are_the_whole(monkeypatch, launch):
    """From the command's start where our spawner has told it, else from the process's."""
    monkeypatch.delenv(COMMAND_STARTED, raising=False)
    if launch is not None:
        told = STARTED - launch if isinstance(launch, float) else launch
        monkeypatch.setenv(COMMAND_STARTED, str(told))
    whole, *parts = told_parts(StartUp(STARTED))
    assert whole == pytest.approx(sum(parts), abs=0.02) and len(parts) == 2 + (launch == 2.5)
    assert parts[0] == 2.5 or launch != 2.5


def test_a_run_of_a_process_that_did_more_begins_with_itself(monkeypatch):
    monkeypatch.setenv(COMMAND_STARTED, str(STARTED - 2.5))
    before = time.monotonic()
    assert told_parts(StartUp())[0] <= time.monotonic() - before + 0.01
