"""Rank arithmetic: which place a rank has along each axis. Pure values; no process is started.

World = pp * dp * ep * tp; tp innermost, then ep, then dp, pp outermost (CONTRACT.md, "Ranks").
"""

from __future__ import annotations

import itertools
import math
from collections import namedtuple
from collections.abc import Collection
from typing import TYPE_CHECKING, NamedTuple

from optimus.config.axes import ADDED, AXES, DATA, MODEL, Axes
from optimus.config.sections import ParallelConfig
from optimus.errors import ConfigError, counted

ENDS = ("ends",)
"""Stands for the axes of a group that no axes give: the first and the last pipeline stage."""
_GROUPS: tuple[Axes, ...] = (
    *((axis,) for axis in AXES),
    *(some for n in range(2, len(ADDED) + 1) for some in itertools.combinations(ADDED, n)),
)
"""The axes of every group that a run makes, in order."""

if TYPE_CHECKING:  # a type checker cannot read the fields from the table

    class Place(NamedTuple):
        pp: int
        dp: int
        ep: int
        tp: int

    class _Sizes(NamedTuple):
        pp: int = 1
        dp: int = 1
        ep: int = 1
        tp: int = 1
else:
    Place = namedtuple("Place", AXES)
    Place.__doc__ = "A rank's index along each axis."
    _Sizes = namedtuple("Mesh", AXES, defaults=[1] * len(AXES))


class Mesh(_Sizes):
    """Sizes of the axes of parallelism."""

    __slots__ = ()

    @property
    def world_size(self) -> int:
        return math.prod(self)

    @property
    def num_data_ranks(self) -> int:
        """Ranks that see different data: w = dp * ep."""
        return self.size_of(DATA)

    def size_of(self, axes: Collection[str]) -> int:
        """How many ranks differ along the given axes alone."""
        return math.prod(getattr(self, axis) for axis in axes)

    def number_of(self, place: Place, axes: Collection[str]) -> int:
        """Which of those ranks lies at `place`, the innermost axis counted first."""
        number = 0
        for axis, size, index in zip(AXES, self, place, strict=True):
            if axis in axes:
                number = number * size + index
        return number

    def place(self, rank: int) -> Place:
        """Where a global rank lies along each axis."""
        assert 0 <= rank < self.world_size, (rank, self)
        indices = []
        for size in reversed(self):
            rank, index = divmod(rank, size)
            indices.append(index)
        return Place(*reversed(indices))

    def rank_at(self, place: Place) -> int:
        """The global rank at a place."""
        return self.number_of(place, AXES)

    def group_of(self, rank: int, axes: Collection[str]) -> tuple[int, ...]:
        """The global ranks, ascending, that lie where `rank` lies but for the given axes.

        A rank's number within such a group is `number_of`: over ("dp", "ep") the data rank.
        """
        assert set(axes) <= set(AXES), axes
        ranks, stride = [rank], 1
        for axis, size in zip(reversed(AXES), reversed(self), strict=True):
            if axis in axes:
                own = rank // stride % size
                steps = range(-own * stride, (size - own) * stride, stride)
                ranks = [one + step for step in steps for one in ranks]
            stride *= size
        return tuple(ranks)

    def groups_of(self, rank: int) -> dict[Axes, tuple[int, ...]]:
        """The global ranks of every group that a rank belongs to, by its axes, or ENDS."""
        column = self.group_of(rank, ("pp",))
        ends = tuple(dict.fromkeys((column[0], column[-1])))
        groups = {axes: self.group_of(rank, axes) for axes in _GROUPS}
        return groups | {ENDS: ends if rank in ends else (rank,)}


def make_mesh(parallel: ParallelConfig, world_size: int | None = None) -> Mesh:
    """A mesh that fills the world; dp = 0 takes what the other axes leave. None: a world of dp
    replicas, or one.

    Raises ConfigError with the nearest legal sizes if the product cannot be the world's size.
    """
    mesh = Mesh(*(getattr(parallel, axis) for axis in AXES))
    model_ranks, dp = mesh.size_of(MODEL), parallel.dp
    if world_size is None:
        world_size = model_ranks * (dp or 1)
    if world_size % model_ranks:
        nearest = max(1, round(world_size / model_ranks)) * model_ranks
        sizes = " * ".join(str(getattr(mesh, axis)) for axis in MODEL)
        raise ConfigError(
            f"parallel.{' * '.join(MODEL)} = {sizes} = {model_ranks} does not divide the world "
            f"of {counted(world_size, 'rank')}; start {counted(nearest, 'rank')} or change the "
            "sizes"
        )
    left = world_size // model_ranks
    if dp and dp != left:
        raise ConfigError(
            f"parallel.dp = {dp} needs a world of {counted(dp * model_ranks, 'rank')}, "
            f"and this one has {world_size}; set parallel.dp = {left} or 0 (what the world leaves)"
        )
    return mesh._replace(dp=left)
