"""Replacements of `qsub`, `qstat` and the `mpiexec` of PALS, as on Aurora. No package contains the
original programs.

`install(folder)` writes these programs. With this folder first on PATH, a job script of Optimus
starts real processes. There are two differences to the real programs. First, `qsub` waits for the
job, prints the job's output and returns the job's exit status. Second, all hosts are this machine.
Options that the scripts of Optimus do not use are refused, so that a misspelled option is an error.
"""

from __future__ import annotations

import argparse
import os
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

RESOURCES = ("walltime", "place", "select", "filesystems")


def install(folder: Path) -> None:
    """Write programs to `folder` that replace `qsub`, `qstat` and `mpiexec` in tests."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("qsub", "qstat", "mpiexec"):
        words = shlex.join([sys.executable, str(Path(__file__).resolve()), name])
        (folder / name).write_text(f'#!/bin/bash\nexec {words} "$@"\n')
        (folder / name).chmod(0o755)


def qsub(argv: Sequence[str]) -> int:
    """Read a script from standard input and run it in the home directory, as PBS does. All jobs of
    an array run at the same time. $PBS_NODEFILE contains each host once."""
    parser = argparse.ArgumentParser(prog="qsub", allow_abbrev=False)
    parser.add_argument("-v", required=True)
    for option in ("-N", "-k", "-j", "-A", "-q", "-J"):
        parser.add_argument(option)
    parser.add_argument("-l", action="append", default=[])
    args = parser.parse_args(argv)
    resources = dict(resource.split("=", 1) for resource in args.l)
    if unknown := resources.keys() - set(RESOURCES):
        parser.error(f"unknown resources {sorted(unknown)}")
    indices: list[str | None] = [None]
    if args.J:
        first, last = map(int, args.J.split("-"))
        if first >= last:
            parser.error(f"-J {args.J}: an array of PBS has at least two jobs")
        indices = [str(index) for index in range(first, last + 1)]
    job = sys.stdin.read()
    with tempfile.TemporaryDirectory(prefix="pbs-") as spool:
        hosts = Path(spool, "nodes")
        hosts.write_text("".join(f"x{n}\n" for n in range(int(resources.get("select", "1")))))
        Path(spool, "job").write_text(job)
        home = os.environ.get("HOME", "/")
        environ = {name: os.environ[name] for name in args.v.split(",")}
        environ |= {"HOME": home, "PBS_NODEFILE": str(hosts), "PBS_ENVIRONMENT": "PBS_BATCH"}
        environ |= {"PBS_O_WORKDIR": os.getcwd(), "PBS_JOBID": "1.here"}
        jobs = [
            subprocess.Popen(
                ["bash", str(Path(spool, "job"))],
                cwd=home,
                env=environ | ({} if index is None else {"PBS_ARRAY_INDEX": index}),
            )
            for index in indices
        ]
        print("1.here", flush=True)
        return max(process.wait() for process in jobs)


def qstat(argv: Sequence[str]) -> int:
    """Print the error with which PBS answers about a job that ended long ago. No job is in
    progress, because `qsub` waits for the end of its job."""
    parser = argparse.ArgumentParser(prog="qstat", allow_abbrev=False)
    parser.add_argument("job")
    print(f"qstat: Unknown Job Id {parser.parse_args(argv).job}", file=sys.stderr)
    return 153


def mpiexec(argv: Sequence[str]) -> int:
    """Start the ranks with the variables that PALS sets. PMI_SIZE is not set. As with PALS, the
    failure of a rank ends the other ranks."""
    parser = argparse.ArgumentParser(prog="mpiexec", allow_abbrev=False)
    parser.add_argument("--envall", action="store_true", required=True)
    parser.add_argument("--line-buffer", action="store_true")
    parser.add_argument("-n", type=int, required=True)
    parser.add_argument("--ppn", type=int, required=True)
    parser.add_argument("--hostfile", type=Path, required=True)
    parser.add_argument("--cpu-bind", default="")
    parser.add_argument("command", nargs=argparse.REMAINDER)
    args = parser.parse_args(argv)
    hosts = args.hostfile.read_text().split()
    if args.n > len(hosts) * args.ppn:
        parser.error(f"{args.n} ranks on {len(hosts)} hosts of {args.ppn}")
    ranks = []
    for rank in range(args.n):
        variables = {"PALS_RANKID": rank, "PALS_LOCAL_RANKID": rank % args.ppn}
        variables |= {"PALS_NODEID": rank // args.ppn, "PMI_RANK": rank}
        environ = os.environ | {name: str(value) for name, value in variables.items()}
        ranks.append(subprocess.Popen(args.command, env=environ))
    while all(process.poll() in (None, 0) for process in ranks):
        if all(process.poll() == 0 for process in ranks):
            return 0
        time.sleep(0.02)
    failure = next(status for process in ranks if (status := process.poll()))
    for process in ranks:
        process.terminate()
    for process in ranks:
        process.wait()
    return failure if failure > 0 else 128 - failure


if __name__ == "__main__":
    programs = {"qsub": qsub, "qstat": qstat, "mpiexec": mpiexec}
    sys.exit(programs[sys.argv[1]](sys.argv[2:]))
