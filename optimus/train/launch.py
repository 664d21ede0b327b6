"""Planning and start of supervised runs: `optimus launch`.

In a supervised run, a supervisor starts the ranks on the nodes of an allocation. After a failure,
the supervisor replaces failed nodes and starts the ranks again.

This module imports no torch.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import resource
import shlex
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from optimus.config import Config, dump_toml
from optimus.config.machine import Machine
from optimus.errors import ConfigError, counted, refuse_if
from optimus.io import files
from optimus.planner.fit import Capacity, refuse_if_too_large
from optimus.resilience.supervision.agent import SECRET, SUPERVISOR
from optimus.resilience.supervision.agents import MIN_OPEN_FILES, Job
from optimus.resilience.supervision.chain import Chain
from optimus.resilience.supervision.decide import Policy
from optimus.resilience.supervision.launchers import (
    LAUNCHERS,
    Launcher,
    Mpiexec,
    read_job_end,
    read_nodes,
)
from optimus.resilience.supervision.ledger import read_history
from optimus.resilience.supervision.staging import (
    check_environment,
    staged_folder,
    staged_python,
)
from optimus.resilience.supervision.supervisor import Supervisor
from optimus.train.fit import capacity_before_ranks, check_before_ranks
from optimus.train.resolve import FROZEN, divide, resolve

logger = logging.getLogger(__name__)


_ALLOCATIONS = {"SLURM_JOB_NODELIST", "PBS_NODEFILE"}
"""Environment variables that Slurm or PBS sets in a job, to describe the nodes of the job."""


_FROZEN = (*FROZEN, "train.global_batch_tokens")


@dataclass(frozen=True)
class LaunchOptions:
    """Command-line options of `optimus launch`."""

    nodes: int
    """Number of nodes on which ranks run."""
    buffer_nodes: int = 0
    """Number of additional nodes, which replace nodes that fail."""
    ranks_per_node: int = 1
    launcher: str | None = None
    """Program that starts processes on the nodes: "local", "srun", "mpiexec" or "ssh". None selects
    "srun" in a Slurm job and "mpiexec" otherwise."""
    hosts: str | None = None
    """Path of a file with the names of the nodes; None to use the nodes of the Slurm or PBS job."""
    pardoned: tuple[str, ...] = ()
    """Nodes that were excluded after failures and that the run may use again."""
    mpi_ranks: bool = False
    """True to start all ranks with one mpiexec; False to let the agent on each node start the ranks
    of the node."""
    stage: str | None = None
    """Folder on a local disk of each node. Before mpiexec starts the ranks, their Python
    environment is copied to this folder. None: the ranks use the Python environment of this
    process."""
    machine: Machine | None = None
    """The machine definition that `--machine` names; None without `--machine`."""
    next_job: str | None = None
    """Bash command that submits a job to continue the run; None: no further job is submitted."""
    is_dry_run: bool = False
    """True for `--dry-run`. In a dry run, `plan_job` leaves out its checks of the run and of this
    machine. Without a Slurm or PBS job, the nodes get the names `node0`, `node1` and so on."""


def plan_job(config: Config, options: LaunchOptions) -> Job:
    """Return the Job of a supervised run: its nodes, launcher, settings and restart policy.

    Starts no process.

    Raises:
        ConfigError: An option or a setting is invalid, the allocation has too few nodes, the
            launcher cannot work on this machine, or the ledger, the record of the run's earlier
            jobs, is damaged.
        DataError: A data set cannot be used.
    """
    for name, value, least in (
        ("--nodes", options.nodes, 1),
        ("--buffer-nodes", options.buffer_nodes, 0),
        ("--ranks-per-node", options.ranks_per_node, 1),
    ):
        refuse_if(value < least, f"{name} {value} must be at least {least}")
    machine, resilience, run_dir = options.machine, config.resilience, Path(config.train.run_dir)
    launcher = _make_launcher(options)
    allocation = _allocation(options, launcher.name)
    # The launcher "local" emulates all nodes on this machine.
    ranks_here = options.ranks_per_node * (options.nodes if launcher.name == "local" else 1)
    capacity = capacity_before_ranks(config.train, ranks_here, machine, not options.is_dry_run)
    if not options.is_dry_run:
        # Finds mistakes before ranks start.
        plan = resolve(config, options.nodes * options.ranks_per_node, True, False)
        check_before_ranks(config, plan.mesh, plan.batch.microbatches_per_rank, capacity)
        _allow_open_files(MIN_OPEN_FILES + len(allocation))
        _check_pardoned(options.pardoned, allocation, run_dir)
        program = launcher.agent_commands(allocation[:1], Path())[0][0]
        refuse_if(
            shutil.which(program) is None,
            f"--launcher {launcher.name} needs the program {program!r}, which is not on PATH; load "
            "its module, or use another launcher",
        )
    heartbeat_s = resilience.heartbeat_s
    if machine is not None and "heartbeat_s" not in resilience.model_fields_set:
        heartbeat_s = machine.heartbeat_s
    return Job(
        run_dir=run_dir.absolute(),
        config=dump_toml(config),
        nodes=allocation,
        ranks_per_node=options.ranks_per_node,
        policy=Policy(
            sizes=_valid_sizes(config, options.nodes, options.ranks_per_node, capacity),
            on_exhausted=resilience.on_exhausted,
            on_repeat_nan=resilience.on_repeat_nan,
            max_restarts=resilience.max_restarts,
        ),
        heartbeat_s=heartbeat_s,
        timeout_s=config.parallel.timeout_s,
        supervisor_timeout_s=resilience.supervisor_timeout_s,
        launcher=launcher,
        settings=_hash_frozen(config),
        frozen=("model", "data.path", *_FROZEN),
        name=os.environ.get("SLURM_JOB_ID") or os.environ.get("PBS_JOBID", ""),
        ends_at=read_job_end(),
        margin_s=resilience.end_margin_s,
        pardoned=options.pardoned,
        stage=Path(options.stage) if options.stage else None,
        chain=Chain(options.next_job) if options.next_job is not None else None,
    )


def _make_launcher(options: LaunchOptions) -> Launcher:
    """Return the launcher that the options select. A launcher starts processes on the nodes of a
    run. Raises ConfigError if the options and the environment select no launcher, or if an option
    does not fit the launcher."""
    name, machine = options.launcher, options.machine
    if name is None:
        name = "srun" if "SLURM_JOB_ID" in os.environ else "mpiexec"
        if not {"SLURM_JOB_ID", "PBS_NODEFILE"} & {*os.environ} and options.hosts is None:
            raise ConfigError(
                "there is no Slurm or PBS job here; use --launcher local to emulate the nodes on "
                "this machine, or name the nodes with --hosts FILE --launcher ssh"
            )
    option = "--mpi-ranks" if options.mpi_ranks else "mpi_ranks in the file of --machine"
    mpi_ranks = options.mpi_ranks or (machine is not None and machine.mpi_ranks)
    if mpi_ranks and name != Mpiexec.name:
        raise ConfigError(
            f"{option} needs the launcher mpiexec, but this run uses the launcher {name}; use "
            f"--launcher mpiexec, or remove {option}"
        )
    refuse_if(
        machine is not None and machine.cpu_bind and not mpi_ranks,
        "cpu_bind in the file of --machine has an effect only on ranks that mpiexec starts; add "
        "--mpi-ranks, or remove cpu_bind",
    )
    if (stage := options.stage) is not None:
        refuse_if(
            not mpi_ranks,
            "--stage has an effect only with --mpi-ranks; without --mpi-ranks, one process per "
            "node imports the Python modules and forks the ranks; remove --stage",
        )
        refuse_if(not os.path.isabs(stage), f"--stage {stage!r} must be an absolute path")
        check_environment()
    if name == Mpiexec.name:
        return Mpiexec(machine, options.nodes, mpi_ranks)
    return LAUNCHERS[name](machine, options.nodes)


def _allocation(options: LaunchOptions, launcher: str) -> tuple[str, ...]:
    """Return the names of the nodes of a run: first the nodes with ranks, then the buffer nodes,
    which replace nodes that fail. Raises ConfigError if the allocation has too few nodes."""
    number = options.nodes + options.buffer_nodes
    if options.is_dry_run and not options.hosts and not _ALLOCATIONS & {*os.environ}:
        return tuple(f"node{index}" for index in range(number))  # on a login node
    hosts = Path(options.hosts) if options.hosts else None
    return read_nodes(launcher, number, hosts)[:number]


def _allow_open_files(number: int) -> None:
    """Increase the limit of open files of this process to at least `number`, because the supervisor
    has an open connection to each node. Raises ConfigError if the hard limit is lower."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    unlimited = resource.RLIM_INFINITY
    if soft == unlimited or soft >= number:
        return
    refuse_if(
        hard != unlimited and hard < number,
        f"ulimit -n {soft}: the supervisor needs {counted(number, 'open file')}, but the hard "
        f"limit is {hard}; raise the hard limit",
    )
    resource.setrlimit(resource.RLIMIT_NOFILE, (number, hard))


