from __future__ import annotations

import re

import pytest

from optimus.launch_env import COMMAND_STARTED, STARTED
from optimus.observe.start_up import StartUp


@pytest.mark.parametrize("launch", [None, 2.5])
def test_its_parts_are_the_whole(monkeypatch, launch):
    """From the command's start where our spawner has told it, else from the process's."""
    monkeypatch.delenv(COMMAND_STARTED, raising=False)
    if launch:
        monkeypatch.setenv(COMMAND_STARTED, str(STARTED - launch))
    start_up = StartUp()
    start_up.done("settling")
    told = start_up.told()
    whole, *parts = map(float, re.findall(r"(?:up|launch|imports|settling) ([\d.]+)", told))
    assert whole == pytest.approx(sum(parts), abs=0.02) and len(parts) == 2 + bool(launch)
    assert ("launch 2.50" in told) == bool(launch)
