"""Prediction of the time of a training step with offloaded chunks, by a simulation of the copies,
updates and computation of the step."""

from __future__ import annotations

import itertools
from collections import defaultdict, deque
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, get_args

from optimus.chunks.disk import BUFFERS
from optimus.chunks.residency import MAX_COPYING, ResidencyPlan, Use
from optimus.config.machine import Links


@dataclass(frozen=True)
class StepWork:
    """Uses, sizes and times of a training step on a rank, for the chunks whose home is the host.

    Chunks and segments are numbered in order of first use.
    """

    plan: ResidencyPlan
    """Uses of the segments in the step, and the actions of the cache."""
    needs: Sequence[frozenset[int]]
    """Chunks of each segment."""
    forward_s: Sequence[float]
    """Seconds for which the device computes in the forward of each segment."""
    backward_s: Sequence[float]
    """Seconds for which the device computes in the backward of each segment."""
    param_bytes: Sequence[int]
    """Bytes of the parameters of each chunk that are copied to the device before a use."""
    grad_bytes: Sequence[int]
    """Bytes of the gradients of each chunk that are copied to the host after each backward."""
    elements: Sequence[int]
    """Number of elements of each chunk that the host updates."""
    early: frozenset[int] = frozenset()
    """Chunks that have spare buffers for early updates (`UpdateQueue`). Chunks on disk have none.
    """
    clips: bool = False
    """True if the gradients are clipped in each step, so that early updates are discarded."""
    disk_bytes: Sequence[int] = ()
    """Bytes of each chunk that are read from disk for the update of the chunk and written to disk
    afterwards; empty if no states are on disk."""
    gather_s: Sequence[float] = ()
    """Seconds of the collective that gathers the shards of each chunk after this rank's shard is
    copied to the device. The device waits for the collective. Empty if each rank has whole
    chunks."""
    end_s: float = 0.0
    """Seconds at the end of a step in which the device updates the chunks on the device and waits
    for collectives of gradients and parameters."""

    def seconds_of(self, use: Use) -> float:
        """Return the seconds for which the device computes in a use."""
        return (self.backward_s if use.backward else self.forward_s)[use.segment]


@dataclass(frozen=True)
class StepTime:
    """Seconds of a training step."""

    step: float
    """Simulated time of a step, from its start to the start of the next step."""
    compute: float
    """Time for which the device computes."""
    to_device: float
    """Time for which the link copies to the device."""
    to_host: float
    """Time for which the link copies to the host."""
    host_adam: float
    """Time for which the host updates chunks."""
    chain: float
    """Shortest time of three phases of a step, which follow each other if the updates need the norm
    of all gradients. The first phase consists of the uses before the first backward, and of the
    updates and copies for which these uses wait. The second phase consists of the uses from the
    first backward to the last forward. The third phase consists of the uses after the last forward,
    and of the copies of their gradients to the host."""
    disk_read: float = 0.0
    """Time for which the disk reads states."""
    disk_write: float = 0.0
    """Time for which the disk writes states."""
    others: float = 0.0
    """Time for which the device waits for gathers of chunks, plus `StepWork.end_s`."""

    @property
    def limit(self) -> float:
        """Time for which the busiest resource is busy. The resources are the device, each direction
        of the link, each direction of the disk, and the host."""
        disk = max(self.disk_read, self.disk_write)
        return max(self.compute, self.to_device, self.to_host, self.host_adam, disk)

    @property
    def shortest(self) -> float:
        """Lower bound of the time of a step, for any order of its operations. The only condition is
        that the parameters keep their values until the norm of all gradients is known. Before that
        time, updates write new values only to the spare buffers of chunks."""
        return max(self.limit, self.chain)


def predict_step(work: StepWork, links: Links) -> StepTime:
    """Simulate `STEPS` steps. Return the time of the last step, and the mean times per step for
    which the resources are busy.

    The simulation contains the actions of `ParamStore`, `ReducePerMicrobatch` and `UpdateQueue` in
    their order. The device, each direction of the link, each direction of the disk, and the host do
    one action at a time. A copy to the device begins when its chunk is updated and the previous
    copy is complete. Clipping needs the norm of all gradients. Therefore the update of the first
    chunk begins when all gradients are on the host and all states of the previous update are on
    disk. Chunks with spare buffers are an exception: until the norm is known, they are updated in
    the order in which their gradients arrive on the host. The host also updates during
    `StepWork.end_s`.
    """
    simulation, ends = TierSimulation(work, links), [0.0]
    for _ in range(STEPS):
        simulation.run(ends[-1], len(work.plan.steps))
        norm_s = simulation.end_backward(0.0)
        simulation.update(norm_s)
        ends.append(norm_s + work.end_s)
    seconds = defaultdict[str, float](float)
    for resource, _, start, end in simulation.spans:
        seconds[resource] += end - start
    return StepTime(
        ends[-1] - ends[-2],
        simulation.computed / STEPS,
        seconds["to device"] / STEPS,
        seconds["to host"] / STEPS,
        sum(work.elements) / links.host_adam,
        _longest_chain(work, links),
        sum(work.disk_bytes) / links.disk_read,
        sum(work.disk_bytes) / links.disk_write,
        simulation.gathered / STEPS + work.end_s,
    )


