"""The process groups of a mesh, as one rank holds them."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import timedelta

import torch.distributed as distributed

from optimus.config.axes import DATA, SAME, Axes
from optimus.distributed.channels import NO_CHANNELS, Channels, open_channels
from optimus.distributed.collectives import ALONE, Group, lost_peers
from optimus.distributed.mesh import ENDS, Mesh, Place
from optimus.distributed.world import World, silent_libraries
from optimus.observe.events import NO_RECORDER, Recorder

Handles = dict[tuple[bool, tuple[int, ...]], weakref.ref | None]
"""Process groups by whether they carry states, and by their ranks."""


@dataclass(frozen=True)
class Groups:
    """This rank's place and its groups; a rank's number in a group counts as ranks do."""

    mesh: Mesh
    place: Place
    everyone: Group
    along: Mapping[Axes, Group]
    """Those of `Mesh.groups_of`."""
    channels: Channels = NO_CHANNELS
    """To and from the neighbours along pp."""

    @property
    def recorder(self) -> Recorder:
        """What receives this rank's collectives, messages and pipeline actions."""
        return self.everyone.recorder

    def over(self, *axes: str) -> Group:
        """The group along an axis, or along several as `optimus.distributed.rules` names them."""
        return self.along[axes] if axes else ALONE

    @property
    def data(self) -> Group:
        """dp x ep: ranks that see different data; the rank within is the data rank."""
        return self.along[DATA]

    @property
    def ends(self) -> Group:
        """The first and the last pipeline stage."""
        return self.along[ENDS]

    @property
    def counts(self) -> bool:
        """Whether this rank's losses count: of ranks with the same data the first one's do."""
        return not any(getattr(self.place, axis) for axis in SAME)


def join_groups(
    mesh: Mesh, world: World, virtual_stages: int = 1, recorder: Recorder = NO_RECORDER
) -> Groups:
    """Make this rank's groups, with the channels that so many stages a rank need; every rank of the
    world calls it. Each rank makes its own alone, so the cost does not grow with the world. The
    `recorder` receives what this rank sends over them.

    torch names a group by its ranks and by how many this rank has made before it, so all ranks make
    equally many.
    """
    members = mesh.groups_of(world.rank)
    channels = open_channels(
        members["pp",],
        virtual_stages > 1,
        world,
        lambda ranks: _make(ranks, world, "pp"),
        recorder,
    )
    handles: Handles = {}
    if world.size > 1:
        handles[False, tuple(range(world.size))] = world.everyone.handle
    for axes, ranks in members.items():  # in one order on all ranks
        key = (_carries_states(axes), ranks)
        if len(ranks) > 1 and key not in handles:
            handles[key] = _make(ranks, world, _label(axes, mesh))
        elif axes == ENDS and mesh.pp > 2:  # a rank between them, which makes one all the same
            _make(ranks, world, _label(axes, mesh))
    everyone = replace(world.everyone, recorder=recorder)
    return _gather(mesh, world.rank, everyone, handles, channels)


def plan_groups(mesh: Mesh, rank: int) -> Groups:
    """The groups that a rank would have, without any process: for plans, which ask how many ranks
    there are and which number this one has. Nothing can be sent over them."""
    return _gather(mesh, rank, Group(mesh.world_size, rank), {}, NO_CHANNELS)


def _gather(
    mesh: Mesh,
    rank: int,
    everyone: Group,
    handles: Handles,
    channels: Channels,
) -> Groups:
    along = {}
    for axes, ranks in mesh.groups_of(rank).items():
        handle = handles.get((_carries_states(axes), ranks))
        label = _label(axes, mesh)
        along[axes] = Group(len(ranks), ranks.index(rank), handle, label, everyone.recorder)
    return Groups(mesh, mesh.place(rank), everyone, along, channels)


def _carries_states(axes: Axes) -> bool:
    """Gradients and parameters travel over these while the model computes. They share no process
    group with others of the same ranks, whose operations would queue up behind, and would have to
    be begun in one order with theirs."""
    return "dp" in axes


def _label(axes: Axes, mesh: Mesh) -> str:
    """The axes along which a group's ranks differ, for messages and the count of bytes."""
    if axes == ENDS:
        return "the end stages"
    return " x ".join(axis for axis in axes if getattr(mesh, axis) > 1)


def _make(ranks: tuple[int, ...], world: World, axes: str) -> weakref.ref:
    """A process group that only its own ranks join, with the run's time limit."""
    limit = timedelta(seconds=world.timeout_s)
    own = Group(len(ranks), ranks.index(world.rank), axes=axes)
    with lost_peers("join_groups", own), silent_libraries():
        made = distributed.new_group(list(ranks), limit, use_local_synchronization=True)
    return weakref.ref(made)
