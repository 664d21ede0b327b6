"""Process groups of a rank: groups along the axes of the mesh, and channels. A channel is a group
of two neighbouring pipeline ranks, for messages in one direction."""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta

import torch
import torch.distributed as distributed

from optimus.config.axes import DATA, SAME_DATA, Axes
from optimus.distributed.collectives import ALONE, Group, raising_lost_peers, receive, send
from optimus.distributed.mesh import ENDS, Coordinate, Mesh
from optimus.distributed.world import World, silent_libraries
from optimus.observe.events import NO_RECORDER, Recorder

Handles = dict[tuple[bool, tuple[int, ...]], weakref.ref | None]
"""Dict of weak references to torch's process groups. A key is a pair (carries_states, ranks):
`carries_states` is True if the group transfers gradients and parameters, and `ranks` are the global
ranks of the group."""


@dataclass(frozen=True)
class Channels:
    """Channels of a pipeline rank: groups of two ranks for the messages to and from a neighbour.

    If a neighbour does not exist, its channels are `ALONE`, a Group that does not communicate. With
    several stages per rank, the first and the last rank are neighbours, too.

    Each channel is for one direction and has a separate communicator. NCCL and XCCL complete the
    messages of a communicator in the order in which the messages are posted. Therefore ranks could
    deadlock if several channels had the same communicator.

    Attributes:
        rank: This rank's index along pp.
        activations_out: Channel to the next rank for activations.
        activations_in: Channel from the previous rank for activations.
        gradients_out: Channel to the previous rank for gradients.
        gradients_in: Channel from the next rank for gradients.
    """

    rank: int = 0
    activations_out: Group = ALONE
    activations_in: Group = ALONE
    gradients_out: Group = ALONE
    gradients_in: Group = ALONE


@dataclass(frozen=True)
class Groups:
    """Mesh coordinate and process groups of this rank. The ranks of each group are ordered by
    global rank.

    Attributes:
        mesh: Sizes of the axes.
        coordinate: Indices of this rank along the axes.
        everyone: The group of all ranks of the world.
        along: Maps each key of `Mesh.groups_of` to this rank's group.
        channels: Channels to and from the neighbours along pp.
    """

    mesh: Mesh
    coordinate: Coordinate
    everyone: Group
    along: Mapping[Axes, Group]
    channels: Channels = Channels()

    @property
    def recorder(self) -> Recorder:
        """Recorder that receives this rank's collectives, messages and pipeline actions."""
        return self.everyone.recorder

    def over(self, *axes: str) -> Group:
        """Return this rank's group along `axes`, which must be in the order of `AXES`.
        `over(*ENDS)` returns the group of the first and the last pipeline stage, and `over()` the
        group of this rank alone."""
        return self.along[axes] if axes else ALONE

    @property
    def data(self) -> Group:
        """This rank's group along dp and ep. The ranks of this group read different data."""
        return self.along[DATA]

    @property
    def counts(self) -> bool:
        """True if this rank adds its losses to the sum over all ranks. Among the ranks that read
        the same data, only the first rank adds its losses."""
        return not any(getattr(self.coordinate, axis) for axis in SAME_DATA)


def join_groups(
    mesh: Mesh, world: World, is_ring: bool = False, recorder: Recorder = NO_RECORDER
) -> Groups:
    """Create and return the process groups of this rank and its channels along pp. All ranks must
    call this function.

    Args:
        mesh: Sizes of the axes.
        world: World of this rank.
        is_ring: True to also open channels between the last and the first pipeline rank. Runs with
            several stages per rank need these channels.
        recorder: Recorder whose methods are called for each collective and message of the groups.
    """
    members = mesh.groups_of(world.rank)
    channels = _open_channels(members["pp",], is_ring, world, recorder)
    # Each rank creates only the groups to which it belongs. torch names a group by its ranks and
    # the number of groups created before, so that all ranks must create the same number of groups.
    handles: Handles = {}
    if world.size > 1:
        handles[False, tuple(range(world.size))] = world.everyone.handle
    for axes, ranks in members.items():  # in the same order on all ranks
        key = (_carries_states(axes), ranks)
        if len(ranks) > 1 and key not in handles:
            handles[key] = _make(ranks, world, _label(axes, mesh))
        elif axes == ENDS and mesh.pp > 2:  # as many groups as on end stages
            _make(ranks, world, _label(axes, mesh))
    everyone = replace(world.everyone, recorder=recorder)
    return _gather(mesh, world.rank, everyone, handles, channels)


