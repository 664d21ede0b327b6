"""Functions that submit, observe and kill Slurm jobs, and the command line of drills that use
Slurm."""

from __future__ import annotations

import argparse
import os
import re
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]

LIMIT_S = 180.0
"""Time limit of a call of `wait_until`, in seconds."""


def wait_until(condition: Callable[[], object], name: str) -> None:
    """Call `condition` repeatedly until its result is true. Raise AssertionError after LIMIT_S
    seconds. `name` describes the condition in the error message."""
    end = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < end, f"timeout after {LIMIT_S:.0f} s while waiting for {name}"
        time.sleep(0.02)


def output_of(*command: str) -> str:
    """Run a command, and return its standard output. Raise CalledProcessError if the command
    fails."""
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def submitted(*command: str) -> str:
    """Run a command that submits a job. Return the ID of the job."""
    return str(re.findall(r"Submitted batch job (\d+)", output_of(*command))[0])


def running(job: str) -> bool:
    """Return True if the job `job` (an ID) is pending or running."""
    return bool(output_of("squeue", "--noheader", f"--jobs={job}"))


def ended(job: str) -> None:
    """Wait until the job with the ID `job` has ended. Raise AssertionError after LIMIT_S
    seconds."""
    wait_until(lambda: not running(job), f"end of job {job}")


def field_of(job: str, key: str) -> list[str]:
    """Return the values of the field `key` in the output of `scontrol show job`: one value for a
    single job, or one value for each job of an array."""
    return re.findall(rf"\b{key}=(\w+)", output_of("scontrol", "--oneliner", "show", "job", job))


def _processes(name: str, value: str) -> list[int]:
    """Return the ids of the processes whose environment variable `name` has the value `value`."""
    pids = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            environment = (entry / "environ").read_bytes().split(b"\0")
        except OSError:
            continue
        if f"{name}={value}".encode() in environment:
            pids.append(int(entry.name))
    return pids


def kill_rank(job: str, rank: int) -> None:
    """Kill all processes of rank `rank` of the Slurm job with the ID `job`."""
    pids = set(_processes("SLURM_PROCID", str(rank))) & set(_processes("SLURM_JOB_ID", job))
    assert pids, f"job {job} has no process of rank {rank}"
    for pid in pids:
        os.kill(pid, signal.SIGKILL)


def run_cases(
    parser: argparse.ArgumentParser,
    cases: Mapping[str, Callable[[Any, Path], str]],
    prepare: Callable[[Path, argparse.Namespace], Any],
    check: Callable[[Any, Path], str] = lambda drill, out: "",
) -> int:
    """Run the cases of a drill that the option --cases selects, and print the result of each case.

    Args:
        parser: The parser of the command line. This function adds the option --cases.
        cases: Functions by name. A function receives the result of `prepare` and a directory for
            the output. The function returns a description of the result, or raises AssertionError
            if the case fails.
        prepare: Function that is called once with a directory and the parsed arguments. Its result
            is passed to all cases.
        check: Function that is called after each case with the same arguments as the case. `check`
            returns text to add to the description, or raises AssertionError if the output is wrong.

    Returns:
        The exit status: 0 if no case failed, else 1.
    """
    parser.add_argument(
        "--cases",
        default=",".join(cases),
        help="cases to run, in this order; a case may be repeated",
    )
    args = parser.parse_args()
    if unknown := set(args.cases.split(",")) - cases.keys():
        parser.error(f"--cases: unknown {', '.join(sorted(unknown))}; use {', '.join(cases)}")
    if "SLURM_DRILL" not in os.environ:
        parser.error(
            "SLURM_DRILL is not set; start the drill with "
            "scripts/drills/slurm.sh --nodes 2 -- COMMAND"
        )
    failed = 0
    with tempfile.TemporaryDirectory(prefix="slurm-drill-") as base:
        os.chdir(base)  # Slurm writes the output of jobs to the working directory
        drill = prepare(Path(base), args)
        for number, name in enumerate(args.cases.split(",")):
            out, start = Path(base, f"{number}-{name}"), time.monotonic()
            try:
                result = cases[name](drill, out) + check(drill, out)
            except (AssertionError, subprocess.CalledProcessError) as error:
                failed += 1
                printed = [path.read_text()[-500:] for path in Path(base).glob("slurm-*.out")]
                result = f"WRONG {error} {getattr(error, 'stderr', '') or ''} {printed[-3:]}"
            print(f"{name}: {result} ({time.monotonic() - start:.1f} s)", flush=True)
    return 1 if failed else 0
