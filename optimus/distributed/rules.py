"""Axes of a parameter's shard, reduce and replica groups.

The functions return axes; `Mesh.group_of(rank, axes)` returns the ranks of a group. The optimizer,
the gradient reduction, the gradient norm and checkpoints use these functions only, so that their
groups are consistent.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from optimus.config.axes import AXES, GRAD_SUM, Axes


@dataclass(frozen=True)
class ParameterKind:
    """Distribution of a parameter over all axes of a mesh except pp.

    Attributes:
        divided: Axes along which each rank has a different slice of the parameter. A rank computes
            the complete gradient of its slice. Examples: ep for experts, which receive rows from
            all ep ranks, and tp for parameters under tensor parallelism.
        partial: Axes along which each rank has the whole parameter and reads the same data, but
            computes only one summand of the gradient. Example: tp for norms under sequence
            parallelism.
    """

    divided: Axes = ()
    partial: Axes = ()


def shard_axes(kind: ParameterKind, sharding: Literal["none", "so", "epso"]) -> Axes:
    """Return the axes over which optimizer states are sharded."""
    if sharding == "none":
        return ()
    return _added(kind) if sharding == "epso" else ("dp",)


def sum_axes(kind: ParameterKind) -> Axes:
    """Return the axes over which gradients are summed. They are not averaged, because each rank
    already divides its loss by the number of targets in the global batch."""
    assert not set(kind.divided) & set(kind.partial), kind
    return _added(kind) + kind.partial


def copy_axes(kind: ParameterKind, sharding: Axes) -> Axes:
    """Return the axes along which ranks have copies of the same shard of the optimizer states.
    `sharding` are the axes over which the states are sharded. The gradient norm counts each shard
    only on the first of the ranks that have it."""
    return tuple(axis for axis in AXES if axis not in ("pp", *sharding, *kind.divided))


def _added(kind: ParameterKind) -> Axes:
    return tuple(axis for axis in GRAD_SUM if axis not in kind.divided)
