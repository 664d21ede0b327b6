"""A minute of the drill of random runs, and how it makes a failure simpler."""

from __future__ import annotations

import random
import subprocess
import sys
from pathlib import Path

from tests.helpers.fuzz import axes, draw, is_legal, shrink, simpler
from tests.helpers.programs import python

DRILL = Path(__file__).resolve().parents[1] / "scripts" / "drills" / "fuzz.py"


def test_random_runs_keep_every_promise():
    """More of it: scripts/drills/fuzz.py --minutes M."""
    drill = [sys.executable, str(DRILL), "--minutes", "0.9", "--seed", "8", "--out", "-"]
    done = subprocess.run(drill, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr[-4000:]
    assert "failed: 0" in done.stdout


def test_a_case_given_by_hand_is_run_alone():
    case = '{"model": "dense", "second.dp": 2, "end": "stop", "end_step": 2}'
    done = python(str(DRILL), "--case", case)
    assert done.returncode == 0, done.stderr
    done = python(str(DRILL), "--case", '{"end": "last", "first.pp": 8}')
    assert done.returncode == 2 and "the case is refused as it stands" in done.stderr


def test_a_failure_is_made_as_simple_as_can_be():
    """No choice can be simpler without the failure going away."""

    def judge(case):
        failed = case["second.pp"] > 1 and case["second.async_save"]
        return "broken" if failed else ""

    numbers = (random.Random(f"shrink {number}") for number in range(1000))
    case = next(one for one in map(draw, numbers) if judge(one))
    least = shrink(judge, case, limit_s=60)
    assert judge(least) and not any(judge(one) for one in simpler(least))
    given = {axis for axis, choices in axes().items() if least[axis] != choices[0]}
    assert {"second.pp", "second.async_save"} <= given and len(given) <= 5


def test_what_is_drawn_is_legal_and_meets_every_choice():
    cases = [draw(random.Random(f"axes {number}")) for number in range(150)]
    assert all(is_legal(case) for case in cases[:20])
    for axis, choices in axes().items():
        met = [choice for choice in choices if any(case[axis] == choice for case in cases)]
        assert met == list(choices), axis
