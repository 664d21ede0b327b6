"""Which chunks are whole in memory when: a pure function of the order in which they are needed.

A training step visits the units of a model (embedding, blocks, head) in an order that the schedule
of the pipeline gives before the run: forward through a stage's units, backward in reverse. A chunk
whose parameters are divided over ranks is gathered before a visit that needs it and finds it
missing, and freed to make room: the room is a number of slots, a chunk in each (the rCache of the
Elixir papers). What goes is what is needed again last (Belady 1966), which fetches least.

Fetches of a step with n chunks, each in one unit, and B slots (`tests/chunks/test_residency.py`):

    one microbatch                                         2n - min(B, n)
    k microbatches, forward and backward in turn           2kn - (2k-1)B, B <= n
    recomputed regions of m > 1 units, B = 1               3n - 1
      the same without a visit before a region's last unit 3n - n/m
    recomputed regions, B >= m                             2n - B

Fetches are begun as soon as their slot is free rather than when they are needed, one visit's at a
time: with B >= 2 they travel beside the computation before, and there are as many.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

NEVER = float("inf")


@dataclass(frozen=True)
class Residency:
    """What a rank keeps whole of chunks that are divided over ranks."""

    divides_gradients: bool = False
    """Gradients are whole for one backward only (ZeRO-2)."""
    divides_parameters: bool = False
    """Parameters are whole in the cache only (ZeRO-3); divides_gradients besides."""
    slots: int = 0
    """Chunks that the cache takes; 0: all."""
    poison: bool = False
    """For tests: what is freed becomes NaN instead."""

    def __post_init__(self) -> None:
        assert self.divides_gradients or not self.divides_parameters, self


ALL_RESIDENT = Residency()


class Pass(NamedTuple):
    """A microbatch's way through one stage."""

    stage: int
    backward: bool


class Visit(NamedTuple):
    """One unit, about to compute: the chunks of `need` are whole until the next visit."""

    unit: int
    backward: bool
    need: frozenset[int]


class Step(NamedTuple):
    """What is done for a visit: first `evict`, then `gather`, which it waits for; then, while it
    computes, room is made by `evict_early` and `prefetch` is begun."""

    visit: Visit
    evict: tuple[int, ...] = ()
    gather: tuple[int, ...] = ()
    evict_early: tuple[int, ...] = ()
    prefetch: tuple[int, ...] = ()
    resident: frozenset[int] = frozenset()
    """While it computes, what is on its way included."""


@dataclass(frozen=True)
class ResidencyPlan:
    """All visits of a training step. It begins and ends with no chunk gathered."""

    steps: tuple[Step, ...]
    slots: int


def visit_order(
    passes: Iterable[Pass],
    stages: Sequence[int],
    needs: Sequence[frozenset[int]],
    learns: Sequence[bool],
    regions: Iterable[range] = (),
) -> list[Visit]:
    """The visits of a step. By unit, in order of first use: the stage it belongs to, the chunks it
    needs, and whether backward comes by (not where it and all before it are frozen).

    The units of a region are computed again together: backward, once it has come to the last of
    them, visits all of them forward before it goes on.
    """
    again = {region[-1]: region for region in regions}
    visits: list[Visit] = []

    def visit(units: Iterable[int], backward: bool) -> None:
        visits.extend(Visit(unit, backward, needs[unit]) for unit in units)

    for stage, backward in passes:
        units = [unit for unit, own in enumerate(stages) if own == stage]
        if not backward:
            visit(units, False)
            continue
        for unit in reversed(units):
            if learns[unit]:
                visit([unit], True)
                visit(again.get(unit, ()), False)
    return visits


def fewest_slots(needs: Iterable[Collection[int]]) -> int:
    """Slots without which some visit could not compute."""
    return max(map(len, needs), default=0)


def plan_residency(visits: Sequence[Visit], slots: int) -> ResidencyPlan:
    """Belady's replacement over known visits, fetches then begun as early as their slots allow."""
    assert slots >= fewest_slots(visit.need for visit in visits), "a visit needs more slots"
    future = Future(visits)
    on_demand: list[_Demand] = []
    resident: set[int] = set()
    for now, visit in enumerate(visits):
        dead = tuple(sorted(c for c in resident if future.next_use(c, now) == NEVER))
        resident.difference_update(dead)
        missing = tuple(sorted(visit.need - resident))
        spare = len(resident) + len(missing) - slots
        victims = farthest(resident - visit.need, spare, partial(future.next_use, now=now))
        resident = (resident - set(victims)) | visit.need
        on_demand.append(_Demand(dead, list(missing), list(victims)))
    return ResidencyPlan(tuple(_begin_early(visits, on_demand, future, slots)), slots)


def farthest(
    candidates: Collection[int], count: int, next_use: Callable[[int], float]
) -> tuple[int, ...]:
    """The `count` candidates that are needed again last."""
    ordered = sorted(candidates, key=lambda chunk: (-next_use(chunk), chunk))
    return tuple(ordered[: max(0, count)])


class Future:
    """When chunks are needed again."""

    def __init__(self, visits: Sequence[Visit]) -> None:
        self._places: dict[int, list[int]] = defaultdict(list)
        for place, visit in enumerate(visits):
            for chunk in visit.need:
                self._places[chunk].append(place)

    def next_use(self, chunk: int, now: int) -> float:
        """The place of the first visit from `now` on that needs `chunk`."""
        places = self._places[chunk]
        at = bisect_left(places, now)
        return places[at] if at < len(places) else NEVER


@dataclass
class _Demand:
    """What a visit finds dead, missing, and in the way, if nothing is fetched before its time."""

    dead: tuple[int, ...]
    missing: list[int]
    victims: list[int]


def _begin_early(
    visits: Sequence[Visit], on_demand: list[_Demand], future: Future, slots: int
) -> Iterable[Step]:
    """Move each fetch to the first visit behind the fetch before it at which a slot is free, or
    held by a victim that is not needed in between."""
    waiting = [place for place, one in enumerate(on_demand) if one.missing]
    resident: set[int] = set()
    for now, (visit, own) in enumerate(zip(visits, on_demand, strict=True)):
        evict, gather = (*own.dead, *own.victims), tuple(own.missing)
        resident = (resident - set(evict)) | set(gather)
        while waiting and waiting[0] <= now:
            waiting.pop(0)
        evicted, begun = [], []
        if waiting:
            ahead = on_demand[waiting[0]]
            for chunk in list(ahead.missing):
                if len(resident) >= slots:
                    idle = [v for v in ahead.victims if future.next_use(v, now) > waiting[0]]
                    if not idle:
                        break
                    ahead.victims.remove(idle[0])
                    resident.remove(idle[0])
                    evicted.append(idle[0])
                ahead.missing.remove(chunk)
                resident.add(chunk)
                begun.append(chunk)
        yield Step(visit, evict, gather, tuple(evicted), tuple(begun), frozenset(resident))
