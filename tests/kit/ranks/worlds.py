"""Groups of all ranks: the real ranks of a pool, or thousands of ranks of torch's fake backend."""

from __future__ import annotations

import torch
import torch.distributed as distributed

from optimus.distributed.collectives import Group, group_of
from optimus.distributed.world import World
from optimus.launch.environment import LaunchEnv
from optimus.observe.events import NO_RECORDER, Recorder


def everyone(axes: str = "all ranks", recorder: Recorder = NO_RECORDER) -> Group:
    """Return the group of all ranks. The process group of this rank must exist."""
    world = distributed.group.WORLD
    assert world is not None, "start the process group first"
    return group_of(world, axes, recorder)


def fake_world(rank: int, size: int) -> World:
    """Return a world of `size` ranks of torch's fake backend. Only the rank `rank`, this process,
    exists."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    distributed.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size)
    launch = LaunchEnv(rank, size, 0, 12, "env://")
    cpu = torch.device("cpu")  # torch 2.8 cannot send tensors on meta
    return World(launch, cpu, "fake", everyone())
