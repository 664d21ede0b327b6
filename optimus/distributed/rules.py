"""Who shards, who adds: the axes of a parameter's groups (CONTRACT.md, "Ranks").

Pure values: `Mesh.group_of(rank, axes)` turns them into ranks. The optimizer, the reduction of
gradients, the norm and checkpoints ask here and nowhere else.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from optimus.config.axes import ADDED, AXES, Axes


@dataclass(frozen=True)
class ParameterKind:
    """How a parameter lies on the mesh, apart from its pipeline stage."""

    divided: Axes = ()
    """Along which each rank holds a part of its own, whose gradient is complete by itself: ep for
    experts, which have met the rows of all ep ranks, tp for slices."""
    partial: Axes = ()
    """Along which ranks hold it whole and see the same data, and the backward of each gives a part
    of its gradient: tp for norms under sequence parallelism."""


def shard_axes(kind: ParameterKind, sharding: Literal["none", "so", "epso"]) -> Axes:
    """Axes over which optimizer states are divided."""
    if sharding == "none":
        return ()
    return _added(kind) if sharding == "epso" else ("dp",)


def sum_axes(kind: ParameterKind) -> Axes:
    """Axes along which gradients are added. A sum, nothing else: the loss carries the scale."""
    assert not set(kind.divided) & set(kind.partial), kind
    return _added(kind) + kind.partial


def copy_axes(kind: ParameterKind, sharding: Axes) -> Axes:
    """Axes along which ranks hold the same part of the optimizer states, divided over `sharding`:
    of such ranks the first counts in the norm."""
    return tuple(axis for axis in AXES if axis not in ("pp", *sharding, *kind.divided))


def _added(kind: ParameterKind) -> Axes:
    return tuple(axis for axis in ADDED if axis not in kind.divided)
