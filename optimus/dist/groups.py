"""The process groups of a mesh, as one rank holds them."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch.distributed as distributed

from optimus.dist.channels import Channels, open_channels
from optimus.dist.collectives import ALONE, Group, lost_peers
from optimus.dist.mesh import Mesh, Place
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
    channels: Channels = Channels()
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
    handles: dict[tuple[int, ...], Any] = {}
    if world.size > 1:
        handles[tuple(range(world.size))] = world.everyone.handle
    for name, ranks in members.items():  # in the same order on all ranks of a group
        if len(ranks) > 1 and ranks not in handles:
            handles[ranks] = _make(ranks, world, _label(name, mesh))
    groups = {
        name: Group(len(ranks), ranks.index(world.rank), handles.get(ranks), _label(name, mesh))
        for name, ranks in members.items()
    }
    return Groups(
        mesh=mesh,
        place=mesh.place(world.rank),
        everyone=world.everyone,
        channels=channels,
        **groups,
    )


def _label(name: str, mesh: Mesh) -> str:
    """The axes along which a group's ranks differ, for messages and the count of bytes."""
    if name == "ends":
        return "the end stages"
    axes = {"data": ("dp", "ep"), "model": ("pp", "ep", "tp")}.get(name, (name,))
    return " x ".join(axis for axis in axes if getattr(mesh, axis) > 1) or name


def _make(ranks: tuple[int, ...], world: World, axes: str) -> Any:
    """A process group that only its own ranks join, with the run's time limit."""
    limit = timedelta(seconds=world.timeout_s)
    with lost_peers("join_groups", Group(len(ranks), ranks.index(world.rank), axes=axes)):
        return distributed.new_group(list(ranks), limit, use_local_synchronization=True)
