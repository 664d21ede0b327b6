"""The rCache: of parameters that are divided over ranks, only some chunks are whole at a time."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from optimus.chunks.residency import ResidencyPlan, Visit, farthest, plan_residency
from optimus.chunks.states import ChunkStates
from optimus.chunks.storage import Memory
from optimus.distributed.collectives import Transfer, begin_all_gather


class ChunkCache:
    """Gathers and frees chunks as units are visited.

    In a training step visits come as planned, anything else is our bug. Outside of one, forward
    passes are assumed to follow each other, and what goes is what such a pass needs last. Every
    visit is a collective of the ranks that divide the missing chunks, in the same order on each.
    """

    def __init__(
        self,
        chunks: Sequence[ChunkStates],
        needs: Sequence[frozenset[int]],
        visits: Sequence[Visit],
        slots: int,
        memory: Memory,
    ) -> None:
        """`needs`: the chunks of each unit, by number; `visits`: those of a training step."""
        self._chunks = {one.chunk.number: one for one in chunks}
        self._needs, self.slots, self._memory = needs, slots, memory
        self.plan: ResidencyPlan = plan_residency(visits, slots)
        self._next = len(self.plan.steps)
        self._on_the_way: dict[int, Transfer] = {}
        self._resident = {n for n, one in self._chunks.items() if memory.holds(one.params)}

    def start(self) -> None:
        """Before the first visit of a training step."""
        self.drop()
        self._next = 0

    def visit(self, unit: int, backward: bool) -> None:
        """A unit is about to compute: what it needs becomes whole."""
        if self._next == len(self.plan.steps):
            self.hold(self._needs[unit], unit)
            return
        step = self.plan.steps[self._next]
        self._next += 1
        assert step.visit[:2] == (unit, backward), f"visited {unit, backward}, planned {step.visit}"
        self._evict(step.evict)
        self._gather(step.gather)
        for number in step.visit.need:
            self._arrive(number)
        self._evict(step.evict_early)
        self._gather(step.prefetch)
        assert self._resident == step.resident, "not what was planned"

    def hold(self, need: Collection[int], unit: int = 0) -> None:
        """Outside of a step: make chunks whole until the next visit."""
        missing = sorted(set(need) - self._resident)
        others = self._resident - set(need)
        spare = len(self._resident) + len(missing) - self.slots
        self._evict(farthest(others, spare, lambda chunk: self._ahead(chunk, unit)))
        self._gather(missing)
        for number in need:
            self._arrive(number)

    def drop(self) -> None:
        """Free every chunk; what was gathered is out of date or no longer needed."""
        self._evict(sorted(self._resident))

    def _ahead(self, chunk: int, unit: int) -> int:
        """Units until a forward pass that has come to `unit`, and the next one, need a chunk."""
        count = len(self._needs)
        places = [place for place, need in enumerate(self._needs) if chunk in need]
        return min(((place - unit - 1) % count for place in places), default=count)

    def _gather(self, numbers: Collection[int]) -> None:
        for number in numbers:
            one = self._chunks[number]
            self._memory.allocate(one.params)
            self._on_the_way[number] = begin_all_gather(one.params, one.shard, one.home.shards)
            self._resident.add(number)

    def _arrive(self, number: int) -> None:
        if (transfer := self._on_the_way.pop(number, None)) is not None:
            transfer.wait()

    def _evict(self, numbers: Collection[int]) -> None:
        for number in numbers:
            assert number not in self._on_the_way, f"chunk {number} is on its way"
            self._memory.free(self._chunks[number].params)
            self._resident.remove(number)
