"""Search for the placement of a rank's chunks: the chunks on the host, the size of the cache, and
the order of the microbatches.

The search minimises the time of a step: the largest of the times for which the device computes, the
link copies in each direction, and the host updates. Elixir (arXiv 2212.05339, section 5.1) compares
two ratios of benefit to memory instead, which assume that nothing overlaps: `cache_benefit` and
`upload_benefit`.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from optimus.chunks.residency import MAX_COPYING, Use, plan_residency
from optimus.chunks.step_time import StepTime, StepWork, predict_step
from optimus.config.machine import Links


class ChunkCost(NamedTuple):
    """Bytes and work of a chunk on a rank."""

    resident: int
    """Bytes on the device between steps, if the home of the chunk is the device."""
    host: int
    """Bytes on the host, if the home of the chunk is the host."""
    cached: int
    """Bytes of its gathered parameters."""
    uploaded: int
    """Bytes of this rank's shard of the parameters, which a gather copies to the device."""
    gradients: int
    """Bytes of its gradients on the device, from a backward to the copy to the host."""
    copied: int
    """Bytes of gradients that a reduction copies to the host."""
    elements: int
    """Elements that this rank updates."""


@dataclass(frozen=True)
class Workload:
    """The chunks and the training step of a rank with one order of microbatches and one layout of
    the chunks. Chunks are numbered in order of first use."""

    order: str
    """Order of the microbatches."""
    chunk_length: int
    """Target length of the chunks, in elements."""
    chunks: Sequence[ChunkCost]
    uses: Sequence[Use]
    """The uses of a step in order. `need` contains all chunks of a segment."""
    needs: Sequence[frozenset[int]]
    """Chunks of each segment."""
    with_gradients: Sequence[frozenset[int]]
    """For each segment, the chunks whose gradients are on the device during its backward."""
    forward_s: Sequence[float]
    """Seconds that the forward of each segment computes for one microbatch."""
    backward_s: Sequence[float]
    """Seconds that the backward of each segment computes for one microbatch."""
    device_bytes: int
    """Bytes on the device that do not depend on the placement, such as activations."""
    host_bytes: int = 0
    """Bytes on the host that do not depend on the number of chunks there."""
    reductions: int = 1
    """Number of times that the gradients of a chunk are reduced in a step."""

    @cached_property
    def compute_s(self) -> float:
        """Seconds for which the device computes in a step."""
        return sum(self._seconds_of(use) for use in self.uses)

    @cached_property
    def leading_s(self) -> float:
        """Seconds of the uses before the first backward."""
        leading = itertools.takewhile(lambda use: not use.backward, self.uses)
        return sum(self._seconds_of(use) for use in leading)

    @cached_property
    def _sweeps(self) -> int:
        """Number of times that a step passes through the segments, forward or backward."""
        segments = (segment for segment, _ in itertools.groupby(use.segment for use in self.uses))
        return max(Counter(segments).values())

    def _seconds_of(self, use: Use) -> float:
        return (self.backward_s if use.backward else self.forward_s)[use.segment]

    def device(self, num_host: int, slots: int) -> int:
        """Return the bytes on the device if the last `num_host` chunks are on the host and the
        cache has `slots` slots."""
        return int(self._uncached[num_host]) + sum(self._largest(num_host)[:slots].tolist())

    def most_slots(self, num_host: int, device_memory: int) -> int | None:
        """Return the size of the largest cache that fits if the last `num_host` chunks are on the
        host; None if none fits."""
        gathered = self._largest(num_host).cumsum()
        slots = int(gathered.searchsorted(device_memory - self._uncached[num_host], "right"))
        return slots if slots >= self.fewest_slots(num_host) else None

    def fewest_slots(self, num_host: int) -> int:
        """Return the smallest cache for the last `num_host` chunks."""
        return int(self._counts[num_host])

    def host(self, num_host: int) -> int:
        """Return the bytes on the host if the last `num_host` chunks are there."""
        total = self._total("host")[num_host] + MAX_COPYING * self._most_copied[num_host]
        return self.host_bytes + int(total)

    def _largest(self, num_host: int) -> np.ndarray:
        """Return the sizes of the last `num_host` chunks, with the largest first."""
        return np.sort(self._cached[len(self.chunks) - num_host :])[::-1]

    @cached_property
    def _cached(self) -> np.ndarray:
        return np.array([chunk.cached for chunk in self.chunks])

    @cached_property
    def _most_copied(self) -> np.ndarray:
        copied = [0, *(chunk.copied for chunk in reversed(self.chunks))]
        return np.maximum.accumulate(copied)

    def _total(self, name: str) -> np.ndarray:
        """Return, for each number of chunks on the host, the sum of a cost of these chunks."""
        if name not in self._totals:
            costs = [getattr(chunk, name) for chunk in reversed(self.chunks)]
            self._totals[name] = np.concatenate([[0], np.cumsum(costs)])
        return self._totals[name]

    @cached_property
    def _totals(self) -> dict[str, np.ndarray]:
        return {}

    def _table(self, sets: Sequence[frozenset[int]]) -> np.ndarray:
        """Return [sets, chunks + 1]: True where a set contains a chunk. The chunks are in reverse
        order after a column of False."""
        table = np.zeros((len(sets), len(self.chunks) + 1), dtype=bool)
        for row, chunks in zip(table, sets, strict=True):
            row[[len(self.chunks) - chunk for chunk in chunks]] = True
        return table

    @cached_property
    def _counts(self) -> np.ndarray:
        """For each number of chunks on the host, the largest number of them in a segment."""
        return self._table(self.needs).cumsum(axis=1).max(axis=0)

    @cached_property
    def _uncached(self) -> np.ndarray:
        """For each number of chunks on the host, the bytes on the device without the cache: those
        of resident chunks, and the largest gradients during a backward."""
        resident = self._total("resident")
        gradients = np.array([0, *(chunk.gradients for chunk in reversed(self.chunks))])
        is_now = self._table(self.with_gradients)
        now = np.where(is_now, gradients, 0).cumsum(axis=1)
        # While a segment computes, the largest gradients of others may be copied to the host.
        others = np.where(is_now, 0, gradients)
        copying = np.zeros_like(now)
        for _ in range(MAX_COPYING):
            largest = np.maximum.accumulate(others, axis=1)
            copying += largest
            others = _without(others, largest)
        return self.device_bytes + resident[-1] - resident + (now + copying).max(axis=0)

    def estimate(self, num_host: int, slots: int, links: Links) -> float:
        """Return the estimated time of a step, in seconds: the largest time of a resource, or of
        the computation and the updates that its first forward waits for.

        The number of gathers is that of a step with one chunk for each segment, as in
        `optimus.chunks.residency`.
        """
        if not num_host:
            return self.compute_s
        gathers = self._sweeps * num_host - (self._sweeps - 1) * slots
        uploaded = self._total("uploaded")[num_host] / num_host * gathers
        copied = self._total("copied")[num_host] * self.reductions
        updates = self._total("elements")[num_host] / links.host_adam
        return max(
            uploaded / links.to_device,
            copied / links.to_host,
            max(self.leading_s, updates) + self.compute_s - self.leading_s,
        )

    def predict(self, num_host: int, slots: int, links: Links) -> StepTime:
        """Return the simulated time of a step."""
        first = len(self.chunks) - num_host
        chunks = self.chunks[first:]
        needs = [frozenset(n - first for n in need if n >= first) for need in self.needs]
        uses = [use._replace(need=needs[use.segment]) for use in self.uses]
        work = StepWork(
            plan_residency(uses, slots),
            needs,
            self.forward_s,
            self.backward_s,
            [chunk.uploaded for chunk in chunks],
            [chunk.copied for chunk in chunks],
            [chunk.elements for chunk in chunks],
        )
        return predict_step(work, links)


