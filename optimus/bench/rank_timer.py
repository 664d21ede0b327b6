"""Measurement of the time of operations that all ranks of a benchmark run simultaneously."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

from optimus import platform
from optimus.distributed.collectives import all_gather_objects, barrier
from optimus.distributed.world import World

_BUDGET_S = 0.3
"""Seconds for which a rank repeats an operation."""
_MIN_RUNS, _MAX_RUNS = 3, 50


class RankTimer:
    """Measures the time of operations that all ranks run simultaneously.

    On a CPU with one thread per rank, the time of an operation without communication is the
    processor time of this thread, which excludes the time for which other programs use the core. In
    all other cases, the time of an operation is the elapsed time.

    Args:
        world: All ranks.
        threads: Number of threads of a rank.
    """

    def __init__(self, world: World, threads: int) -> None:
        self.world, self.device = world, world.device
        self._has_one_thread = world.device.type == "cpu" and threads == 1
        self._clock = time.thread_time if self._has_one_thread else time.perf_counter
        self._processor_s = self._elapsed_s = 0.0

    def slowest(self, seconds: float) -> float:
        """Return the largest value of `seconds` on all ranks."""
        return max(all_gather_objects(seconds, self.world.everyone, float))

    def times(self, run: Callable[[], Any], before: Callable[[], Any] | None = None) -> list[float]:
        """Run the function `run` repeatedly. Return the seconds of each run on this rank. Short
        runs are timed in batches, unless `before` is called before each run."""
        run()
        size = 1
        if before is None:
            size = max(1, min(200, math.ceil(0.002 / max(self._batch(run, 1), 1e-9))))
        barrier(self.world.everyone)
        seconds = list[float]()
        end = time.perf_counter() + _BUDGET_S
        while len(seconds) < _MIN_RUNS or (time.perf_counter() < end and len(seconds) < _MAX_RUNS):
            if before is not None:
                before()
            seconds.append(self._batch(run, size))
        barrier(self.world.everyone)
        return seconds

    def median(self, run: Callable[[], Any], before: Callable[[], Any] | None = None) -> float:
        """Return the median seconds of the function `run` on the slowest rank."""
        return self.slowest(statistics.median(self.times(run, before)))

    def together(
        self, run: Callable[[], Any], runs: int, compute: Callable[[], Any] | None = None
    ) -> tuple[float, float]:
        """Measure an operation in which all ranks take part.

        Args:
            run: The operation.
            runs: Number of runs.
            compute: Computation of a rank before the operation; None for no computation. With
                `compute`, each result is the time of computation and operation together, less the
                time of the computation alone. As in a step, the result includes the time for which
                a rank waits for other ranks that compute longer.

        Returns:
            The median and the mean of the elapsed seconds, each on the rank with the largest value.
            The mean excludes the slowest run. A step contains many such operations. Multiply their
            number by the mean, not by the median, to get their total time: threads of a backend use
            the cores of other ranks, so that some operations take longer than the median.
        """
        run()
        both, alone = list[float](), list[float]()
        for _ in range(runs):
            barrier(self.world.everyone)
            start = time.perf_counter()
            if compute is not None:
                compute()
            run()
            platform.synchronize(self.device)
            both.append(time.perf_counter() - start)
            if compute is not None:
                barrier(self.world.everyone)
                start = time.perf_counter()
                compute()
                platform.synchronize(self.device)
                alone.append(time.perf_counter() - start)
        median, mean = (
            self.slowest(of(both)) - (self.slowest(of(alone)) if alone else 0.0)
            for of in (statistics.median, _mean)
        )
        return median, mean

    @property
    def processor_share(self) -> float | None:
        """Processor time of this rank, divided by the elapsed time of the operations that the rank
        has timed; None if the processor time is not measured."""
        return self._processor_s / self._elapsed_s if self._has_one_thread else None

    def _batch(self, run: Callable[[], Any], size: int) -> float:
        platform.synchronize(self.device)
        elapsed, start = time.perf_counter(), self._clock()
        for _ in range(size):
            run()
        platform.synchronize(self.device)
        seconds = self._clock() - start
        self._processor_s += seconds
        self._elapsed_s += time.perf_counter() - elapsed
        return seconds / size


def _mean(seconds: Sequence[float]) -> float:
    """Return the mean of `seconds` without its largest value. `seconds` has at least two values."""
    return statistics.fmean(sorted(seconds)[:-1])
