"""The process groups of a mesh, as one rank holds them."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch.distributed as distributed

from optimus.dist.collectives import ALONE, Group
from optimus.dist.mesh import AXES, Mesh, Place
from optimus.dist.world import World


@dataclass(frozen=True)
class Groups:
    """This rank's place and its groups; a rank's number in a group counts as ranks do."""

    mesh: Mesh
    place: Place
    everyone: Group
    pp: Group = ALONE
    dp: Group = ALONE
    ep: Group = ALONE
    tp: Group = ALONE
    data: Group = ALONE
    """dp x ep: ranks that see different data; the rank within is the data rank."""
    model: Group = ALONE
    """pp x ep x tp: ranks that together hold one whole model."""
    ends: Group = ALONE
    """The first and the last pipeline stage."""

    def over(self, axes: tuple[str, ...]) -> Group:
        """The group along some of the data axes, as `optimus.dist.rules` names them."""
        groups = {(): ALONE, ("dp",): self.dp, ("ep",): self.ep, ("dp", "ep"): self.data}
        return groups[axes]


def join_groups(mesh: Mesh, world: World) -> Groups:
    """Make this rank's groups; every rank of the world calls it. Each rank makes its own alone, so
    the cost does not grow with the world."""
    column = mesh.group_of(world.rank, ("pp",))
    ends = (column[0], column[-1]) if world.rank in (column[0], column[-1]) else (world.rank,)
    members = {axis: mesh.group_of(world.rank, (axis,)) for axis in AXES}
    members["data"] = mesh.group_of(world.rank, ("dp", "ep"))
    members["model"] = mesh.group_of(world.rank, ("pp", "ep", "tp"))
    members["ends"] = tuple(dict.fromkeys(ends))
    handles: dict[tuple[bool, tuple[int, ...]], Any] = {}
    if world.size > 1:
        handles[False, tuple(range(world.size))] = world.everyone.handle
    groups = {}
    for name, ranks in members.items():  # in the same order on all ranks of a group
        key = (name in _STATES, ranks)
        if len(ranks) > 1 and key not in handles:
            handles[key] = _make(ranks, world)
        rank = ranks.index(world.rank)
        groups[name] = Group(len(ranks), rank, handles.get(key), _label(name, mesh))
    return Groups(mesh=mesh, place=mesh.place(world.rank), everyone=world.everyone, **groups)


_STATES = ("dp", "data")
"""Gradients and parameters travel over these while the model computes. They share no process group
with others of the same ranks, whose operations would queue up behind, and would have to be begun in
one order with theirs."""


def _label(name: str, mesh: Mesh) -> str:
    """The axes along which a group's ranks differ, for messages and the count of bytes."""
    if name == "ends":
        return "the end stages"
    axes = {"data": ("dp", "ep"), "model": ("pp", "ep", "tp")}.get(name, (name,))
    return " x ".join(axis for axis in axes if getattr(mesh, axis) > 1) or name


def _make(ranks: tuple[int, ...], world: World) -> Any:
    """A process group that only its own ranks join, with the run's time limit."""
    return distributed.new_group(
        list(ranks), timedelta(seconds=world.timeout_s), use_local_synchronization=True
    )