def _longest_chain(work: StepWork, links: Links) -> float:
    """Return `StepTime.chain`."""
    uses = [step.use for step in work.plan.steps]
    leading = list(itertools.takewhile(lambda use: not use.backward, uses))
    trailing = list(itertools.takewhile(lambda use: use.backward, reversed(uses)))[::-1]
    read = updated = uploaded = forward = 0.0
    ready: dict[int, float] = {}
    early = frozenset() if work.clips else work.early - uses[-1].need
    for segment, _, needs in leading:
        for chunk in sorted(needs - ready.keys()):
            if work.disk_bytes:
                read += work.disk_bytes[chunk] / links.disk_read
                updated = max(updated, read)
            if chunk not in early:
                updated += work.elements[chunk] / links.host_adam
            uploaded = max(uploaded, updated) + work.param_bytes[chunk] / links.to_device
            ready[chunk] = uploaded
        forward = max([forward, *(ready[chunk] for chunk in needs)]) + work.forward_s[segment]
    last = {chunk: number for number, use in enumerate(trailing) for chunk in use.need}
    backward = copied = 0.0
    for number, (segment, _, needs) in enumerate(trailing):
        backward += work.backward_s[segment]
        for chunk in needs:
            if last[chunk] == number:
                copied = max(copied, backward) + work.grad_bytes[chunk] / links.to_host
    between = uses[len(leading) : len(uses) - len(trailing)]
    others = sum(work.seconds_of(use) for use in between)
    return forward + others + max(backward, copied)


Resource = Literal["to device", "to host", "host Adam", "disk read", "disk write"]
"""The resources of a rank other than its device: the two directions of the link to the host, the
host, and the two directions of the disk."""


class ResourceSpan(NamedTuple):
    """Interval in which a resource copies or updates a chunk. Times are in seconds from the start
    of the first step."""

    resource: Resource
    chunk: int
    start: float
    end: float