def plan_groups(mesh: Mesh, rank: int, recorder: Recorder = NO_RECORDER) -> Groups:
    """Return the Groups that the global rank `rank` would have on `mesh`, without torch process
    groups. These Groups support only collectives of meta tensors. `recorder` receives the
    collectives."""
    everyone = Group(mesh.world_size, rank, recorder=recorder)
    return _gather(mesh, rank, everyone, {}, Channels())


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
    return Groups(mesh, mesh.coordinate(rank), everyone, along, channels)


def _carries_states(axes: Axes) -> bool:
    """Return True if gradients and parameters are sent over the group along `axes` while the model
    computes."""
    # These transfers have separate process groups, so that other collectives do not wait for them.
    return "dp" in axes


def _label(axes: Axes, mesh: Mesh) -> str:
    """Return the name of the group along `axes` for messages and recorders, such as `dp x ep`. The
    name contains the axes that have more than one rank."""
    if axes == ENDS:
        return "the end stages"
    return " x ".join(axis for axis in axes if getattr(mesh, axis) > 1)


def _make(ranks: tuple[int, ...], world: World, axes: str) -> weakref.ref:
    """Create the torch process group of the global ranks `ranks`, and return a weak reference to
    it. All of these ranks must call this function."""
    limit = timedelta(seconds=world.timeout_s)
    group = Group(len(ranks), ranks.index(world.rank), axes=axes)
    with raising_lost_peers("join_groups", group), silent_libraries():
        made = distributed.new_group(list(ranks), limit, use_local_synchronization=True)
    return weakref.ref(made)


def _open_channels(
    line: Sequence[int], is_ring: bool, world: World, recorder: Recorder
) -> Channels:
    """Create and return this rank's channels to its neighbours along pp. All ranks in `line` must
    call this function.

    Args:
        line: Global ranks along pp. Before this call, all these ranks must have created the same
            number of process groups.
        is_ring: True if each rank has several stages, so that the first and the last rank are
            neighbours.
        world: World of this rank.
        recorder: Recorder whose method `collective` is called for each sent message.
    """
    rank = line.index(world.rank)
    channels: dict[str, Group] = {}
    for edges in _rounds(len(line), is_ring):
        edge = next((edge for edge in edges if rank in edge), None)
        # tests/kit/layouts/schedule_proof.py proves that schedules complete with these
        # communicators.
        for name, source in (("activations", 0), ("gradients", 1)):
            if edge is None:  # all ranks must create the same number of groups
                _make((world.rank,), world, "pp")
                continue
            ranks = tuple(sorted(line[end] for end in edge))
            channel = Group(2, ranks.index(world.rank), _make(ranks, world, "pp"), "pp", recorder)
            is_sender = rank == edge[source]
            transfer = send if is_sender else receive
            # Some communicators connect at their first use, in which both ranks must take part.
            transfer(torch.zeros(1, device=world.device), channel, 1 - channel.rank).wait()
            channels[f"{name}_{'out' if is_sender else 'in'}"] = channel
    return Channels(rank, **channels)


def _rounds(size: int, is_ring: bool) -> list[list[tuple[int, int]]]:
    """Divide the pairs of neighbouring pipeline ranks into rounds, such that a rank is in at most
    one pair of a round. `size` is the number of pipeline ranks. With `is_ring`, the last and the
    first rank are neighbours, too. Return the list of pairs of each round."""
    # All channels of a round open at the same time, so that ranks cannot wait for each other in a
    # cycle.
    edges = [(rank, rank + 1) for rank in range(size - 1)]
    rounds = [edges[::2], edges[1::2], []]
    if is_ring and size > 1:
        rounds[1 + size % 2].append((size - 1, 0))
    return [edges for edges in rounds if edges]
