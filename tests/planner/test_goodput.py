"""Tests of goodput (productive time / total time). The formula agrees with a Monte Carlo
simulation, and the best interval of checkpoints has the highest goodput."""

from __future__ import annotations

import math
import random

import pytest

from optimus.planner.goodput import best_interval, goodput

HOUR = 3600.0


def simulated(interval_s, checkpoint_s, restart_s, rate, intervals=4000) -> float:
    """Return the goodput of a simulated run of `intervals` checkpoint intervals. Failures occur at
    random times, on average `rate` failures per second."""
    draws, time = random.Random(0), 0.0
    for _ in range(intervals):
        while (failure_s := draws.expovariate(rate)) < interval_s + checkpoint_s:
            time += failure_s
            while (failure_s := draws.expovariate(rate)) < restart_s:  # fails in the restart
                time += failure_s
            time += restart_s
        time += interval_s + checkpoint_s
    return intervals * interval_s / time


@pytest.mark.parametrize(
    ("interval_s", "checkpoint_s", "restart_s", "mean_s"),
    [
        (600.0, 5.0, 300.0, 1 * HOUR),
        (600.0, 60.0, 900.0, 3 * HOUR),
        (3600.0, 30.0, 600.0, 1 * HOUR),
        (1800.0, 20.0, 120.0, 24 * HOUR),
    ],
)
def test_goodput_is_within_a_point_of_a_monte_carlo(interval_s, checkpoint_s, restart_s, mean_s):
    inputs = interval_s, checkpoint_s, restart_s, 1 / mean_s
    assert goodput(*inputs) == pytest.approx(simulated(*inputs), abs=0.01)


@pytest.mark.parametrize("checkpoint_s", [0.5, 20.0, 600.0])
@pytest.mark.parametrize("mean_s", [0.5 * HOUR, 3 * HOUR, 240 * HOUR])
def test_best_interval_has_the_largest_goodput(checkpoint_s, mean_s):
    best = best_interval(checkpoint_s, 300.0, 1 / mean_s)
    value = goodput(best, checkpoint_s, 300.0, 1 / mean_s)
    for factor in (0.8, 0.95, 1.05, 1.25):
        assert goodput(factor * best, checkpoint_s, 300.0, 1 / mean_s) < value
    if checkpoint_s < mean_s / 1000:
        assert best == pytest.approx(math.sqrt(2 * checkpoint_s * mean_s), rel=0.05)


def test_goodput_without_and_with_constant_failures():
    assert goodput(90.0, 10.0, 300.0, 0.0) == 0.9
    assert goodput(1e6, 10.0, 300.0, 1.0) == 0.0


def test_runs_without_work_or_without_failures():
    assert goodput(0.0, 0.0, 0.0, 0.0) == goodput(0.0, 60.0, 60.0, 1e-5) == 0.0
    assert best_interval(60.0, 60.0, 0.0) == math.inf
    assert goodput(math.inf, 60.0, 60.0, 0.0) == 1.0
    assert goodput(60.0, 60.0, 60.0, 0.0) == 0.5
