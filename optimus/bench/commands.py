"""The command `optimus bench`. This module imports no torch until a measurement starts."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from typing import Any

from optimus.errors import ConfigError, OptimusError

_MOVED = {
    "checkpoint": "python scripts/bench/checkpoint.py",
    "moe": "python scripts/bench/moe.py",
    "optimizer": "python scripts/bench/optimizer.py or, for --ranks, scripts/bench/sharding.py",
}
"""Names of benchmarks in earlier versions, and the commands in a checkout that replace them."""


def add_to(commands: argparse._SubParsersAction) -> None:
    """Add the command to the parser of `optimus`."""
    text = "Measure an update of a training run."
    parser = commands.add_parser("bench", help=text, description=text)
    parser.set_defaults(run=_bench)
    parser.add_argument(
        "name", metavar="NAME", type=_benchmark, help="step: an update against a plain torch loop"
    )
    parser.add_argument("config", help="a TOML file; configs/run has examples")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value", help="settings")
    parser.add_argument("--steps", type=int, default=20, help="timed updates (20)")
    parser.add_argument("--json", action="store_true", help="one JSON object on standard output")
    parser.add_argument(
        "--nproc",
        type=int,
        metavar="N",
        help="start N local ranks and measure time, payload bytes by mesh axis and pipeline bubble "
        "instead of comparing with plain torch",
    )
    parser.add_argument(
        "--profile",
        action="store_true",
        help="measure the time by phase and by module instead of comparing with plain torch (one "
        "process, on a CPU)",
    )


def _benchmark(name: str) -> str:
    if name in _MOVED:
        raise ConfigError(f"bench {name} is a script now; run {_MOVED[name]}")
    if name != "step":
        raise ConfigError(f"bench {name} does not exist; use optimus bench step")
    return name


def _bench(args: argparse.Namespace, arguments: list[str]) -> int:
    from optimus.config import load_config
    from optimus.launch.environment import read_launch_env
    from optimus.train.startup import ranks_to_start, refuse_together

    launch = read_launch_env()
    try:
        config = load_config(args.config, args.overrides)
        if args.steps < 1:
            raise ConfigError(f"--steps {args.steps} must be at least 1")
        nproc = ranks_to_start(args.nproc, launch.world_size)
        ranks = max(nproc, launch.world_size)
        if args.profile and ranks > 1:
            raise ConfigError(f"--profile measures one process, not {ranks}; remove --profile")
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

        result, text = profile_step(config, args.steps), format_profile
    elif launch.world_size == 1 and not args.nproc:
        from optimus.bench.step import bench_step, format_result

        result, text = bench_step(config, args.steps), format_result
    else:
        from optimus.bench.layout import bench_layout, format_layout

        result, text = bench_layout(config, args.steps, launch), format_layout
    if result is not None:
        print(json.dumps(result) if args.json else text(result))
    return 0
