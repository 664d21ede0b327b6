"""Who shards, who adds: the axes of a parameter's groups (CONTRACT.md, "Ranks").

Pure values: `Mesh.group_of(rank, axes)` turns them into ranks. The optimizer, the reduction of
gradients, the norm and checkpoints ask here and nowhere else; a new kind of parallelism is a new
field of `ParameterKind`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Axes = tuple[str, ...]


@dataclass(frozen=True)
class ParameterKind:
    """How a parameter lies on the mesh, apart from its pipeline stage."""

    expert: bool = False
    """Belongs to one expert: ep divides experts, and the rows of all ep ranks reach it."""
    divided_by_tp: bool = False
    """Each tensor-parallel rank holds a slice of its own."""
    partial_over_tp: bool = False
    """Held whole, but each tensor-parallel rank's backward gives a part of its gradient: a norm
    under sequence parallelism, a q/k-norm weight beside divided heads."""


def shard_axes(kind: ParameterKind, sharding: Literal["none", "so", "epso"]) -> Axes:
    """Axes over which optimizer states are divided."""
    if sharding == "none":
        return ()
    return ("dp", "ep") if sharding == "epso" and not kind.expert else ("dp",)


def sum_axes(kind: ParameterKind) -> Axes:
    """Axes along which gradients are added. A sum, nothing else: the loss carries the scale.

    Experts add over dp alone, since their backward has already seen the rows of all ep ranks.
    """
    assert not (kind.divided_by_tp and kind.partial_over_tp), kind
    data = ("dp",) if kind.expert else ("dp", "ep")
    return (*data, "tp") if kind.partial_over_tp else data
