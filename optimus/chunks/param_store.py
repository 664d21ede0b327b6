"""Gathers of the parameters of chunks before their use, and a cache of gathered parameters."""

from __future__ import annotations

import logging
from collections.abc import Collection, Sequence
from functools import partial

import torch

from optimus.chunks.buffers import ParamChunk
from optimus.chunks.memory import Copy, Memory, Tier
from optimus.chunks.optimizer import UpdateQueue
from optimus.chunks.residency import (
    ResidencyPlan,
    Use,
    farthest,
    likely_uses,
    plan_residency,
)
from optimus.distributed.collectives import Transfer, all_gather

logger = logging.getLogger(__name__)


class ParamStore:
    """Gathers the parameters of chunks from their shards before segments use them.

    A chunk is whole on a rank if the rank has all parameters of the chunk on the device, and not
    only a shard. Some chunks stay whole; the others are transient. A chunk that stays whole is
    gathered once after each update. After a call of `overlap`, this gather can run until the first
    use of the chunk. A transient chunk is whole only while it is in a cache, which has space for a
    fixed number of chunks (the rCache of the Elixir papers). The chunk is gathered into the cache
    before a use that needs it, and freed when another chunk needs the space. If the shard is in
    host memory, the shard is first copied to the device. This copy begins early, but the gather
    begins only at the use, so that all ranks gather in the same order.

    With transient chunks, a training step normally uses the model's segments in the order of
    `plan`. The plan does not apply outside of a step. After a use in another order, it does not
    apply to the rest of the step. Without a plan, if the cache is full, the store frees the chunk
    whose next use is the latest according to `likely_uses`. A gather is a collective. Therefore all
    ranks of a shard group must call `use` for the same segments in the same order.

    Args:
        chunk_states: All chunks of this rank.
        memory: Frees and allocates the parameters of transient chunks.
        updates: Queue of the chunks that the host has not updated yet.
    """

    def __init__(
        self, chunk_states: Sequence[ParamChunk], memory: Memory, updates: UpdateQueue
    ) -> None:
        self._chunks = {state.chunk.number: state for state in chunk_states}
        self._memory, self._updates = memory, updates
        self._in_flight: dict[int, Transfer] = {}
        self._uploads: dict[int, Copy] = {}
        """Copies of shards to the device, by chunk. Each copy begins when the update of the chunk
        is complete."""
        self._overlaps = False
        self._needs: Sequence[frozenset[int]] = ()
        """Chunks of each segment."""
        self.plan: ResidencyPlan | None = None
        """Plan of a training step; None if no chunk is transient."""
        self._next = 0
        """Index of the next planned use. While the plan does not apply, the value is the number of
        planned uses."""
        self._last_backward = 0
        """Segment of the last backward in the present step; 0 if no backward has started."""
        self._cached: set[int] = set()
        self._has_warned = False
        self.num_unplanned = 0
        """Number of uses of the present step to which the plan does not apply."""

    def overlap(self, needs: Sequence[frozenset[int]]) -> None:
        """Let the gathers after each update run in the background until `use` or `wait`.

        Args:
            needs: For each segment, the numbers of all chunks that it reads.
        """
        self._needs, self._overlaps = needs, True

    def cache(self, needs: Sequence[frozenset[int]], uses: Sequence[Use], slots: int) -> None:
        """Let `use` gather transient chunks into a cache of `slots` chunks.

        Args:
            needs: For each segment, the numbers of all chunks that it reads.
            uses: The uses of all segments in a training step, in order.
            slots: Size of the cache, in chunks.
        """
        self._needs, self.plan = needs, plan_residency(uses, slots)
        self._next = len(self.plan.steps)
        transient = (number for number, state in self._chunks.items() if state.is_transient)
        self._cached = {n for n in transient if self._memory.has(self._chunks[n].params)}

    def replan(self, uses: Sequence[Use]) -> None:
        """Replace the plan of a training step by the plan for `uses`. Call this method between two
        steps."""
        assert self.plan is not None, "no chunk is transient"
        self.plan = plan_residency(uses, self.plan.slots)
        self._next = len(self.plan.steps)

    def start_step(self) -> None:
        """Empty the cache and return to the first use of the plan. Call this before each training
        step."""
        self.invalidate()
        self._next = self.num_unplanned = self._last_backward = 0

    def use(self, segment: int, backward: bool) -> None:
        """Gather the parameters of a segment, or wait for gathers in progress. Call this method
        before each forward and each backward of the segment."""
        if self.plan is None:
            if self._overlaps:
                self._wait_for(self._needs[segment])
            return
        if backward:
            self._last_backward = segment
        if self._next == len(self.plan.steps):
            self.num_unplanned += 1
            self.gather(self._needs[segment], segment, backward)
            return
        step = self.plan.steps[self._next]
        if step.use[:2] != (segment, backward):
            if not self._has_warned:
                self._has_warned = True
                logger.warning(
                    "the model's segments compute in another order than planned: parameters are "
                    "gathered without prefetch, which takes longer and does not change results"
                )
            self._next = len(self.plan.steps)
            self.use(segment, backward)
            return
        self._next += 1
        self._evict(step.evict)
        self._begin_gather(step.gather)
        self._wait_for(self._needs[segment])
        self._evict(step.evict_early)
        self._begin_gather(step.prefetch)
        assert self._cached == step.resident, "the cache differs from its plan"

    def gather(self, numbers: Collection[int], segment: int = 0, backward: bool = False) -> None:
        """Gather chunks for a use that is not in the plan. The chunks stay whole until the next
        use. The plan does not apply to the rest of the step.

        Args:
            numbers: Numbers of the chunks.
            segment, backward: The use that needs the chunks. `likely_uses` predicts the uses after
                it. If the cache is full, the chunks whose predicted next use is the latest are
                freed.
        """
        needed = {number for number in numbers if self._chunks[number].is_transient}
        if self.plan is not None:
            self._next = len(self.plan.steps)
            missing, others = sorted(needed - self._cached), self._cached - needed
            excess = len(self._cached) + len(missing) - self.plan.slots
            ahead = likely_uses(
                len(self._needs), segment, backward, self._last_backward, torch.is_grad_enabled()
            )
            distance = {
                chunk: next((i for i, s in enumerate(ahead) if chunk in self._needs[s]), len(ahead))
                for chunk in others
            }
            self._evict(farthest(others, excess, distance.__getitem__))
            self._begin_gather(missing)
        self._wait_for(numbers)

    def gather_updated(self, state: ParamChunk) -> None:
        """Gather a chunk after the update of its shards, unless it is transient. All ranks of the
        shard group must call this method, with the chunks in the same order."""
        if state.is_transient:
            return
        self._start_gather(state)
        if not self._overlaps:
            self.wait()

    def wait(self) -> None:
        """Wait until all gathers have completed."""
        self._wait_for([*self._in_flight, *self._uploads])

    def invalidate(self) -> None:
        """Free all chunks in the cache. Call this method when these chunks are out of date or are
        not needed any more."""
        self._evict(sorted(self._cached))

    @property
    def num_in_flight(self) -> int:
        """Number of chunks whose gather has started and for which no code has waited yet."""
        return len(self._in_flight)

    def _wait_for(self, numbers: Collection[int]) -> None:
        for number in sorted(numbers):
            if number in self._uploads:
                chunk = self._chunks[number]
                self._uploads[number].wait()
                del self._uploads[number]
                if chunk.groups.shard_group.size > 1:
                    all_gather(chunk.params, chunk.local, chunk.groups.shard_group)
            if (transfer := self._in_flight.pop(number, None)) is not None:
                transfer.wait()

    def _begin_gather(self, numbers: Collection[int]) -> None:
        for number in numbers:
            state = self._chunks[number]
            self._memory.allocate(state.params)
            if state.home is Tier.DEVICE:
                self._start_gather(state)
            else:
                self._uploads[number] = self._upload(state)
            self._cached.add(number)

    def _upload(self, state: ParamChunk) -> Copy:
        """Start a copy of the shard of a chunk to the device. The copy first waits for the update
        of the chunk."""
        number, after = state.chunk.number, None
        if self._updates.is_done(number):
            self._updates.wait(number)  # raises an error if an update has failed
        else:
            after = partial(self._updates.wait, number)
        return self._memory.copy(state.local, state.shard, after)

    def _start_gather(self, state: ParamChunk) -> None:
        """Start to gather the parameters of a chunk."""
        transfer = all_gather(state.params, state.shard, state.groups.shard_group, async_op=True)
        self._in_flight[state.chunk.number] = transfer

    def _evict(self, numbers: Collection[int]) -> None:
        self._wait_for(numbers)
        for number in numbers:
            self._memory.free(self._chunks[number].params)
            self._cached.remove(number)
