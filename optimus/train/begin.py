"""What a command does before its ranks compute: how many to start, how they meet, how they refuse.
Needs no torch until ranks meet."""

from __future__ import annotations

import os
from typing import NoReturn

from optimus.errors import ConfigError, OptimusError
from optimus.launch_env import LaunchEnv


def prepare_meeting(launch: LaunchEnv) -> None:
    from optimus.dist.meeting import check_meeting_point

    check_meeting_point(launch)
    if launch.world_size > 1:
        # What torch prints while ranks look for each other says no more than our one line does.
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")


def refuse_together(launch: LaunchEnv, error: OptimusError) -> NoReturn:
    """Raise `error` or, where other ranks were started, what they all agree to raise: a mistake
    that each finds is told once."""
    if launch.world_size > 1:
        prepare_meeting(launch)
        from optimus.dist.world import start_world

        start_world(launch, device="cpu", trouble=error)
    raise error


def ranks_to_start(nproc: int | None, started: int) -> int:
    """Return how many local ranks this process starts: `--nproc`, or 0 where it was not given or
    a launcher has started this rank.

    Args:
        nproc: the value of `--nproc`, None where it was not given.
        started: ranks of this run that a launcher has started.

    Raises:
        ConfigError: `--nproc` is below 1 or differs from the launcher's number.
    """
    if nproc is not None and nproc < 1:
        raise ConfigError(
            f"--nproc {nproc} must be at least 1; leave --nproc out to use this process alone"
        )
    if started == 1 and "RANK" not in os.environ:
        return nproc or 0
    if nproc not in (None, started):
        message = f"--nproc {nproc}, but {started} ranks were started; drop --nproc"
        raise ConfigError(message, on_every_rank=True)
    return 0
