"""Event simulator of a pipeline step, in which transfers take time and share links.

Each rank has a device, a host, and a port at each level of the network. The device runs the actions
of the schedule in order. The host of an accelerator starts the operations of the actions in the
same order. Within a step, the host does not wait for the device, so it can be ahead of the device.
An action ends only after the host has started all operations of the action. A port sends tensors to
other ranks and takes part in collectives, at the same time as the device computes. Two rules
determine how transfers compete:

- Transfers that use a port at the same time share its rate equally. A transfer that crosses several
  levels uses only a fraction of the rate of the ports at the faster levels. Transfers at different
  levels do not compete, because a rank has different links within a node and between nodes.
- The ranks of a domain, such as a rack, share the links that leave the domain. If these links carry
  less than the ports of all ranks (the taper of a machine file), the sending ranks of the domain
  share the links equally. A transfer then uses these links and also the port of the previous level,
  such as the network adapter of a node.

The simulation has a single pipeline. The ranks of all other pipelines run the same actions at the
same time. In a domain, a transfer of a pipeline rank is therefore counted once for each rank of the
domain that has the same stages.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from optimus.parallel.pipeline.actions import COMPUTE, RECEIVES, SENDS, Action, Kind, Schedule
from optimus.parallel.pipeline.simulate import Cost, Span, Timeline


class Transfer(NamedTuple):
    """A transfer of a rank."""

    seconds: float
    """Duration in seconds if no other transfer competes with this transfer."""
    loads: tuple[float, ...] = (1.0,)
    """For each level of the network, the fraction (0 to 1) of the rate of the rank's port that the
    transfer uses if no other transfer competes with it."""

    def times(self, number: float) -> Transfer:
        """Return the transfer of `number` times as many bytes."""
        return self._replace(seconds=number * self.seconds)


class SharedLevel(NamedTuple):
    """The links that leave a domain, such as a rack. All ranks of the domain share them."""

    capacity: float
    """Number of ranks of a domain that can send through the links at the same time, each at the
    rate of its port."""
    loads: Sequence[Sequence[float]]
    """`loads[d][s]` is the number of ranks in domain d that have the stages of pipeline rank s.
    These ranks send at the same time as rank s."""
    domains: Sequence[Sequence[int]] = ()
    """For each pipeline rank, the domains that contain ranks with its stages. The slowest of these
    domains determines the rate of the pipeline rank. If empty, pipeline rank r is only in domain
    r."""


class Transfers(NamedTuple):
    """Transfers of a step."""

    send: Callable[[Action], Transfer] = lambda action: Transfer(0.0)
    """Returns the transfer of an action whose kind is in `SENDS`."""
    reduce: Mapping[int, Sequence[Transfer]] = {}
    """A dict from each stage to the collectives of its gradients, which begin with the last
    backward of the stage. OPT_STEP waits for these collectives."""
    gather: Sequence[Transfer] = ()
    """The collectives of parameters, which each rank begins at the start of the step. The second
    action of the rank waits for these collectives."""
    exchanges: Mapping[tuple[Kind, int], Transfer] = {}
    """A dict from the kind and the stage of an action to a transfer. Some collectives within the
    action compete with other transfers; the transfer represents these collectives. After the
    computation of the action, the device waits for the transfer. The time of all other collectives
    within the action is included in the cost of the action."""
    shared: Mapping[int, SharedLevel] = {}
    """A dict from the index of a level to the links that leave its domains, for the levels at which
    these links carry less than the ports of all ranks of a domain."""


class Device(Protocol):
    """A device whose actions can wait, for example for copies of parameters."""

    def run(self, action: Action, start: float, seconds: float) -> float:
        """Return the time at which an action ends, in seconds. The simulation calls this method for
        the actions of a rank in order.

        Args:
            action: The action.
            start: Time at which the action can begin, in seconds.
            seconds: Duration of the action if it does not wait.
        """


@dataclass(frozen=True)
class Played(Timeline):
    """Start and end times of the actions and of the transfers of all ranks, in seconds."""

    transfers: tuple[tuple[Span, ...], ...] = ()
    """Transfers of each rank, in the order of their ends. The action of a `Span` is the send,
    REDUCE_GRAD for a collective of gradients, or RECV_ACTIVATION of stage 0 for a collective of
    parameters."""
    hosts: tuple[tuple[Span, ...], ...] = ()
    """For each rank, the intervals in which the host starts the operations of the actions."""


def play(
    schedule: Schedule,
    cost: Cost,
    transfers: Transfers | None = None,
    devices: Sequence[Device] = (),
    launch: Cost = lambda action: 0.0,
) -> Played:
    """Simulate a schedule, and return the times of all actions and transfers.

    Args:
        schedule: The actions of each rank.
        cost: Function that returns the seconds of an action on the device. The function is not
            called for sends and receives.
        transfers: The transfers and their seconds; None if transfers take no time.
        devices: The device of each rank. If empty, the actions of all ranks do not wait.
        launch: Function that returns the seconds that the host needs to start the operations of an
            action.
    """
    return _Play(schedule, cost, transfers or Transfers(), devices, launch).run()


_GATHER = Action(Kind.RECV_ACTIVATION)


class _Job(NamedTuple):
    """A transfer in progress."""

    left: float
    """Seconds that remain if no other transfer competes with this transfer."""
    start: float
    rank: int
    loads: tuple[float, ...]
    action: Action


class _Ports:
    """The transfers in progress of a rank or, with shared levels, of all ranks.

    Attributes:
        version: Number of changes of `active`. An event for an earlier version is obsolete.
        next_end: Time at which the next transfer ends, if there is one.
    """

    def __init__(self, shared: Mapping[int, SharedLevel]) -> None:
        self.shared = shared
        self.active: list[_Job] = []
        self.version, self.next_end = 0, 0.0
        self._last = 0.0
        """Time at which the jobs in `active` have `_Job.left` remaining seconds."""
        self._speeds: list[float] = []
        self._next = 0
        """Index in `active` of the transfer that ends next."""

    def speeds(self) -> list[float]:
        """Return the speed of each transfer: 1 if no other transfer competes with it, and less
        otherwise."""
        if len(self.active) == 1 and not self.shared:
            return [1.0]
        totals: dict[tuple[int, int], float] = {}
        for job in self.active:
            for level, load in enumerate(job.loads):
                if load:
                    key = job.rank, level
                    totals[key] = totals.get(key, 0.0) + load
        slowing = {key: max(1.0, total) for key, total in totals.items()}
        for level, (capacity, loads, domains) in self.shared.items():
            sending = [(rank, load) for (rank, at), load in totals.items() if at == level]
            senders: dict[int, float] = {}
            for rank, _ in sending:
                for domain in domains[rank] if domains else (rank,):
                    if domain not in senders:
                        senders[domain] = sum(load * loads[domain][r] for r, load in sending)
                    slowing[rank, level] = max(slowing[rank, level], senders[domain] / capacity)
        return [
            1 / max([slowing[job.rank, level] for level, load in enumerate(job.loads) if load])
            for job in self.active
        ]

    def add(self, now: float, job: _Job) -> None:
        """Begin a transfer."""
        self._advance(now)
        self.active.append(job)
        self._change()

    def finish(self, now: float) -> _Job:
        """Remove the transfer that ends next, at the time `now`, and return it."""
        self._advance(now)
        job = self.active.pop(self._next)
        self._change()
        return job

    def _advance(self, now: float) -> None:
        elapsed, self._last = now - self._last, now
        if elapsed and self.active:
            pairs = zip(self.active, self._speeds, strict=True)
            self.active = [
                _Job(left - elapsed * speed, start, rank, loads, action)
                for (left, start, rank, loads, action), speed in pairs
            ]

    def _change(self) -> None:
        """Compute the speeds of the transfers and the time at which the next transfer ends."""
        self.version += 1
        if not self.active:
            return
        self._speeds = self.speeds()
        times = [job.left / speed for job, speed in zip(self.active, self._speeds, strict=True)]
        seconds = min(times)
        self._next = times.index(seconds)
        self.next_end = self._last + seconds


_RESUME, _PORT, _EXCHANGE = 0, 1, 2


class _Play:
    """State of a simulation."""

    def __init__(
        self,
        schedule: Schedule,
        cost: Cost,
        transfers: Transfers,
        devices: Sequence[Device],
        launch: Cost,
    ) -> None:
        self._schedule, self._cost, self._transfers = schedule, cost, transfers
        self._devices, self._launch = devices, launch
        self._launched = [0.0] * schedule.num_ranks
        """Time at which the host of each rank has started the operations of the actions that have
        been simulated so far."""
        self._hosts: list[list[Span]] = [[] for _ in schedule.ranks]
        ranks = range(schedule.num_ranks)
        self._next = [0] * schedule.num_ranks
        """Index of the next action of each rank."""
        shared = transfers.shared
        self._ports = [_Ports(shared) for _ in range(1 if shared else schedule.num_ranks)]
        """A `_Ports` for each rank or, with shared levels, one for all ranks."""
        self._collectives = [0] * schedule.num_ranks
        """Number of collectives of each rank in progress."""
        self._waits: list[bool] = [False] * schedule.num_ranks
        """True for ranks that wait for their collectives."""
        self._arrived: set[tuple[bool, int, int]] = set()
        """Data that has arrived. An element has True for an activation or False for a gradient, and
        the stage and the microbatch that need the data."""
        self._waiting: dict[tuple[bool, int, int], int] = {}
        """A dict from the data for which a rank waits to this rank."""
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
            for transfer in self._transfers.gather:
                self._begin(rank, 0.0, transfer, _GATHER)
            self._push(0.0, _RESUME, rank)
        while self._events:
            now, _, event, number, version = heapq.heappop(self._events)
            if event == _RESUME:
                self._act(number, now)
            elif event == _EXCHANGE:
                self._begin_exchange(number, now)
            elif version == self._ports[number].version:
                self._finish(number, now)
        unfinished = [
            rank
            for rank, actions in enumerate(self._schedule.ranks)
            if self._next[rank] < len(actions)
        ]
        assert not unfinished, f"deadlock of ranks {unfinished}"
        spans, sent, hosts = (
            tuple(map(tuple, of_ranks)) for of_ranks in (self._spans, self._sent, self._hosts)
        )
        return Played(spans, sent, hosts)

    def _push(self, time: float, event: int, number: int, version: int = 0) -> None:
        self._count += 1
        heapq.heappush(self._events, (time, self._count, event, number, version))

    def _act(self, rank: int, now: float) -> None:
        """Run the actions of an idle rank until an action takes time or must wait."""
        actions, last = self._schedule.ranks[rank], self._schedule.num_stages - 1
        cost, devices, spans = self._cost, self._devices, self._spans[rank]
        exchanges = self._transfers.exchanges
        for index in range(self._next[rank], len(actions)):
            action = actions[index]
            kind, stage, microbatch = action
            if kind in SENDS:
                self._begin(rank, now, self._transfers.send(action), action)
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
            computed = now + seconds
            if devices:
                computed = devices[rank].run(action, now, seconds)
            end = computed
            if launch_s := self._launch(action):
                start = self._launched[rank]
                self._launched[rank] = start + launch_s
                self._hosts[rank].append(Span(action, start, start + launch_s))
                end = max(computed, start + launch_s)
            spans.append(Span(action, now, end))
            if exchanges and (kind, stage) in exchanges:
                self._next[rank] = index + 1
                self._push(computed, _EXCHANGE, rank)
                return
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
            for transfer in self._transfers.reduce.get(stage, ()):
                self._begin(rank, now, transfer, Action(Kind.REDUCE_GRAD, stage, microbatch))

    def _begin_exchange(self, rank: int, now: float) -> None:
        """Begin the transfer of `exchanges` for the last action of a rank."""
        action = self._spans[rank][-1].action
        self._begin(rank, now, self._transfers.exchanges[action[:2]], action)

    def _begin(self, rank: int, now: float, transfer: Transfer, action: Action) -> None:
        if action.kind is Kind.REDUCE_GRAD or action is _GATHER:
            self._collectives[rank] += 1
        if not transfer.seconds:
            self._complete(rank, now, action)
            return
        number = 0 if self._transfers.shared else rank
        job = _Job(transfer.seconds, now, rank, transfer.loads, action)
        self._ports[number].add(now, job)
        self._plan_end(number)

    def _plan_end(self, number: int) -> None:
        """Add the event for the next end of a transfer in the `_Ports` with the index `number`."""
        ports = self._ports[number]
        if ports.active:
            self._push(ports.next_end, _PORT, number, ports.version)

    def _finish(self, number: int, now: float) -> None:
        """End the transfer that ends next in the `_Ports` with the index `number`."""
        _, start, rank, _, action = self._ports[number].finish(now)
        self._plan_end(number)
        if action.kind in COMPUTE:
            end = max(now, self._launched[rank])
            self._spans[rank][-1] = self._spans[rank][-1]._replace(end=end)
            self._push(end, _RESUME, rank)
            return
        self._sent[rank].append(Span(action, start, now))
        self._complete(rank, now, action)

    def _complete(self, rank: int, now: float, action: Action) -> None:
        """Record that a transfer has ended, and resume the rank that waits for it."""
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
