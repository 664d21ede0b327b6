"""Axes over which gradients are summed, and axes over which optimizer states are sharded or copied.

The optimizer, the gradient reduction and checkpoints all use the functions of this module, so that
their groups are consistent. `Mesh.group_of` converts the axes to ranks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from optimus.config.axes import AXES, GRAD_SUM, Axes


@dataclass(frozen=True)
class ParameterKind:
    """Distribution of a parameter over the ranks of a pipeline stage.

    Attributes:
        divided: Axes along which each rank has a different slice of the parameter and the complete
            gradient of its slice. Example: ep for experts.
        partial: Axes along which each rank has the whole parameter, but computes only one summand
            of its gradient. Example: tp for norms under sequence parallelism.
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
    divides its loss by the global number of targets."""
    assert not set(kind.divided) & set(kind.partial), kind
    return _added(kind) + kind.partial


def copy_axes(kind: ParameterKind, sharding: Axes) -> Axes:
    """Return the axes along which ranks have copies of the same shard of the optimizer states.

    `sharding` are the axes over which the states are sharded.
    """
    return tuple(axis for axis in AXES if axis not in ("pp", *sharding, *kind.divided))


def _added(kind: ParameterKind) -> Axes:
    return tuple(axis for axis in GRAD_SUM if axis not in kind.divided)