class Placement(NamedTuple):
    """Result of a search."""

    workload: Workload
    num_host: int
    """Number of chunks on the host: the last ones in the order of first use."""
    slots: int
    """Size of the cache, in chunks."""
    device: int
    """Bytes on the device."""
    host: int
    """Bytes on the host."""
    time: StepTime
    """Simulated time of a step."""


class NoPlacement(Exception):
    """No placement fits.

    Attributes:
        device, host: Bytes of the placement that needs the least more: of those that fit on the
            device, the placement with the fewest bytes on the host; if there is none, of those that
            fit on the host, the placement with the fewest bytes on the device.
    """

    def __init__(self, device: int, host: int) -> None:
        super().__init__(device, host)
        self.device, self.host = device, host


def search(
    workloads: Iterable[Workload], device_memory: int, host_memory: int, links: Links
) -> Placement:
    """Return the placement with the shortest step.

    For each number of chunks on the host, the cache is as large as `device_memory` allows. The
    placements with the shortest estimates are simulated.

    Args:
        workloads: Possible orders and layouts.
        device_memory: Bytes on the device that the placement may use.
        host_memory: Bytes on the host that the placement may use.
        links: Rates of the links and of updates on the host.

    Raises:
        NoPlacement: No placement fits.
    """
    workloads = list(workloads)
    fitting: list[tuple[float, int, int, int, Workload]] = []
    for workload, num_host in _numbers(workloads):
        slots = workload.most_slots(num_host, device_memory)
        if slots is not None and workload.host(num_host) <= host_memory:
            estimate = workload.estimate(num_host, slots, links)
            fitting.append((estimate, num_host, -slots, len(fitting), workload))
    if not fitting:
        raise _nearest(workloads, device_memory, host_memory)
    fitting.sort()
    simulated = []
    for _, num_host, negative, rank, workload in fitting[:_SIMULATED]:
        time = workload.predict(num_host, -negative, links)
        simulated.append(
            (
                time.step,
                rank,
                Placement(
                    workload,
                    num_host,
                    -negative,
                    workload.device(num_host, -negative),
                    workload.host(num_host),
                    time,
                ),
            )
        )
    return min(simulated, key=lambda entry: entry[:2])[2]


