#!/usr/bin/env python3
"""Let ranks, agents, nodes and supervisors of `optimus launch` fail, and check each run.

    python scripts/drills/failures.py [--case NAME] [--runs N] [--seed S] [--results FILE]

Nodes are emulated on this machine: an agent and its ranks are a node. Each run trains a tiny model
on 2 nodes of 2 ranks with 2 buffer nodes, and gets one fault of
`tests/kit/faults/failures.py::CASES` at a random step. After the run, the drill checks that

- the losses and norms of all steps equal those of an unbroken run, and each step appears once;
- the right node was excluded or suspected, or none;
- the exit status and the verdict are right;
- every checkpoint is complete;
- no process of the run remains.

With --results, a later command continues after the last run of FILE. Exit status 0: all runs are
right.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
from pathlib import Path

from results import Results

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "kernels")]

from tests.kit.faults.failures import CASES, run_case, train_unbroken  # noqa: E402
from tests.kit.runs.tiny import make_tiny_data  # noqa: E402


def main() -> int:
    """Run the drill."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--case", choices=sorted(CASES), action="append")
    parser.add_argument("--runs", type=int, default=1, help="runs of each case (1)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the first run (0)")
    parser.add_argument("--results", default="-", help="file with the results; -: none")
    parser.add_argument("--work", type=Path, help="folder for the runs; default: a temporary one")
    args = parser.parse_args()
    results = Results(args.results)
    done = {(record["case"], record["seed"]) for record in results.records}
    work = args.work or Path(tempfile.mkdtemp(prefix="failures-"))
    work.mkdir(parents=True, exist_ok=True)
    if not (data := work / "data").exists():
        make_tiny_data(work)
    expected = train_unbroken(work, data)
    failed = 0
    for seed in range(args.seed, args.seed + args.runs):
        for name in args.case or CASES:
            if (name, seed) in done:
                continue
            record = results.add(**run_case(work, data, name, seed, expected))
            failed += bool(record["problems"])
            verdict = "; ".join(record["problems"]) or "right"
            print(f"{name} {seed}: {record['seconds']} s, {verdict}", flush=True)
            if not record["problems"]:
                shutil.rmtree(work / f"{name}-{seed}")
    print(f"{failed} of the runs are wrong")
    if not failed and args.work is None:
        shutil.rmtree(work)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
