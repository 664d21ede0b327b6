"""Rank arithmetic: which place a rank has along each axis. Pure values; no process is started.

World = pp * dp * ep * tp; tp innermost, then ep, then dp, pp outermost (CONTRACT.md, "Ranks").
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from optimus.errors import ConfigError

AXES = ("pp", "dp", "ep", "tp")
"""From the outermost to the innermost."""


class Place(NamedTuple):
    """A rank's index along each axis."""

    pp: int
    dp: int
    ep: int
    tp: int


@dataclass(frozen=True)
class Mesh:
    """Sizes of the four axes of parallelism."""

    pp: int = 1
    dp: int = 1
    ep: int = 1
    tp: int = 1

    @property
    def sizes(self) -> Place:
        return Place(self.pp, self.dp, self.ep, self.tp)

    @property
    def world_size(self) -> int:
        return self.pp * self.dp * self.ep * self.tp

    @property
    def num_data_ranks(self) -> int:
        """Ranks that see different data: w = dp * ep."""
        return self.dp * self.ep

    def data_rank(self, rank: int) -> int:
        """d = dp_index * ep + ep_index of a global rank."""
        return rank // self.tp % self.num_data_ranks

    def place(self, rank: int) -> Place:
        """Where a global rank lies along each axis."""
        assert 0 <= rank < self.world_size, (rank, self)
        rank, tp = divmod(rank, self.tp)
        rank, ep = divmod(rank, self.ep)
        pp, dp = divmod(rank, self.dp)
        return Place(pp, dp, ep, tp)

    def rank_at(self, place: Place) -> int:
        """The global rank at a place."""
        return ((place.pp * self.dp + place.dp) * self.ep + place.ep) * self.tp + place.tp

    def group_of(self, rank: int, axes: Collection[str]) -> tuple[int, ...]:
        """The global ranks, ascending, that lie where `rank` lies but for the given axes.

        A rank's number within such a group counts the given axes as ranks do, tp innermost: over
        ("dp", "ep") it is the data rank.
        """
        assert set(axes) <= set(AXES), axes
        still = [
            0 if axis in axes else index for axis, index in zip(AXES, self.place(rank), strict=True)
        ]
        first = self.rank_at(Place(*still))
        (stride, count), *outer = self._runs(axes) or [(1, 1)]
        ranks: Sequence[int] = range(first, first + stride * count, stride)
        for stride, count in outer:
            ranks = [one + step for step in range(0, stride * count, stride) for one in ranks]
        return tuple(ranks)

    def _runs(self, axes: Collection[str]) -> list[tuple[int, int]]:
        """(stride, ranks) along the given axes, from the innermost; neighbouring axes, and those
        with nothing between them, are one run."""
        runs: list[tuple[int, int]] = []
        stride = 1
        for axis, size in zip(AXES[::-1], self.sizes[::-1], strict=True):
            if axis in axes and size > 1:
                if runs and runs[-1][0] * runs[-1][1] == stride:
                    runs[-1] = (runs[-1][0], runs[-1][1] * size)
                else:
                    runs.append((stride, size))
            stride *= size
        return runs

    def groups_of(self, rank: int) -> dict[str, tuple[int, ...]]:
        """The global ranks of every group that a rank belongs to, by the group's name."""
        column = self.group_of(rank, ("pp",))
        ends = tuple(dict.fromkeys((column[0], column[-1])))
        return {
            **{axis: self.group_of(rank, (axis,)) for axis in AXES},
            "data": self.group_of(rank, ("dp", "ep")),
            "model": self.group_of(rank, ("pp", "ep", "tp")),
            "ends": ends if rank in ends else (rank,),
        }


def make_mesh(world_size: int, pp: int, dp: int, ep: int, tp: int) -> Mesh:
    """A mesh that fills the world; dp = 0 takes what the other axes leave.

    Raises ConfigError with the nearest legal sizes if the product cannot be the world's size.
    """
    model_ranks = pp * ep * tp
    if world_size % model_ranks:
        nearest = max(1, round(world_size / model_ranks)) * model_ranks
        raise ConfigError(
            f"parallel.pp * ep * tp = {pp} * {ep} * {tp} = {model_ranks} does not divide the world "
            f"of {world_size} ranks; start {nearest} ranks or change the sizes"
        )
    left = world_size // model_ranks
    if dp and dp != left:
        raise ConfigError(
            f"parallel.dp = {dp} needs a world of {dp * model_ranks} ranks but {world_size} were "
            f"started; set parallel.dp = {left} or 0 (what the world leaves)"
        )
    return Mesh(pp, left, ep, tp)
