"""Event simulator of a pipeline step, in which transfers take time and share links.

Each rank has two resources. Its device runs the actions of the schedule in order; the times of the
actions include the launches of the host. Its port sends tensors to other ranks and takes part in
collectives, at the same time as the device computes. Transfers that use a port at the same time
share its rate equally.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from optimus.parallel.pipeline.actions import RECEIVES, SENDS, Action, Kind, Schedule
from optimus.parallel.pipeline.simulate import Cost, Span, Timeline


class Transfers(NamedTuple):
    """Seconds of the transfers of a step, if they use their port alone."""

    send_s: Callable[[Action], float] = lambda action: 0.0
    """Seconds of an action of `SENDS`."""
    reduce_s: Mapping[int, Sequence[float]] = {}
    """Seconds of the collectives of each stage's gradients, which begin with the stage's last
    backward. OPT_STEP waits for them."""
    gather_s: Sequence[float] = ()
    """Seconds of the collectives of parameters, which each rank begins at the start of the step.
    The second action of the rank waits for them."""


class Device(Protocol):
    """A device whose actions may wait, for example for copies of parameters."""

    def run(self, action: Action, start: float, seconds: float) -> float:
        """Return the end of an action that begins at `start` and takes `seconds` if it does not
        wait. The actions of a rank are given in their order."""


@dataclass(frozen=True)
class Played(Timeline):
    """Start and end times of the actions of all ranks, and of their transfers."""

    transfers: tuple[tuple[Span, ...], ...] = ()
    """Transfers of each rank, in the order of their ends. The actions are the sends, REDUCE_GRAD
    for collectives of gradients, and RECV_ACTIVATION of stage 0 for collectives of parameters."""


def play(
    schedule: Schedule,
    cost: Cost,
    transfers: Transfers | None = None,
    devices: Sequence[Device] = (),
) -> Played:
    """Simulate a schedule, and return the times of all actions and transfers.

    Args:
        schedule: The actions of each rank.
        cost: Seconds of an action on the device. Those of sends and receives are not used.
        transfers: Seconds of transfers; None: they take no time.
        devices: The device of each rank; empty: the actions of all ranks do not wait.
    """
    return _Play(schedule, cost, transfers or Transfers(), devices).run()


_GATHER = Action(Kind.RECV_ACTIVATION)


@dataclass
class _Port:
    """The transfers of a rank in progress."""

    active: list[tuple[float, float, Action]] = field(default_factory=list)
    """Remaining seconds alone, start, and action of each transfer."""
    last: float = 0.0
    """Time for which the remaining seconds hold."""
    version: int = 0
    """Number of changes. An event for an earlier version is obsolete."""

    def advance(self, now: float) -> None:
        elapsed = (now - self.last) / max(1, len(self.active))
        self.active = [(left - elapsed, start, action) for left, start, action in self.active]
        self.last = now

    def next_end(self) -> float:
        return self.last + min(self.active)[0] * len(self.active)


_RESUME, _PORT = 0, 1


class _Play:
    """State of a simulation."""

    def __init__(
        self, schedule: Schedule, cost: Cost, transfers: Transfers, devices: Sequence[Device]
    ) -> None:
        self._schedule, self._cost, self._transfers = schedule, cost, transfers
        self._devices = devices
        ranks = range(schedule.num_ranks)
        self._next = [0] * schedule.num_ranks
        """Index of the next action of each rank."""
        self._ports = [_Port() for _ in ranks]
        self._collectives = [0] * schedule.num_ranks
        """Number of collectives of each rank in progress."""
        self._waits: list[bool] = [False] * schedule.num_ranks
        """True for ranks that wait for their collectives."""
        self._arrived: set[tuple[bool, int, int]] = set()
        """Data that has arrived: True for an activation, stage and microbatch that need it."""
        self._waiting: dict[tuple[bool, int, int], int] = {}
        """Ranks that wait for data."""
        self._events: list[tuple[float, int, int, int, int]] = []
        self._count = 0
        self._spans: list[list[Span]] = [[] for _ in ranks]
        self._sent: list[list[Span]] = [[] for _ in ranks]
        self._last_backward = {
            (action.stage, action.microbatch)
            for actions in schedule.ranks
            for action in actions
            if action.kind is Kind.REDUCE_GRAD
        }

    def run(self) -> Played:
        for rank in range(self._schedule.num_ranks):
            for seconds in self._transfers.gather_s:
                self._begin(rank, 0.0, seconds, _GATHER)
            self._push(0.0, _RESUME, rank)
        while self._events:
            now, _, event, rank, version = heapq.heappop(self._events)
            if event == _RESUME:
                self._act(rank, now)
            elif version == self._ports[rank].version:
                self._finish(rank, now)
        unfinished = [
            rank
            for rank, actions in enumerate(self._schedule.ranks)
            if self._next[rank] < len(actions)
        ]
        assert not unfinished, f"deadlock of ranks {unfinished}"
        return Played(tuple(map(tuple, self._spans)), tuple(map(tuple, self._sent)))

    def _push(self, time: float, event: int, rank: int, version: int = 0) -> None:
        self._count += 1
        heapq.heappush(self._events, (time, self._count, event, rank, version))

    def _act(self, rank: int, now: float) -> None:
        """Run the actions of a rank that is idle, up to the next one that takes time or waits."""
        actions, last = self._schedule.ranks[rank], self._schedule.num_stages - 1
        cost, devices, spans = self._cost, self._devices, self._spans[rank]
        for index in range(self._next[rank], len(actions)):
            action = actions[index]
            kind, stage, microbatch = action
            if kind in SENDS:
                self._begin(rank, now, self._transfers.send_s(action), action)
                continue
            if kind in RECEIVES:
                continue
            is_forward, is_backward = kind is Kind.F, kind is Kind.B or kind is Kind.I
            if (is_forward and stage > 0) or (is_backward and stage < last):
                key = is_forward, stage, microbatch
                if key not in self._arrived:
                    self._waiting[key] = rank
                    self._next[rank] = index
                    return
                self._arrived.remove(key)
            if self._collectives[rank] and (kind is Kind.OPT_STEP or len(spans) == 1):
                self._waits[rank] = True
                if is_forward or is_backward:
                    self._arrived.add((is_forward, stage, microbatch))
                self._next[rank] = index
                return
            if kind is Kind.B or kind is Kind.W:
                self._begin_reduction(rank, now, stage, microbatch)
            seconds = cost(action)
            end = now + seconds
            if devices:
                end = devices[rank].run(action, now, seconds)
            spans.append(Span(action, now, end))
            if self._schedule.num_ranks == 1 and stage < last and is_forward:
                self._arrived.add((True, stage + 1, microbatch))
            elif self._schedule.num_ranks == 1 and stage and is_backward:
                self._arrived.add((False, stage - 1, microbatch))
            if end > now:
                self._next[rank] = index + 1
                self._push(end, _RESUME, rank)
                return
        self._next[rank] = len(actions)

    def _begin_reduction(self, rank: int, now: float, stage: int, microbatch: int) -> None:
        if (stage, microbatch) in self._last_backward:
            for seconds in self._transfers.reduce_s.get(stage, ()):
                self._begin(rank, now, seconds, Action(Kind.REDUCE_GRAD, stage, microbatch))

    def _begin(self, rank: int, now: float, seconds: float, action: Action) -> None:
        if action.kind not in SENDS:
            self._collectives[rank] += 1
        if not seconds:
            self._complete(rank, now, action)
            return
        port = self._ports[rank]
        port.advance(now)
        port.active.append((seconds, now, action))
        port.version += 1
        self._push(port.next_end(), _PORT, rank, port.version)

    def _finish(self, rank: int, now: float) -> None:
        """End the transfer of a port with the least remaining time."""
        port = self._ports[rank]
        port.advance(now)
        ended = min(port.active)
        port.active.remove(ended)
        port.version += 1
        if port.active:
            self._push(port.next_end(), _PORT, rank, port.version)
        _, start, action = ended
        self._sent[rank].append(Span(action, start, now))
        self._complete(rank, now, action)

    def _complete(self, rank: int, now: float, action: Action) -> None:
        """Wake the rank that waits for a transfer."""
        kind, stage, microbatch = action
        if kind not in SENDS:
            self._collectives[rank] -= 1
            if not self._collectives[rank] and self._waits[rank]:
                self._waits[rank] = False
                self._push(now, _RESUME, rank)
            return
        is_forward = kind is Kind.SEND_ACTIVATION
        key = is_forward, stage + (1 if is_forward else -1), microbatch
        self._arrived.add(key)
        if (waiting := self._waiting.pop(key, None)) is not None:
            self._push(now, _RESUME, waiting)
