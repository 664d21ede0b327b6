"""The command `optimus bench`. This module does not import torch until a measurement starts."""

from __future__ import annotations

import argparse
import itertools
import json
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

from optimus.errors import ConfigError, OptimusError, refuse_if

_MOVED = {
    "checkpoint": "python scripts/bench/checkpoint.py",
    "moe": "python scripts/bench/moe.py",
    "optimizer": "python scripts/bench/optimizer.py or, for --ranks, scripts/bench/sharding.py",
}
"""Maps each removed benchmark NAME of `optimus bench NAME` to the script that replaces it."""


_OPTIONS = {
    "step": ("steps", "nproc", "profile", "trace"),
    "supervision": (
        *("only", "rounds", "nodes", "ranks_per_node", "updates"),
        *("alarm_s", "load", "seed", "dir"),
    ),
    "links": ("out", "disk"),
    "disk": ("disk", "rounds"),
    "machine": ("out", "nproc", "dir"),
    "offload": ("steps", "mixes", "seed", "disk"),
}
"""Options that each benchmark accepts, as names of attributes of the parsed arguments."""


def add_to(commands: argparse._SubParsersAction) -> None:
    """Add the command `bench` to `commands`, the subcommands of `optimus`."""
    text = (
        "Measure the time of a training update, the restarts of a supervised run, offloading, or "
        "the rates of this machine."
    )
    parser = commands.add_parser("bench", help=text, description=text)
    parser.set_defaults(run=_bench)
    parser.add_argument(
        "name",
        metavar="NAME",
        type=_benchmark,
        help="step: time of an update, compared with a plain torch loop; supervision: times of "
        "detection and restart after failures, on nodes that this machine emulates; links: rates "
        "of copies and updates for offloading; disk: rate of updates of optimizer states on disk, "
        "compared with raw reads and writes; offload: times of steps with random workloads on an "
        "emulated device, compared with predicted times; machine: rates of matrix products, "
        "memory, network and disk, for the planner",
    )
    parser.add_argument(
        "config",
        nargs="?",
        help="a TOML file; configs/run has examples. step requires the file. supervision uses the "
        "file only for the NaN check; links and machine read only the device and the number of "
        "threads from the file; these three benchmarks also run without a file",
    )
    parser.add_argument("overrides", nargs="*", metavar="section.key=value", help="settings")
    parser.add_argument("--json", action="store_true", help="one JSON object on standard output")
    _add_step_options(parser.add_argument_group("step"))
    _add_supervision_options(parser.add_argument_group("supervision"))
    offloading = parser.add_argument_group("links, disk and offload")
    text = "links: write the rates to this file, for the setting offload.links; machine: write a "
    text += "machine file"
    offloading.add_argument("--out", metavar="FILE", help=text)
    text = "links: also measure the disk that contains this directory; disk: measure the disk that "
    text += "contains this directory (required) in --rounds N rounds (default: 10); offload: put "
    text += "all optimizer states into a file in this directory"
    offloading.add_argument("--disk", metavar="DIR", help=text)
    text = "offload: number of random workloads (default: 20), each with --steps N updates "
    text += "(default: 6); --seed N changes the workloads"
    offloading.add_argument("--mixes", type=int, metavar="N", help=text)


def _add_step_options(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--steps", type=int, metavar="N", help="number of timed updates (default: 20)"
    )
    group.add_argument(
        "--nproc",
        type=int,
        metavar="N",
        help="step: start N local ranks, and measure the time of an update, the pipeline bubble, "
        "and the payload bytes of collectives by mesh axis; no comparison with plain torch; "
        "machine: number of local ranks (default: one for each accelerator, or 2 on a CPU)",
    )
    group.add_argument(
        "--trace",
        metavar="FILE",
        help="with --nproc: write the pipeline actions of all ranks in the last update to this "
        "file, for ui.perfetto.dev; optimus plan --trace writes the planned actions",
    )
    group.add_argument(
        "--profile",
        action="store_const",
        const=True,
        help="measure the time of an update by phase and by module, without a comparison with "
        "plain torch; only with one process and train.device=cpu",
    )