def _check_pardoned(pardoned: Sequence[str], allocation: Sequence[str], run_dir: Path) -> None:
    """Raise ConfigError if a node of `--pardon` is unknown. A node is known if it is in the
    allocation, or if the run's earlier jobs have marked it as excluded, suspect or good. The ledger
    in the run directory contains these marks.

    A node that is not excluded is accepted, because all jobs of a chain have the same options, and
    an earlier job may have made the node usable again.
    """
    history = read_history(run_dir) if pardoned else None
    for node in pardoned:
        assert history is not None
        if node not in allocation and node not in history.standings:
            marked = [name for name in history.standings if history.standing(name) == "excluded"]
            raise ConfigError(
                f"--pardon {node}: not a node of this run; excluded nodes: "
                f"{', '.join(marked) or 'none'}"
            )


def ended_status(run_dir: Path) -> int | None:
    """Return the exit status of a run that an earlier job has completed or stopped, and log a
    warning. Return None if the run can continue.

    Raises:
        ConfigError: The ledger of the run, events.jsonl, is damaged or cannot be read.
    """
    verdict = read_history(run_dir).verdict
    if verdict is None or verdict.verdict == "continue":
        return None
    logger.warning(
        "%s: the run has ended (%s: %s), so this job has nothing to do",
        run_dir,
        verdict.verdict,
        verdict.reason,
    )
    return verdict.status