class TierSimulation:
    """Training steps of a rank with offloaded chunks, one after the other.

    In each step, call `run` until all uses of `StepWork.plan` are done, then `end_backward`, then
    `update`.

    Attributes:
        spans: Intervals in which the resources were busy so far, in the order of the simulation.
        computed: Seconds for which the device has computed.
        gathered: Seconds for which the device has waited for gathers of chunks.
    """

    def __init__(self, work: StepWork, links: Links) -> None:
        self._work, self._links = work, links
        self._now = 0.0
        """Time, in seconds, that the device has reached."""
        self._ends: dict[Resource, float] = dict.fromkeys(get_args(Resource), 0.0)
        """Time at which each resource completes the last of the actions that were simulated so
        far."""
        self.spans: list[ResourceSpan] = []
        self._buffers = deque([0.0] * BUFFERS)
        """Times from which the buffers for states on disk are free."""
        self.computed = self.gathered = 0.0
        self._next = 0
        """Index of the next use of the step."""
        self._updated = [0.0] * len(work.elements)
        """For each chunk, the time at which its update is complete."""
        self._uploads: dict[int, float] = {}
        """A dict from a chunk to the time at which its copy to the device is complete. A chunk is
        removed when a use waits for the copy."""
        self._copying: deque[tuple[int, float]] = deque()
        """Chunks whose gradients are being copied to the host, with the times at which the copies
        end."""
        self._gradients: list[int] = []
        """Chunks whose gradients are on the device."""
        self._arrived: dict[int, float] = {}
        """For each chunk, the time at which its last gradients are on the host."""
        numbers = reversed(range(len(work.needs)))
        self._first = {chunk: n for n in numbers for chunk in work.needs[n]}

    def run(self, start: float, count: int) -> float:
        """Simulate the next `count` uses of a step. Return the time at which the last of them is
        computed.

        Args:
            start: Time before which these uses do not begin.
            count: Number of uses.
        """
        work, steps = self._work, self._work.plan.steps
        self._now = max(self._now, start)
        for index in range(self._next, self._next + count):
            step = steps[index]
            segment, is_backward, _ = step.use
            needs = work.needs[segment]
            if is_backward:
                self._reduce([c for c in self._gradients if self._first[c] > segment])
                while any(chunk in needs for chunk, _ in self._copying):
                    self._wait_for_gradient_copy()
                self._gradients += sorted(needs.difference(self._gradients))
            self._wait_for(step.evict)
            self._upload(step.gather)
            self._wait_for(needs)
            self._wait_for(step.evict_early)
            self._upload(step.prefetch)
            seconds = work.seconds_of(step.use)
            self._now += seconds
            self.computed += seconds
            following = steps[index + 1].use if index + 1 < len(steps) else None
            if is_backward and (following is None or not following.backward):
                self._reduce(list(self._gradients))
        self._next += count
        return self._now

    def end_backward(self, start: float) -> float:
        """Return the time at which all gradients are on the host and all states of the previous
        update are on disk. `start` is as for `run`."""
        assert self._next == len(self._work.plan.steps), self._next
        self._now, self._next = max(self._now, start), 0
        while self._copying:
            self._wait_for_gradient_copy()
        self._now = max(self._now, self._ends["disk write"])
        return self._now

    def update(self, start: float) -> None:
        """Simulate the updates of all chunks. `start` is the time at which the norm of the
        gradients of all ranks is known."""
        work = self._work
        early = self._update_early(start)
        for chunk in range(len(work.elements)):
            on_disk = work.disk_bytes[chunk] if work.disk_bytes else 0
            ready = start
            if on_disk:
                # The read waits until a buffer is free.
                begin = max(start, self._buffers.popleft())
                ready = self._do("disk read", chunk, begin, on_disk / self._links.disk_read)
            seconds = 0.0
            if work.clips or chunk not in early:
                seconds = work.elements[chunk] / self._links.host_adam
            updated = self._do("host Adam", chunk, ready, seconds)
            self._updated[chunk] = updated
            if on_disk:
                seconds = on_disk / self._links.disk_write
                self._buffers.append(self._do("disk write", chunk, updated, seconds))

    def _do(self, resource: Resource, chunk: int, ready: float, seconds: float) -> float:
        """Make a resource busy for `seconds`, as soon as the resource is idle but not before the
        time `ready`. Return the time at which the resource is idle again."""
        start = max(ready, self._ends[resource])
        end = self._ends[resource] = start + seconds
        if seconds:
            self.spans.append(ResourceSpan(resource, chunk, start, end))
        return end

    def _update_early(self, norm: float) -> set[int]:
        """Simulate the early updates that begin before `norm`, the time at which the norm is known.
        Return their chunks. A chunk that no backward uses has no gradients and no early update."""
        early = set()
        chunks = self._work.early & self._arrived.keys()
        for chunk in sorted(chunks, key=self._arrived.__getitem__):
            if max(self._ends["host Adam"], self._arrived[chunk]) >= norm:
                break
            seconds = self._work.elements[chunk] / self._links.host_adam
            self._do("host Adam", chunk, self._arrived[chunk], seconds)
            early.add(chunk)
        return early

    def _upload(self, chunks: Iterable[int]) -> None:
        for chunk in chunks:
            seconds = self._work.param_bytes[chunk] / self._links.to_device
            ready = max(self._now, self._updated[chunk])
            self._uploads[chunk] = self._do("to device", chunk, ready, seconds)

    def _wait_for(self, chunks: Collection[int]) -> None:
        if not self._uploads:
            return
        for chunk in sorted(chunks):
            if (copied := self._uploads.pop(chunk, None)) is not None:
                self._now = max(self._now, copied)
                if self._work.gather_s:
                    self._now += self._work.gather_s[chunk]
                    self.gathered += self._work.gather_s[chunk]

    def _reduce(self, chunks: Iterable[int]) -> None:
        for chunk in chunks:
            while len(self._copying) >= MAX_COPYING:
                self._wait_for_gradient_copy()
            seconds = self._work.grad_bytes[chunk] / self._links.to_host
            copied = self._do("to host", chunk, self._now, seconds)
            self._copying.append((chunk, copied))
            self._arrived[chunk] = copied
            self._gradients.remove(chunk)

    def _wait_for_gradient_copy(self) -> None:
        self._now = max(self._now, self._copying.popleft()[1])


STEPS = 4
"""Number of simulated steps. From the third step on, all steps take the same time."""
