"""Contestants that take turns on several ranks, and what is told of their times."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence

import torch

from optimus.dist.collectives import all_reduce_max, barrier
from optimus.dist.world import World


def race(
    contestants: Sequence[Callable[[], object]],
    rounds: int,
    world: World,
    clock: Callable[[], float] = time.perf_counter,
    before: Sequence[Callable[[], object]] = (),
) -> list[list[float]]:
    """Seconds of the slowest rank, by contestant and round; the first round does not count, nor
    what is done `before` each. A collective of all ranks."""
    times: list[list[float]] = [[] for _ in contestants]
    for number in range(rounds + 1):
        order = list(range(len(contestants)))
        for which in order if number % 2 else order[::-1]:
            if before:
                before[which]()
            barrier(world.everyone)
            start = clock()
            contestants[which]()
            taken = torch.tensor([clock() - start], dtype=torch.float64)
            all_reduce_max(taken, world.everyone)
            if number:
                times[which].append(taken.item())
    return times


def paired(ours: Sequence[float], theirs: Sequence[float]) -> list[float]:
    """Least, median and greatest ratio of times of one round."""
    ratios = sorted(a / b for a, b in zip(ours, theirs, strict=True))
    return [ratios[0], statistics.median(ratios), ratios[-1]]
