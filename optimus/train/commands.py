"""Subcommands `train`, `launch`, `machine` and `status` of the `optimus` command.

This module imports torch only in the functions that need it.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
from collections.abc import Callable
from typing import Any

from optimus.errors import ConfigError, OptimusError, OutcomeKind, counted, refuse_if


def add_to(commands: argparse._SubParsersAction) -> None:
    """Add the subcommands `train`, `launch`, `machine` and `status` to the parser of `optimus`."""
    for add in (_add_train, _add_launch, _add_machine, _add_status):
        add(commands)


def add_command(
    commands: argparse._SubParsersAction, name: str, run: Callable[..., int], text: str
) -> argparse.ArgumentParser:
    """Add a subcommand and return its parser. The subcommand `name` calls `run`, and `text` is its
    help text."""
    parser = commands.add_parser(name, help=text, description=text)
    parser.set_defaults(run=run)
    return parser


def add_config(parser: argparse.ArgumentParser) -> None:
    """Add the arguments that give a configuration: the path of a TOML file, and arguments
    `section.key=value`, which replace settings of the file."""
    parser.add_argument("config", help="a TOML file; configs/run has examples")
    parser.add_argument(
        "overrides",
        nargs="*",
        metavar="section.key=value",
        help="settings that replace the settings of the file",
    )


def _add_train(commands: argparse._SubParsersAction) -> None:
    parser = add_command(commands, "train", _train, "Train a model as a configuration file says.")
    add_config(parser)
    parser.add_argument("--settings", action=_PrintSettings, help="list all settings and exit")
    parser.add_argument(
        "--nproc",
        type=int,
        metavar="N",
        help="start N ranks on this node (default: mpiexec, srun or torchrun starts the ranks and "
        "sets rank and world size)",
    )
    parser.add_argument(
        "--dry-run",
        action="store_true",
        help="check settings, layout, data, run directory and checkpoint, print what the run would "
        "do, and create nothing",
    )
    parser.add_argument(
        "--nodes",
        type=int,
        metavar="N",
        help="with --dry-run: check a run on N nodes with --nproc ranks each",
    )
    parser.add_argument(
        "--machine",
        metavar="NAME",
        help="with --dry-run: check that the run fits on the machine NAME; NAME is a name in "
        "configs/machine, or the path of a TOML file (default: train.machine)",
    )
    _add_skips(parser)


def _add_skips(parser: argparse.ArgumentParser) -> None:
    for name, absent in (
        ("data", "the data"),
        ("run-dir", "the run directory and its checkpoints"),
    ):
        text = f"with --dry-run: do not check {absent}, which this machine cannot read"
        parser.add_argument(f"--skip-{name}-check", action="store_true", help=text)


class _PrintSettings(argparse.Action):
    def __init__(self, **options: Any) -> None:
        super().__init__(nargs=0, **options)

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        from optimus.config.reference import settings_text

        print(settings_text(markdown=False), end="")
        parser.exit()


def _train(args: argparse.Namespace, arguments: list[str]) -> int:
    from optimus.launch.environment import is_started_by_launcher

    if is_started_by_launcher():  # before the slow imports
        status = OutcomeKind.FAILED.exit_status
        # srun returns the highest exit status of all ranks. If another rank fails before this
        # rank's first step, srun sends SIGTERM to this rank. The default status for SIGTERM, 143,
        # would hide the status of the failed rank.
        signal.signal(signal.SIGTERM, lambda number, frame: os._exit(status))
    from optimus.config import load_config
    from optimus.launch.environment import STARTED, prints_start, read_launch_env
    from optimus.launch.imports import without_collections
    from optimus.train.startup import prepare_meeting, ranks_to_start, refuse_together

    if args.dry_run:
        return _dry_run(args)
    launch = read_launch_env()
    try:
        _refuse_without_dry_run(args, "nodes", "machine", "skip_data_check", "skip_run_dir_check")
        nproc = ranks_to_start(args.nproc, launch.world_size)
        config = load_config(args.config, args.overrides)
    except OptimusError as error:
        refuse_together(launch, error)
    if nproc:
        from optimus.launch.spawn import spawn_local
        from optimus.train.fit import FIT_CHECKED, capacity_before_ranks, check_before_ranks
        from optimus.train.resolve import read_inputs

        inputs = read_inputs(config, nproc)
        microbatches = inputs.batch.microbatches_per_rank
        capacity = capacity_before_ranks(config.train, nproc)
        is_checked = check_before_ranks(config, inputs.mesh, microbatches, capacity)
        print(f"optimus: starting {counted(nproc, 'rank')}", file=sys.stderr)
        return spawn_local(arguments, nproc, {FIT_CHECKED: "1"} if is_checked else {})
    if launch.world_size == 1:
        from optimus.train.resolve import read_inputs

        read_inputs(config, 1)  # finds mistakes before torch is imported, which takes seconds
    if prints_start():
        print("optimus: importing torch", file=sys.stderr)
    prepare_meeting(launch)
    with without_collections():
        from optimus.train.loop import train

    train(config, launch, STARTED)
    return 0


def _refuse_without_dry_run(args: argparse.Namespace, *options: str) -> None:
    for option in options:
        if (value := getattr(args, option)) is not None and value is not False:
            name = option.replace("_", "-")
            raise ConfigError(
                f"--{name} has an effect only with --dry-run; add --dry-run or remove --{name}"
            )


def _dry_run(args: argparse.Namespace) -> int:
    from optimus.config import load_config
    from optimus.config.machine import load_machine
    from optimus.train.startup import dry_run

    nodes, ranks = 1 if args.nodes is None else args.nodes, 1 if args.nproc is None else args.nproc
    refuse_if(
        nodes < 1 or ranks < 1, f"--nodes {nodes} and --nproc {ranks}: both must be at least 1"
    )
    config = load_config(args.config, args.overrides)
    checks = not args.skip_data_check, not args.skip_run_dir_check
    machine = load_machine(args.machine) if args.machine else None
    dry_run(config, nodes, ranks, *checks, machine, is_node=args.nodes is None)
    return 0


def _add_launch(commands: argparse._SubParsersAction) -> None:
    text = "Train in an allocation of nodes, and replace nodes that fail."
    parser = add_command(commands, "launch", _launch, text)
    add_config(parser)
    parser.add_argument(
        "--nodes", type=int, default=1, metavar="N", help="number of nodes with ranks (default: 1)"
    )
    parser.add_argument(
        "--buffer-nodes",
        type=int,
        default=0,
        metavar="K",
        help="number of further nodes, which replace nodes that fail (default: 0)",
    )
    parser.add_argument(
        "--ranks-per-node",
        type=int,
        default=1,
        metavar="R",
        help="number of ranks on each node (default: 1)",
    )
    parser.add_argument(
        "--launcher",
        choices=("local", "srun", "mpiexec", "ssh"),
        help="command that starts an agent on each node, to supervise the ranks of the node; "
        "default: srun in a Slurm job, mpiexec in a PBS job",
    )
    parser.add_argument("--hosts", metavar="FILE", help="file with a host name in each line")
    parser.add_argument(
        "--mpi-ranks",
        action="store_true",
        help="start all ranks with one mpiexec, as oneCCL over MPI needs",
    )
    parser.add_argument(
        "--stage",
        metavar="DIR",
        help="with --mpi-ranks: copy the Python environment of the ranks to DIR on each node, once "
        "per job",
    )
    parser.add_argument(
        "--machine",
        metavar="NAME",
        help="file with the environment, binding and addresses of a machine: a name in "
        "configs/machine, or the path of a TOML file",
    )
    parser.add_argument(
        "--pardon",
        action="append",
        default=[],
        metavar="NODE",
        help="use node NODE again, although it was excluded after failures; give the option once "
        "for each such node",
    )
    parser.add_argument(
        "--next-job",
        metavar="COMMAND",
        help="bash command that submits a job to continue the run; the command must print the name "
        "of this job",
    )
    parser.add_argument(
        "--unless-ended",
        action="store_true",
        help="end at once if an earlier job of a chain has completed or stopped the run",
    )
    parser.add_argument(
        "--dry-run",
        action="store_true",
        help="check the run as `optimus train --dry-run` does, print nodes, ranks and commands, "
        "and start nothing",
    )
    _add_skips(parser)


def _launch(args: argparse.Namespace, arguments: list[str]) -> int:
    from pathlib import Path

    from optimus.config import load_config
    from optimus.config.machine import load_machine
    from optimus.train.launch import LaunchOptions, describe, ended_status, plan_job, supervise

    config = load_config(args.config, args.overrides)
    if not args.dry_run:
        _refuse_without_dry_run(args, "skip_data_check", "skip_run_dir_check")
        if args.unless_ended and (status := ended_status(Path(config.train.run_dir))) is not None:
            return status
    options = LaunchOptions(
        nodes=args.nodes,
        buffer_nodes=args.buffer_nodes,
        ranks_per_node=args.ranks_per_node,
        launcher=args.launcher,
        hosts=args.hosts,
        pardoned=tuple(args.pardon),
        mpi_ranks=args.mpi_ranks,
        stage=args.stage,
        machine=load_machine(args.machine) if args.machine else None,
        next_job=args.next_job,
        is_dry_run=args.dry_run,
    )
    job = plan_job(config, options)
    if args.dry_run:
        from optimus.train.startup import dry_run

        checks = not args.skip_data_check, not args.skip_run_dir_check
        is_node = job.launcher.name == "local"
        dry_run(config, args.nodes, args.ranks_per_node, *checks, options.machine, is_node)
        print(describe(job))
        return 0
    return supervise(job)


def _add_machine(commands: argparse._SubParsersAction) -> None:
    text = (
        "Check that a queue of a machine accepts a job, and print the machine's settings for a job "
        "script."
    )
    parser = add_command(commands, "machine", _machine, text)
    parser.add_argument("machine", help="a name in configs/machine, or the path of a TOML file")
    parser.add_argument("--queue", default="", metavar="Q", help="queue of the job")
    parser.add_argument(
        "--walltime",
        default="1:00:00",
        metavar="T",
        help="time of the job, H:MM:SS (default: 1:00:00)",
    )
    for name, default, text in (
        ("nodes", 1, "number of nodes with ranks (default: 1)"),
        ("buffer-nodes", 0, "number of further nodes, which replace nodes that fail (default: 0)"),
        ("ranks-per-node", 0, "number of ranks on each node (default: as in the machine file)"),
        ("chain", 0, "number of further jobs that continue the run (default: 0)"),
    ):
        parser.add_argument(f"--{name}", type=int, default=default, metavar="N", help=text)


def _machine(args: argparse.Namespace, arguments: list[str]) -> int:
    from optimus.config.machine import load_machine, shell_settings

    machine, requested = load_machine(args.machine), args.nodes + args.buffer_nodes
    machine.check_job(args.queue, requested, args.walltime, 2 if args.chain else 1)
    print(shell_settings(machine, args.nodes, args.ranks_per_node))
    return 0


def _add_status(commands: argparse._SubParsersAction) -> None:
    text = "Show the nodes, the attempts and the use of time of a supervised run."
    parser = add_command(commands, "status", _status, text)
    parser.add_argument("run_dir", help="run directory of optimus launch")
    parser.add_argument("--watch", action="store_true", help="repeat every 2 s until the run ends")
    parser.add_argument("--json", action="store_true", help="one JSON object on standard output")


def _status(args: argparse.Namespace, arguments: list[str]) -> int:
    import time
    from pathlib import Path

    from optimus.resilience.supervision.status import format_status, read_status

    while True:
        status = read_status(Path(args.run_dir))
        print(json.dumps(status) if args.json else format_status(status), flush=True)
        if not args.watch or status["state"] not in ("running", "idle"):
            return 0
        time.sleep(2.0)
