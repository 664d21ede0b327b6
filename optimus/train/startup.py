"""Start of a training command: number of ranks, rendezvous address, dry run and start-up times.

Importing this module imports no torch.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from optimus.config import Config
from optimus.config.machine import Machine
from optimus.errors import ConfigError, OptimusError, counted, refuse_if
from optimus.launch.environment import COMMAND_STARTED, LaunchEnv
from optimus.observe.events import StartUpRecord

if TYPE_CHECKING:
    from optimus.train.resolve import PartialPlan


def prepare_meeting(launch: LaunchEnv) -> None:
    """Check the rendezvous address of the ranks, and turn off torch's warnings about failed
    connections. Raises LaunchError if the address cannot be used."""
    from optimus.distributed.rendezvous import check_meeting_point

    check_meeting_point(launch)
    if launch.world_size > 1:
        # If ranks cannot connect, torch's warnings repeat our error message.
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")


def check_run(
    config: Config, world_size: int, check_data: bool = True, check_run_dir: bool = True
) -> PartialPlan:
    """Make the checks of `optimus train` that need only one process. Creates no file.

    Args:
        config: The run's configuration.
        world_size: Number of ranks.
        check_data: False on a machine that does not have the data.
        check_run_dir: False on a machine that does not have the run directory and its checkpoints.

    Returns:
        The plan of the run: a RunPlan if the data was checked, else a PartialPlan.

    Raises:
        ConfigError, DataError, CheckpointError: `optimus train` would fail with the same error.
    """
    from optimus.train.resolve import resolve

    plan = resolve(config, world_size, check_data, check_run_dir)
    # Only these modules import torch, which takes seconds.
    from optimus.io.workspace import check_not_in_use
    from optimus.planner.states import check_names, check_slots
    from optimus.rank.states import check_disk_memory
    from optimus.train.autotune import warn_of_alltoall
    from optimus.train.save import check_saves

    check_names(config.optim, config.model)
    check_slots(config, plan.mesh)
    check_disk_memory(config, plan.mesh)
    warn_of_alltoall(config.parallel, config.train.device)
    if check_run_dir:
        check_not_in_use(Path(config.train.run_dir))
        check_saves(config.model, config.checkpoint.model_interval, plan.start)
    return plan


def dry_run(
    config: Config,
    nodes: int,
    ranks_per_node: int,
    check_data: bool,
    check_run_dir: bool,
    machine: Machine | None = None,
    is_node: bool = True,
) -> None:
    """Check a run on `nodes` nodes with `ranks_per_node` ranks each, and print its plan.

    Args:
        config: The run's configuration.
        nodes, ranks_per_node: Numbers of nodes and ranks.
        check_data, check_run_dir: As for `check_run`.
        machine: Machine of the run, if `train.machine` is not set.
        is_node: False if this machine is not a node of the run. The memory and the disk of this
            machine are then not checked.
    """
    plan = check_run(config, nodes * ranks_per_node, check_data, check_run_dir)
    _check_node(config, plan, nodes, ranks_per_node, machine, is_node)
    from optimus.train.summary import print_start

    print_start(config, plan, ranks_per_node)
    logging.getLogger(__name__).info(
        "dry run: all checks%s passed, and no file was created",
        "" if check_data and check_run_dir else " except the skipped checks",
    )


def _check_node(
    config: Config,
    plan: PartialPlan,
    nodes: int,
    ranks_per_node: int,
    machine: Machine | None,
    is_node: bool,
) -> None:
    """Check that the ranks of a node fit in the memory of the node, and that `offload.disk` can be
    used. See `dry_run` for the arguments."""
    from optimus.chunks.state_file import check_directory
    from optimus.train.fit import capacity_before_ranks, capacity_of_rank, check_before_ranks

    # If this machine is a node of the run, it has the ranks of all nodes, because `optimus launch
    # --launcher local` emulates all nodes on this machine.
    ranks_here = ranks_per_node * (nodes if is_node else 1)
    capacity = capacity_before_ranks(config.train, ranks_here, machine, is_node)
    if capacity is None and is_node and config.train.fit_check != "off":
        capacity = capacity_of_rank(config.train, 0, ranks_here)
    microbatches = plan.batch.microbatches_per_rank
    if not check_before_ranks(config, plan.mesh, microbatches, capacity):
        logging.getLogger(__name__).info(
            "the memory of the nodes is unknown here, so it was not checked that the run fits; set "
            "train.machine for this check"
        )
    if is_node and config.offload.disk:
        check_directory(config.offload.disk, range(ranks_here))


def refuse_together(launch: LaunchEnv, error: OptimusError) -> NoReturn:
    """End this rank because of `error`.

    In a run with one rank, raise `error`. In a run with several ranks, start the process group,
    through which the ranks agree on one error. All ranks then raise a RunEnded, and the run prints
    only one error.
    """
    if launch.world_size > 1:
        prepare_meeting(launch)
        from optimus.distributed.world import start_world

        start_world(launch, device="cpu", failure=error)
    raise error


def ranks_to_start(nproc: int | None, started: int) -> int:
    """Return the number of local ranks that this process must start; 0 if this process is itself a
    rank.

    Args:
        nproc: Value of `--nproc`; None if it was not given.
        started: Number of ranks of this run that a launcher has started.

    Raises:
        ConfigError: `--nproc` is below 1 or differs from the number that the launcher started.
    """
    refuse_if(
        nproc is not None and nproc < 1,
        f"--nproc {nproc} must be at least 1; leave --nproc out to run one rank in this process",
    )
    if started == 1 and "RANK" not in os.environ:
        return nproc or 0
    if nproc not in (None, started):
        message = (
            f"--nproc {nproc}, but a launcher started {counted(started, 'rank')}; remove --nproc"
        )
        raise ConfigError(message)
    return 0


class StartUp:
    """Stopwatch for the start-up of one rank: measures the phases from the start of the command to
    the end of the first update."""

    def __init__(self, process_start: float | None = None) -> None:
        """Start the stopwatch.

        Args:
            process_start: Value of `time.monotonic` at the start of this process. The phase
                `imports` lasts from `process_start` to this call. With `--nproc`, the phase
                `launch` lasts from the start of the command to `process_start`. If `process_start`
                is None, the stopwatch starts at this call, without these two phases.
        """
        self._phases: list[tuple[str, float]] = []
        self._processor_start = 0.0 if process_start is not None else time.process_time()
        self._start = self._last = time.monotonic() if process_start is None else process_start
        if process_start is None:
            return
        with contextlib.suppress(KeyError, ValueError):  # only `--nproc` sets the variable
            command_start = float(os.environ[COMMAND_STARTED])
            if 0 <= command_start <= process_start:
                self._start = command_start
                self._phases.append(("launch", process_start - command_start))
        self.done("imports")

    def done(self, phase: str) -> None:
        """Record that the phase `phase` has ended. The phase began when the previous phase
        ended."""
        now = time.monotonic()
        self._phases.append((phase, now - self._last))
        self._last = now

    def record(self) -> StartUpRecord:
        """Return the durations of all phases that have ended, their total, and the processor time
        of this process, in seconds."""
        processor_s = time.process_time() - self._processor_start
        return StartUpRecord(tuple(self._phases), self._last - self._start, processor_s)
