#!/usr/bin/env python3
"""Prepare data sets by jobs on two nodes of a real Slurm installation, and interrupt some of the
jobs.

    scripts/drills/slurm.sh --nodes 2 -- python scripts/drills/data_slurm.py [--cases nodes,array]

Each case prepares a data set from the same corpus. The data set must be byte-identical to the data
set that a single process prepares from this corpus without Slurm, and `optimus-data verify` must
accept the prepared data set.

nodes    scripts/slurm/data.sh --nodes 2
tasks    srun with two tasks on each of two nodes
array    scripts/slurm/data.sh --array 2
cancel   a job of two nodes is cancelled half-way, and an array of two jobs completes the output
requeue  a job of two nodes is requeued half-way, and Slurm starts the job again
rank     one of two ranks is killed half-way; the job is cancelled, and the same command completes
         the output
node     all processes of one of two nodes are killed half-way; the job is cancelled, and the same
         command on the other node completes the output (needs root; the killed node remains down)
"""

from __future__ import annotations

import argparse
import os
import random
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import slurm_jobs as jobs
from data_kill import differences, tree, write_corpus

sys.path.insert(0, str(jobs.ROOT))

from tests.kit.ranks.processes import install

JOB_SCRIPT = jobs.ROOT / "scripts" / "slurm" / "data.sh"


@dataclass
class Drill:
    """Inputs of all cases: `base`, the folder that contains the corpus and the tokenizer;
    `program`, the command `optimus-data`; and `expected`, the files of the data set that a single
    process prepares from the corpus, by relative path."""

    base: Path
    program: Path
    expected: dict[str, bytes]

    def arguments(self, out: Path) -> list[str]:
        words = ["run", "--input", str(self.base / "text"), "--context", "64", "--out", str(out)]
        words += ["--tokenizer", str(self.base / "t.json"), "--workers", "1"]
        return [*words, "--unit-size", "50KB", "--shard-size", "40KB", "--eval-fraction", "0.1"]

    def submit(self, out: Path, *how: str) -> str:
        """Submit a job that prepares the data set in `out`. `how` are options of
        scripts/slurm/data.sh. Return the ID of the job."""
        return jobs.submitted(str(JOB_SCRIPT), *how, "--time", "10", "--", *self.arguments(out))

    def half_way(self, out: Path, job: str) -> bool:
        """Wait until `job` has tokenized a third of the text or has ended. Return True if the job
        still runs and has not completed the data set."""
        units = sum(name.startswith("tokens/unit-") for name in self.expected) // 2

        def some() -> bool:
            done = len(list((out / "tokens").glob("unit-*.json")))
            return done >= units // 3 or not jobs.running(job)

        jobs.wait_until(some, f"a third of the units of job {job}")
        return jobs.running(job) and not (out / "manifest.json").exists()

    def disturb(self, out: Path, how: Callable[[str], None], tries: int = 5) -> str:
        """Submit a job of two nodes. When the job has tokenized a third of the text, call
        `how(ID)`. If a job ends before this moment, submit another job, but at most `tries` jobs in
        total. Return the ID of the disturbed job."""
        for _ in range(tries):
            job = self.submit(out, "--nodes", "2")
            if self.half_way(out, job):
                how(job)
                if not (out / "manifest.json").exists():
                    return job
            jobs.ended(job)
            shutil.rmtree(out)
        raise AssertionError(f"{tries} jobs ended before they could be disturbed; use more --files")

    def check(self, out: Path) -> str:
        """Assert that all files of the data set in `out` have the expected bytes, and that
        `optimus-data verify` accepts the data set. Return text to append to the result of the
        case."""
        verified = subprocess.run([self.program, "verify", str(out)], capture_output=True)
        wrong = differences(out, self.expected, whole=True) + ["verify"] * bool(verified.returncode)
        assert not wrong, wrong[:5]
        return ": byte-identical, verified"


def states(job: str) -> list[str]:
    """Return the states of a job, or of all jobs of an array."""
    return jobs.field_of(job, "JobState")


def assert_all_ranks_worked(printed: str, world: int) -> None:
    """Assert that `printed`, the output of a job, contains a line about tokenization from each of
    `world` ranks. The data set does not show that all ranks worked, because a single rank would
    write the same bytes."""
    ranks = set(re.findall(rf"^\[rank (\d+) of {world}\] tokenize", printed, re.MULTILINE))
    assert ranks == {str(rank) for rank in range(world)}, (
        f"of {world} ranks, only {ranks} printed a line about tokenization: {printed}"
    )


