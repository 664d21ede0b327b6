"""Follows the units of a model through a step, so that each finds what it needs in memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from optimus.chunks.pieces import Buffer, PieceReduction
from optimus.chunks.rcache import ChunkCache
from optimus.chunks.units import Unit


class Follower:
    """Told of every visit of a unit.

    Before a unit's backward the gradients of all units behind it are complete: buffers that no unit
    from it on adds to are reduced and freed, and its own are given memory. Unless `early`, where
    weight gradients come later than a unit's backward or its passes cannot be seen, buffers of a
    stage last from its backward to its reduction. `buffers`: what each unit adds to. `cache`:
    parameters are divided, too.
    """

    def __init__(
        self,
        units: Sequence[Unit],
        buffers: Sequence[Sequence[Buffer]],
        reduction: PieceReduction,
        cache: ChunkCache | None,
        before_sum: Callable[[Buffer], None],
        early: bool,
    ) -> None:
        self._reduction, self._cache, self._early = reduction, cache, early
        self._before_sum = before_sum
        self._stage_of = [unit.stage for unit in units]
        self._buffers = [tuple(dict.fromkeys(own)) for own in buffers]
        self._first_unit: dict[Buffer, int] = {}
        for number, unit in enumerate(units):
            for one in self._buffers[number]:
                self._first_unit.setdefault(one, number)
            if early or cache is not None:
                unit.watch(partial(self._visit, number, False), partial(self._visit, number, True))
        self._open: dict[Buffer, None] = {}
        self._in_step = False

    def start(self) -> None:
        self._in_step = True
        if self._cache is not None:
            self._cache.start()

    def finish(self) -> None:
        assert not self._open, "gradients were left behind"
        self._in_step = False

    def before_backward(self, stage: int) -> None:
        """Before a backward of the stage, or the part of it that gives weight gradients."""
        if not self._early:
            for own, buffers in zip(self._stage_of, self._buffers, strict=True):
                if own == stage:
                    self._fill(buffers)

    def reduce(self, stage: int) -> None:
        """Behind them: what is left."""
        self._close([one for one in self._open if one.home.stage == stage])

    def _visit(self, unit: int, backward: bool) -> None:
        if backward and self._early and self._in_step:
            self._close([one for one in self._open if self._first_unit[one] > unit])
            self._fill(self._buffers[unit])
        if self._cache is not None:
            self._cache.visit(unit, backward)

    def _fill(self, buffers: Sequence[Buffer]) -> None:
        for one in buffers:
            self._reduction.fill(one)
            self._open[one] = None

    def _close(self, buffers: Sequence[Buffer]) -> None:
        for one in buffers:
            self._before_sum(one)
            self._reduction.after(one)
            del self._open[one]
