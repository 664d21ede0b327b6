#!/usr/bin/env python3
"""Train on every layout of up to 8 ranks and hold each run against one process.

    python scripts/drills/layouts.py [--out layouts.jsonl] [--pairs] [--only TEXT] [--first N]

All factorisations over pp, dp, ep and tp, with every schedule, model, dtype and batch of
`tests/kit/layouts/matrix.py`. The promise of deterministic mode for a layout decides on its run.
Results are added to --out line by line, and cases that it contains are not run again: give the same
command to continue. Exit status 0: every promise was kept. A case that breaks its promise prints
the command that runs it alone.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from contextlib import closing
from pathlib import Path

from results import Results

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
os.environ.setdefault("OMP_NUM_THREADS", "1")

from tests.kit.layouts.matrix import Case, Outcome, agree, all_cases, pairwise, run_case  # noqa: E402
from tests.kit.ranks.pool import RankPool, RanksFailed  # noqa: E402


def main() -> int:
    args = _arguments()
    results = Results(args.out)
    done = {record["case"]: record for record in results.records}
    everything = pairwise(all_cases()) if args.pairs else all_cases()
    cases = [case for case in everything if args.only in str(case)]
    # those that share a run of one process stand together
    cases.sort(key=lambda case: (case.model, case.dtype, case.batch, case[:4]))
    left = [case for case in cases if str(case) not in done][: args.first or None]
    print(f"{len(cases)} cases, {len(cases) - len(left)} done or put off, {len(left)} to do")
    known: dict[str, Outcome] = {}
    with tempfile.TemporaryDirectory() as scratch, closing(RankPool(scratch)) as pool:
        for number, case in enumerate(left, 1):
            record = done[str(case)] = results.add(**_judge(pool, case, known))
            print(f"{number}/{len(left)} {case}: {record['broken'] or 'holds'}", flush=True)
            if record["broken"]:
                print(f"    again: python scripts/drills/layouts.py --out - --only {case}")
    return _sum_up([done[str(case)] for case in cases if str(case) in done])


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", default="layouts.jsonl", help="results; - for none")
    parser.add_argument("--only", default="", help="cases whose name holds this text")
    parser.add_argument("--pairs", action="store_true", help="the sample that the tests run")
    parser.add_argument("--first", type=int, default=0, help="stop after so many; 0: all")
    return parser.parse_args()


def _judge(pool: RankPool, case: Case, known: dict[str, Outcome]) -> dict:
    start = time.monotonic()
    record = {"case": str(case), "exact": case.is_exact}

    def run(size: int, tree: dict) -> Outcome:
        return pool.run(size, run_case, tree, start_world=False, timeout_s=300)[0]

    def alone(tree: dict) -> Outcome:
        key = repr(tree)
        if key not in known:
            if len(known) > 1:  # the usual and the gentle; hundreds of gradients would not fit
                known.pop(next(iter(known)))
            known[key] = run(1, tree)
        return known[key]

    try:
        agreement = agree(case, run, alone)
    except RanksFailed as error:
        return record | {"broken": [f"it did not run: {error}"]}
    return record | agreement._asdict() | {"s": time.monotonic() - start}


def _sum_up(records: list[dict]) -> int:
    broken = [record["case"] for record in records if record["broken"]]
    ran = [record for record in records if "gradient_error" in record]
    exact = [record for record in ran if record["exact"]]
    near = [record for record in ran if not record["exact"]]
    print(f"{len(exact)} layouts to be bit-identical, {len(near)} within 1e-5")
    if near:
        print(f"  largest error of a gradient {max(r['gradient_error'] for r in near):.1e}")
        print(f"  largest error of a loss     {max(r['loss_error'] for r in near):.1e}")
        print(f"  of an auxiliary loss        {max(r['aux_error'] for r in near):.1e}")
    turned, ties = (sum(r[key] for r in ran) for key in ("turned", "near_ties"))
    widest = max((r["widest"] for r in ran), default=0.0)
    print(f"  near-ties {ties}; tokens that turned {turned}, the widest gap {widest:.1e}")
    adamw = sum(bool(r.get("by_adamw")) for r in ran)
    print(f"  layouts whose tokens turned behind an update, and hold with eps = 1e-5: {adamw}")
    print(f"broken: {len(broken)}" + "".join(f"\n  {name}" for name in broken))
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
