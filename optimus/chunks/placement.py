"""Search for the placement of a rank's chunks: the chunks on the host, the chunks with states on
disk, the size of the cache, and the order of the microbatches.

The search estimates the time of a step as the time for which the busiest resource is busy
(`Workload.estimate`). The resources are the device, the host (for updates of chunks), the disk, and
each direction of the link between host and device. The search then simulates the placements with
the shortest estimates, and selects the placement with the shortest simulated step.

Elixir (arXiv 2212.05339, section 5.1) instead compares two benefits: the time that each byte saves
in the cache (`cache_benefit`), and the time that each byte saves in chunks on the device
(`upload_benefit`). Both benefits assume that computation, copies and updates do not overlap.
"""

from __future__ import annotations

import itertools
import math
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import astuple, dataclass, replace
from functools import cached_property
from typing import Literal, NamedTuple

import numpy as np

from optimus.chunks.disk import staging_bytes
from optimus.chunks.reductions import most_gradients
from optimus.chunks.residency import MAX_COPYING, Use, plan_residency
from optimus.chunks.step_time import StepTime, StepWork, predict_step
from optimus.config.machine import Links


class ChunkCost(NamedTuple):
    """Bytes and numbers of elements of a chunk on a rank. A chunk is called "on the device" or "on
    the host" by the location of its states between uses."""

    resident: int
    """Bytes of the chunk on the device between steps, if the chunk is on the device."""
    host: int
    """Bytes of the chunk in host memory, if the chunk is on the host and has no states on disk."""
    cached: int
    """Bytes of the gathered parameters of the chunk in the cache on the device."""
    uploaded: int
    """Bytes of this rank's shard of the parameters, which is copied to the device before a
    gather."""
    gradients: int
    """Bytes of the gradients of the chunk on the device, from a backward to the copy of the
    gradients to the host."""
    copied: int
    """Bytes of the gradients of the chunk that a reduction copies to the host."""
    elements: int
    """Number of elements that this rank updates; 0 for a frozen chunk."""
    spare: int = 0
    """Bytes of the spare buffers for an early update of the chunk (`UpdateQueue`)."""
    moved: int = 0
    """Bytes by which the chunk needs less host memory than `host` if the masters and moments are on
    disk."""
    file: int = 0
    """Bytes of the masters and moments in the file of states on disk, for a chunk with states on
    disk. Each update reads and writes these bytes."""
    saved: int = 0
    """Bytes that `checkpoint.async_save` needs in the file of states on disk, for its copies of the
    masters and moments. `file` does not include these bytes."""


