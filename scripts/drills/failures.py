#!/usr/bin/env python3
r"""Cause failures of ranks, agents, nodes and supervisors of `optimus launch`; check each run.

    python scripts/drills/failures.py [--case NAME] [--runs N] [--seed S] [--results FILE]
    python scripts/drills/failures.py --sequences N [--seed S] [--results FILE]
    scripts/drills/slurm.sh --networks --nodes 5 -- \
        python scripts/drills/failures.py --launcher srun [--case NAME | --sequences N]

Nodes are emulated on this machine: each emulated node is an agent process and the ranks that the
agent starts. With --launcher srun, the nodes belong to a real Slurm installation, each node has a
separate network, and each launch is a Slurm job. Each run trains a tiny model on 2 nodes of 2
ranks. The drill causes one fault of `tests/kit/faults/failures.py::CASES` (with srun:
`tests/kit/faults/slurm.py::CASES`) at a random step of the run. With --sequences, the drill causes
several random faults, each of them after the run has recovered from the previous fault. After the
run, the drill checks that

- the losses and norms of all steps are equal to the values of an unbroken run, and each step
  appears once;
- the right nodes were excluded or suspected, and the right buffer nodes replaced them;
- the number of restarts of training, the exit status and the verdict are right;
- every checkpoint is complete and finite;
- no process of the run remains.

With --results FILE, for example tests/results/failures_local.jsonl, the results are appended to
FILE. A later command continues after the last run in FILE, and prints the number of faults in all
runs of FILE. Exit status 0: all runs of this command have passed the checks.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import sys
import tempfile
from collections import Counter
from pathlib import Path

from results import Results

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "kernels")]

from tests.kit.faults import failure_runs, failures, slurm  # noqa: E402
from tests.kit.faults.supervised import Allocation, Launch, References  # noqa: E402
from tests.kit.runs.tiny import make_tiny_data  # noqa: E402


def main() -> int:
    """Do the runs that the command line selects. Return the exit status: 0 if all runs of this
    command have passed the checks, else 1."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--case", action="append", help="name of a case; may be repeated (default: all)"
    )
    parser.add_argument("--launcher", choices=("local", "srun"), default="local")
    parser.add_argument("--runs", type=int, default=1, help="runs of each case (default: 1)")
    parser.add_argument(
        "--sequences", type=int, default=0, help="runs with several faults (default: 0)"
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of the first run (default: 0)")
    parser.add_argument("--results", default="-", help="file of the results; -: none")
    parser.add_argument(
        "--work", type=Path, help="folder for the runs; default: a temporary folder"
    )
    args = parser.parse_args()
    # A shell starts a background process with SIGINT ignored. Without this line, the runs would
    # inherit the ignored signal.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    cases, allocation, launch_type = failures.CASES, None, Launch
    if args.launcher == "srun":
        if "SLURM_DRILL" not in os.environ:
            parser.error(
                "--launcher srun: start the drill by "
                "scripts/drills/slurm.sh --networks --nodes 5 -- COMMAND"
            )
        cases, allocation = slurm.CASES, Allocation(slurm.NAMES, launcher="srun")
        launch_type = slurm.SlurmLaunch
    names = args.case or cases
    if unknown := {*names} - {*cases}:
        parser.error(f"--case: unknown {', '.join(sorted(unknown))}; use {', '.join(cases)}")
    results = Results(args.results)
    done = {(record["case"], record["seed"]) for record in results.records}
    work = args.work or Path(tempfile.mkdtemp(prefix="failures-"))
    work.mkdir(parents=True, exist_ok=True)
    if not (work / "data").exists():
        make_tiny_data(work)
    references, failed = References(work, work / "data"), 0
    for seed in range(args.seed, args.seed + (args.sequences or args.runs)):
        for name in ["sequence"] if args.sequences else names:
            if (name, seed) in done:
                continue
            record = results.add(
                **failure_runs.run_sequence(
                    references,
                    seed,
                    allocation,
                    names=args.case or (),
                    cases=cases,
                    launch_type=launch_type,
                )
                if args.sequences
                else failure_runs.run_case(
                    references, name, seed, allocation, cases=cases, launch_type=launch_type
                )
            )
            failed += bool(record["problems"])
            verdict = "; ".join(record["problems"]) or "right"
            faults = f"{len(record['faults'])} faults, " if args.sequences else ""
            print(f"{name} {seed}: {faults}{record['seconds']} s, {verdict}", flush=True)
            if not record["problems"]:
                shutil.rmtree(work / f"{name}-{seed}")
    total = Counter(fault for record in results.records for fault in record["faults"])
    print(", ".join(f"{name} {number}" for name, number in sorted(total.items())))
    print(f"{total.total()} faults in {len(results.records)} runs; {failed} new runs are wrong")
    if not failed and args.work is None:
        shutil.rmtree(work)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
