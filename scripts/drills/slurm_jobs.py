"""What drills under a real Slurm share: looking at jobs, and running cases one by one."""

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
"""How long anything here may take before it counts as stuck."""


def wait_until(true: Callable[[], object], what: str) -> None:
    end = time.monotonic() + LIMIT_S
    while not true():
        assert time.monotonic() < end, f"{what}: not within {LIMIT_S:.0f} s"
        time.sleep(0.02)


def output_of(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def submitted(*command: str) -> str:
    """The number of the job that a job script submits."""
    return re.findall(r"Submitted batch job (\d+)", output_of(*command))[0]


def running(job: str) -> bool:
    return bool(output_of("squeue", "--noheader", f"--jobs={job}"))


def ended(job: str) -> None:
    wait_until(lambda: not running(job), f"end of job {job}")


def told(job: str, key: str) -> list[str]:
    """What Slurm says of the job, or of each of an array's."""
    return re.findall(rf"\b{key}=(\w+)", output_of("scontrol", "--oneliner", "show", "job", job))


def _processes(name: str, value: str) -> list[int]:
    """Those that have this in the environment."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            environment = (entry / "environ").read_bytes().split(b"\0")
        except OSError:
            continue
        if f"{name}={value}".encode() in environment:
            found.append(int(entry.name))
    return found


def kill_rank(job: str, rank: int) -> None:
    """All processes of a rank of the job."""
    mine = set(_processes("SLURM_PROCID", str(rank))) & set(_processes("SLURM_JOB_ID", job))
    assert mine, f"no process of rank {rank}"
    for pid in mine:
        os.kill(pid, signal.SIGKILL)


def run_cases(
    parser: argparse.ArgumentParser,
    cases: Mapping[str, Callable[[Any, Path], str]],
    prepare: Callable[[Path, argparse.Namespace], Any],
    check: Callable[[Any, Path], str] = lambda drill, out: "",
) -> int:
    """Each case with what `prepare` made and a directory for its output, which `check` looks at;
    they return words on how it went, or raise AssertionError. The exit status."""
    parser.add_argument(
        "--cases", default=",".join(cases), help="in this order; one may come twice"
    )
    args = parser.parse_args()
    if unknown := set(args.cases.split(",")) - cases.keys():
        parser.error(f"no case {', '.join(sorted(unknown))}; there are {', '.join(cases)}")
    if "SLURM_DRILL" not in os.environ:
        parser.error("start it by scripts/drills/slurm.sh --nodes 2 -- COMMAND")
    failed = 0
    with tempfile.TemporaryDirectory(prefix="slurm-drill-") as base:
        os.chdir(base)  # where Slurm writes what jobs print
        drill = prepare(Path(base), args)
        for number, name in enumerate(args.cases.split(",")):
            out, start = Path(base, f"{number}-{name}"), time.monotonic()
            try:
                words = cases[name](drill, out) + check(drill, out)
            except (AssertionError, subprocess.CalledProcessError) as error:
                failed += 1
                printed = [path.read_text()[-500:] for path in Path(base).glob("slurm-*.out")]
                words = f"WRONG {error} {getattr(error, 'stderr', '') or ''} {printed[-3:]}"
            print(f"{name}: {words} ({time.monotonic() - start:.1f} s)", flush=True)
    return 1 if failed else 0