@dataclass(frozen=True)
class Workload:
    """The chunks and the training step of a rank, for one order of the microbatches and one layout
    of the chunks. Chunks are numbered in order of first use."""

    order: str
    """Order of the microbatches, a value of `offload.order`."""
    chunk_length: int
    """Target length of the chunks, in elements."""
    chunks: Sequence[ChunkCost]
    uses: Sequence[Use]
    """The uses of the segments in a step, in order. `Use.need` contains all chunks of the segment,
    also those on the device. If `further` > 0, these are the uses of the first microbatches."""
    needs: Sequence[frozenset[int]]
    """Chunks of each segment."""
    with_gradients: Sequence[frozenset[int]]
    """For each segment, the chunks whose gradients are on the device during its backward."""
    forward_s: Sequence[float]
    """Seconds for which the device computes in the forward of each segment, for one microbatch."""
    backward_s: Sequence[float]
    """Seconds for which the device computes in the backward of each segment, for one microbatch."""
    device_bytes: int
    """Bytes on the device that do not depend on the placement, such as activations."""
    host_bytes: int = 0
    """Bytes in host memory that do not depend on the number of chunks on the host."""
    reductions: int = 1
    """Number of times that the gradients of a chunk are reduced in a step."""
    reduction_bytes: int = 0
    """Bytes on the device of the temporary tensors of a reduction."""
    idle_s: float = 0.0
    """Seconds for which the rank waits for other pipeline ranks in a step."""
    gather_s: Sequence[float] = ()
    """Seconds of the collective that gathers each chunk after this rank's shard is copied to the
    device; empty if these times are not known."""
    end_s: Sequence[float] = ()
    """`StepWork.end_s` for each number of chunks on the host; empty if these times are not
    known."""
    all_on_host: bool = False
    """True to search only placements with all chunks on the host. This is necessary with
    optim.resident = "cache". With this setting, chunks on the device would also need slots, but a
    `Workload` counts slots only for chunks on the host."""
    further: int = 0
    """Number of microbatches of a step that are not in `uses`. Each of them has the same uses as a
    microbatch in the middle of `uses`: one forward and one backward of each segment."""

    @cached_property
    def _listed(self) -> int:
        """Number of microbatches in `uses`."""
        return self.uses.count(self.uses[0])

    @cached_property
    def compute_s(self) -> float:
        """Seconds for which the device computes in a step."""
        listed_s = sum(self._seconds_of(use) for use in self.uses)
        return listed_s * (1 + self.further / self._listed)

    @cached_property
    def leading_s(self) -> float:
        """Seconds for which the device computes in the uses before the first backward."""
        leading = itertools.takewhile(lambda use: not use.backward, self.uses)
        return sum(self._seconds_of(use) for use in leading)

    @cached_property
    def _sweeps(self) -> int:
        """Number of passes, forward or backward, that a step makes through the segments."""
        segments = (segment for segment, _ in itertools.groupby(use.segment for use in self.uses))
        listed = max(Counter(segments).values())
        return listed + self.further * (listed // self._listed)

    def _seconds_of(self, use: Use) -> float:
        return (self.backward_s if use.backward else self.forward_s)[use.segment]

    def device(self, num_host: int, slots: int) -> int:
        """Return the bytes on the device if the last `num_host` chunks are on the host and the
        cache has `slots` slots."""
        return int(self._uncached[num_host]) + sum(self._largest(num_host)[:slots].tolist())

    def most_slots(self, num_host: int, device_memory: int) -> int | None:
        """Return the largest number of slots of the cache with which the bytes on the device are at
        most `device_memory`; None if the smallest possible cache does not fit. The last `num_host`
        chunks are on the host."""
        gathered = self._largest(num_host).cumsum()
        slots = int(gathered.searchsorted(device_memory - self._uncached[num_host], "right"))
        return slots if slots >= self.fewest_slots(num_host) else None

    def fewest_slots(self, num_host: int) -> int:
        """Return the smallest possible number of slots of the cache if the last `num_host` chunks
        are on the host: the largest number of these chunks that any segment needs."""
        return int(self._counts[num_host])

    def host(self, num_host: int, num_disk: int = 0) -> int:
        """Return the bytes in host memory if the last `num_host` chunks are on the host, and the
        masters and moments of `num_disk` of these chunks are on disk."""
        total = self._total("host")[num_host] + MAX_COPYING * self._most_copied[num_host]
        if num_disk:
            on_disk = self.on_disk(num_host, num_disk)
            total += staging_bytes(self._costs("file")[on_disk].tolist())
            total -= self._costs("moved")[on_disk].sum()
        return self.host_bytes + int(total)

    def disk(self, num_host: int, num_disk: int) -> int:
        """Return the bytes on disk if the masters and moments of `num_disk` of the last `num_host`
        chunks are on disk."""
        on_disk = self.on_disk(num_host, num_disk)
        return int((self._costs("file") + self._costs("saved"))[on_disk].sum())

    def on_disk(self, num_host: int, num_disk: int) -> np.ndarray:
        """Return the numbers of the chunks whose masters and moments are on disk, as
        `spread_evenly` selects them."""
        trained = self._trained_of(num_host)
        return trained[spread_evenly(num_disk, len(trained))]

    def fewest_on_disk(self, num_host: int, host_memory: int, disk_memory: int) -> int | None:
        """Return the smallest number of chunks that must have states on disk, so that the last
        `num_host` chunks fit into `host_memory` and `disk_memory` bytes; None if no number is
        sufficient."""
        if self.host(num_host) <= host_memory:
            return 0
        most = self.most_on_disk(num_host, disk_memory)
        # The search begins with 1 chunk on disk, not with 0: with few chunks on disk, the host
        # buffers for updates can be larger than the states on disk.
        fits = _first_true(most, lambda n: self.host(num_host, n) <= host_memory)
        return fits if fits <= most else None

    def most_on_disk(self, num_host: int, disk_memory: int) -> int:
        """Return the largest number of trained chunks, among the last `num_host` chunks, whose
        masters and moments together fit into `disk_memory` bytes."""
        total = len(self._trained_of(num_host)) if disk_memory else 0
        return _first_true(total, lambda n: self.disk(num_host, n) > disk_memory) - 1

    def num_trained(self, num_host: int) -> int:
        """Return the number of trained chunks among the last `num_host` chunks."""
        return len(self._trained_of(num_host))

    def _trained_of(self, num_host: int) -> np.ndarray:
        """Return the numbers of the trained chunks among the last `num_host` chunks."""
        first = np.searchsorted(self._trained, len(self.chunks) - num_host)
        return self._trained[first:]

    @cached_property
    def _trained(self) -> np.ndarray:
        return np.flatnonzero(self._costs("elements"))

    def _costs(self, name: str) -> np.ndarray:
        """Return the field `name` of the `ChunkCost` of each chunk."""
        if name not in self._arrays:
            self._arrays[name] = np.array([getattr(chunk, name) for chunk in self.chunks])
        return self._arrays[name]

    @cached_property
    def _arrays(self) -> dict[str, np.ndarray]:
        return {}

    def _largest(self, num_host: int) -> np.ndarray:
        """Return `ChunkCost.cached` of the last `num_host` chunks, the largest first."""
        return np.sort(self._costs("cached")[len(self.chunks) - num_host :])[::-1]

    @cached_property
    def _most_copied(self) -> np.ndarray:
        return np.maximum.accumulate([0, *self._costs("copied")[::-1]])

    def _total(self, name: str) -> np.ndarray:
        """Return the sum of the field `name` of the `ChunkCost`s of the chunks on the host, for
        each number of these chunks."""
        if name not in self._totals:
            self._totals[name] = np.concatenate([[0], np.cumsum(self._costs(name)[::-1])])
        return self._totals[name]

    @cached_property
    def _gathered_s(self) -> np.ndarray:
        """Seconds to gather all chunks on the host once, for each number of these chunks."""
        seconds = self.gather_s or [0.0] * len(self.chunks)
        return np.concatenate([[0.0], np.cumsum(seconds[::-1])])

    @cached_property
    def _totals(self) -> dict[str, np.ndarray]:
        return {}

    @cached_property
    def _counts(self) -> np.ndarray:
        """For each number of chunks on the host, the largest number of these chunks that any
        segment needs."""
        last = len(self.chunks)
        is_needed = np.zeros((len(self.needs), last + 1), dtype=bool)
        for row, chunks in zip(is_needed, self.needs, strict=True):
            row[[last - chunk for chunk in chunks]] = True
        return is_needed.cumsum(axis=1).max(axis=0)

    @cached_property
    def _uncached(self) -> np.ndarray:
        """The bytes on the device without the cache, for each number of chunks on the host:
        `device_bytes`, the chunks on the device, and the largest gradients during a backward."""
        resident = self._total("resident")
        gradients = most_gradients(
            self.with_gradients,
            self._costs("gradients"),
            self._costs("copied"),
            self.reduction_bytes,
        )
        return self.device_bytes + resident[-1] - resident + gradients

    def estimate(
        self, num_host: int, slots: int, links: Links, num_disk: int = 0, spare: float = 0.0
    ) -> float:
        """Return the estimated time of a step, in seconds.

        The estimate is the largest of these times: the times of all copies in each direction of the
        link; the time of all updates on the host; the time of all writes to disk; and the sum of
        the computation, the gathers, `end_s`, and the reads and updates for which the first forward
        waits. The number of gathers is computed as for a step with one chunk for each segment
        (`optimus.chunks.residency`).

        Args:
            num_host: Number of chunks on the host.
            slots: Size of the cache, in chunks.
            links: Rates of the links, of updates on the host, and of the disk.
            num_disk: Number of chunks with states on disk.
            spare: Largest number of bytes of the spare buffers for early updates.
        """
        device_s = self.compute_s + (self.end_s[num_host] if self.end_s else 0.0)
        if not num_host:
            return device_s
        gathers = self._sweeps * num_host - (self._sweeps - 1) * slots
        uploaded = self._total("uploaded")[num_host] / num_host * gathers
        device_s += self._gathered_s[num_host] / num_host * gathers
        copied = self._total("copied")[num_host] * self.reductions
        elements, spared = self._total("elements")[num_host], self._total("spare")[num_host]
        moved = 0
        if num_disk:
            on_disk = self.on_disk(num_host, num_disk)
            moved = self._costs("file")[on_disk].sum()
            spared -= self._costs("spare")[on_disk].sum()
        early = elements * (min(spare, spared) / max(1, self._total("spare")[num_host]))
        first = max((elements - early) / links.host_adam, moved / links.disk_read)
        return max(
            uploaded / links.to_device,
            copied / links.to_host,
            elements / links.host_adam,
            moved / links.disk_write,
            max(self.leading_s, first) + device_s - self.leading_s,
        )

    def predict(
        self, num_host: int, slots: int, links: Links, num_disk: int = 0, spare: float = 0.0
    ) -> StepTime:
        """Return the simulated time of a step that does not clip. The arguments are those of
        `estimate`. The time is linear in `further`: each further microbatch takes as long as a
        microbatch in the middle of `uses`."""
        assert not (self.further and num_disk), "the disk may write longer than the listed uses"
        time = predict_step(self.step_work(num_host, slots, num_disk, spare), links)
        if not self.further:
            return time
        length = len(self.uses) // self._listed
        first = (len(self.uses) - length) // 2
        fewer = replace(self, uses=[*self.uses[:first], *self.uses[first + length :]], further=0)
        less = predict_step(fewer.step_work(num_host, slots, num_disk, spare), links)
        pairs = zip(astuple(time), astuple(less), strict=True)
        return StepTime(*(long + self.further * (long - short) for long, short in pairs))

    def step_work(
        self, num_host: int, slots: int, num_disk: int = 0, spare: float = 0.0
    ) -> StepWork:
        """Return the uses, sizes and times of a step in which gradients are not clipped, with the
        last `num_host` chunks on the host. The arguments are those of `estimate`."""
        first = len(self.chunks) - num_host
        chunks = self.chunks[first:]
        needs = [frozenset(n - first for n in need if n >= first) for need in self.needs]
        uses = [use._replace(need=needs[use.segment]) for use in self.uses]
        moved, spared = [0] * num_host, [chunk.spare for chunk in chunks]
        for number in (self.on_disk(num_host, num_disk) - first).tolist():
            moved[number], spared[number] = chunks[number].file, 0
        return StepWork(
            plan_residency(uses, slots),
            needs,
            self.forward_s,
            self.backward_s,
            [chunk.uploaded for chunk in chunks],
            [chunk.copied for chunk in chunks],
            [chunk.elements for chunk in chunks],
            early=frozenset(choose_spare(spared, spare)),
            disk_bytes=moved if num_disk else (),
            gather_s=self.gather_s[first:],
            end_s=self.end_s[num_host] if self.end_s else 0.0,
        )


def spread_evenly(count: int, total: int) -> np.ndarray:
    """Return the indices of the chunks with states on disk: `count` of `total` chunks in order of
    first use. These chunks are distributed evenly, so that their reads and writes overlap with the
    updates of other chunks."""
    return -(-np.arange(1, count + 1) * total // max(1, count)) - 1


def choose_spare(sizes: Sequence[int], limit: float) -> list[int]:
    """Return the indices of the chunks that have spare buffers for early updates: as many of the
    last chunks as `limit` bytes allow. Backward completes the gradients of the last chunks first.

    Args:
        sizes: Bytes of the spare buffers of each chunk in order of first use; 0 for a chunk that
            cannot be updated early.
        limit: Largest number of bytes of all spare buffers.
    """
    chosen = []
    for number in reversed(range(len(sizes))):
        if 0 < sizes[number] <= limit:
            limit -= sizes[number]
            chosen.append(number)
    return chosen


def _first_true(count: int, is_true: Callable[[int], bool]) -> int:
    """Return the smallest number from 1 to `count` for which a condition is true; `count` + 1 if
    the condition is false for all of them. If the condition is true for a number, the condition
    must be true for all larger numbers."""
    return bisect_left(range(1, count + 1), True, key=is_true) + 1


Early = Literal["auto", "on", "off"]
"""Values of `offload.early_adam`."""


class TierBytes(NamedTuple):
    """Bytes in each memory tier: the bytes that a placement needs, or an upper limit of these
    bytes."""

    device: int
    host: int
    disk: int = 0


class SimulatedPlacement(NamedTuple):
    """A placement of the chunks of a workload, with its simulated time."""

    workload: Workload
    num_host: int
    """Number of chunks on the host. They are the last chunks in the order of first use."""
    slots: int
    """Size of the cache, in chunks."""
    num_disk: int
    """Number of chunks on the host whose masters and moments are on disk."""
    needs: TierBytes
    """Bytes in each tier. They include spare buffers only if `early` = "on" in `search`."""
    time: StepTime
    """Simulated time of a step."""
    late_s: float
    """Simulated time of a step without early updates, in seconds."""

    @property
    def step_s(self) -> float:
        """Predicted seconds of a step, including the wait for other pipeline ranks."""
        return self.time.step + self.workload.idle_s

    @property
    def updates_early(self) -> bool:
        """True if early updates make a step noticeably shorter."""
        return self.time.step < self.late_s * (1 - _SMALLEST_GAIN)


_SMALLEST_GAIN = 1e-3
"""Smallest fraction of a step's time that early updates must save. If early updates would save
less, they are not used, and no spare buffers are allocated."""


class NoPlacement(Exception):
    """No placement fits.

    Attributes:
        needs: Bytes of the placement that is nearest to the limits. If placements fit on the
            device, only these are compared, and the placement with the fewest bytes on the host is
            the nearest. If no placement fits on the device, the placement with the fewest bytes on
            the device is the nearest. In this case, only placements that fit on the host are
            compared, if there are any.
    """

    def __init__(self, needs: TierBytes) -> None:
        super().__init__(needs)
        self.needs = needs


def search(
    workloads: Iterable[Workload],
    capacity: TierBytes,
    links: Links,
    early: Early = "off",
    all_cached: bool = False,
) -> SimulatedPlacement:
    """Return the placement with the shortest step.

    For each number of chunks on the host, the search considers a single placement. Its cache is as
    large as the device memory allows, and its number of chunks with states on disk is as small as
    the host memory allows. The placements with the shortest estimated steps are simulated.

    Args:
        workloads: A workload of the rank for each possible order of the microbatches and each
            layout of the chunks. With `early` = "on", `ChunkCost.host` must include the spare
            buffers.
        capacity: Upper limits of the memory that the placement needs.
        links: Rates of the links, of updates on the host, and of the disk.
        early: The chunks that are updated early. "off": no chunks. "on": all chunks without states
            on disk. "auto": as many chunks as have spare buffers in half of the free host memory.
        all_cached: True to search only placements whose cache has a slot for each chunk on the
            host.

    Raises:
        NoPlacement: No placement fits.
    """
    workloads = list(workloads)
    fitting: list[tuple[float, int, int, int, int, Workload]] = []
    for workload, num_host in _numbers(workloads):
        slots = workload.most_slots(num_host, capacity.device)
        if slots is None or (all_cached and slots < num_host):
            continue
        num_disk = workload.fewest_on_disk(num_host, capacity.host, capacity.disk)
        if num_disk is not None:
            spare = _spare_bytes(workload, num_host, num_disk, capacity, early)
            estimate = workload.estimate(num_host, slots, links, num_disk, spare) + workload.idle_s
            fitting.append((estimate, num_disk, num_host, -slots, len(fitting), workload))
    if not fitting:
        raise NoPlacement(_nearest(workloads, capacity))
    fitting.sort(key=lambda entry: entry[:-1])
    simulated = []
    for _, num_disk, num_host, negative, _, workload in fitting[:_SIMULATED]:
        of_workload = num_host, -negative, links, num_disk
        spare = _spare_bytes(workload, num_host, num_disk, capacity, early)
        late = workload.predict(*of_workload)
        time = workload.predict(*of_workload, spare) if spare else late
        needs = TierBytes(
            workload.device(num_host, -negative),
            workload.host(num_host, num_disk),
            workload.disk(num_host, num_disk),
        )
        simulated.append(
            SimulatedPlacement(workload, num_host, -negative, num_disk, needs, time, late.step)
        )
    return min(simulated, key=lambda placement: placement.step_s)


_SIMULATED = 4
"""Largest number of placements that a search simulates."""


def smallest_capacity(workloads: Sequence[Workload], capacity: TierBytes) -> tuple[int, int]:
    """Return two numbers of bytes: the smallest device memory of the placements that fit on the
    host, and the smallest host memory of the placements that fit on the device. All these
    placements have at most `capacity.disk` bytes on disk.

    If no placement fits on the host, the first number is the smallest device memory of all
    placements. If no placement fits on the device, the second number is the host memory of the
    placement with the fewest bytes on the device."""
    device = _nearest(workloads, capacity._replace(device=-1)).device
    return device, _nearest(workloads, capacity._replace(host=-1)).host


def _spare_bytes(
    workload: Workload, num_host: int, num_disk: int, capacity: TierBytes, early: Early
) -> float:
    """Return the upper limit of the bytes of the spare buffers for early updates."""
    if early == "auto":
        return max(0, capacity.host - workload.host(num_host, num_disk)) // 2
    return math.inf if early == "on" else 0.0


def _numbers(workloads: Sequence[Workload]) -> Iterator[tuple[Workload, int]]:
    for workload in workloads:
        most = len(workload.chunks)
        for num_host in range(most if workload.all_on_host else 1, most + 1):
            yield workload, num_host


def _nearest(workloads: Sequence[Workload], capacity: TierBytes) -> TierBytes:
    """Return `NoPlacement.needs`."""
    needs = []
    for workload, num_host in _numbers(workloads):
        most = workload.most_on_disk(num_host, capacity.disk)
        host, num_disk = min((workload.host(num_host, n), n) for n in {0, most})
        device = workload.device(num_host, workload.fewest_slots(num_host))
        needs.append(TierBytes(device, host, workload.disk(num_host, num_disk)))
    on_device = [need for need in needs if need.device <= capacity.device]
    if on_device:
        return min(on_device, key=lambda need: need.host)
    on_host = [need for need in needs if need.host <= capacity.host]
    return min(on_host or needs)


class Rates(NamedTuple):
    """Aggregate rates of n processes, for Elixir's benefits (section 5.1 of the paper)."""

    to_device: float
    """Bytes per second from the host to the device."""
    to_host: float
    """Bytes per second from the device to the host."""
    device_update: float
    """Elements per second that the optimizer updates on the devices."""
    host_update: float
    """Elements per second that the optimizer updates on the hosts."""


def cache_benefit(rates: Rates) -> float:
    """Return Elixir's I(n): the seconds that a larger cache saves, for each additional byte of the
    cache. The chunk length C of the paper is 1 element."""
    return 1 / rates.to_host + 1 / rates.to_device


def upload_benefit(rates: Rates, processes: int, low: int, state: int, factor: int) -> float:
    """Return Elixir's J(n): the seconds that a step saves if a chunk is on the device instead of
    the host, for each byte of the parameters and optimizer states of the chunk. The chunk length C
    of the paper is 1 element.

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