def nodes(drill: Drill, out: Path) -> str:
    job = drill.submit(out, "--nodes", "2")
    jobs.ended(job)
    assert states(job) == ["COMPLETED"], states(job)
    assert_all_ranks_worked(Path(f"slurm-{job}.out").read_text(), 2)
    return "one job of 2 nodes"


def tasks(drill: Drill, out: Path) -> str:
    step = ["srun", "--nodes=2", "--ntasks-per-node=2", str(drill.program), *drill.arguments(out)]
    done = subprocess.run(step, check=True, capture_output=True, text=True)
    assert_all_ranks_worked(done.stderr, 4)
    return "one step of 2 x 2 tasks"


def array(drill: Drill, out: Path) -> str:
    job = drill.submit(out, "--array", "2")
    jobs.ended(job)
    assert states(job) == ["COMPLETED"] * 2, states(job)
    assert_all_ranks_worked(
        "".join(Path(f"slurm-{job}_{task}.out").read_text() for task in range(2)), 2
    )
    return "an array of 2 on 2 nodes"


def cancel(drill: Drill, out: Path) -> str:
    def how(job: str) -> None:
        jobs.output_of("scancel", job)
        jobs.ended(job)

    job = drill.disturb(out, how)
    assert states(job) == ["CANCELLED"], states(job)
    left = len(list((out / "tokens").glob("unit-*.json")))
    assert not (wrong := differences(out, drill.expected, whole=False)), wrong
    array(drill, out)
    return f"cancelled with {left} units done, completed by an array of 2"


def requeue(drill: Drill, out: Path) -> str:
    def how(job: str) -> None:
        jobs.output_of("scontrol", "requeue", job)
        jobs.wait_until(lambda: "PENDING" in states(job), f"job {job} in the queue")
        # Start the requeued job after 3 s. By default, Slurm would start the job after two minutes.
        # A start in the same second as the requeue would fail, because a node refuses the job:
        # "credential revoked".
        jobs.output_of("scontrol", "update", f"JobId={job}", "StartTime=now+3")

    job = drill.disturb(out, how)
    jobs.ended(job)
    assert states(job) == ["COMPLETED"], states(job)
    return "requeued, started again"


def complete(drill: Drill, out: Path, job: str, nodes: str) -> None:
    """Cancel a job that has lost a rank. Submit the same command as a new job on `nodes` nodes.
    Assert that the new job completes the data set."""
    jobs.output_of("scancel", job)
    jobs.ended(job)
    assert not (out / "manifest.json").exists(), f"{out} is complete although a rank was lost"
    job = drill.submit(out, "--nodes", nodes)
    jobs.ended(job)
    assert states(job) == ["COMPLETED"], states(job)


def rank(drill: Drill, out: Path) -> str:
    job = drill.disturb(out, lambda job: jobs.kill_rank(job, 1))
    complete(drill, out, job, "2")
    return "rank 1 killed, completed by the same command"


def node(drill: Drill, out: Path) -> str:
    assert os.geteuid() == 0, "run the case `node` as root, so that each node has a namespace"
    slurmd = int((Path(os.environ["SLURM_DRILL"]) / "n2.pid").read_text())
    namespace, killed = os.readlink(f"/proc/{slurmd}/ns/uts"), []

    def how(job: str) -> None:
        for entry in Path("/proc").glob("[0-9]*"):
            try:
                if os.readlink(entry / "ns" / "uts") == namespace:
                    os.kill(int(entry.name), signal.SIGKILL)
                    killed.append(entry.name)
            except OSError:
                continue

    job = drill.disturb(out, how, tries=1)
    assert len(killed) >= 3, (
        f"killed only the processes {killed} on n2; expected slurmd, slurmstepd and a rank"
    )
    complete(drill, out, job, "1")
    return f"{len(killed)} processes of n2 killed, completed by the same command"


CASES = {case.__name__: case for case in (nodes, tasks, array, cancel, requeue, rank, node)}


def prepare(base: Path, args: argparse.Namespace) -> Drill:
    """Write the corpus, train the tokenizer, and prepare the expected data set with a single
    process. Return the inputs of the cases."""
    program = install(base / "optimus-data", "data_prep.cli")
    os.environ["OPTIMUS_DATA"] = str(program)
    write_corpus(base / "text", args.files, 2000, random.Random(0))
    train = ["train-tokenizer", "--vocab-size", "300", "--input", str(base / "text")]
    jobs.output_of(str(program), *train, "--out", str(base / "t.json"))
    drill = Drill(base, program, {})
    jobs.output_of(str(program), *drill.arguments(base / "reference"))
    drill.expected = tree(base / "reference")
    return drill


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--files", type=int, default=300, help="number of files in the corpus")
    return jobs.run_cases(parser, CASES, prepare, Drill.check)


if __name__ == "__main__":
    sys.exit(main())
