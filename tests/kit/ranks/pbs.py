"""Stand-ins for `qsub` and for the `mpiexec` of PALS, which no package offers, as Aurora has them.

`install(folder)` writes both programs; with that folder first on PATH, a job script of ours starts
real processes here. Other than the real ones: `qsub` returns when the job has ended, with its exit
status and what it printed on its own output, and all hosts are this machine. Options which our
scripts do not use are refused, so that a misspelt one does not pass.
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
    """Programs `qsub` and `mpiexec` in `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("qsub", "mpiexec"):
        words = shlex.join([sys.executable, str(Path(__file__).resolve()), name])
        (folder / name).write_text(f'#!/bin/bash\nexec {words} "$@"\n')
        (folder / name).chmod(0o755)


def strict(name: str) -> argparse.ArgumentParser:
    return argparse.ArgumentParser(prog=name, allow_abbrev=False)


def qsub(argv: Sequence[str]) -> int:
    """Run the script on standard input as PBS does: from the home, a job of an array after the
    other's start, $PBS_NODEFILE naming each host once."""
    parser = strict("qsub")
    parser.add_argument("-v", required=True)
    for option in ("-N", "-k", "-j", "-A", "-q", "-J"):
        parser.add_argument(option)
    parser.add_argument("-l", action="append", default=[])
    args = parser.parse_args(argv)
    wanted = dict(one.split("=", 1) for one in args.l)
    if unknown := wanted.keys() - set(RESOURCES):
        parser.error(f"resources {sorted(unknown)}")
    indices: list[str | None] = [None]
    if args.J:
        first, last = map(int, args.J.split("-"))
        if first >= last:
            parser.error(f"-J {args.J}: PBS has no array of one")
        indices = [str(index) for index in range(first, last + 1)]
    job = sys.stdin.read()
    with tempfile.TemporaryDirectory(prefix="pbs-") as spool:
        hosts = Path(spool, "nodes")
        hosts.write_text("".join(f"x{n}\n" for n in range(int(wanted.get("select", "1")))))
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
        return max(one.wait() for one in jobs)


def mpiexec(argv: Sequence[str]) -> int:
    """Start the ranks with the variables of PALS alone: PMI_SIZE and the like are not among them.

    As with PALS, one rank's failure ends the others.
    """
    parser = strict("mpiexec")
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
        own = {"PALS_RANKID": rank, "PALS_LOCAL_RANKID": rank % args.ppn}
        own |= {"PALS_NODEID": rank // args.ppn, "PMI_RANK": rank}
        environ = os.environ | {name: str(value) for name, value in own.items()}
        ranks.append(subprocess.Popen(args.command, env=environ))
    while all(one.poll() in (None, 0) for one in ranks):
        if all(one.poll() == 0 for one in ranks):
            return 0
        time.sleep(0.02)
    first = next(status for one in ranks if (status := one.poll()))
    for one in ranks:
        one.terminate()
    for one in ranks:
        one.wait()
    return first if first > 0 else 128 - first


if __name__ == "__main__":
    sys.exit({"qsub": qsub, "mpiexec": mpiexec}[sys.argv[1]](sys.argv[2:]))
