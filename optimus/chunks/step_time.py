"""Predicted time of a training step with offloaded chunks, from a simulation of its copies, updates
and computation."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from optimus.chunks.disk import BUFFERS
from optimus.chunks.residency import MAX_COPYING, ResidencyPlan, Use
from optimus.config.machine import Links


@dataclass(frozen=True)
class StepWork:
    """Work of a training step on a rank whose chunks all have their home on the host.

    Chunks and segments are numbered in order of first use.
    """

    plan: ResidencyPlan
    """Uses of the segments in the step, and the actions of the cache."""
    needs: Sequence[frozenset[int]]
    """Chunks of each segment."""
    forward_s: Sequence[float]
    """Seconds that the forward of each segment computes."""
    backward_s: Sequence[float]
    """Seconds that the backward of each segment computes."""
    param_bytes: Sequence[int]
    """Bytes of each chunk that are copied to the device."""
    grad_bytes: Sequence[int]
    """Bytes of each chunk that are copied to the host after each backward."""
    elements: Sequence[int]
    """Elements of each chunk that the host updates."""
    early: frozenset[int] = frozenset()
    """Chunks that have spare buffers for early updates (`UpdateQueue`). Chunks on disk have none.
    """
    clips: bool = False
    """True if the norm of the gradients is clipped, so that early updates are discarded."""
    disk_bytes: Sequence[int] = ()
    """Bytes of each chunk that are read from disk for its update and written afterwards; empty if
    no states are on disk."""

    def seconds_of(self, use: Use) -> float:
        """Return the seconds that a use computes."""
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
    """Shortest time of the work that must be done one after the other, if the updates need the norm
    of all gradients: the uses before the first backward, with the updates and copies that they wait
    for; the computation of the uses up to the last forward; and the uses after the last forward,
    with the copies of their gradients to the host."""
    disk_read: float = 0.0
    """Time for which the disk reads states."""
    disk_write: float = 0.0
    """Time for which the disk writes states."""

    @property
    def limit(self) -> float:
        """Largest of the times for which a resource (device, direction of the link or of the disk,
        host) works."""
        disk = max(self.disk_read, self.disk_write)
        return max(self.compute, self.to_device, self.to_host, self.host_adam, disk)

    @property
    def shortest(self) -> float:
        """Lower limit of the time of any schedule in which the parameters keep their values until
        the norm of all gradients is known. Before that, the new values of chunks with spare buffers
        may be computed."""
        return max(self.limit, self.chain)


def predict_step(work: StepWork, links: Links) -> StepTime:
    """Simulate some steps and return the times of the last one.

    The simulation contains the actions of `ParamStore`, `ReducePerMicrobatch` and `UpdateQueue` in
    their order. The device, each direction of the link, each direction of the disk, and the host do
    one action at a time. A copy to the device begins when its chunk is updated and the previous
    copy is complete. Clipping needs the norm of all gradients. Therefore the update of the first
    chunk begins when all gradients are on the host and all states of the previous update are on
    disk. Chunks with spare buffers are an exception: until the norm is known, they are updated in
    the order in which their gradients arrive on the host.
    """
    simulation, ends = _Simulation(work, links), [0.0]
    for _ in range(_STEPS):
        simulation.run_step()
        ends.append(simulation.now)
    return StepTime(
        ends[-1] - ends[-2],
        simulation.computed / _STEPS,
        simulation.uploaded / _STEPS,
        simulation.reduced / _STEPS,
        sum(work.elements) / links.host_adam,
        _longest_chain(work, links),
        sum(work.disk_bytes) / links.disk_read,
        sum(work.disk_bytes) / links.disk_write,
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


class _Simulation:
    """Times at which the resources of a rank have completed their work so far, in seconds."""

    def __init__(self, work: StepWork, links: Links) -> None:
        self._work, self._links = work, links
        self.now = 0.0
        """Time at which the device has completed its work so far."""
        self._up = self._down = self._host = self._read = self._written = 0.0
        self._buffers = deque([0.0] * BUFFERS)
        """Times from which the buffers for states on disk are free."""
        self.computed = self.uploaded = self.reduced = 0.0
        """Seconds for which the device has computed, and the link has copied in each direction."""
        self._updated = [0.0] * len(work.elements)
        """For each chunk, the time at which its update is complete."""
        self._on_device: dict[int, float] = {}
        """For each chunk, the time at which its last copy to the device is complete."""
        self._copying: deque[tuple[int, float]] = deque()
        """Chunks whose gradients are being copied to the host, and the ends of these copies."""
        self._gradients: list[int] = []
        """Chunks whose gradients are on the device."""
        self._arrived: dict[int, float] = {}
        """For each chunk, the time at which its last gradients are on the host."""
        numbers = reversed(range(len(work.needs)))
        self._first = {chunk: n for n in numbers for chunk in work.needs[n]}

    def run_step(self) -> None:
        """Simulate the work of a step."""
        work, steps = self._work, self._work.plan.steps
        for step, following in zip(steps, [*steps[1:], None], strict=True):
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
            self.now += seconds
            self.computed += seconds
            if is_backward and (following is None or not following.use.backward):
                self._reduce(list(self._gradients))
        while self._copying:
            self._wait_for_gradient_copy()
        early = self._update_early()
        self.now = max(self.now, self._written)
        for chunk in range(len(work.elements)):
            on_disk = work.disk_bytes[chunk] if work.disk_bytes else 0
            ready = self._read_states(on_disk) if on_disk else self.now
            self._host = max(ready, self._host)
            if work.clips or chunk not in early:
                self._host += work.elements[chunk] / self._links.host_adam
            self._updated[chunk] = self._host
            if on_disk:
                self._written = max(self._host, self._written) + on_disk / self._links.disk_write
                self._buffers.append(self._written)

    def _read_states(self, size: int) -> float:
        """Simulate the read of a chunk's states, `size` bytes, to the first free buffer. Return the
        time at which the states are in host memory."""
        begin = max(self.now, self._read, self._buffers.popleft())
        self._read = begin + size / self._links.disk_read
        return self._read

    def _update_early(self) -> set[int]:
        """Simulate the updates that begin before the norm is known, at `now`. Return the chunks."""
        early = set()
        for chunk in sorted(self._work.early, key=self._arrived.__getitem__):
            start = max(self._host, self._arrived[chunk])
            if start >= self.now:
                break
            self._host = start + self._work.elements[chunk] / self._links.host_adam
            early.add(chunk)
        return early

    def _upload(self, chunks: Iterable[int]) -> None:
        for chunk in chunks:
            seconds = self._work.param_bytes[chunk] / self._links.to_device
            self._up = max(self.now, self._updated[chunk], self._up) + seconds
            self._on_device[chunk] = self._up
            self.uploaded += seconds

    def _wait_for(self, chunks: Iterable[int]) -> None:
        self.now = max([self.now, *(self._on_device.get(chunk, 0.0) for chunk in chunks)])

    def _reduce(self, chunks: Iterable[int]) -> None:
        for chunk in chunks:
            while len(self._copying) >= MAX_COPYING:
                self._wait_for_gradient_copy()
            seconds = self._work.grad_bytes[chunk] / self._links.to_host
            self._down = max(self.now, self._down) + seconds
            self._copying.append((chunk, self._down))
            self._arrived[chunk] = self._down
            self._gradients.remove(chunk)
            self.reduced += seconds

    def _wait_for_gradient_copy(self) -> None:
        self.now = max(self.now, self._copying.popleft()[1])


_STEPS = 4
"""Number of simulated steps. After the second, all steps take the same time."""
