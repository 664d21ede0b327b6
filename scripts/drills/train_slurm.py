#!/usr/bin/env python3
"""Train a tiny model under a real Slurm with two nodes, by the job script, and disturb it.

    scripts/drills/slurm.sh --nodes 2 -- python scripts/drills/train_slurm.py [--cases nodes,rank]

nodes    scripts/slurm/train.sh with 2 x 2 ranks, dp = 2 and pp = 2, deterministic: the metrics of
         one process without Slurm, bit for bit
world    a layout that the 4 ranks cannot have: one line, exit status 2
address  a MASTER_ADDR that does not exist: one line, exit status 2
rank     one of 4 ranks is killed: one line, exit status 5
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from data_slurm import ended, output_of, processes, running, wait_until

ROOT = Path(__file__).resolve().parents[2]
JOB_SCRIPT = ROOT / "scripts" / "slurm" / "train.sh"
TIMES = ("step_time_s", "tokens_per_s", "tflops_per_device", "mfu", "mem_bytes")
LAYOUT = ("parallel.pp=2", "parallel.dp=2")


@dataclass
class Drill:
    """A configuration and what one process makes of it."""

    base: Path
    config: Path
    expected: list[dict]

    def submit(self, out: Path, *settings: str) -> str:
        """The number of the job of 2 x 2 ranks."""
        how = ["--nodes", "2", "--ranks", "2", "--time", "10"]
        words = [str(self.config), f"train.run_dir={out}", *settings]
        done = output_of(str(JOB_SCRIPT), *how, "--", *words)
        return re.findall(r"Submitted batch job (\d+)", done)[0]


def metrics_of(run_dir: Path) -> list[dict]:
    lines = (run_dir / "metrics.jsonl").read_text().splitlines()
    return [{k: v for k, v in json.loads(line).items() if k not in TIMES} for line in lines]


def status(job: str) -> int:
    told = output_of("scontrol", "--oneliner", "show", "job", job)
    return int(re.findall(r" ExitCode=(\d+):", told)[0])


def refused(job: str, code: int, words: str) -> str:
    """Once the job has ended: our one line about what went wrong."""
    ended(job)
    printed = Path(f"slurm-{job}.out").read_text()
    told = [line for line in printed.splitlines() if re.match(r"optimus:.* error: ", line)]
    assert status(job) == code, f"exit status {status(job)}: {printed}"
    assert len(told) == 1 and words in told[0], f"not one line with {words!r}: {printed}"
    assert "Traceback" not in printed, printed
    return f"exit status {code}: {told[0]}"


def nodes(drill: Drill, out: Path) -> str:
    job = drill.submit(out, *LAYOUT)
    ended(job)
    assert status(job) == 0, f"exit status {status(job)}"
    assert metrics_of(out) == drill.expected, "other metrics than those of one process"
    settings = (out / "config.toml").read_text()
    assert "pp = 2" in settings and "dp = 2" in settings
    return f"{len(drill.expected)} steps with the metrics of one process, bit for bit"


def world(drill: Drill, out: Path) -> str:
    return refused(drill.submit(out, "parallel.pp=8"), 2, "start 8 ranks or change the sizes")


def address(drill: Drill, out: Path) -> str:
    os.environ["MASTER_ADDR"] = "nowhere.invalid"  # sbatch hands it on
    try:
        return refused(drill.submit(out), 2, "nowhere.invalid is no host")
    finally:
        del os.environ["MASTER_ADDR"]


def rank(drill: Drill, out: Path) -> str:
    job = drill.submit(out, *LAYOUT, "train.max_steps=100000", "parallel.timeout_s=60")
    metrics = out / "metrics.jsonl"
    wait_until(lambda: (metrics.exists() and metrics.read_text()) or not running(job), "a step")
    mine = set(processes("SLURM_PROCID", "3")) & set(processes("SLURM_JOB_ID", job))
    assert mine, "no process of rank 3"
    for pid in mine:
        os.kill(pid, signal.SIGKILL)
    return refused(job, 5, "did not complete")


CASES = {case.__name__: case for case in (nodes, world, address, rank)}


def prepare(base: Path) -> Drill:
    """The command, a data set, a configuration, and the run of one process."""
    sys.path.insert(0, str(ROOT))
    from optimus.config import dump_toml, make_config
    from tests.helpers.tiny import make_tiny_data, tiny_tree

    program = base / "optimus"
    python = f"exec {shlex.quote(sys.executable)} -m optimus.cli"
    program.write_text(
        f'#!/bin/bash\nexport PYTHONPATH={shlex.quote(f"{ROOT}:{ROOT}/kernels")}\n{python} "$@"\n'
    )
    program.chmod(0o755)
    os.environ["OPTIMUS"] = str(program)
    data, config = make_tiny_data(base / "tiny"), base / "run.toml"
    tree = tiny_tree(data, base / "one", train__max_steps=4)
    config.write_text(dump_toml(make_config(tree)))
    output_of(str(program), "train", str(config))
    return Drill(base, config, metrics_of(base / "one"))


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", default=",".join(CASES), help="in this order")
    args = parser.parse_args(argv)
    if unknown := set(args.cases.split(",")) - CASES.keys():
        parser.error(f"no case {', '.join(sorted(unknown))}; there are {', '.join(CASES)}")
    if "SLURM_DRILL" not in os.environ:
        parser.error("start it by scripts/drills/slurm.sh --nodes 2 -- COMMAND")
    failed = 0
    with tempfile.TemporaryDirectory(prefix="train-slurm-") as base:
        os.chdir(base)  # where Slurm writes what jobs print
        drill = prepare(Path(base))
        for number, name in enumerate(args.cases.split(",")):
            out, start = Path(base, f"{number}-{name}"), time.monotonic()
            try:
                told = CASES[name](drill, out)
            except (AssertionError, subprocess.CalledProcessError) as error:
                failed += 1
                told = f"WRONG {error} {getattr(error, 'stderr', '') or ''}"
            print(f"{name}: {told} ({time.monotonic() - start:.1f} s)", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
