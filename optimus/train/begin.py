"""What a command does before its ranks compute: how many to start, how they meet, how they refuse.
Needs no torch until ranks meet."""

from __future__ import annotations

import os
from pathlib import Path
from typing import NoReturn

from optimus.config import Config
from optimus.errors import ConfigError, OptimusError, counted
from optimus.launch.environment import LaunchEnv


def prepare_meeting(launch: LaunchEnv) -> None:
    from optimus.distributed.meeting import check_meeting_point

    check_meeting_point(launch)
    if launch.world_size > 1:
        # What torch prints while ranks look for each other says no more than our one line does.
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")


def dry_run(
    config: Config, nodes: int, ranks_per_node: int, check_data: bool, check_run_dir: bool
) -> None:
    """Check all that `optimus train` checks before its ranks compute, and print what the run would
    do. Creates nothing.

    Raises what a run would raise, in one line. `check_data` and `check_run_dir`: as for
    `preflight`; checkpoints are looked at with the run directory.
    """
    from optimus.train.preflight import doubts, preflight, with_start

    world_size = nodes * ranks_per_node
    flight = preflight(config, world_size, check_data, check_run_dir)
    # Only now torch, which takes seconds to import.
    from optimus.rank.states import check_names, check_slots
    from optimus.train.run_dir import check_not_in_use
    from optimus.train.save import check_saves
    from optimus.train.summary import print_start

    check_names(config)
    check_slots(config, flight.mesh)
    if check_run_dir:
        check_not_in_use(Path(config.train.run_dir))
        flight = with_start(config, flight)
        check_saves(config, flight)
    print_start(config, flight, doubts(config, flight.mesh, ranks_per_node))


def refuse_together(launch: LaunchEnv, error: OptimusError) -> NoReturn:
    """Raise `error` or, where other ranks were started, what they all agree to raise: a mistake
    that each finds is told once."""
    if launch.world_size > 1:
        prepare_meeting(launch)
        from optimus.distributed.world import start_world

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
        message = (
            f"--nproc {nproc}, but a launcher started {counted(started, 'rank')}; drop --nproc"
        )
        raise ConfigError(message, on_every_rank=True)
    return 0
