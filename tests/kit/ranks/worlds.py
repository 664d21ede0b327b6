"""All ranks of a job: of the pool, which has made their process group, or thousands of none."""

from __future__ import annotations

import torch
import torch.distributed as distributed

from optimus.distributed.collectives import Group, group_of
from optimus.distributed.world import World
from optimus.launch.environment import LaunchEnv
from optimus.observe.events import NO_RECORDER, Recorder


def everyone(axes: str = "all ranks", recorder: Recorder = NO_RECORDER) -> Group:
    return group_of(distributed.group.WORLD, axes, recorder)


def fake_world(rank: int, size: int) -> World:
    """Of torch's fake backend, with this rank alone."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    distributed.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size)
    launch = LaunchEnv(rank, size, 0, 12, "env://")
    cpu = torch.device("cpu")  # torch 2.8 sends nothing from meta
    return World(launch, cpu, "fake", everyone())
