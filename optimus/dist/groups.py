"""The process groups of a mesh, as one rank holds them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch.distributed as distributed

from optimus.dist.channels import NO_CHANNELS, Channels, open_channels
from optimus.dist.collectives import ALONE, Group, lost_peers
from optimus.dist.mesh import Mesh, Place
from optimus.dist.world import World, silent_libraries


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
    channels: Channels = NO_CHANNELS
    """To and from the neighbours along pp."""

    def over(self, axes: tuple[str, ...]) -> Group:
        """The group along some of the data axes, as `optimus.dist.rules` names them."""
        groups = {(): ALONE, ("dp",): self.dp, ("ep",): self.ep, ("dp", "ep"): self.data}
        return groups[axes]


def join_groups(mesh: Mesh, world: World) -> Groups:
    """Make this rank's groups; every rank of the world calls it. Each rank makes its own alone, so
    the cost does not grow with the world."""
    members = mesh.groups_of(world.rank)
    # Before "ends", which only some ranks make.
    channels = open_channels(members["pp"], world, lambda ranks: _make(ranks, world, "pp"))
    handles: dict[tuple[bool, tuple[int, ...]], Any] = {}
    if world.size > 1:
        handles[False, tuple(range(world.size))] = world.everyone.handle
    for name, ranks in members.items():  # in one order on all ranks of a group
        key = (name in _STATES, ranks)
        if len(ranks) > 1 and key not in handles:
            handles[key] = _make(ranks, world, _label(name, mesh))
    return _gather(mesh, world.rank, world.everyone, handles, channels)


def plan_groups(mesh: Mesh, rank: int) -> Groups:
    """The groups that a rank would have, without any process: for plans, which ask how many ranks
    there are and which number this one has. Nothing can be sent over them."""
    return _gather(mesh, rank, Group(mesh.world_size, rank), {}, NO_CHANNELS)


def _gather(
    mesh: Mesh,
    rank: int,
    everyone: Group,
    handles: Mapping[tuple[bool, tuple[int, ...]], Any],
    channels: Channels,
) -> Groups:
    groups = {}
    for name, ranks in mesh.groups_of(rank).items():
        handle = handles.get((name in _STATES, ranks))
        groups[name] = Group(len(ranks), ranks.index(rank), handle, _label(name, mesh))
    return Groups(mesh=mesh, place=mesh.place(rank), everyone=everyone, channels=channels, **groups)


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


def _make(ranks: tuple[int, ...], world: World, axes: str) -> Any:
    """A process group that only its own ranks join, with the run's time limit."""
    limit = timedelta(seconds=world.timeout_s)
    own = Group(len(ranks), ranks.index(world.rank), axes=axes)
    with lost_peers("join_groups", own), silent_libraries():
        return distributed.new_group(list(ranks), limit, use_local_synchronization=True)
