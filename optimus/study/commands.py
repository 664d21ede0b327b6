"""The command `optimus study`. This module imports torch only in functions that need torch: to plan
a point or a run, and for `optimus study moe`."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from optimus.errors import ConfigError, counted, refuse_if
from optimus.train.commands import add_command, add_config

if TYPE_CHECKING:
    from optimus.config import Config
    from optimus.config.machine import Machine
    from optimus.study.directory import State, StudyDirectory
    from optimus.study.scaling import Job, Point, Settings


def add_to(commands: argparse._SubParsersAction) -> None:
    """Add the command `study` to `commands`, the subcommands of `optimus`."""
    text = "Plan, run and draw scaling studies, and compare the MoE optimizations with a baseline."
    parser = commands.add_parser("study", help=text, description=text)
    studies = parser.add_subparsers(metavar="STUDY", required=True)
    _add_scaling(studies)
    show = add_command(studies, "show", _show, "Collect and draw the points of a scaling study.")
    show.add_argument("dir", metavar="DIR", help="the --out directory of optimus study scaling")
    show.add_argument(
        "--out", metavar="FOLDER", help="folder for the pictures and tables (default: DIR)"
    )
    show.add_argument("--json", action="store_true", help="one JSON object on standard output")
    _add_moe(studies)
    text = "Print the planned memory, time and node-hours of runs as a Markdown page."
    runs = add_command(studies, "runs", _runs, text)
    _add_run_options(runs, "the paper's runs")
    runs.add_argument("--out", metavar="FILE", help="also write the page to this file")


def _add_run_options(parser: argparse.ArgumentParser, default: str) -> None:
    """Add the arguments for the configurations, the machine and the nodes. `default` is a phrase
    for the runs that the command uses if no configuration is given."""
    parser.add_argument(
        "configs", nargs="*", metavar="CONFIG", help=f"TOML files (default: {default})"
    )
    parser.add_argument(
        "--machine",
        default="aurora",
        metavar="NAME",
        help="machine of the predictions: a name in configs/machine, or the path of a TOML file "
        "(default: aurora)",
    )
    parser.add_argument(
        "--nodes",
        type=int,
        default=256,
        metavar="N",
        help="number of nodes of runs with parallel.dp = 0 (default: 256, as in the paper)",
    )


def _add_moe(studies: argparse._SubParsersAction) -> None:
    text = (
        "Compare FastSparseMoE with a loop over the experts, and EPSO with optimizer states that "
        "are sharded only along dp, as in Table 3 of the Optimus paper."
    )
    parser = add_command(studies, "moe", _moe, text)
    _add_run_options(parser, "the paper's MoE runs")
    for name, default, text in (
        ("tokens", 0, "tokens of a rank in a round (default: a microbatch; on a CPU, 256)"),
        ("rounds", 5, "number of timed rounds (default: 5)"),
    ):
        parser.add_argument(f"--{name}", type=int, default=default, metavar="N", help=text)
    parser.add_argument("--json", action="store_true", help="one JSON object on standard output")


def _add_scaling(studies: argparse._SubParsersAction) -> None:
    text = (
        "Plan a short run of CONFIG, a point of the study, on each number of nodes. Write the "
        "configurations and jobs of the points, and submit or run the points that have no results."
    )
    parser = add_command(studies, "scaling", _scaling, text)
    add_config(parser)
    parser.add_argument(
        "--nodes", required=True, metavar="N,N,...", help="numbers of nodes, such as 32,64,128"
    )
    parser.add_argument(
        "--machine",
        required=True,
        metavar="NAME",
        help="a name in configs/machine, or the path of a TOML file",
    )
    parser.add_argument("--out", required=True, metavar="DIR", help="directory of the study")
    parser.add_argument(
        "--scaling",
        choices=("weak", "strong"),
        default="weak",
        help="weak: the global batch grows with the number of nodes; strong: all points have the "
        "same global batch (default: weak)",
    )
    parser.add_argument(
        "--routing",
        metavar="R,R",
        help="routing to experts: top-k, uniform, or top-k,uniform for two points on each number "
        "of nodes (default: model.router)",
    )
    for name, default, text in (
        ("steps", 30, "number of updates of a point (default: 30)"),
        ("warmup", 5, "number of first updates of a point that are not measured (default: 5)"),
    ):
        parser.add_argument(f"--{name}", type=int, default=default, metavar="N", help=text)
    mode = parser.add_mutually_exclusive_group()
    mode.add_argument(
        "--dry-run",
        action="store_true",
        help="write the study, print the commands that submit its jobs, and run no job (default)",
    )
    mode.add_argument("--submit", choices=("pbs", "slurm"), help="submit the missing points")
    mode.add_argument(
        "--local", action="store_true", help="run the missing points on ranks of this machine"
    )
    parser.add_argument(
        "--max-node-hours",
        type=float,
        metavar="H",
        help="start no job if the time limits of all jobs allow more than H node-hours in total",
    )
    for name, text in (
        ("queue", "queue of all jobs (default: the machine's first queue that takes the point)"),
        ("account", "account of the jobs"),
    ):
        parser.add_argument(f"--{name}", default="", metavar=name.upper(), help=text)
    parser.add_argument(
        "--walltime",
        metavar="WALLTIME",
        help="time limit of each point, H:MM:SS (default: computed from the planned step time)",
    )
    parser.add_argument(
        "--share-jobs",
        action="store_true",
        help="run several points in a job, one after the other (default: only in queues that "
        "limit the number of jobs of a user)",
    )
    parser.add_argument(
        "--skip-data-check",
        action="store_true",
        help="with --submit: do not check data.path, since this machine cannot read the data",
    )
    parser.add_argument("--json", action="store_true", help="one JSON object on standard output")


def _scaling(args: argparse.Namespace, arguments: list[str]) -> int:
    from optimus.config import load_config
    from optimus.config.machine import load_machine
    from optimus.io.files import check_output_dir
    from optimus.study.directory import StudyDirectory, local_threads
    from optimus.study.scaling import (
        check_point_fit,
        local_limits,
        make_point,
        pack_jobs,
        parse_limit,
        parse_nodes,
        parse_routings,
    )

    _check_options(args)
    check_output_dir(args.out, "--out")
    config, machine = load_config(args.config, args.overrides), load_machine(args.machine)
    nodes, routings = parse_nodes(args.nodes), parse_routings(args.routing, config)
    limit_s = parse_limit(args.walltime)
    for number in nodes:
        machine.check_nodes(number)
    directory = StudyDirectory(Path(args.out))
    settings = _settings(args, config, machine, nodes, directory)
    directory.check_same(config, settings, machine)
    points = [
        make_point(config, settings, machine, number, routing, directory.points)
        for routing in routings
        for number in nodes
    ]

    def read_states() -> dict[str, State]:
        return {point.name: directory.state(point.name, args.steps) for point in points}

    states = read_states()
    missing = [p for p in points if states[p.name].name in ("missing", "failed")]
    for point in missing:
        check_point_fit(point, machine)
    jobs: list[Job] = []
    limits: dict[str, int | None] = {}
    if args.local:
        limits = local_limits(missing, limit_s, args.max_node_hours is not None)
    else:
        jobs = pack_jobs(missing, machine, args.queue, limit_s, args.share_jobs)
    node_hours = sum(job.node_hours for job in jobs)
    node_hours += sum(point.nodes * (limits.get(point.name) or 0) / 3600 for point in missing)
    if args.max_node_hours is not None and node_hours > args.max_node_hours:
        raise ConfigError(
            f"--max-node-hours {args.max_node_hours:g}: {counted(len(missing), 'point')} could use "
            f"{node_hours:,.4g} node-hours; use fewer --nodes or --steps, or a larger limit"
        )
    threads = local_threads(points) if args.local else 0
    if args.local or args.submit:
        _check_runs(missing, not args.skip_data_check)
    with directory.locked():
        refuse_if(
            read_states() != states,
            f"--out {args.out}: another command has changed the study; run the same command again",
        )
        directory.write(config, settings, machine)
        for point in missing:
            directory.write_point(point)
        submissions = _write_jobs(args, directory, jobs, machine, settings.machine)
        if args.json:
            _report_json(points, states, missing, jobs, submissions, limits, node_hours)
        else:
            _report(points, states)
            if not missing:
                print("nothing is left to run", flush=True)
            elif args.local:
                _report_limits(missing, limits)
            else:
                _report_jobs(jobs, submissions, node_hours)
        if args.submit:
            return _submit(args, directory, jobs, submissions, machine)
        if args.local:
            return _run_locally(directory, missing, limits, threads)
    return 0


def _check_options(args: argparse.Namespace) -> None:
    for name, least in (("steps", 1), ("warmup", 0)):
        value = getattr(args, name)
        refuse_if(value < least, f"--{name} {value} must be at least {least}")
    refuse_if(
        args.warmup >= args.steps,
        f"--warmup {args.warmup} leaves none of the {counted(args.steps, 'update')} of a point to "
        "measure; use more --steps or a shorter --warmup",
    )
    limit = args.max_node_hours
    refuse_if(limit is not None and not limit > 0, f"--max-node-hours {limit} must be above 0")
    for name in ("queue", "account", "share_jobs"):
        refuse_if(
            args.local and getattr(args, name),
            f"--{name.replace('_', '-')} has no effect with --local; remove it",
        )
    refuse_if(
        args.skip_data_check and not args.submit,
        "--skip-data-check has an effect only with --submit; remove it",
    )


def _settings(
    args: argparse.Namespace,
    config: Config,
    machine: Machine,
    nodes: Sequence[int],
    directory: StudyDirectory,
) -> Settings:
    """Return the settings of the study. With weak scaling and `parallel.dp = 0`, the number of
    tokens of a data rank is read from the stored study, so that points with fewer nodes can be
    added. In a new study, this number is the global batch divided by the number of data ranks on
    the smallest number of nodes."""
    from optimus.study.scaling import Settings, tokens_per_data_rank

    stored, tokens = directory.settings(), 0
    if args.scaling == "strong":
        refuse_if(
            not config.train.global_batch_tokens,
            "--scaling strong needs a global batch, which all points have; set "
            "train.global_batch_tokens",
        )
    elif config.train.global_batch_tokens:
        tokens = tokens_per_data_rank(config, machine, args.machine, nodes)
        if stored is not None and not config.parallel.dp:
            tokens = stored.tokens_per_data_rank
    is_path = os.sep in args.machine or args.machine.endswith(".toml")
    name = str(Path(args.machine).absolute()) if is_path else args.machine
    return Settings(name, args.scaling, args.steps, args.warmup, tokens)


def _check_runs(points: Sequence[Point], check_data: bool) -> None:
    """Check each point as `optimus train --dry-run` does. `check_data` is False to leave out the
    check of data.path."""
    from optimus.train.startup import check_run

    for point in points:
        try:
            check_run(point.config, point.mesh.world_size, check_data)
        except ConfigError as error:
            raise ConfigError(f"point {point.name}: {error}") from None


def _write_jobs(
    args: argparse.Namespace,
    directory: StudyDirectory,
    jobs: Sequence[Job],
    machine: Machine,
    machine_name: str,
) -> list[list[str]]:
    """Write the scripts of the jobs, and return the command that submits each job."""
    from optimus.study.directory import scheduler, submission_of

    system, commands = args.submit or scheduler(machine), []
    for job in jobs:
        command = submission_of(directory, job, system, machine, args.account)
        directory.write_job(job, machine_name, machine.ranks_per_node, command)
        commands.append(command)
    return commands


def _report_json(
    points: Sequence[Point],
    states: dict[str, State],
    missing: Sequence[Point],
    jobs: Sequence[Job],
    submissions: Sequence[Sequence[str]],
    limits: dict[str, int | None],
    node_hours: float,
) -> None:
    """Print the points, the jobs and their node-hours as a JSON object."""
    result = {
        "points": [
            {
                "name": p.name,
                "nodes": p.nodes,
                "routing": p.routing,
                "ranks": p.mesh.world_size,
                "tokens": p.tokens,
                "planned": p.planned,
                "state": states[p.name].name,
                "limit_s": limits.get(p.name),
            }
            for p in points
        ],
        "jobs": [
            {
                "name": job.name,
                "queue": job.queue,
                "nodes": job.nodes,
                "walltime_s": job.walltime_s,
                "points": [point.name for point in job.points],
                "submission": list(command),
            }
            for job, command in zip(jobs, submissions, strict=True)
        ],
        "node_hours": node_hours,
        "expected_node_hours": _expected_node_hours(missing),
    }
    print(json.dumps(result), flush=True)


def _expected_node_hours(points: Sequence[Point]) -> float:
    return sum(point.nodes * (point.expected_s or 0) / 3600 for point in points)


def _report(points: Sequence[Point], states: dict[str, State]) -> None:
    """Print the ranks, the batch, the planned step time and the state of each point."""
    for point in points:
        step = "no planned step time"
        if point.planned:
            step = f"planned step {point.planned['step_s']:.4g} s"
        batch = f"{point.tokens:,} tokens an update"
        ranks = counted(point.mesh.world_size, "rank")
        state = states[point.name]
        print(f"{point.name}: {ranks}, {batch}, {step}; {state.name}")
        if state.reason:
            print(f"  {state.reason}")


def _report_jobs(
    jobs: Sequence[Job], submissions: Sequence[Sequence[str]], node_hours: float
) -> None:
    """Print each job and the command that submits it."""
    import shlex

    from optimus.study.scaling import walltime_text

    for job, command in zip(jobs, submissions, strict=True):
        names = ", ".join(point.name for point in job.points)
        queue = f" in queue {job.queue}" if job.queue else ""
        print(
            f"job of {counted(job.nodes, 'node')}{queue} for {walltime_text(job.walltime_s)} "
            f"({job.node_hours:,.4g} node-hours): {names}\n  {shlex.join(command)}"
        )
    expected = sum(_expected_node_hours(job.points) for job in jobs)
    print(f"at most {node_hours:,.4g} node-hours, predicted {expected:,.4g}", flush=True)


def _report_limits(points: Sequence[Point], limits: dict[str, int | None]) -> None:
    """Print the time limits of points that this machine runs."""
    from optimus.study.scaling import walltime_text

    for point in points:
        limit_s = limits[point.name]
        text = "no time limit" if limit_s is None else f"killed after {walltime_text(limit_s)}"
        print(f"run {point.name} on this machine: {text}")
    known = [limit_s for limit_s in limits.values() if limit_s is not None]
    minutes = f"at most {sum(known) / 60:,.3g} minutes"
    if len(known) < len(points):
        minutes = "no time limit; --walltime H:MM:SS limits the time of a point"
    print(f"{counted(len(points), 'point')}, one after the other: {minutes}", flush=True)


def _submit(
    args: argparse.Namespace,
    directory: StudyDirectory,
    jobs: Sequence[Job],
    submissions: Sequence[Sequence[str]],
    machine: Machine,
) -> int:
    """Submit the jobs. If a queue limits the number of jobs of a user, submit at most this number.
    Return the exit status 0."""
    limits = {queue.name: queue.max_jobs for queue in machine.queues if queue.max_jobs}
    left = 0
    for job, command in zip(jobs, submissions, strict=True):
        if limits.get(job.queue) == 0:
            left += 1
            continue
        if job.queue in limits:
            limits[job.queue] -= 1
        name = directory.submit(job, args.submit, command)
        if not args.json:
            print(f"submitted {job.name} as job {name}", flush=True)
    if left and not args.json:
        print(
            f"{counted(left, 'job')} not submitted, because the queue takes no more jobs from a "
            "user; run the same command again when the submitted jobs have ended"
        )
    return 0


def _run_locally(
    directory: StudyDirectory,
    points: Sequence[Point],
    limits: dict[str, int | None],
    threads: int,
) -> int:
    """Run points one after the other. Return 1 if a point failed."""
    from optimus.launch.signals import raising_keyboard_interrupt

    failed = 0
    with raising_keyboard_interrupt():
        for point in points:
            status = directory.run_local(point, limits[point.name], threads)
            failed += status != 0
            print(f"{point.name}: exit status {status}", file=sys.stderr, flush=True)
    return 1 if failed else 0


def _show(args: argparse.Namespace, arguments: list[str]) -> int:
    from optimus.io.files import check_output_dir
    from optimus.study.directory import StudyDirectory
    from optimus.study.results import collect, format_results, rows, write_results

    if args.out is not None:
        check_output_dir(args.out, "--out")
    directory = StudyDirectory(Path(args.dir))
    results = collect(directory)
    paths = write_results(results, Path(args.out) if args.out else directory.path)
    if args.json:
        print(json.dumps({"points": rows(results), "files": [str(path) for path in paths]}))
    else:
        print(format_results(results))
        print("\n".join(map(str, paths)))
    return 0


def _moe(args: argparse.Namespace, arguments: list[str]) -> int:
    from optimus.config import load_config
    from optimus.config.machine import load_machine
    from optimus.distributed.mesh import make_mesh
    from optimus.study.runs import FOLDER, MULA

    for name, least in (("nodes", 1), ("tokens", 0), ("rounds", 1)):
        value = getattr(args, name)
        refuse_if(value < least, f"--{name} {value} must be at least {least}")
    machine = load_machine(args.machine)
    paths = [Path(path) for path in args.configs] or [FOLDER / f"{name}.toml" for name in MULA[1:]]
    runs = {}
    for path in paths:
        config = load_config(path, [])
        ranks = None if config.parallel.dp else args.nodes * machine.ranks_per_node
        runs[path.stem] = config, make_mesh(config.parallel, ranks)
    import torch

    from optimus import platform
    from optimus.study.moe import Speedup, format_table, study_moe

    first, _ = next(iter(runs.values()))
    device = platform.pick_device(0, first.train.device)
    threads = platform.set_threads(first.train.threads, False, 1)
    results = {
        name: study_moe(config, mesh, machine, args.machine, args.tokens, args.rounds, device)
        for name, (config, mesh) in runs.items()
    }
    if args.json:
        print(
            json.dumps(
                {
                    name: {
                        key: value._asdict() if isinstance(value, Speedup) else value
                        for key, value in result.items()
                    }
                    for name, result in results.items()
                }
            )
        )
        return 0
    tokens = sorted({result["tokens"] for result in results.values()})
    conditions = (
        f"Speed-ups over the baseline: the median of {counted(args.rounds, 'round')}, with the "
        "smallest and the largest in parentheses. Measured on "
        f"{platform.device_name(device)} with torch {torch.__version__}, "
        f"{counted(threads, 'thread')} and {' or '.join(map(str, tokens))} tokens of a rank; "
        f"modelled for {args.machine}."
    )
    print(format_table(results, conditions))
    return 0


def _runs(args: argparse.Namespace, arguments: list[str]) -> int:
    from optimus.config.machine import load_machine
    from optimus.io.files import check_output, write_bytes
    from optimus.study.runs import FOLDER, MULA, format_page, plan_run

    if args.out is not None:
        check_output(args.out, "--out")
    machine = load_machine(args.machine)
    paths = [Path(path) for path in args.configs] or [FOLDER / f"{name}.toml" for name in MULA]
    runs = [plan_run(path, machine, args.machine, args.nodes) for path in paths]
    page = format_page(runs, args.machine, " ".join(["optimus", *arguments]))
    if args.out is not None:
        write_bytes(args.out, page.encode())
    print(page, end="")
    if misfits := [run.name for run in runs if not run.fits]:
        raise ConfigError(
            f"{', '.join(misfits)}: states and activations exceed the memory of a device of "
            f"{args.machine}; use a layout of optimus plan --search"
        )
    return 0
