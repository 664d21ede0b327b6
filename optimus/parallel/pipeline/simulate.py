"""Simulation of a pipeline schedule, which computes the start and end times of all actions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from optimus.parallel.pipeline.actions import COMPUTE, SENDS, Action, Kind, Schedule
from optimus.parallel.pipeline.communicate import needs_of, received_by, sends_of

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


def simulate(schedule: Schedule, cost: Cost) -> Timeline:
    """Simulate a schedule in which the action `a` takes the time cost(a), and return the start and
    end times of the actions.

    Transfers overlap with computation. If the schedule has a deadlock, the call does not return.
    """
    clock = [0.0] * schedule.num_ranks
    next_action = [0] * schedule.num_ranks
    arrives: dict[Action, float] = {}
    ends: dict[Action, float] = {}
    spans: list[list[Span]] = [[] for _ in schedule.ranks]
    while any(index < len(schedule.ranks[rank]) for rank, index in enumerate(next_action)):
        for rank, actions in enumerate(schedule.ranks):
            while next_action[rank] < len(actions):
                action = actions[next_action[rank]]
                needs = needs_of(action, schedule.num_stages) if action.kind in COMPUTE else []
                if any(need not in arrives for need in needs):
                    break
                next_action[rank] += 1
                if action.kind in SENDS:
                    arrives[received_by(action)] = clock[rank] + cost(action)
                elif action.kind in COMPUTE or action.kind in (Kind.REDUCE_GRAD, Kind.OPT_STEP):
                    start = max([clock[rank], *(arrives[need] for need in needs)])
                    clock[rank] = ends[action] = start + cost(action)
                    spans[rank].append(Span(action, start, clock[rank]))
                    for send in sends_of(action, schedule.num_stages):
                        received = received_by(send)
                        if schedule.rank_of(received.stage) == rank:
                            arrives[received] = clock[rank]
    return Timeline(tuple(map(tuple, spans)))
