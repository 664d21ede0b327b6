#!/usr/bin/env python3
"""Train a tiny model under a real Slurm with two nodes, by the job script, and disturb it.

    scripts/drills/slurm.sh --nodes 2 -- python scripts/drills/train_slurm.py [--cases nodes,rank]

nodes    scripts/slurm/train.sh with 2 x 2 ranks, dp = 2 and pp = 2, deterministic: the metrics of
         one process without Slurm, bit for bit
world    a layout that the 4 ranks cannot have: one line, exit status 2
address  a MASTER_ADDR that does not exist: one line a node, exit status 2
rank     one of 4 ranks is killed: one line, exit status 5
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import slurm_jobs as jobs

sys.path.insert(0, str(jobs.ROOT))

from optimus.config import dump_toml, make_config
from tests.kit.ranks.processes import install
from tests.kit.runs.results import metrics_of
from tests.kit.runs.tiny import make_tiny_data, tiny_tree

JOB_SCRIPT = jobs.ROOT / "scripts" / "slurm" / "train.sh"
LAYOUT = ("parallel.pp=2", "parallel.dp=2")


@dataclass
class Drill:
    """A configuration and what one process makes of it."""

    base: Path
    config: Path
    expected: list[dict]

    def command(self, out: Path, *settings: str) -> list[str]:
        """Submits a job of 2 x 2 ranks."""
        how = ["--nodes", "2", "--ranks", "2", "--time", "10"]
        return [str(JOB_SCRIPT), *how, "--", str(self.config), f"train.run_dir={out}", *settings]

    def submit(self, out: Path, *settings: str) -> str:
        """The number of the job of 2 x 2 ranks."""
        return jobs.submitted(*self.command(out, *settings))


def status(job: str) -> int:
    return int(jobs.told(job, "ExitCode")[0])


def refused(job: str, code: int, words: str, most: int = 1) -> str:
    """Once the job has ended: our line about what went wrong, printed `most` times at most."""
    jobs.ended(job)
    printed = Path(f"slurm-{job}.out").read_text()
    lines = [line for line in printed.splitlines() if re.match(r"optimus:.* error: ", line)]
    assert status(job) == code, f"exit status {status(job)}: {printed}"
    assert 1 <= len(lines) <= most and words in lines[0], (
        f"not {most} lines with {words!r}: {printed}"
    )
    assert "Traceback" not in printed, printed
    return f"exit status {code}: {lines[0]}"


def nodes(drill: Drill, out: Path) -> str:
    job = drill.submit(out, *LAYOUT)
    jobs.ended(job)
    assert status(job) == 0, f"exit status {status(job)}"
    assert metrics_of(out) == drill.expected, "other metrics than those of one process"
    settings = (out / "config.toml").read_text()
    assert "pp = 2" in settings and "dp = 2" in settings
    return f"{len(drill.expected)} steps with the metrics of one process, bit for bit"


def world(drill: Drill, out: Path) -> str:
    command = drill.command(out, "parallel.pp=8")  # refused before it is submitted
    done = subprocess.run(command, capture_output=True, text=True)
    told = "start 8 ranks or change the sizes"
    assert done.returncode == 2 and told in done.stderr, f"{done.returncode}: {done.stderr}"
    return f"exit status 2: {done.stderr.strip()}"


def address(drill: Drill, out: Path) -> str:
    os.environ["MASTER_ADDR"] = "nowhere.invalid"  # sbatch hands it on
    try:
        # Ranks that cannot meet cannot agree: the first rank of each of the 2 nodes prints it.
        return refused(drill.submit(out), 2, "nowhere.invalid is not a host", most=2)
    finally:
        del os.environ["MASTER_ADDR"]


def rank(drill: Drill, out: Path) -> str:
    job = drill.submit(out, *LAYOUT, "train.max_steps=100000", "parallel.timeout_s=60")
    metrics = out / "metrics.jsonl"

    def begun() -> bool:
        return (metrics.exists() and metrics.read_text() != "") or not jobs.running(job)

    jobs.wait_until(begun, "a step")
    jobs.kill_rank(job, 3)
    return refused(job, 5, "did not complete")


CASES = {case.__name__: case for case in (nodes, world, address, rank)}


def prepare(base: Path, args: argparse.Namespace) -> Drill:
    """The command, a data set, a configuration, and the run of one process."""
    program = install(base / "optimus", "optimus.cli")
    os.environ["OPTIMUS"] = str(program)
    data, config = make_tiny_data(base / "tiny"), base / "run.toml"
    tree = tiny_tree(data, base / "one", train__max_steps=4)
    config.write_text(dump_toml(make_config(tree)))
    jobs.output_of(str(program), "train", str(config))
    return Drill(base, config, metrics_of(base / "one"))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    sys.exit(jobs.run_cases(parser, CASES, prepare))