def _add_supervision_options(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--only",
        action="append",
        metavar="FIGURE",
        help="measure only this figure: faults (time to detect a fault, nodes that were excluded, "
        "time to the first update), cold (time to the first update if the node has lost its warm "
        "process, which forks ranks), files (numbers of files that a restart opens and creates), "
        "nan-check (time of the NaN check as a share of an update's time) or false-alarms (number "
        "of reported failures in a run without faults); repeat the option for several figures",
    )
    for name, text in (
        ("rounds", "number of faults of each kind (default: 3)"),
        ("nodes", "number of nodes with ranks (default: 4)"),
        ("ranks-per-node", "number of ranks on each node (default: 2)"),
        ("updates", "number of updates in which the NaN check is timed (default: 40)"),
        ("alarm-s", "seconds for which false alarms are counted (default: 60)"),
        ("load", "number of busy processes while false alarms are counted (default: 8)"),
        ("seed", "seed of the times, nodes and ranks of faults (default: 0)"),
    ):
        group.add_argument(f"--{name}", type=int, metavar="N", help=text)
    text = (
        "folder for temporary run directories (default: the folder of temporary files); machine: "
        "folder on the disk to measure (default: the current folder)"
    )
    group.add_argument("--dir", metavar="DIR", help=text)


def _benchmark(name: str) -> str:
    if name in _MOVED:
        raise ConfigError(f"bench {name} is a script now; run {_MOVED[name]}")
    if name not in _OPTIONS:
        known = " or ".join(f"optimus bench {name}" for name in _OPTIONS)
        raise ConfigError(f"bench {name} does not exist; use {known}")
    return name


def _bench(args: argparse.Namespace, arguments: list[str]) -> int:
    for name in dict.fromkeys(itertools.chain.from_iterable(_OPTIONS.values())):
        if name not in _OPTIONS[args.name] and getattr(args, name) is not None:
            option = f"--{name.replace('_', '-')}"
            raise ConfigError(f"{option} has no effect on bench {args.name}; remove {option}")
    if args.name == "step":
        return _bench_step(args, arguments)
    if args.name == "machine":
        return _bench_machine(args, arguments)
    return {
        "supervision": _bench_supervision,
        "links": _bench_links,
        "disk": _bench_disk,
        "offload": _bench_offload,
    }[args.name](args)


def _bench_links(args: argparse.Namespace) -> int:
    from optimus import platform
    from optimus.bench.links import bench_links, format_links, write_links
    from optimus.config import TrainConfig, load_config
    from optimus.io.files import check_output

    if args.out is not None:
        check_output(args.out, "--out")
    train = TrainConfig()
    if args.config is not None:
        train = load_config(args.config, args.overrides).train
    device = platform.pick_device(0, train.device)
    disk = None if args.disk is None else Path(args.disk)
    result = bench_links(device, platform.set_threads(train.threads, False, 1), disk)
    if args.out is not None:
        write_links(result, Path(args.out))
    print(json.dumps(result) if args.json else format_links(result))
    return 0


def _bench_machine(args: argparse.Namespace, arguments: list[str]) -> int:
    from optimus import platform
    from optimus.bench.machine import (
        bench_machine,
        format_machine,
        ranks_to_measure,
        write_machine,
    )
    from optimus.config import TrainConfig, load_config
    from optimus.io.files import check_output
    from optimus.launch.environment import is_launched, read_launch_env
    from optimus.train.startup import ranks_to_start, refuse_together

    launch = read_launch_env()
    try:
        if args.out is not None and launch.is_first:  # this rank writes the file
            check_output(args.out, "--out")
        train = TrainConfig()
        if args.config is not None:
            train = load_config(args.config, args.overrides).train
        nproc = ranks_to_start(args.nproc, launch.world_size)
        if not nproc and not is_launched():
            device = platform.pick_device(launch.local_rank, train.device)
            nproc = ranks_to_measure(device.type)
    except OptimusError as error:
        refuse_together(launch, error)
    if nproc > 1:
        from optimus.launch.spawn import spawn_local

        return spawn_local(arguments, nproc)
    folder = Path.cwd() if args.dir is None else Path(args.dir)
    result = bench_machine(launch, train.device, train.threads, folder)
    if result is not None:
        if args.out is not None:
            write_machine(result, Path(args.out))
        print(json.dumps(result) if args.json else format_machine(result))
    return 0


