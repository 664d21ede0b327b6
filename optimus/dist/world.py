"""Starting and ending the process group of all ranks."""

from __future__ import annotations

import contextlib
import os
import threading
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as distributed

from optimus.dist.collectives import Group, barrier
from optimus.errors import LostPeerError, one_line
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
    try:
        distributed.init_process_group(
            backend,
            init_method=launch.init_method,
            rank=launch.rank,
            world_size=launch.world_size,
            timeout=timedelta(seconds=timeout_s),
            # No device_id: with one, nccl splits every later group from this one, which all ranks
            # of the world would have to join in, while ours are made by their own ranks alone.
        )
    except RuntimeError as error:  # torch's DistError, and plain ones of gloo
        raise _unmet(error, launch, timeout_s) from error
    everyone = Group(launch.world_size, launch.rank, distributed.group.WORLD)
    barrier(everyone)  # a rank that ended now would break the start of slower ones
    return World(launch, own_device, backend, everyone, timeout_s)


def _unmet(error: RuntimeError, launch: LaunchEnv, timeout_s: float) -> LostPeerError:
    text = one_line(error)
    return LostPeerError(
        f"the {launch.world_size} ranks did not meet at {launch.init_method} within "
        f"parallel.timeout_s = {timeout_s:g}: one has not started, has ended, or cannot reach it; "
        f"look at the ranks' own messages, or set MASTER_ADDR to the host of rank 0 ({text[:200]})"
    )


def tells_first(limit_s: float = 2.0) -> bool:
    """Whether this rank, which lost another, is the first to say so: all ask the store through
    which they met. True too where it does not answer within `limit_s`: who kept it is gone."""
    answer: list[bool] = []

    def ask() -> None:
        with contextlib.suppress(RuntimeError, ValueError):
            store = distributed.distributed_c10d._get_default_store()
            answer.append(store.add("optimus/lost-peer-told", 1) == 1)

    asking = threading.Thread(target=ask, daemon=True)
    asking.start()
    asking.join(limit_s)
    return answer[0] if answer else True


def end_world() -> None:
    """Leave the process group, if one was started."""
    if distributed.is_initialized():
        distributed.destroy_process_group()
