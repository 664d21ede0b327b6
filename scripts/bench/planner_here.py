#!/usr/bin/env python3
"""Compare planned with measured step times and memory on this machine.

    python scripts/bench/planner_here.py [--machine FILE] [--out FILE]

The script measures a machine file with `optimus bench machine`, unless --machine names one. Then it
runs each layout of `CASES`, none of which has set a figure of the machine file: five rounds, in
each of which all layouts run one after the other. Ranks have one thread each. The result is a
Markdown page, docs/benchmarks/planner_here.md by default.

Peak memory is the growth of the resident memory of a rank from before its model exists to the end
of two updates, in a separate process whose malloc returns freed memory at once.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import common
import torch

from optimus import platform
from optimus.bench.step import make_rank
from optimus.config import Config, make_config
from optimus.config.machine import load_machine
from optimus.data.batch import plan_batch
from optimus.distributed.collectives import barrier
from optimus.distributed.mesh import make_mesh
from optimus.distributed.world import end_world, start_world
from optimus.errors import OptimusError
from optimus.launch.environment import RENDEZVOUS, read_launch_env
from optimus.planner.memory import rank_memory
from optimus.planner.step_plan import plan_step
from optimus.train.autotune import autotune_kernels

ROOT = Path(__file__).resolve().parents[2]
ROUNDS, UPDATES = 5, 2
"""Number of rounds, and of timed updates of a layout in a round."""
WARMUP = 2
LIMIT_S = 120.0
"""Longest time for which the script waits for a rank."""


class Case(NamedTuple):
    """A layout that the script plans and runs."""

    name: str
    ranks: int
    settings: dict[str, Any]
    """Settings by `section__key`."""


DENSE = {
    "model__architecture": "olmo",
    "model__num_layers": 6,
    "model__hidden_size": 512,
    "model__num_attention_heads": 8,
    "model__intermediate_size": 1408,
    "model__vocab_size": 2048,
}
MOE = {
    "model__architecture": "olmoe",
    "model__num_layers": 4,
    "model__hidden_size": 512,
    "model__num_attention_heads": 8,
    "model__intermediate_size": 512,
    "model__num_experts": 8,
    "model__num_experts_per_tok": 2,
    "model__vocab_size": 2048,
    "model__router": "uniform",
}
WIDE = {"model__hidden_size": 768, "model__intermediate_size": 2048, "model__num_layers": 4}
SO, EPSO = {"optim__sharding": "so"}, {"optim__sharding": "epso"}
ALLGATHER = {"parallel__ep_dispatch": "allgather"}
PIPELINE = {"parallel__pp": 2, "train__global_batch_tokens": 2048}
CASES = (
    Case("dense", 1, DENSE),
    Case("dense wide, long sequences", 1, DENSE | WIDE | {"train__seq_len": 512}),
    Case("dense, blocks recomputed", 1, DENSE | {"recompute__modules": ["block"]}),
    Case("dense dp 2", 2, DENSE),
    Case("dense dp 2, so", 2, DENSE | SO),
    Case("dense dp 2, so, cache", 2, DENSE | SO | {"optim__resident": "cache"}),
    Case("dense tp 2", 2, DENSE | {"parallel__tp": 2}),
    Case("dense pp 2, 1f1b", 2, DENSE | PIPELINE),
    Case("dense pp 2, gpipe", 2, DENSE | PIPELINE | {"parallel__schedule": "gpipe"}),
    Case("dense pp 2, zb-h1", 2, DENSE | PIPELINE | {"parallel__schedule": "zb-h1"}),
    Case(
        "dense pp 2, interleaved",
        2,
        DENSE
        | PIPELINE
        | {
            "parallel__schedule": "interleaved",
            "parallel__virtual_stages": 2,
            "model__num_layers": 8,
        },
    ),
    Case("MoE", 1, MOE),
    Case("MoE, experts and norms recomputed", 1, MOE | {"recompute__modules": ["norm", "moe"]}),
    Case("MoE dp 2, so", 2, MOE | SO),
    Case("MoE ep 2, alltoall, epso", 2, MOE | EPSO | {"parallel__ep": 2}),
    Case("MoE ep 2, allgather, so", 2, MOE | SO | ALLGATHER | {"parallel__ep": 2}),
    Case("dense, bf16", 1, DENSE | {"train__dtype": "bf16"}),
)


def config_of(case: Case) -> Config:
    """Return the configuration of a case."""
    settings = {
        "data__path": "unused",
        "train__seq_len": 256,
        "train__microbatch_size": 1,
        "train__global_batch_tokens": 1024,
        "train__dtype": "fp32",
        "train__threads": 1,
        "train__device": "cpu",
        "train__max_steps": 100,
        "train__deterministic": False,
        "optim__warmup_steps": 0,
        "optim__schedule": "constant",
        **case.settings,
    }
    tree: dict[str, dict[str, Any]] = {}
    for key, value in settings.items():
        section, _, name = key.partition("__")
        tree.setdefault(section, {})[name] = value
    return make_config(tree)


def run_rank(case: Case, clock: str, measures_memory: bool) -> None:
    """Run updates of a case in this process, which is a rank. The number of updates comes from
    standard input, and their seconds go to standard output."""
    config, launch = config_of(case), read_launch_env()
    meter = common.MemoryMeter() if measures_memory else None
    world = start_world(launch, 600.0, "cpu")
    platform.set_threads(1, False, launch.local_world_size)
    autotune_kernels(config, world, None)
    now = time.process_time if clock == "processor" else time.perf_counter
    warm = torch.randn(64, 64, requires_grad=True)
    (warm @ warm).sum().backward()
    before = meter.start() if meter is not None else 0
    rank = make_rank(config, world)
    updater, microbatches = rank.updater(), rank.microbatches()
    for step in range(1, WARMUP + 1):
        updater.run(step, microbatches)
    peak = meter.peak() - before if meter is not None else 0
    print(json.dumps({"peak": peak}), flush=True)
    step = WARMUP
    for line in sys.stdin:
        seconds = []
        for _ in range(int(line)):
            step += 1
            barrier(world.everyone)
            start = now()
            updater.run(step, microbatches)
            seconds.append(now() - start)
        print(json.dumps({"seconds": seconds}), flush=True)
    end_world()


class Ranks:
    """Processes that run a case."""

    def __init__(self, case: Case, clock: str, measures_memory: bool, folder: Path) -> None:
        self.case = case
        arguments = ["--rank-of", case.name, "--clock", clock]
        arguments += ["--memory"] if measures_memory else []
        rendezvous = folder / f"rendezvous-{case.name.replace(' ', '-')}-{measures_memory}"
        self._processes = [
            subprocess.Popen(
                [sys.executable, __file__, *arguments],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                env={
                    **os.environ,
                    "OMP_NUM_THREADS": "1",
                    "GLOO_SOCKET_IFNAME": "lo",
                    "RANK": str(rank),
                    "WORLD_SIZE": str(case.ranks),
                    "LOCAL_RANK": str(rank),
                    "LOCAL_WORLD_SIZE": str(case.ranks),
                    RENDEZVOUS: f"file://{rendezvous}",
                },
            )
            for rank in range(case.ranks)
        ]

    def answers(self) -> list[dict[str, Any]]:
        """Return the next line of each rank."""
        lines = []
        for process in self._processes:
            assert process.stdout is not None
            line = process.stdout.readline()
            if not line:
                raise OptimusError(f"a rank of {self.case.name!r} has ended")
            lines.append(json.loads(line))
        return lines

    def step_s(self, updates: int) -> list[float]:
        """Run updates. Return the seconds of each on its slowest rank."""
        for process in self._processes:
            assert process.stdin is not None
            process.stdin.write(f"{updates}\n")
            process.stdin.flush()
        return [max(times) for times in zip(*(a["seconds"] for a in self.answers()), strict=True)]

    def end(self) -> None:
        for process in self._processes:
            assert process.stdin is not None
            process.stdin.close()
        for process in self._processes:
            try:
                process.wait(LIMIT_S)
            except subprocess.TimeoutExpired:
                process.kill()


@contextmanager
def started(cases: Sequence[Case], clock: str, memory: bool) -> Iterator[list[Ranks]]:
    """Return a context with the running ranks of all cases, and end them."""
    ranks: list[Ranks] = []
    with tempfile.TemporaryDirectory() as folder:
        try:
            for case in cases:
                ranks.append(Ranks(case, clock, memory, Path(folder)))
                yield_first = ranks[-1]
                yield_first.peaks = [answer["peak"] for answer in yield_first.answers()]
            yield ranks
        finally:
            for rank in ranks:
                rank.end()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--machine")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--clock", choices=("wall", "processor"), default="wall")
    parser.add_argument("--only", nargs="*")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--rank-of")
    parser.add_argument("--memory", action="store_true")
    args = parser.parse_args()
    by_name = {case.name: case for case in CASES}
    if args.rank_of:
        run_rank(by_name[args.rank_of], args.clock, args.memory)
        return
    machine = load_machine(args.machine)
    cases = [by_name[name] for name in args.only or by_name]
    for case in cases:
        config = config_of(case)
        mesh = make_mesh(config.parallel, case.ranks)
        m = plan_batch(config.train, mesh.num_data_ranks).microbatches_per_rank
        planned = plan_step(config, mesh, machine, "here")
        memory = max(
            rank_memory(config, mesh, mesh.coordinate(r), m, "cpu").device
            for r in range(case.ranks)
        )
        row = [case.name, f"{planned['step_s']:.4f}"]
        if args.rounds:
            with started([case], args.clock, False) as (ranks,):
                times = [t for _ in range(args.rounds) for t in ranks.step_s(UPDATES)]
            s = statistics.median(times)
            row += [
                f"{s:.4f}",
                f"min {min(times):.4f}",
                f"{planned['step_s'] / s - 1:+.1%} {planned['step_s'] / min(times) - 1:+.1%}",
            ]
        if args.memory:
            with started([case], args.clock, True) as (ranks,):
                peak = max(ranks.peaks)
            row += [f"{memory / 1e6:.1f}", f"{peak / 1e6:.1f}", f"{memory / peak - 1:+.1%}"]
        print(
            "  ".join(row),
            {
                k: round(v, 4)
                for k, v in planned.items()
                if k in ("compute_s", "bubble_s", "optimizer_s")
            },
            planned["exposed_s"],
            flush=True,
        )


if __name__ == "__main__":
    main()
