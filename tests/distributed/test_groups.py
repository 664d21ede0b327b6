from __future__ import annotations

import copy
import pickle
import threading
import time

import pytest
import torch

from optimus.distributed import collectives
from optimus.distributed.groups import join_groups
from optimus.distributed.mesh import ENDS, Mesh
from optimus.distributed.world import World
from optimus.errors import LostPeerError
from optimus.launch.environment import LaunchEnv
from optimus.observe.events import NO_RECORDER, Recorder, Recorders
from tests.kit.ranks.worlds import everyone, fake_world

GROUPS = (("pp",), ("dp",), ("ep",), ("tp",), ("dp", "ep"), ENDS)


def gathered_ranks(sizes: tuple[int, ...]) -> dict[tuple[str, ...], list[int]]:
    """Return a dict that maps the axes of each group of this rank to the global ranks of the group.

    The ranks of a group are collected by an all-gather over the group. The function also checks
    that a group with the axis dp and a group without this axis never share a torch process group.
    """
    rank = torch.distributed.get_rank()
    groups = join_groups(Mesh(*sizes), make_world(timeout_s=600.0))
    seen = {}
    for name in GROUPS:
        group = groups.over(*name)
        gathered = torch.empty(group.size, dtype=torch.int64)
        collectives.all_gather(gathered, torch.tensor([rank]), group)
        assert gathered[group.rank] == rank
        seen[name] = gathered.tolist()
    computing = [groups.everyone, *(groups.over(*axes) for axes in GROUPS if "dp" not in axes)]
    for states in (groups.over("dp"), groups.data):
        assert states.size == 1 or all(states.handle is not group.handle for group in computing)
    return seen


def make_world(timeout_s: float) -> World:
    rank, size = torch.distributed.get_rank(), torch.distributed.get_world_size()
    launch = LaunchEnv(rank, size, rank, size, "env://")
    return World(launch, torch.device("cpu"), "gloo", everyone(), timeout_s)


def stay_away(when: str) -> str:
    """Delay rank 3 until the other ranks reach their time limit. The delay is "before" or "after"
    the creation of the groups, as selected by `when`. Return the error of this rank."""
    world = make_world(timeout_s=2.0)
    if when == "before" and world.rank == 3:
        time.sleep(6)
    try:
        groups = join_groups(Mesh(1, 2, 1, 2), world)
        if world.rank == 3:
            time.sleep(6)
        collectives.all_reduce_sum(torch.ones(1), groups.over("tp"))
    except LostPeerError as error:
        return str(error)
    return "no error"


@pytest.mark.parametrize(
    ("when", "operation"), [("before", "join_groups"), ("after", "all_reduce_sum")]
)
def test_groups_wait_for_the_time_limit_of_the_run(ranks, when, operation):
    errors = ranks(4, stay_away, when, timeout_s=20)
    reason = "another rank did not respond within parallel.timeout_s"
    lost = f"{operation} over tp did not complete: {reason}"
    assert lost in errors


def test_groups_have_the_ranks_of_their_axes(ranks):
    for sizes in ((2, 2, 1, 2), (1, 2, 2, 2), (4, 1, 2, 1), (8, 1, 1, 1), (1, 4, 2, 1)):
        mesh = Mesh(*sizes)
        for rank, seen in enumerate(ranks(8, gathered_ranks, sizes)):
            for axes in GROUPS[:-1]:
                assert seen[axes] == list(mesh.group_of(rank, axes))
            column = mesh.group_of(rank, ("pp",))
            is_end = rank in (column[0], column[-1])
            assert seen[ENDS] == (sorted({column[0], column[-1]}) if is_end else [rank])


def pass_along() -> list[float]:
    """Send two messages to the next rank. Return the two messages that the previous rank sent."""
    group = everyone()
    rank, size = group.rank, group.size
    previous, following = (rank - 1) % size, (rank + 1) % size
    received = [collectives.receive(torch.empty(1), group, previous) for _ in range(2)]
    sent = [collectives.send(torch.tensor([rank + n / 10]), group, following) for n in range(2)]
    values = [transfer.wait().item() for transfer in received]
    for transfer in sent:
        transfer.wait()
    return values


