"""Tests of the fuzz drill: random runs, and the reduction of a failing case to a simpler case."""

from __future__ import annotations

import random
import subprocess
import sys
from pathlib import Path

from tests.kit.faults.fuzz import axes, draw, is_legal, shrink, simpler
from tests.kit.ranks.processes import python

DRILL = Path(__file__).resolve().parents[1] / "scripts" / "drills" / "fuzz.py"


def test_random_runs_keep_all_promises():
    """Run the fuzz drill for half a minute: random runs must keep all promises of the drill.
    `scripts/drills/fuzz.py --minutes M` runs the drill for M minutes."""
    drill = [sys.executable, str(DRILL), "--minutes", "0.5", "--seed", "8", "--out", "-"]
    result = subprocess.run(drill, capture_output=True, text=True, timeout=600)
    assert result.returncode == 0, result.stdout + result.stderr[-4000:]
    assert "failed: 0" in result.stdout


def test_case_of_the_command_line_is_run():
    case = '{"model": "dense", "second.dp": 2, "end": "stop", "end_step": 2}'
    result = python(str(DRILL), "--case", case)
    assert result.returncode == 0, result.stderr
    result = python(str(DRILL), "--case", '{"end": "last", "first.pp": 8}')
    assert result.returncode == 2 and "this case is not legal" in result.stderr


def test_failing_case_is_reduced_to_the_simplest():
    """The drill simplifies a failing case step by step. The reduced case must fail, and every
    simpler case must pass."""

    def judge(case):
        failed = case["second.pp"] > 1 and case["second.async_save"]
        return "broken" if failed else ""

    numbers = (random.Random(f"shrink {number}") for number in range(1000))
    case = next(drawn for drawn in map(draw, numbers) if judge(drawn))
    least = shrink(judge, case, limit_s=60)
    assert judge(least) and not any(judge(smaller) for smaller in simpler(least))
    changed_axes = {axis for axis, choices in axes().items() if least[axis] != choices[0]}
    assert {"second.pp", "second.async_save"} <= changed_axes and len(changed_axes) <= 5


def test_drawn_cases_are_legal_and_cover_all_choices():
    cases = [draw(random.Random(f"axes {number}")) for number in range(80)]
    assert all(is_legal(case) for case in cases[:20])
    for axis, choices in axes().items():
        drawn = [choice for choice in choices if any(case[axis] == choice for case in cases)]
        assert drawn == list(choices), axis
