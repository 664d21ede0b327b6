#!/usr/bin/env python3
"""Train a tiny model with scripts/slurm/train.sh on two real Slurm nodes, and cause errors.

    scripts/drills/slurm.sh --nodes 2 -- python scripts/drills/train_slurm.py [--cases nodes,rank]

nodes    scripts/slurm/train.sh with 2 x 2 ranks, dp = 2 and pp = 2, deterministic: the metrics must
         be bit-identical to a run on one process without Slurm
world    a layout that 4 ranks cannot have: one error line, exit status 2
address  a MASTER_ADDR that does not exist: one error line of each node, exit status 2, even though
         srun ends one rank before Python has started in this rank
rank     one of 4 ranks is killed: one error line, exit status 5
study    a scaling study on one and two nodes, from generated jobs to pictures
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

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
    """Inputs of all cases: the configuration of the jobs, the command `optimus`, and the expected
    metrics, from a run on one process."""

    base: Path
    config: Path
    program: Path
    """The command `optimus`."""
    expected: list[dict[str, Any]]

    def command(self, out: Path, *settings: str) -> list[str]:
        """Return the command that submits a job of 2 nodes with 2 ranks each. `out` is the run
        directory, and `settings` override the configuration."""
        options = ["--nodes", "2", "--ranks", "2", "--time", "10"]
        arguments = [str(self.config), f"train.run_dir={out}", *settings]
        return [str(JOB_SCRIPT), *options, "--", *arguments]

    def submit(self, out: Path, *settings: str) -> str:
        """Submit the job of `command(out, *settings)`. Return the ID of the job."""
        return jobs.submitted(*self.command(out, *settings))


def status(job: str) -> int:
    """Return the exit status of a job."""
    return int(jobs.field_of(job, "ExitCode")[0])


def assert_refused(job: str, code: int, message: str, max_lines: int = 1) -> str:
    """Wait until the job has ended. Assert that its exit status is `code`, that it has printed 1 to
    `max_lines` error lines, and that the first of these lines contains `message`. Return a
    description of the result."""
    jobs.ended(job)
    printed = Path(f"slurm-{job}.out").read_text()
    lines = [line for line in printed.splitlines() if re.match(r"optimus:.* error: ", line)]
    assert status(job) == code, f"exit status {status(job)}: {printed}"
    assert 1 <= len(lines) <= max_lines and message in lines[0], (
        f"expected 1 to {max_lines} error lines, the first with {message!r}: {printed}"
    )
    assert "Traceback" not in printed, printed
    return f"exit status {code}: {lines[0]}"


def nodes(drill: Drill, out: Path) -> str:
    job = drill.submit(out, *LAYOUT)
    jobs.ended(job)
    assert status(job) == 0, f"exit status {status(job)}"
    assert metrics_of(out) == drill.expected, "the metrics differ from a run on one process"
    settings = (out / "config.toml").read_text()
    assert "pp = 2" in settings and "dp = 2" in settings
    return f"{len(drill.expected)} steps with the metrics of one process, bit for bit"


def world(drill: Drill, out: Path) -> str:
    command = drill.command(out, "parallel.pp=8")  # fails before it submits a job
    done = subprocess.run(command, capture_output=True, text=True)
    message = "such as 8, or change the sizes"
    assert done.returncode == 2 and message in done.stderr, f"{done.returncode}: {done.stderr}"
    return f"exit status 2: {done.stderr.strip()}"


def address(drill: Drill, out: Path) -> str:
    late = drill.base / "late"
    wait = "[[ ${SLURM_PROCID:-} != 3 || -z ${SLURM_STEP_ID:-} ]] || sleep 60"
    late.write_text(f'#!/bin/bash\n{wait}\nexec {drill.program} "$@"\n')
    late.chmod(0o755)
    # sbatch passes this environment to the job.
    changed = {"MASTER_ADDR": "nowhere.invalid", "OPTIMUS": str(late)}
    with mock.patch.dict(os.environ, changed):
        # Without a rendezvous, the first rank of each of the 2 nodes prints the error.
        return assert_refused(drill.submit(out), 2, "nowhere.invalid is not a host", max_lines=2)


def rank(drill: Drill, out: Path) -> str:
    job = drill.submit(out, *LAYOUT, "train.max_steps=100000", "parallel.timeout_s=60")
    metrics = out / "metrics.jsonl"

    def has_started() -> bool:
        return (metrics.exists() and metrics.read_text() != "") or not jobs.running(job)

    jobs.wait_until(has_started, "a step")
    jobs.kill_rank(job, 3)
    return assert_refused(job, 5, "did not complete")


def study(drill: Drill, out: Path) -> str:
    machine = jobs.ROOT / "tests" / "study" / "machine.toml"
    command = [str(drill.program), "study", "scaling", str(drill.config), "--nodes", "1,2"]
    command += ["--machine", str(machine), "--out", str(out), "--steps", "4", "--warmup", "1"]
    printed = jobs.output_of(*command, "--submit", "slurm")
    names = re.findall(r"as job (\d+)", printed)
    assert len(names) == 2, printed
    again = jobs.output_of(*command, "--submit", "slurm")
    assert "as job" not in again, f"points were submitted twice: {again}"
    for name in names:
        jobs.ended(name)
        assert status(name) == 0, f"exit status {status(name)}"
    result = json.loads(jobs.output_of(str(drill.program), "study", "show", str(out), "--json"))
    assert [point["state"] for point in result["points"]] == ["done", "done"], result
    assert [point["measured_updates"] for point in result["points"]] == [3, 3], result
    assert all(Path(path).stat().st_size > 0 for path in result["files"])
    return "two points done, " + ", ".join(Path(path).name for path in result["files"])


CASES = {case.__name__: case for case in (nodes, world, address, rank, study)}


def prepare(base: Path, args: argparse.Namespace) -> Drill:
    """Install the command `optimus`, create data and a configuration, and train on one process.
    Return the inputs of the cases."""
    program = install(base / "optimus", "optimus.cli")
    os.environ["OPTIMUS"] = str(program)
    data, config = make_tiny_data(base / "tiny"), base / "run.toml"
    tree = tiny_tree(data, base / "single", train__max_steps=4)
    config.write_text(dump_toml(make_config(tree)))
    jobs.output_of(str(program), "train", str(config))
    return Drill(base, config, program, metrics_of(base / "single"))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    sys.exit(jobs.run_cases(parser, CASES, prepare))
