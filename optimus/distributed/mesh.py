"""Mesh of the axes of parallelism: coordinates and groups of ranks, computed without communication.

The world size is pp * dp * ep * tp. Ranks are numbered with tp as the innermost axis and pp as the
outermost. `ParameterKind` determines the axes over which gradients are summed, and the axes over
which optimizer states are sharded or copied. The optimizer, the gradient reduction and checkpoints
all use these axes, and therefore the same groups of ranks.
"""

from __future__ import annotations

import itertools
import math
from collections import namedtuple
from collections.abc import Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple

from optimus.config import ParallelConfig
from optimus.config.axes import AXES, DATA, GRAD_SUM, MODEL, Axes
from optimus.errors import ConfigError, counted, refuse_if

ENDS = ("ends",)
"""Key, in dicts of groups, for the group of the first and the last pipeline stage. The key for any
other group is the tuple of the group's axes."""
_GROUPS: tuple[Axes, ...] = (
    *((axis,) for axis in AXES),
    *(some for n in range(2, len(GRAD_SUM) + 1) for some in itertools.combinations(GRAD_SUM, n)),
)
"""Axes of each process group that a rank creates, in the order of creation. The group ENDS is not
included."""

if TYPE_CHECKING:  # a type checker cannot read the fields from AXES

    class Coordinate(NamedTuple):
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
    Coordinate = namedtuple("Coordinate", AXES)
    Coordinate.__doc__ = "A rank's index along each axis."
    _Sizes = namedtuple("Mesh", AXES, defaults=[1] * len(AXES))


class Mesh(_Sizes):
    """The sizes of the axes of parallelism. Ranks are numbered with tp innermost, then ep, dp,
    pp."""

    __slots__ = ()

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return math.prod(self)

    @property
    def num_data_ranks(self) -> int:
        """Number of ranks that read different data, dp * ep."""
        return self.size_of(DATA)

    def size_of(self, axes: Collection[str]) -> int:
        """Return the number of ranks in a group along the given axes."""
        return math.prod(getattr(self, axis) for axis in axes)

    def number_of(self, coordinate: Coordinate, axes: Collection[str]) -> int:
        """Return the index of the rank at `coordinate` in its group along `axes`. The innermost
        axis varies fastest in the order of a group's ranks."""
        number = 0
        for axis, size, index in zip(AXES, self, coordinate, strict=True):
            if axis in axes:
                number = number * size + index
        return number

    def coordinate(self, rank: int) -> Coordinate:
        """Return the mesh coordinate of the global rank `rank`."""
        assert 0 <= rank < self.world_size, (rank, self)
        indices = []
        for size in reversed(self):
            rank, index = divmod(rank, size)
            indices.append(index)
        return Coordinate(*reversed(indices))

    def rank_at(self, coordinate: Coordinate) -> int:
        """Return the global rank of the process at the mesh coordinate `coordinate`."""
        return self.number_of(coordinate, AXES)

    def group_of(self, rank: int, axes: Collection[str]) -> tuple[int, ...]:
        """Return the global ranks, in ascending order, of the group of `rank` along `axes`.

        These ranks have the same indices along all other axes.
        """
        assert set(axes) <= set(AXES), axes
        ranks, stride = [rank], 1
        for axis, size in zip(reversed(AXES), reversed(self), strict=True):
            if axis in axes:
                index = rank // stride % size
                steps = range(-index * stride, (size - index) * stride, stride)
                ranks = [member + step for step in steps for member in ranks]
            stride *= size
        return tuple(ranks)

    def groups_of(self, rank: int) -> dict[Axes, tuple[int, ...]]:
        """Return the global ranks of each group to which the global rank `rank` belongs. The keys
        of the dict are the tuples of the groups' axes, and ENDS. The group ENDS of a rank in a
        middle pipeline stage contains only this rank."""
        column = self.group_of(rank, ("pp",))
        ends = tuple(dict.fromkeys((column[0], column[-1])))
        groups = {axes: self.group_of(rank, axes) for axes in _GROUPS}
        return groups | {ENDS: ends if rank in ends else (rank,)}