def supervise(job: Job) -> int:
    """Supervise the ranks of a run until the run or the Slurm or PBS job ends.

    Returns:
        The exit status of `optimus launch`. 0: the run is done. 2: the command or a setting is
        invalid. 3: a later job continues the run. 6: the supervisor has stopped the run.

    Raises:
        ConfigError: Too few nodes can be used, another process uses the run directory, a file of
            the run is damaged, or frozen settings differ from those of an earlier job.
    """
    os.environ.update(job.launcher.variables(len(job.nodes) * job.ranks_per_node))
    return asyncio.run(Supervisor(job).run())


def _valid_sizes(
    config: Config, nodes: int, ranks_per_node: int, capacity: Capacity | None
) -> tuple[int, ...]:
    """Return all node counts from 1 to `nodes` with which the configuration is valid. If the
    settings allow the run to continue on fewer nodes, a count below `nodes` is left out if the run
    cannot fit in the memory of that number of nodes. Raises ConfigError if the configuration is
    invalid with `nodes` nodes."""
    may_shrink = config.resilience.on_exhausted == "shrink" and config.train.fit_check == "refuse"
    sizes = []
    for number in range(1, nodes + 1):
        try:
            mesh, batch = divide(config, number * ranks_per_node)
            if number < nodes and may_shrink and capacity is not None:
                refuse_if_too_large(config, mesh, batch.microbatches_per_rank, capacity)
        except ConfigError:
            if number == nodes:
                raise
            continue
        sizes.append(number)
    return tuple(sizes)


def _hash_frozen(config: Config) -> str:
    """Return a hash of the settings that later jobs of the same run must not change."""
    # Default values are left out, so that settings which a later version adds do not change the
    # hash. The path of the data set is hashed instead of its identity, which would have to be read
    # from the data set.
    model = config.model.model_dump(mode="json", exclude_defaults=True)
    values = {"model": model, "data": os.path.realpath(config.data.path)}
    for key in _FROZEN:
        section, _, name = key.partition(".")
        if name in (fields := getattr(config, section, config).model_dump(mode="json")):
            values[key] = fields[name]
    return files.xxh3_bytes(json.dumps(values, sort_keys=True).encode())


def describe(job: Job) -> str:
    """Return the text that `optimus launch --dry-run` prints about a job: the ranks of each node,
    the environment, and the commands that start agents and ranks."""
    per_node, nodes = job.ranks_per_node, job.policy.sizes[-1]
    lines = []
    for index, node in enumerate(job.nodes):
        ranks = f"ranks {index * per_node}-{(index + 1) * per_node - 1}"
        lines.append(f"{node}: {ranks if index < nodes else 'buffer node'}")
    variables = job.launcher.variables(len(job.nodes) * per_node)
    if variables:
        lines.append(f"environment: {' '.join(f'{k}={v}' for k, v in variables.items())}")
    commands = job.launcher.agent_commands(job.nodes, job.run_dir)
    lines.append(f"{counted(len(commands), 'command')} to start agents:")
    lines += [f"  {shlex.join(command)}" for command in commands]
    secret = job.run_dir / SUPERVISOR / SECRET
    python = staged_python(staged_folder(job.stage, "HASH")) if job.stage else sys.executable
    ranks_of = job.nodes[:nodes]
    if command := job.launcher.rank_command(ranks_of, per_node, secret, "WORKSPACE", python):
        lines += ["command to start the ranks of an attempt:", f"  {shlex.join(command)}"]
    if job.chain is not None:
        lines.append(f"command that submits the next job: {job.chain.command}")
    return "\n".join(lines)