def _bench_disk(args: argparse.Namespace) -> int:
    from optimus import platform
    from optimus.bench.disk import bench_disk, format_disk

    refuse_if(args.disk is None, "bench disk needs --disk DIR, a directory on the disk")
    refuse_if(args.config is not None, "bench disk has no settings; remove the configuration")
    rounds = 10 if args.rounds is None else args.rounds
    refuse_if(rounds < 2, f"--rounds {rounds} must be at least 2")
    result = bench_disk(Path(args.disk), rounds, platform.set_threads(0, False, 1))
    print(json.dumps(result) if args.json else format_disk(result))
    return 0


def _bench_offload(args: argparse.Namespace) -> int:
    from optimus.bench.offload import bench_offload, format_offload

    refuse_if(
        args.config is not None,
        "bench offload chooses its workloads at random; remove the configuration",
    )
    mixes = 20 if args.mixes is None else args.mixes
    steps = 6 if args.steps is None else args.steps
    refuse_if(mixes < 1, f"--mixes {mixes} must be at least 1")
    refuse_if(steps < 1, f"--steps {steps} must be at least 1")
    result = bench_offload(mixes, steps, args.seed or 0, args.disk or "")
    print(json.dumps(result) if args.json else format_offload(result))
    return 0


def _bench_supervision(args: argparse.Namespace) -> int:
    from optimus.bench import supervision
    from optimus.config import load_config
    from optimus.launch.environment import is_launched
    from optimus.launch.signals import raising_keyboard_interrupt

    if is_launched():
        raise ConfigError(
            "bench supervision starts its ranks itself, but a launcher started this process; "
            "run the command without a launcher"
        )
    names = [name for name in supervision.Options._fields if name != "figures"]
    values = {name: getattr(args, name) for name in names if getattr(args, name) is not None}
    if args.only is not None:
        values["figures"] = tuple(dict.fromkeys(args.only))
    options = supervision.Options(**values)
    folder = None if args.dir is None else Path(args.dir)
    supervision.check(options, folder, has_config=args.config is not None)
    config = None if args.config is None else load_config(args.config, args.overrides)
    before = signal.getsignal(signal.SIGTERM)
    # SIGTERM raises an exception, so that the benchmark removes its processes and files before it
    # ends.
    with raising_keyboard_interrupt():
        signal.signal(signal.SIGTERM, signal.default_int_handler)
        try:
            result = supervision.bench_supervision(options, config, folder)
        finally:
            signal.signal(signal.SIGTERM, before)
    print(json.dumps(result) if args.json else supervision.format_supervision(result))
    return 0


def _bench_step(args: argparse.Namespace, arguments: list[str]) -> int:
    from optimus.config import load_config
    from optimus.io.files import check_output
    from optimus.launch.environment import read_launch_env
    from optimus.train.startup import ranks_to_start, refuse_together

    launch, steps = read_launch_env(), 20 if args.steps is None else args.steps
    try:
        if args.config is None:
            raise ConfigError("bench step needs a configuration; use optimus bench step CONFIG")
        config = load_config(args.config, args.overrides)
        if steps < 1:
            raise ConfigError(f"--steps {steps} must be at least 1")
        nproc = ranks_to_start(args.nproc, launch.world_size)
        ranks = max(nproc, launch.world_size)
        if args.profile and ranks > 1:
            raise ConfigError(f"--profile measures one process, not {ranks}; remove --profile")
        if args.trace and (args.profile or (ranks == 1 and not args.nproc)):
            raise ConfigError(
                f"--trace {args.trace}: only a run with --nproc N has a trace; add --nproc N"
            )
        if args.trace and launch.is_first:  # this rank writes the file
            check_output(args.trace, "--trace")
    except OptimusError as error:
        refuse_together(launch, error)
    if nproc and not args.profile:
        from optimus.launch.spawn import spawn_local
        from optimus.train.resolve import divide

        divide(config, nproc)
        return spawn_local(arguments, nproc)
    result: dict[str, Any] | None
    text: Callable[[dict[str, Any]], str]
    if args.profile:
        from optimus.bench.profile import format_profile, profile_step

        result, text = profile_step(config, steps), format_profile
    elif launch.world_size == 1 and not args.nproc:
        from optimus.bench.step import bench_step, format_result

        result, text = bench_step(config, steps), format_result
    else:
        from optimus.bench.layout import bench_layout, format_layout

        trace = None if args.trace is None else Path(args.trace)
        result, text = bench_layout(config, steps, launch, trace), format_layout
    if result is not None:
        print(json.dumps(result) if args.json else text(result))
    return 0
