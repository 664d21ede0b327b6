"""Simulator of pipeline schedules, which computes the start and end times of all actions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from optimus.parallel.pipeline.actions import COMPUTE, RECEIVES, Action, Kind, Schedule

Cost = Callable[[Action], float]
"""Function that returns the duration of an action, in any unit. The duration of a send is the time
until its data arrives on the receiving rank."""


class Span(NamedTuple):
    """Start and end times of one action."""

    action: Action
    start: float
    end: float


@dataclass(frozen=True)
class Timeline:
    """Start and end times of the compute, reduction and optimizer actions of all ranks."""

    ranks: tuple[tuple[Span, ...], ...]

    @property
    def end(self) -> float:
        return max(spans[-1].end for spans in self.ranks)

    def busy(self, rank: int) -> float:
        """Return the total duration of a rank's compute actions."""
        return sum(s.end - s.start for s in self.ranks[rank] if s.action.kind in COMPUTE)

    @property
    def bubble_ratio(self) -> float:
        """Return the total idle time of all ranks, divided by the total compute time of all
        ranks."""
        busy = sum(map(self.busy, range(len(self.ranks)))) / len(self.ranks)
        return self.end / busy - 1 if busy else 0.0


def unit_costs(virtual_stages: int = 1) -> Cost:
    """Return a cost function in which F, I and W take the time 1/`virtual_stages`, and B takes the
    time 2/`virtual_stages`.

    All other actions take no time.
    """
    costs = {Kind.F: 1.0, Kind.B: 2.0, Kind.I: 1.0, Kind.W: 1.0}
    return lambda action: costs.get(action.kind, 0.0) / virtual_stages


def bubble_ratio(name: str, num_ranks: int, virtual_stages: int, num_microbatches: int) -> float:
    """Return the bubble ratio of a schedule of equal stages, computed by a formula.

    The result is equal to `Timeline.bubble_ratio` of a simulation with `unit_costs`. The arguments
    are as for `make_schedule`.
    """
    p, v, m = num_ranks, virtual_stages, num_microbatches
    if name == "zb-h1":  # W runs while a rank of 1F1B is idle
        return ((p - 1) if m >= p else (2 * p - m - 1)) / (3 * m)
    return ((p - 1) if m >= p else ((p - m) * v + m - 1)) / (v * m)


def simulate(schedule: Schedule, cost: Cost) -> Timeline:
    """Simulate a schedule. Return the start and end times of its actions.

    The action `a` takes the time cost(a). Transfers overlap with computation. If the schedule has a
    deadlock, an assertion fails.
    """
    simulation = _Simulation(schedule, cost)
    ready = list(range(schedule.num_ranks))
    while ready:
        ready += simulation.run(ready.pop())
    assert not simulation.waiting, f"deadlock: {simulation.waiting}"
    return Timeline(tuple(map(tuple, simulation.spans)))


_Key = tuple[int, int]
"""Pair (stage, microbatch)."""


class _Simulation:
    """State of a simulation: the next action of each rank, and the arrival times of data."""

    def __init__(self, schedule: Schedule, cost: Cost) -> None:
        self._schedule, self._cost = schedule, cost
        self._clock = [0.0] * schedule.num_ranks
        self._next = [0] * schedule.num_ranks
        """Index of the next action of each rank."""
        self._activations: dict[_Key, float] = {}
        """Time at which the input of each stage and microbatch arrives."""
        self._gradients: dict[_Key, float] = {}
        self.spans: list[list[Span]] = [[] for _ in schedule.ranks]
        self.waiting: dict[tuple[bool, _Key], int] = {}
        """Ranks that wait for data: (True for an activation, key of the data) -> rank."""

    def run(self, rank: int) -> list[int]:
        """Run the actions of a rank until the rank waits for data that no rank has sent yet. Return
        the waiting ranks for which data has arrived."""
        last, alone = self._schedule.num_stages - 1, self._schedule.num_ranks == 1
        cost, actions, spans = self._cost, self._schedule.ranks[rank], self.spans[rank]
        activations, gradients = self._activations, self._gradients
        now, arrived = self._clock[rank], []
        for index in range(self._next[rank], len(actions)):
            action = actions[index]
            kind, stage, microbatch = action
            if kind is Kind.SEND_ACTIVATION:
                key = stage + 1, microbatch
                activations[key] = now + cost(action)
                arrived.append((True, key))
            elif kind is Kind.SEND_GRADIENT:
                key = stage - 1, microbatch
                gradients[key] = now + cost(action)
                arrived.append((False, key))
            elif kind not in RECEIVES:
                start, is_forward = now, kind is Kind.F
                is_backward = kind is Kind.B or kind is Kind.I
                if (is_forward and stage > 0) or (is_backward and stage < last):
                    arrives = activations if is_forward else gradients
                    ready = arrives.get((stage, microbatch))
                    if ready is None:
                        self.waiting[is_forward, (stage, microbatch)] = rank
                        self._next[rank] = index
                        break
                    start = max(now, ready)
                now = start + cost(action)
                spans.append(Span(action, start, now))
                if alone and is_forward:
                    activations[stage + 1, microbatch] = now
                elif alone and is_backward:
                    gradients[stage - 1, microbatch] = now
        self._clock[rank] = now
        return [self.waiting.pop(data) for data in arrived if data in self.waiting]
