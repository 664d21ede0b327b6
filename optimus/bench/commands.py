"""`optimus bench`: its parts and their options. Needs no torch until one runs."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from typing import Any

from optimus.errors import ConfigError, OptimusError


def _add(
    parts: argparse._SubParsersAction, name: str, run: Any, text: str
) -> argparse.ArgumentParser:
    parser = parts.add_parser(name, help=text, description=text)
    parser.set_defaults(run=run)
    return parser


def add_to(commands: argparse._SubParsersAction) -> None:
    """The subcommands, for the parser of `optimus`."""
    text = "Measure a part of Optimus against other forms of it."
    parser = commands.add_parser("bench", help=text, description=text)
    parts = parser.add_subparsers(metavar="PART", required=True)
    step = _add(parts, "step", _bench_step, "An update against a plain torch loop.")
    step.add_argument("config", help="a TOML file; configs/run holds examples")
    step.add_argument("overrides", nargs="*", metavar="section.key=value", help="settings")
    step.add_argument("--steps", type=int, default=20, help="timed pairs of updates")
    step.add_argument("--json", action="store_true", help="one JSON object on standard output")
    step.add_argument(
        "--nproc",
        type=int,
        metavar="N",
        help="start N local ranks and tell time, bytes by axis and bubble instead",
    )
    step.add_argument(
        "--profile",
        action="store_true",
        help="tell instead where the time goes, by phase and part (one process, on a CPU)",
    )
    moe = _add(parts, "moe", _bench_moe, "The MoE block against other MoE blocks.")
    moe.add_argument(
        "--case", action="append", default=[], metavar="SHAPE-DTYPE", help="such as small-bf16"
    )
    moe.add_argument("--peers", default="", metavar="A,B", help="only these (all that can run)")
    moe.add_argument("--rounds", type=int, default=5, help="timed passes of each block")
    moe.add_argument("--threads", type=int, action="append", help="on a CPU (1 and then 2)")
    moe.add_argument("--tokens", type=int, default=0, help="in a batch (0: by case and device)")
    moe.add_argument("--device", default="auto", help="cpu, cuda, xpu (the best there is)")
    moe.add_argument("--json", action="store_true", help="one JSON object on standard output")
    optimizer = _add(parts, "optimizer", _bench_optimizer, "The AdamW step against others.")
    optimizer.add_argument("--size", type=int, action="append", help="parameters (2^16, 2^26)")
    optimizer.add_argument("--peers", default="", metavar="A,B", help="only these (all there are)")
    optimizer.add_argument("--rounds", type=int, default=7, help="timed steps of each")
    optimizer.add_argument("--threads", type=int, action="append", help="on a CPU (1 and then 2)")
    optimizer.add_argument("--device", default="cpu", help="cpu or cuda")
    optimizer.add_argument(
        "--ranks",
        type=int,
        action="append",
        help="local ranks for divided states, FSDP2 and the peak of memory (4 and then 8); 0: none",
    )
    optimizer.add_argument("--hidden", type=int, default=256, help="of the model that they train")
    optimizer.add_argument("--result", default="", help=argparse.SUPPRESS)
    optimizer.add_argument("--json", action="store_true", help="one JSON object on standard output")
    keep = _add(parts, "checkpoint", _bench_checkpoint, "Checkpoints against the disk and others.")
    keep.add_argument("--dir", default=".", help="on whose file system (here)")
    keep.add_argument("--ranks", type=int, action="append", help="local ranks (1 and then 2)")
    keep.add_argument("--hidden", type=int, default=512, help="of the model (512: 1.3 GB)")
    keep.add_argument("--rounds", type=int, default=5, help="timed passes of each")
    keep.add_argument("--result", default="", help=argparse.SUPPRESS)
    keep.add_argument("--json", action="store_true", help="one JSON object on standard output")


def _bench_step(args: argparse.Namespace, arguments: list[str]) -> int:
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
            raise ConfigError(f"--profile is of one process, not of {ranks}")
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


def _bench_optimizer(args: argparse.Namespace, arguments: list[str]) -> int:
    from optimus.bench import ranks
    from optimus.bench.optimizer import SIZES, bench_optimizer, format_result

    if args.result:  # started by on_ranks
        ranks.be_a_rank(ranks.measure_optimizer, args.hidden, args.rounds, args.result)
        return 0
    counts = [count for count in args.ranks or (4, 8) if count]
    ranks.check_ranks(counts, args.hidden)
    peers = [name for name in args.peers.split(",") if name]
    threads = args.threads or (1, 2)
    result = bench_optimizer(args.size or SIZES, threads, args.rounds, peers, args.device)
    result["ranks"] = ranks.on_ranks("optimizer", counts, args.hidden, args.rounds)
    text = format_result(result) + (ranks.format_ranks(result["ranks"]) if counts else "")
    print(json.dumps(result) if args.json else text)
    return 0


def _bench_checkpoint(args: argparse.Namespace, arguments: list[str]) -> int:
    from optimus.bench import ranks
    from optimus.bench.checkpoint import bench_checkpoint, format_result, measure_checkpoint

    if args.result:  # started by on_ranks
        ranks.be_a_rank(measure_checkpoint, args.hidden, args.rounds, args.result)
        return 0
    result = bench_checkpoint(args.dir, args.ranks or (1, 2), args.hidden, args.rounds)
    print(json.dumps(result) if args.json else format_result(result))
    return 0


def _bench_moe(args: argparse.Namespace, arguments: list[str]) -> int:
    from optimus.bench.moe import bench_moe, format_result

    result = bench_moe(
        args.case,
        [name for name in args.peers.split(",") if name],
        args.threads or (1, 2),
        args.rounds,
        args.tokens,
        args.device,
    )
    print(json.dumps(result) if args.json else format_result(result))
    return 0
