"""Tests of the measurement of collectives. The tests replace the measured times by known times."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch

from optimus.bench import network, rank_timer
from optimus.bench.network import OPERATIONS
from optimus.bench.rank_timer import RankTimer

SMALL_WAIT_S, LARGE_WAIT_S = 2e-4, 1.0


def alone_s(size: int) -> float:
    return 1e-6 + 1e-9 * size


@pytest.mark.parametrize("sign", [1, -1])
def test_a_step_has_the_mean_wait_after_computations_of_small_buffers(monkeypatch, sign):
    """The reported time of a collective is the time measured without a computation, plus a wait.
    The wait is the mean additional time of collectives with small buffers after a computation. A
    negative mean, which noise can cause, counts as 0."""

    def together(size, runs, compute=None):
        """Return fake seconds of a collective: (median, mean). The caller uses only the median
        without `compute` and only the mean with `compute`. The unused value is 9."""
        if compute is None:
            return alone_s(size), 9.0
        wait_s = LARGE_WAIT_S if size >= 1 << 24 else SMALL_WAIT_S
        return 9.0, alone_s(size) + sign * wait_s

    monkeypatch.setattr(
        network, "_collectives", lambda _, __, size: dict.fromkeys(OPERATIONS, size)
    )
    bench = SimpleNamespace(device=torch.device("cpu"), together=together)
    level = network._measure_level(bench, SimpleNamespace(size=4), 1 << 26)
    steps = dict.fromkeys(OPERATIONS, 3) | {"all_reduce": 6, "send": 1}
    wait_s = SMALL_WAIT_S if sign == 1 else 0.0
    for message in level.messages:
        size = message.num_bytes * (1 if message.operation == "send" else 4)
        expected_s = (alone_s(size) + wait_s) / steps[message.operation]
        assert message.seconds == pytest.approx(expected_s)
    assert {message.num_bytes for message in level.messages} >= {256, 1 << 24, 1 << 26}
    assert level.latency_s == pytest.approx((alone_s(1 << 10) + wait_s) / 6)


def test_a_rank_multiplies_matrices_before_a_collective(monkeypatch):
    """The second measurement of a collective has a computation before it, the first has none."""
    products, computed = [], []

    def together(run, runs, compute=None):
        if compute is not None:
            compute()
        computed.append(products.copy())
        return 1.0, 2.0

    monkeypatch.setattr(network, "_COMPUTED", {"cpu": 8})
    monkeypatch.setattr(torch, "mm", lambda a, b: products.append((a.shape, b.shape)))
    bench = SimpleNamespace(device=torch.device("cpu"), together=together)
    assert network._measure(bench, list, 1024) == (1024, 1.0, 2.0)
    assert computed == [[], [((8, 8), (8, 8))]]


def test_time_of_an_operation_excludes_the_computation_and_the_slowest_run(monkeypatch):
    now, calls = 0.0, []
    times: Iterator[float] = iter((7.0, 1.0, 1.0, 5.0, 2.0))

    def run() -> None:
        nonlocal now
        now += next(times)
        calls.append("run")

    def compute() -> None:
        nonlocal now
        now += 10.0
        calls.append("compute")

    clock = SimpleNamespace(perf_counter=lambda: now, thread_time=lambda: now)
    monkeypatch.setattr(rank_timer, "time", clock)
    monkeypatch.setattr(rank_timer, "barrier", lambda group: None)
    monkeypatch.setattr(RankTimer, "slowest", lambda _, seconds: seconds)
    timer = RankTimer(SimpleNamespace(device=torch.device("cpu"), everyone=None), 1)
    # The first run (7 s) is not timed. The others take 1, 1, 5 and 2 s: their median is 1.5 s, and
    # their mean without the slowest run is 4/3 s.
    assert timer.together(run, 4, compute) == (pytest.approx(1.5), pytest.approx(4 / 3))
    assert calls == ["run", *["compute", "run", "compute"] * 4]
