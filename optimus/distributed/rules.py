"""Axes of a parameter's shard, reduce and replica groups (CONTRACT.md, "Ranks").

The functions return pure values, which `Mesh.group_of(rank, axes)` turns into ranks. The optimizer,
the reduction of gradients, the norm and checkpoints all get these groups from here only.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from optimus.config.axes import AXES, GRAD_SUM, Axes


@dataclass(frozen=True)
class ParameterKind:
    """Distribution of a parameter over the mesh, apart from its pipeline stage.

    Attributes:
        divided: Axes along which each rank has another slice of the parameter. The gradient of a
            slice is complete on its rank: ep for experts, which compute the rows of all ep ranks;
            tp for the slices of tensor parallelism.
        partial: Axes along which each rank has the whole parameter and sees the same data, but its
            backward gives only a summand of the gradient: tp for norms under sequence parallelism.
    """

    divided: Axes = ()
    partial: Axes = ()


def shard_axes(kind: ParameterKind, sharding: Literal["none", "so", "epso"]) -> Axes:
    """Return the axes over which optimizer states are sharded."""
    if sharding == "none":
        return ()
    return _added(kind) if sharding == "epso" else ("dp",)


def sum_axes(kind: ParameterKind) -> Axes:
    """Return the axes over which gradients are summed; they are not averaged, since the loss has
    the global scale."""
    assert not set(kind.divided) & set(kind.partial), kind
    return _added(kind) + kind.partial


def copy_axes(kind: ParameterKind, sharding: Axes) -> Axes:
    """Return the axes along which ranks have the same shard of the optimizer states, which are
    divided over the axes `sharding`. Of such ranks, only the first counts in the norm."""
    return tuple(axis for axis in AXES if axis not in ("pp", *sharding, *kind.divided))


def _added(kind: ParameterKind) -> Axes:
    return tuple(axis for axis in GRAD_SUM if axis not in kind.divided)
