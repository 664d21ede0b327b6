"""Contestants that take turns, and what is told of their times."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import torch

from optimus.dist.collectives import all_reduce_max, barrier
from optimus.dist.world import World


def turns(names: Iterable[str], rounds: int) -> Iterator[tuple[int, str]]:
    """Who runs when, by round: all once in each, and each in its turn the first, so that a noisy
    machine disturbs all alike. Round 0 comes before the others, to warm up."""
    names = list(names)
    for number in range(rounds + 1):
        first = number % len(names)
        for name in (*names[first:], *names[:first]):
            yield number, name


def race(
    contestants: Mapping[str, Callable[[], object]],
    rounds: int,
    world: World,
    clock: Callable[[], float] = time.perf_counter,
    before: Mapping[str, Callable[[], object]] | None = None,
) -> dict[str, list[float]]:
    """Seconds of the slowest rank, by contestant and round; what is done `before` each does not
    count. A collective of all ranks."""
    times: dict[str, list[float]] = {name: [] for name in contestants}
    for number, name in turns(contestants, rounds):
        if before is not None:
            before[name]()
        barrier(world.everyone)
        start = clock()
        contestants[name]()
        taken = torch.tensor([clock() - start], dtype=torch.float64)
        all_reduce_max(taken, world.everyone)
        if number:
            times[name].append(taken.item())
    return times


def paired(ours: Sequence[float], theirs: Sequence[float]) -> list[float]:
    """Least, median and greatest ratio of times of one round."""
    ratios = sorted(a / b for a, b in zip(ours, theirs, strict=True))
    return [ratios[0], statistics.median(ratios), ratios[-1]]
