"""Gradients leaving for their reduction: looked at, in one order, as soon as they are complete."""

from __future__ import annotations

from collections.abc import Callable, Collection
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

from torch import Tensor

from optimus.chunks.pieces import Buffer
from optimus.chunks.uses import Completion, Procession


@dataclass(frozen=True)
class Parcel:
    """Gradients that are reduced as one: a chunk's, or those of a further use of a parameter."""

    buffer: Buffer
    parts: dict[str, tuple[Tensor, Tensor]]
    """The leaves and their parts of the buffer, by name, in order of first use."""
    send: Callable[[], None]


class Departures:
    """The parcels of one rank. Those of a stage leave with what is used last first, since backward
    completes it first."""

    def __init__(self, in_place: bool, early: bool, look: Callable[[Buffer], None]) -> None:
        """`in_place`: `.grad` is the parcel's own memory, else hooks add to it. `early`: parcels
        leave while `last_backward` lasts; else all of a stage leave in `rest`. `look` is called
        before a parcel leaves: a sum over ranks hides whose a NaN is."""
        self._in_place, self._completion = in_place, Completion() if early else None
        self._look = look
        self._parcels: list[Parcel] = []
        self._stages: dict[int, Procession] = {}

    def add(self, parcel: Parcel) -> None:
        """In order of first use, and once its leaves' gradients are caught."""
        number = len(self._parcels)
        self._parcels.append(parcel)
        stage = parcel.buffer.home.stage
        before = self._stages.get(stage)
        order = (number, *(before.order if before else ()))
        self._stages[stage] = Procession(order, self._go)
        if self._completion is not None:
            for name, (leaf, _) in parcel.parts.items():
                self._completion.add(number, name, leaf)

    def start(self) -> None:
        """Before the first backward of a step."""
        if self._completion is not None:
            self._completion.start()

    def last_backward(self, stage: int, late: Collection[Tensor] | None) -> AbstractContextManager:
        """Around a stage's last backward of a step: its parcels may leave. `late` as in
        Completion."""
        if self._completion is None or stage not in self._stages:
            return nullcontext()
        procession = self._stages[stage]
        return self._completion.listening(procession.order, procession.ready, late)

    def rest(self, stage: int) -> None:
        """Behind a backward of the stage: all its parcels that are here still leave."""
        if stage in self._stages:
            self._stages[stage].rest()

    def check(self, stage: int) -> None:
        """Assert that no `.grad` of the stage was replaced: it would be lost in silence."""
        if stage in self._stages:
            for number in self._stages[stage].order:
                self._check(self._parcels[number])

    def _go(self, number: int) -> None:
        parcel = self._parcels[number]
        self._check(parcel)
        self._look(parcel.buffer)
        if self._completion is not None:
            self._completion.gone(number)
        parcel.send()

    def _check(self, parcel: Parcel) -> None:
        if not self._in_place:
            return
        for name, (leaf, part) in parcel.parts.items():
            in_place = leaf.grad is not None and _same_memory(leaf.grad, part)
            assert in_place, f"the gradient of {name} was replaced; it must accumulate in place"


def _same_memory(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors begin at the same place of the same storage, which may be freed."""
    same = one.untyped_storage()._cdata == other.untyped_storage()._cdata
    return same and one.storage_offset() == other.storage_offset()
