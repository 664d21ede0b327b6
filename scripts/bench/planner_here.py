#!/usr/bin/env python3
"""Compare planned with measured step times and memory on this machine.

    python scripts/bench/planner_here.py [--machine FILE] [--out FILE]

The layouts of `CASES` run in five rounds. At the beginning of each round, the script measures a
machine file with `optimus bench machine` and plans all layouts with it, because the speed of a
virtual machine changes within minutes. Then the layouts run one after the other, each in new
processes, so that a layout is alone on the machine, like a user's run. The error of a layout is the
median of its errors in the rounds. With --machine, the script plans all layouts with FILE. Each
rank has one thread. The result is a Markdown page, docs/benchmarks/planner_here.md by default.

Peak memory is the increase of a rank's resident memory, from before the model is built to its peak
in two updates. It is measured in a separate process, whose malloc returns freed memory to the
system at once. This process first updates a tiny model with the same layout, so that the increase
does not include the memory of loaded code.
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
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import common
from planner import table

from optimus import platform
from optimus.bench.step import make_rank
from optimus.config import Config, make_config
from optimus.config.machine import Machine, load_machine
from optimus.data.batch import plan_batch
from optimus.distributed.collectives import barrier
from optimus.distributed.mesh import make_mesh
from optimus.distributed.world import end_world, start_world
from optimus.errors import OptimusError, counted, refuse_if
from optimus.io import files
from optimus.launch.environment import RENDEZVOUS, read_launch_env
from optimus.planner.memory import rank_memory
from optimus.planner.step_plan import plan_step
from optimus.train.autotune import autotune_kernels

ROOT = Path(__file__).resolve().parents[2]
ROUNDS, UPDATES = 5, 4
"""Number of rounds, and number of timed updates of each layout in a round."""
WARMUP = 2
LIMIT_S = 120.0
"""Longest time for which the script waits for a rank."""


class Case(NamedTuple):
    """A layout that the script plans and runs."""

    name: str
    ranks: int
    settings: dict[str, Any]
    """Maps `section__key` to the value of a setting."""


DENSE = {
    "model__architecture": "olmo",
    "model__num_layers": 4,
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
TINY = {
    "model__hidden_size": 64,
    "model__intermediate_size": 64,
    "model__vocab_size": 64,
    "optim__chunk_length": 1 << 14,
}
SO, EPSO = {"optim__sharding": "so"}, {"optim__sharding": "epso"}
ALLGATHER = {"parallel__ep_dispatch": "allgather"}
ALLTOALL = {"parallel__ep_dispatch": "alltoall"}
PIPELINE = {"parallel__pp": 2, "train__global_batch_tokens": 1024}
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
            "model__num_layers": 4,
        },
    ),
    Case("MoE", 1, MOE),
    Case("MoE, experts and norms recomputed", 1, MOE | {"recompute__modules": ["norm", "moe"]}),
    Case("MoE dp 2, so", 2, MOE | SO),
    Case("MoE ep 2, alltoall, epso", 2, MOE | EPSO | ALLTOALL | {"parallel__ep": 2}),
    Case("MoE ep 2, allgather, so", 2, MOE | SO | ALLGATHER | {"parallel__ep": 2}),
    Case("dense, bf16", 1, DENSE | {"train__dtype": "bf16"}),
)


def config_of(case: Case) -> Config:
    """Return the configuration of a case."""
    settings = {
        "data__path": "unused",
        "train__seq_len": 256,
        "train__microbatch_size": 1,
        "train__global_batch_tokens": 512 * case.ranks,
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
    """Run updates of a case in this process, which is a rank. Each line of standard input contains
    a number of updates. The seconds of these updates are written to standard output."""
    config, launch = config_of(case), read_launch_env()
    meter = common.MemoryMeter() if measures_memory else None
    world = start_world(launch, 600.0, "cpu")
    platform.set_threads(1, False, launch.local_world_size)
    autotune_kernels(config, world, None)
    now = time.process_time if clock == "processor" else time.perf_counter
    before = 0
    if meter is not None:  # a tiny model loads the code and allocates the buffers
        tiny = make_rank(config_of(case._replace(settings=case.settings | TINY)), world)
        updater, microbatches = tiny.updater(), tiny.microbatches()
        for step in (1, 2):
            updater.run(step, microbatches)
        del tiny, updater, microbatches
        before = meter.start()
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
    """The processes (ranks) that run a case."""

    def __init__(self, case: Case, clock: str, measures_memory: bool, folder: Path) -> None:
        self.case = case
        arguments = ["--rank-of", case.name, "--clock", clock]
        arguments += ["--memory"] if measures_memory else []
        rendezvous = folder / "rendezvous"
        rendezvous.unlink(missing_ok=True)  # of the previous case
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
        """Return the JSON object in the next output line of each rank."""
        lines = []
        for process in self._processes:
            assert process.stdout is not None
            line = process.stdout.readline()
            if not line:
                raise OptimusError(f"a rank of {self.case.name!r} has ended")
            lines.append(json.loads(line))
        return lines

    def step_s(self, updates: int) -> list[float]:
        """Run `updates` updates. Return the seconds of each update on the slowest rank."""
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


class Result(NamedTuple):
    """Planned and measured step times and memory of a case."""

    case: Case
    plans_s: list[float]
    """For each round, the planned seconds of an update."""
    measured: list[list[float]]
    """For each round, the seconds of each update."""
    planned_bytes: int
    """Planned memory, in bytes, of the rank with the largest measured peak."""
    peak_bytes: int
    """Largest measured peak memory of a rank, in bytes."""

    @property
    def step_s(self) -> float:
        """Median of the times of all measured updates, in seconds."""
        return statistics.median(s for of_round in self.measured for s in of_round)

    @property
    def planned_s(self) -> float:
        return statistics.median(self.plans_s)

    @property
    def errors(self) -> list[float]:
        """For each round, planned / measured - 1. The measured time of a round is the median of its
        updates."""
        pairs = zip(self.plans_s, self.measured, strict=True)
        return [plan / statistics.median(times) - 1 for plan, times in pairs]

    @property
    def error(self) -> float:
        return statistics.median(self.errors)

    @property
    def memory_error(self) -> float:
        return self.planned_bytes / self.peak_bytes - 1

    @property
    def spread(self) -> float:
        """Relative spread of the rounds: (largest median of a round - smallest median of a round) /
        `step_s`."""
        medians = [statistics.median(of_round) for of_round in self.measured]
        return (max(medians) - min(medians)) / self.step_s


def measure_peaks(case: Case, folder: Path) -> list[int]:
    """Return the peak memory of each rank, in bytes."""
    ranks = Ranks(case, "wall", True, folder)
    try:
        return [answer["peak"] for answer in ranks.answers()]
    finally:
        ranks.end()


def measure_round(cases: Sequence[Case], clock: str, folder: Path) -> list[list[float]]:
    """Return the seconds of the updates of each case. The cases run one after the other."""
    seconds = []
    for case in cases:
        ranks = Ranks(case, clock, False, folder)
        try:
            ranks.answers()  # the ranks have warmed up
            seconds.append(ranks.step_s(UPDATES))
        finally:
            ranks.end()
    return seconds


def planned(case: Case, machine: Machine, name: str) -> tuple[float, list[int]]:
    """Return the planned seconds of a step, and the planned bytes of each rank. `name` is the name
    of the machine in messages."""
    config = config_of(case)
    mesh = make_mesh(config.parallel, case.ranks)
    number = plan_batch(config.train, mesh.num_data_ranks).microbatches_per_rank
    code = machine.device.product_code_bytes if machine.device is not None else None
    code_bytes = 0.0 if code is None else code.value
    sizes = [
        rank_memory(
            config, mesh, mesh.coordinate(rank), number, "cpu", product_code=code_bytes
        ).device
        for rank in range(case.ranks)
    ]
    return plan_step(config, mesh, machine, name)["step_s"], sizes


def run(
    cases: Sequence[Case], machine_file: str | None, clock: str, rounds: int
) -> tuple[list[Result], Machine]:
    """Plan and measure all cases. Return a result for each case, and the machine file of the last
    round.

    Args:
        cases: The cases.
        machine_file: Name or path of the machine file; None: measure one in each round.
        clock: Clock of the measured times: "wall" or "processor".
        rounds: Number of rounds.

    Raises:
        ConfigError: The machine file is wrong or lacks a rate. Nothing has been measured.
    """
    plans: list[list[tuple[float, list[int]]]] = []
    if machine_file is not None:
        machine = load_machine(machine_file)
        plans = [[planned(case, machine, machine_file) for case in cases]] * rounds
    seconds = []
    with tempfile.TemporaryDirectory() as path:
        folder = Path(path)
        peaks = [measure_peaks(case, folder) for case in cases]
        for number in range(1, rounds + 1):
            if machine_file is None:
                machine = load_machine(str(measure_machine(folder)))
                plans.append([planned(case, machine, "this machine") for case in cases])
            seconds.append(measure_round(cases, clock, folder))
            print(f"round {number} of {rounds}", file=sys.stderr)
    results = []
    for case, of_ranks, of_case, times in zip(
        cases, peaks, zip(*plans, strict=True), zip(*seconds, strict=True), strict=True
    ):
        fullest = of_ranks.index(max(of_ranks))
        plans_s = [step_s for step_s, _ in of_case]
        results.append(
            Result(case, plans_s, list(times), of_case[-1][1][fullest], of_ranks[fullest])
        )
    return results, machine


def verdict(results: Sequence[Result]) -> list[str]:
    """Return lines of text with the errors that have a limit, and with these limits."""
    errors = [abs(result.error) for result in results]
    memory = max(abs(result.memory_error) for result in results)
    repeated = results[0]
    lines = []
    for text, value, limit in (
        ("Median error of the step time", statistics.median(errors), 0.08),
        ("Worst error of the step time", max(errors), 0.15),
        ("Worst error of the peak memory", memory, 0.05),
        *(
            (
                f"{name}: measured time of the layout that the plan ranks first, above the fastest",
                *pair,
            )
            for name, pair in _first(results)
        ),
    ):
        outcome = "met" if value <= limit else "MISSED"
        lines.append(f"- {text}: {value:.1%} (required {limit:.0%}: {outcome}).")
    worst, name = max((abs(e), result.case.name) for result in results for e in result.errors)
    lines.append(f"- Largest error of a step time in a single round: {worst:.1%} ({name}).")
    lines.append(
        f"- Spread of {repeated.case.name!r} over the rounds: {repeated.spread:.1%} "
        "(largest less smallest median of a round)."
    )
    return lines


def _first(results: Sequence[Result]) -> list[tuple[str, tuple[float, float]]]:
    """Return (name of a model, (excess, limit)) for each model with several layouts on two ranks.
    The excess is (measured time of the layout with the smallest planned time) / (measured time of
    the fastest layout) - 1."""
    pairs = []
    for model in ("dense", "MoE"):
        of_model = [
            result
            for result in results
            if result.case.ranks == 2 and result.case.name.startswith(model)
        ]
        if len(of_model) > 1:
            best = min(result.step_s for result in of_model)
            chosen = min(of_model, key=lambda result: result.planned_s)
            pairs.append((model, (chosen.step_s / best - 1, 0.05)))
    return pairs


def report(
    results: Sequence[Result], machine: Machine, machine_file: str | None, clock: str, load: str
) -> str:
    """Return the Markdown page. `machine` and `machine_file` are as in `run`."""
    measured = machine.measured
    conditions = (
        "this machine"
        if measured is None
        else (f"{measured.device}, {measured.cores} cores, torch {measured.torch}, {measured.date}")
    )
    rows = [
        (
            result.case.name,
            str(result.case.ranks),
            f"{result.planned_s:.3f}",
            f"{result.step_s:.3f}",
            f"{result.error:+.1%}",
            f"{result.spread:.1%}",
            f"{result.planned_bytes / 1e6:.1f}",
            f"{result.peak_bytes / 1e6:.1f}",
            f"{result.memory_error:+.1%}",
        )
        for result in results
    ]
    times = ("planned s", "measured s", "error", "spread")
    head = ("layout", "ranks", *times, "planned MB", "measured MB", "error")
    note = "" if clock == "wall" else " Times are processor times, not wall-clock times."
    source = f"All layouts are planned with the machine file `{machine_file}`."
    if machine_file is None:
        source = (
            "At the beginning of each round, it measures a machine file with `optimus bench "
            "machine` and plans all layouts with it; no layout of this page was used to set a "
            "value in a machine file. Memory is planned with the last file."
        )
    return "\n".join(
        [
            "# Planned and measured steps on a CPU",
            "",
            f"`python scripts/bench/planner_here.py` writes this page. {source}",
            f"{conditions}; each rank has one thread. A planned time is the median over "
            f"{counted(len(results[0].measured), 'round')}, a measured time the median over all "
            "updates, and an error of a time the median of the errors of the rounds. The error of "
            "a round compares the planned time with the median of the updates of the round. A "
            "round runs the layouts one after the other, with "
            f"{UPDATES} updates of each after {WARMUP} for warming up.{note} {load}",
            "",
            *table(head, rows),
            "",
            *verdict(results),
            "",
            "The table shows the memory of the rank with the largest measured peak. The measured "
            "memory is the increase of resident memory from before the model is built to its peak. "
            "Before the measurement, a tiny model with the same layout is updated. malloc returns "
            "freed blocks to the system at once.",
            "",
        ]
    )


def measure_machine(folder: Path) -> Path:
    """Measure this machine with two busy ranks. Return the machine file."""
    path = folder / "machine.toml"
    command = [sys.executable, "-m", "optimus.cli", "bench", "machine", "--nproc", "2"]
    paths = os.pathsep.join([str(ROOT), str(ROOT / "kernels"), os.environ.get("PYTHONPATH", "")])
    ended = subprocess.run(
        [*command, "--out", str(path), "--dir", str(folder)],
        stdout=sys.stderr,
        env=os.environ | {"PYTHONPATH": paths},
    )
    if ended.returncode:
        raise OptimusError("optimus bench machine failed; see its error above")
    return path


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--machine", help="machine file; by default it is measured")
    parser.add_argument(
        "--out", type=Path, default=ROOT / "docs" / "benchmarks" / "planner_here.md"
    )
    parser.add_argument("--only", nargs="*", metavar="NAME", help="names of layouts")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument(
        "--clock",
        choices=("wall", "processor"),
        default="wall",
        help="processor: for a busy machine; it leaves out the times in which ranks wait",
    )
    parser.add_argument("--rank-of", help=argparse.SUPPRESS)
    parser.add_argument("--memory", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args(arguments)
    by_name = {case.name: case for case in CASES}
    if args.rank_of:
        run_rank(by_name[args.rank_of], args.clock, args.memory)
        return
    for name in args.only or ():
        refuse_if(
            name not in by_name, f"--only {name!r}: no such layout; use one of {list(by_name)}"
        )
    refuse_if(args.rounds < 1, f"--rounds {args.rounds} must be at least 1")
    files.check_output(args.out, "--out")
    start, before = time.monotonic(), os.getloadavg()[0]
    cases = [case for case in CASES if not args.only or case.name in args.only]
    results, machine = run(cases, args.machine, args.clock, args.rounds)
    minutes = (time.monotonic() - start) / 60
    load = f"Load of the machine before: {before:.1f}. Duration: {minutes:.1f} minutes."
    page = report(results, machine, args.machine, args.clock, load)
    files.write_bytes(args.out, page.encode())
    print(page)


if __name__ == "__main__":
    sys.exit(common.run_script(main))
