"""Starting and ending the process group of all ranks."""

from __future__ import annotations

import os
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as distributed

from optimus.dist.collectives import Group, barrier
from optimus.launch_env import LaunchEnv, read_launch_env
from optimus.platform import collective_backend, import_ipex, pick_device


@dataclass(frozen=True)
class World:
    """All ranks of the run, seen from this one."""

    launch: LaunchEnv
    device: torch.device
    backend: str
    everyone: Group
    timeout_s: float = 600.0
    """What bounds every wait for another rank."""

    @property
    def rank(self) -> int:
        return self.launch.rank

    @property
    def size(self) -> int:
        return self.launch.world_size

    @property
    def is_first(self) -> bool:
        return self.launch.is_first


def start_world(
    launch_env: LaunchEnv | None = None, timeout_s: float = 600.0, device: str = "auto"
) -> World:
    """Take this rank's device and, if there are others, join them in one process group.

    `timeout_s` bounds the rendezvous and every collective. A single process starts no group.
    """
    launch = launch_env or read_launch_env(os.environ)
    import_ipex()  # before any device is touched: it registers operators for them
    own_device = pick_device(launch.local_rank, device)
    if launch.world_size == 1:
        return World(launch, own_device, "none", Group(size=1, rank=0))
    backend = collective_backend(own_device)
    distributed.init_process_group(
        backend,
        init_method=launch.init_method,
        rank=launch.rank,
        world_size=launch.world_size,
        timeout=timedelta(seconds=timeout_s),
        device_id=own_device if own_device.type == "cuda" else None,
    )
    everyone = Group(launch.world_size, launch.rank, distributed.group.WORLD)
    barrier(everyone)  # a rank that ended now would break the start of slower ones
    return World(launch, own_device, backend, everyone, timeout_s)


def end_world() -> None:
    """Leave the process group, if one was started."""
    if distributed.is_initialized():
        distributed.destroy_process_group()
