"""Plan of the cache of sharded parameters, computed from the order in which the segments of a model
are used.

A training step uses the segments of a model (embedding, blocks, head) in an order that the pipeline
schedule determines before the run: forward through the segments of a stage, backward in reverse. A
chunk with sharded parameters is gathered before a use if the chunk is not in the cache (the rCache
of the Elixir papers). The cache has a fixed number of slots, each for one chunk. If the cache is
full, the chunk whose next use is the latest is freed. This rule (Belady 1966) minimises the number
of gathers.

Number of gathers in a step with n chunks, one for each segment, and B slots
(tests/chunks/test_residency.py):

    one microbatch                                         2n - min(B, n)
    k microbatches, forward and backward in turn           2kn - (2k-1)B, B <= n
    recomputed regions of m > 1 segments, B = 1            3n - 1
      if backward of a region's last segment uses the
      chunk that its recomputation has gathered            3n - n/m
    recomputed regions, B >= m                             2n - B

Gathers begin early, in the order of the uses that need them, as soon as slots are free. With
B >= 2, gathers overlap with computation. Early gathers do not change the number of gathers.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from optimus.config.machine import Links

NEVER = float("inf")
MAX_COPYING = 2
"""Largest number of gradient buffers that are copied to the host at the same time. A copy counts
until the host has added the copied gradients to their sum."""


@dataclass(frozen=True)
class Residency:
    """Settings that determine the tiers of a rank's states, and the times at which the rank has
    whole gradients and whole parameters."""

    divides_gradients: bool = False
    """True if gradients are whole only during a backward (ZeRO-2)."""
    divides_parameters: bool = False
    """True if parameters are whole only in the cache (ZeRO-3). Requires `divides_gradients`."""
    host_share: float = 0.0
    """Fraction, from 0 to 1, of the chunks whose states are in host memory. These are the last
    chunks in the order of first use. They are not on the device between uses. A value above 0
    requires `divides_gradients`."""
    disk_share: float = 0.0
    """Fraction, from 0 to 1, of the trained chunks in host memory. The masters and moments of this
    fraction of the chunks are on disk."""
    disk: str = ""
    """Directory of the states on disk."""
    disk_key: str = "offload.disk"
    """Name of the setting with the directory, for messages."""
    slots: int = 0
    """Number of slots of the cache, each of which has space for one chunk; 0: one slot for each
    chunk that is not always on the device."""
    poison: bool = False
    """True to fill freed buffers with NaN, for tests."""
    copies: str = "early"
    """Time at which copies between host and device take place on a CPU, as for
    `optimus.chunks.memory.Memory`."""
    links: Links | None = None
    """Rates of the links of an emulated device; None to copy without delay."""
    rounds_gradients: bool = False
    """True to round gradients to bf16 once. For a chunk on the host, they are rounded before they
    are copied to the host. For a chunk on the device, they are rounded before they are added to the
    sum over microbatches."""

    def __post_init__(self) -> None:
        is_transient = self.divides_parameters or self.host_share > 0
        assert self.divides_gradients or not is_transient, self


ALL_RESIDENT = Residency()


class Pass(NamedTuple):
    """The forward or the backward of a microbatch through one stage."""

    stage: int
    backward: bool


class Use(NamedTuple):
    """A forward or a backward of a segment. The chunks in `need` are whole on the device until the
    next use."""

    segment: int
    backward: bool
    need: frozenset[int]


class Step(NamedTuple):
    """Actions of the cache for one use of a segment.

    Before the segment computes, the chunks in `evict` are freed, and those in `gather` are
    gathered. Then the cache prepares a later use: the chunks in `evict_early` are freed, and the
    gathers of those in `prefetch` begin. These gathers overlap with the computation of the segment.
    """

    use: Use
    evict: tuple[int, ...] = ()
    gather: tuple[int, ...] = ()
    evict_early: tuple[int, ...] = ()
    prefetch: tuple[int, ...] = ()
    resident: frozenset[int] = frozenset()
    """Chunks in the cache while the segment computes, including those that are still being
    gathered."""


@dataclass(frozen=True)
class ResidencyPlan:
    """Plan of all uses of chunks in a training step. The cache on the device is empty before the
    first use and after the last use."""

    steps: tuple[Step, ...]
    slots: int


def use_order(
    passes: Iterable[Pass],
    stages: Sequence[int],
    needs: Sequence[frozenset[int]],
    learns: Sequence[bool],
    regions: Iterable[range] = (),
) -> list[Use]:
    """Return the uses of all segments in a training step, in order.

    The backward of the last segment of a region recomputes the forward of all segments of the
    region.

    Args:
        passes: The forward and backward passes of this rank, in order.
        stages: The stage of each segment. Segments are in order of first use.
        needs: The chunks of each segment.
        learns: For each segment, True if the segment has a backward. A segment has no backward if
            it and all earlier segments of the model are frozen.
        regions: Ranges of indices of segments. Backward recomputes the segments of a range
            together.
    """
    again = {region[-1]: region for region in regions}
    uses: list[Use] = []

    def add(segments: Iterable[int], backward: bool) -> None:
        uses.extend(Use(segment, backward, needs[segment]) for segment in segments)

    for stage, backward in passes:
        segments = [segment for segment, number in enumerate(stages) if number == stage]
        if not backward:
            add(segments, False)
            continue
        for segment in reversed(segments):
            if learns[segment]:
                add([segment], True)
                add(again.get(segment, ()), False)
    return uses


def fewest_slots(needs: Iterable[Collection[int]]) -> int:
    """Return the smallest number of slots that have space for the chunks of any single use."""
    return max(map(len, needs), default=0)


def plan_residency(uses: Sequence[Use], slots: int) -> ResidencyPlan:
    """Return the plan with the fewest gathers (Belady's rule). Gathers begin in the order of the
    uses that need them, each as soon as there is a slot for its chunk."""
    assert slots >= fewest_slots(use.need for use in uses), "a use needs more slots"
    following = _following_uses(uses)
    on_demand: list[_Demand] = []
    resident: set[int] = set()
    upcoming: dict[int, float] = {}
    """Index of the next use of each chunk in the cache."""
    dead: tuple[int, ...] = ()
    for use, next_uses in zip(uses, following, strict=True):
        resident.difference_update(dead)
        missing = sorted(use.need - resident)
        victims: tuple[int, ...] = ()
        if (excess := len(resident) + len(missing) - slots) > 0:
            victims = farthest(resident - use.need, excess, upcoming.__getitem__)
        resident.difference_update(victims)
        resident.update(use.need)
        upcoming.update(next_uses)
        on_demand.append(_Demand(dead, missing, list(victims)))
        dead = tuple(sorted(chunk for chunk, index in next_uses.items() if index == NEVER))
    return ResidencyPlan(tuple(_begin_early(uses, on_demand, following, slots)), slots)


def farthest(
    candidates: Collection[int], count: int, next_use: Callable[[int], float]
) -> tuple[int, ...]:
    """Return the `count` candidates whose next use is the latest."""
    return tuple(heapq.nsmallest(count, candidates, lambda chunk: (-next_use(chunk), chunk)))


def likely_uses(
    num_segments: int, segment: int, backward: bool, last_backward: int, trains: bool
) -> list[int]:
    """Return the segments that will probably be used after the present use, in order. Call this
    function when the plan does not contain the present use.

    In training, a forward through all segments is followed by a backward through all segments in
    reverse order, and then by the next forward. A forward of a segment that precedes the segment of
    the last backward is assumed to be a recomputation. The recomputation ends before the segment of
    the last backward. Without training, a forward is followed by the next forward.

    Args:
        num_segments: Number of segments, numbered in order of first use.
        segment, backward: The present use.
        last_backward: Segment of the last backward in the present step; 0 if there was none.
        trains: False if no backward follows, as in an evaluation.
    """
    again = range(num_segments)
    if backward:
        return [*reversed(range(segment)), *again]
    if not trains:
        return [*range(segment + 1, num_segments), *again]
    turn = last_backward if segment < last_backward else num_segments
    return [*range(segment + 1, turn), *reversed(range(turn)), *again]


def _following_uses(uses: Sequence[Use]) -> list[dict[int, float]]:
    """Return a dict for each use. The keys are the chunks that the use needs. The values are the
    indices of the next uses of these chunks, or NEVER."""
    latest: dict[int, float] = {}
    following: list[dict[int, float]] = []
    for index in range(len(uses) - 1, -1, -1):
        need = uses[index].need
        following.append({chunk: latest.get(chunk, NEVER) for chunk in need})
        latest.update(dict.fromkeys(need, index))
    return following[::-1]


@dataclass
class _Demand:
    """Chunks to free and to gather for a use, in a plan without early gathers. Chunks in `dead` are
    freed, because they are not used again. Chunks in `missing` are gathered. Chunks in `victims`
    are freed although they are used again, because the chunks in `missing` need their slots."""

    dead: tuple[int, ...]
    missing: list[int]
    victims: list[int]


def _begin_early(
    uses: Sequence[Use],
    on_demand: list[_Demand],
    following: Sequence[dict[int, float]],
    slots: int,
) -> Iterable[Step]:
    """Yield the steps of the plan, in which gathers begin early.

    Gathers begin in the order of the uses that need them. Each gather begins as soon as there is a
    slot for it. This is a free slot, or the slot of a victim whose next use is after the use that
    needs the gather.
    """
    waiting = deque(index for index, demand in enumerate(on_demand) if demand.missing)
    resident: set[int] = set()
    upcoming: dict[int, float] = {}
    """For each chunk, the index of its first use that is not before the present use."""
    for index in range(len(uses) - 1, -1, -1):
        upcoming.update(dict.fromkeys(uses[index].need, index))
    for now, (use, demand) in enumerate(zip(uses, on_demand, strict=True)):
        evict, gather = (*demand.dead, *demand.victims), tuple(demand.missing)
        resident = (resident - set(evict)) | set(gather)
        while waiting and waiting[0] <= now:
            waiting.popleft()
        evicted: list[int] = []
        started: list[int] = []
        while waiting:
            ahead = on_demand[waiting[0]]
            while ahead.missing and ahead.missing[0] not in resident:
                if len(resident) >= slots:
                    idle = [v for v in ahead.victims if upcoming[v] > waiting[0]]
                    if not idle:
                        break
                    ahead.victims.remove(idle[0])
                    resident.remove(idle[0])
                    evicted.append(idle[0])
                started.append(ahead.missing.pop(0))
                resident.add(started[-1])
            if ahead.missing:
                break
            waiting.popleft()
        upcoming.update(following[now])
        yield Step(use, evict, gather, tuple(evicted), tuple(started), frozenset(resident))