def make_mesh(parallel: ParallelConfig, world_size: int | None = None) -> Mesh:
    """Return the mesh of a run.

    Args:
        parallel: Sizes of the axes. If dp is 0, `world_size` divided by the product of the other
            sizes is used instead.
        world_size: Number of ranks; None if it is the product of the sizes.

    Raises:
        ConfigError: The product of the sizes differs from the number of ranks.
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
            f"of {counted(world_size, 'rank')}; use a multiple of {counted(model_ranks, 'rank')}, "
            f"such as {nearest}, or change the sizes"
        )
    left = world_size // model_ranks
    refuse_if(
        dp and dp != left,
        f"parallel.dp = {dp} needs a world of {counted(dp * model_ranks, 'rank')}, "
        f"but this run has {world_size:,}; set parallel.dp = {left}, or 0 to use all ranks",
    )
    return mesh._replace(dp=left)


class GroupAxes(NamedTuple):
    """Axes of the process groups of a parameter, as in `ParamProcessGroups`."""

    reduce: Axes
    """Axes over which the gradient is summed, except `ParameterKind.partial`."""
    shard: Axes
    """Axes over which the optimizer states are sharded."""
    replica: Axes
    """Axes of `reduce` along which ranks have the same shard of the states."""
    partial: Axes
    copy: Axes
    """Axes along which ranks have the same shard of the states. They are the axes in `replica`, and
    the axes along which ranks read the same data, such as tp for a parameter that tp does not
    divide."""
    stages: Axes


@dataclass(frozen=True)
class ParameterKind:
    """Distribution of a parameter and its gradient over ranks.

    Attributes:
        divided: Axes along which each rank has a different slice of the parameter and the complete
            gradient of its slice. Example: ep for experts.
        partial: Axes along which each rank has the whole parameter, but computes only one summand
            of its gradient. Example: tp for norms under sequence parallelism.
        stages: If several pipeline stages have a copy of the parameter, the axes of their process
            group, else (). Example: ENDS for tied embeddings. Each stage computes one summand of
            the gradient. The copies have identical states. The gradient norm includes only the
            first stage's copy, and a checkpoint contains the states only once.
    """

    divided: Axes = ()
    partial: Axes = ()
    stages: Axes = ()

    @property
    def sum_axes(self) -> Axes:
        """Axes over which the gradient of the parameter is summed. The gradient is not averaged,
        because each rank divides its loss by the global number of targets."""
        assert not set(self.divided) & set(self.partial), self
        return self.shard_axes("epso") + self.partial

    def shard_axes(self, sharding: Literal["none", "so", "epso"]) -> Axes:
        """Return the axes over which optimizer states are sharded. `sharding` is the setting
        `optim.sharding`."""
        undivided = tuple(axis for axis in GRAD_SUM if axis not in self.divided)
        return {"none": (), "so": ("dp",), "epso": undivided}[sharding]

    def group_axes(self, sharding: Literal["none", "so", "epso"]) -> GroupAxes:
        """Return the axes of the parameter's process groups. `sharding` is the setting
        `optim.sharding`."""
        # The sum over partial axes is a separate all-reduce, because no group has the axes dp, ep
        # and tp together.
        reduce, shard = self.shard_axes("epso"), self.shard_axes(sharding)
        replica = tuple(axis for axis in reduce if axis not in shard)
        return GroupAxes(reduce, shard, replica, self.partial, self.copy_axes(shard), self.stages)

    def copy_axes(self, sharding: Axes) -> Axes:
        """Return the axes along which ranks have copies of the same shard of the optimizer states.

        `sharding` contains the axes over which the optimizer states are sharded.
        """
        return tuple(axis for axis in AXES if axis not in ("pp", *sharding, *self.divided))
