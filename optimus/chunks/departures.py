"""Gradients leaving for their reduction: looked at, in one order, as soon as they are complete."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

from torch import Tensor

from optimus.chunks.uses import Completion, Procession

Look = Callable[[Tensor, Iterable[tuple[str, Tensor]]], None]
"""Told of a flat buffer of gradients, and of the named ones in it with the last used first."""


@dataclass(frozen=True)
class Parcel:
    """Gradients that are reduced as one: a chunk's, or those of a further use of a parameter."""

    stage: int
    flat: Tensor
    parts: dict[str, tuple[Tensor, Tensor]]
    """The leaves and their parts of `flat`, by name, in order of first use."""
    send: Callable[[], None]


class Departures:
    """The parcels of one rank. Those of a stage leave with what is used last first, since backward
    completes it first."""

    def __init__(self, in_place: bool, early: bool) -> None:
        """`in_place`: `.grad` is the parcel's own memory, else hooks add to it. `early`: parcels
        leave while `last_backward` lasts; else all of a stage leave in `rest`."""
        self._in_place, self._completion = in_place, Completion() if early else None
        self._parcels: list[Parcel] = []
        self._stages: dict[int, Procession] = {}
        self.look: Look = _look_away
        """Called before a parcel leaves: a sum over ranks hides whose a NaN is."""

    def add(self, parcel: Parcel) -> None:
        """In order of first use, and once its leaves' gradients are caught."""
        number = len(self._parcels)
        self._parcels.append(parcel)
        before = self._stages.get(parcel.stage)
        order = (number, *(before.order if before else ()))
        self._stages[parcel.stage] = Procession(order, self._go)
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
        if stage not in self._stages:
            return
        for number in self._stages[stage].order:
            self._check(self._parcels[number])
        self._stages[stage].rest()

    def gradients_of(self, stage: int) -> Iterator[tuple[str, Tensor]]:
        """What backward has added for a stage on this rank, by name, before any reduction."""
        for parcel in self._parcels:
            if parcel.stage == stage:
                yield from ((name, part) for name, (_, part) in parcel.parts.items())

    def _go(self, number: int) -> None:
        parcel = self._parcels[number]
        self._check(parcel)
        self.look(parcel.flat, ((name, part) for name, (_, part) in reversed(parcel.parts.items())))
        if self._completion is not None:
            self._completion.gone(number)
        parcel.send()

    def _check(self, parcel: Parcel) -> None:
        """Assert that no `.grad` was replaced: a replaced one would be lost in silence."""
        if not self._in_place:
            return
        for name, (leaf, part) in parcel.parts.items():
            in_place = leaf.grad is not None and leaf.grad.data_ptr() == part.data_ptr()
            assert in_place, f"the gradient of {name} was replaced; it must accumulate in place"


def _look_away(flat: Tensor, named: Iterable[tuple[str, Tensor]]) -> None:
    """Nobody looks."""
