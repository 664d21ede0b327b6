#!/usr/bin/env python3
"""Train on all layouts of up to 8 ranks, and compare each run with a run on one process.

    python scripts/drills/layouts.py [--out layouts.jsonl] [--pairs] [--only TEXT] [--first N]

The layouts are all divisions of the ranks into pp, dp, ep and tp, combined with the schedules,
models, dtypes and batches of `tests/kit/layouts/matrix.py`. Without ep and tp, a run must have the
same bits as the run on one process; with ep or tp, errors up to 1e-5 are allowed. Results are
appended to --out; the same command continues after the last result. If a case fails, the command
that runs only this case is printed. Exit status 0: no case failed.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from contextlib import closing
from pathlib import Path
from typing import Any

from results import Results

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
os.environ.setdefault("OMP_NUM_THREADS", "1")

from tests.kit.layouts.matrix import (  # noqa: E402
    Case,
    Outcome,
    all_cases,
    check_case,
    pairwise,
    run_case,
)
from tests.kit.ranks.pool import RankPool, RanksFailed  # noqa: E402


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", default="layouts.jsonl", help="file of the results; -: none")
    parser.add_argument("--only", default="", help="only cases whose name contains this text")
    parser.add_argument("--pairs", action="store_true", help="only the cases of the tests")
    parser.add_argument("--first", type=int, default=0, help="number of cases to run; 0: all")
    args = parser.parse_args()
    results = Results(args.out)
    done = {record["case"]: record for record in results.records}
    cases = pairwise(all_cases()) if args.pairs else all_cases()
    cases = [case for case in cases if args.only in str(case)]
    # Cases that are compared with the same run on one process follow each other.
    cases.sort(key=lambda case: (case.model, case.dtype, case.batch, case[:4]))
    remaining = [case for case in cases if str(case) not in done][: args.first or None]
    print(f"{len(cases)} cases, {len(remaining)} to do now")
    known: dict[str, Outcome] = {}
    with tempfile.TemporaryDirectory() as scratch, closing(RankPool(scratch)) as pool:
        for number, case in enumerate(remaining, 1):
            record = done[str(case)] = results.add(**_run(pool, case, known))
            print(f"{number}/{len(remaining)} {case}: {record['broken'] or 'passed'}", flush=True)
            if record["broken"]:
                print(f"    to repeat: python scripts/drills/layouts.py --out - --only {case}")
    return _sum_up([done[str(case)] for case in cases if str(case) in done])


def _run(pool: RankPool, case: Case, known: dict[str, Outcome]) -> dict[str, Any]:
    """Run a case, compare the outcome of the case with the outcome of a run on one process, and
    return the result as a record. `known` is a cache of the outcomes of runs on one process."""
    start = time.monotonic()
    record = {"case": str(case), "exact": case.is_exact}

    def run(size: int, tree: dict[str, Any]) -> Outcome:
        outcome: Outcome
        outcome = pool.run(size, run_case, tree, start_world=False, timeout_s=300)[0]
        return outcome

    def run_alone(tree: dict[str, Any]) -> Outcome:
        key = repr(tree)
        if key not in known:
            # Keep the outcomes of only two runs, one with the default eps and one with the large
            # eps. The gradients of all runs would not fit in memory.
            if len(known) > 1:
                known.pop(next(iter(known)))
            known[key] = run(1, tree)
        return known[key]

    try:
        agreement = check_case(case, run, run_alone)
    except RanksFailed as error:
        return record | {"broken": [f"the run failed: {error}"]}
    return record | agreement._asdict() | {"s": time.monotonic() - start}


def _sum_up(records: list[dict[str, Any]]) -> int:
    broken = [record["case"] for record in records if record["broken"]]
    ran = [record for record in records if "gradient_error" in record]
    exact = [record for record in ran if record["exact"]]
    near = [record for record in ran if not record["exact"]]
    print(f"layouts compared bit for bit: {len(exact)}; with a tolerance of 1e-5: {len(near)}")
    if near:
        print(f"  largest error of a gradient {max(r['gradient_error'] for r in near):.1e}")
        print(f"  largest error of a loss     {max(r['loss_error'] for r in near):.1e}")
        print(f"  largest error of an auxiliary loss {max(r['aux_error'] for r in near):.1e}")
    rerouted, ties = (sum(r[key] for r in ran) for key in ("rerouted", "near_ties"))
    max_gap = max((r["max_gap"] for r in ran), default=0.0)
    print(f"  near-ties {ties}; rerouted tokens {rerouted}, largest gap {max_gap:.1e}")
    adamw = sum(bool(r.get("by_adamw")) for r in ran)
    print(f"  passed only with optim.eps = 1e-5 (tokens rerouted after an update): {adamw}")
    print(f"broken: {len(broken)}" + "".join(f"\n  {name}" for name in broken))
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