_SIMULATED = 4
"""Number of placements that a search simulates."""


def _numbers(workloads: Sequence[Workload]) -> Iterator[tuple[Workload, int]]:
    for workload in workloads:
        for num_host in range(1, len(workload.chunks) + 1):
            yield workload, num_host


def _without(values: np.ndarray, largest: np.ndarray) -> np.ndarray:
    """Replace, in each row, the values that have become the largest by the largest before them.
    `largest` are the cumulative maxima of the rows."""
    before = np.concatenate([np.zeros_like(largest[:, :1]), largest[:, :-1]], axis=1)
    return np.minimum(values, before)


def _nearest(workloads: Sequence[Workload], device_memory: int, host_memory: int) -> NoPlacement:
    needs = [
        (workload.device(num_host, workload.fewest_slots(num_host)), workload.host(num_host))
        for workload, num_host in _numbers(workloads)
    ]
    on_device = [need for need in needs if need[0] <= device_memory]
    if on_device:
        return NoPlacement(*min(on_device, key=lambda need: need[1]))
    on_host = [need for need in needs if need[1] <= host_memory]
    return NoPlacement(*min(on_host or needs))


class Rates(NamedTuple):
    """Aggregate rates of n processes, for Elixir's benefits (section 5.1 of the paper)."""

    to_device: float
    """Parameters per second from the host to the device, times the bytes of a parameter."""
    to_host: float
    device_update: float
    """Elements that the devices update per second."""
    host_update: float
    """Elements that the hosts update per second."""


def cache_benefit(rates: Rates) -> float:
    """Return I(n): the seconds saved by a larger cache, for each byte of the cache, with C = 1."""
    return 1 / rates.to_host + 1 / rates.to_device


def upload_benefit(rates: Rates, processes: int, low: int, state: int, factor: int) -> float:
    """Return J(n): the seconds saved by a chunk on the device, for each byte there, with C = 1.

    Args:
        rates: Aggregate rates of the processes.
        processes: n.
        low: L_c, the bytes of a parameter in the training dtype.
        state: L_os, the bytes of an element of an optimizer state.
        factor: F_os, the number of optimizer states of a parameter.
    """
    copies = state / rates.to_device + low * cache_benefit(rates) + low / rates.to_host
    update = 1 / rates.host_update - 1 / rates.device_update
    return processes / (low + state * factor) * (copies + update)