def test_messages_arrive_in_order(ranks):
    for rank, values in enumerate(ranks(3, pass_along)):
        previous = (rank - 1) % 3
        assert values == [previous, torch.tensor(previous + 0.1).item()]


def over_channels(sizes: tuple[int, ...], virtual_stages: int) -> dict[str, float]:
    """Send a value through each pipeline channel, after all receives are posted. Return a dict that
    maps "activations" and "gradients", if this rank receives them, to the received values."""
    world = make_world(timeout_s=600.0)
    channels = join_groups(Mesh(*sizes), world, virtual_stages > 1).channels
    directions = {
        "activations": (channels.activations_out, channels.activations_in, 1.0),
        "gradients": (channels.gradients_out, channels.gradients_in, 2.0),
    }
    pairs = [(out, into) for out, into, _ in directions.values()]
    opened = [channel for pair in pairs for channel in pair if channel.size > 1]
    shared = len(opened) - len({id(channel.handle()) for channel in opened})
    assert not shared, "a channel shares its communicator"
    received = {
        name: collectives.receive(torch.empty(1), into, 1 - into.rank)
        for name, (_, into, _) in directions.items()
        if into.size > 1
    }
    sent = [
        collectives.send(torch.tensor([10.0 * world.rank + mark]), out, 1 - out.rank)
        for out, _, mark in directions.values()
        if out.size > 1
    ]
    assert len(opened) == len(received) + len(sent)
    values = {name: transfer.wait().item() for name, transfer in received.items()}
    for transfer in sent:
        transfer.wait()
    return values


@pytest.mark.parametrize("virtual_stages", [1, 2])
@pytest.mark.parametrize("sizes", [(2, 1, 1, 1), (3, 1, 1, 1), (4, 1, 1, 2)], ids=str)
def test_neighbours_have_a_communicator_for_each_direction(ranks, sizes, virtual_stages):
    mesh = Mesh(*sizes)
    for rank, values in enumerate(ranks(mesh.world_size, over_channels, sizes, virtual_stages)):
        column = mesh.group_of(rank, ("pp",))
        stage, wanted = column.index(rank), {}
        if stage > 0 or virtual_stages > 1:
            wanted["activations"] = 10.0 * column[stage - 1] + 1
        if stage < len(column) - 1 or virtual_stages > 1:
            wanted["gradients"] = 10.0 * column[(stage + 1) % len(column)] + 2
        assert values == wanted


def sums_twice(sizes: tuple[int, ...]) -> bool:
    return gathered_ranks(sizes) == gathered_ranks(sizes) and over_channels(
        sizes, 1
    ) == over_channels(sizes, 1)


@pytest.mark.parametrize("sizes", [(3, 1, 1, 1), (4, 1, 1, 2), (5, 1, 1, 1)], ids=str)
def test_groups_may_be_made_again(ranks, sizes):
    """Groups and channels are made twice. The second time succeeds only if all stages make the same
    number of groups."""
    assert all(ranks(Mesh(*sizes).world_size, sums_twice, sizes, timeout_s=40))


def build_at_scale(size: int, rank: int) -> tuple[int, ...]:
    groups = join_groups(Mesh(8, 128, 12, 1), fake_world(rank, size))
    for name in GROUPS:
        group = groups.over(*name)
        if group.size > 1:
            members = torch.distributed.get_process_group_ranks(group.handle())
            assert members[group.rank] == rank, (name, members)
    return tuple(groups.over(*name).size for name in GROUPS)


def test_groups_of_12288_ranks_on_the_fake_backend(ranks):
    for rank in (0, 777, 12_287):
        (sizes,) = ranks(1, build_at_scale, 12_288, rank, start_world=False)
        assert sizes == (8, 128, 12, 1, 1536, 2 if rank in (0, 777, 12_287) else 1)


class OpenFile(Recorder):
    """Recorder that can be neither copied nor pickled."""

    def __init__(self) -> None:
        self.lock = threading.Lock()


def test_copy_of_a_group_has_no_recorder():
    group = collectives.Group(1, 0, axes="ep", recorder=Recorders(OpenFile()))
    for copied in (copy.deepcopy([group])[0], pickle.loads(pickle.dumps(group))):
        assert copied == group and copied.axes == "ep" and copied.recorder is NO_RECORDER
