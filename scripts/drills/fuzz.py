#!/usr/bin/env python3
"""Train random models on random layouts, interrupt them, and hold each against one process.

    python scripts/drills/fuzz.py [--minutes M] [--seed S] [--out fuzz.jsonl] [--case JSON]

Cases are drawn by tests/kit/faults/fuzz.py. Results are added to --out line by line, and the draw
goes on behind those that stand there: give the same command to go on. A case that fails is made
simpler while it goes on failing; the command that runs it alone is printed. At the end: how many
cases, which choices were met how often, what failed. Exit status 0: every promise held.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shlex
import sys
import tempfile
import time
from collections import Counter
from contextlib import closing
from pathlib import Path

from results import Results

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
os.environ.setdefault("OMP_NUM_THREADS", "1")

from tests.kit.faults.fuzz import Bench, Case, axes, draw, is_legal, shrink  # noqa: E402
from tests.kit.ranks.pool import RankPool  # noqa: E402


def main() -> int:
    args = _arguments()
    with tempfile.TemporaryDirectory() as folder, closing(RankPool(folder)) as pool:
        bench = Bench(pool, Path(folder))
        if args.case is None:
            return _drill(bench, args)
        wrong = bench.judge(args.case)
        print(wrong or "every promise holds")
        return 1 if wrong else 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=10.0, help="no new case after these")
    parser.add_argument("--seed", type=int, default=0, help="of the draw")
    parser.add_argument("--out", default="fuzz.jsonl", help="results; - for none")
    parser.add_argument(
        "--shrink-s", type=float, default=300.0, help="for making a failure simpler"
    )
    parser.add_argument("--case", type=_case, help="run this one alone")
    return parser.parse_args()


def _case(text: str) -> Case:
    """The simplest case with these choices."""
    given = json.loads(text)
    case = {axis: choices[0] for axis, choices in axes().items()}
    if unknown := set(given) - set(case):
        raise argparse.ArgumentTypeError(f"no axes of a case: {', '.join(sorted(unknown))}")
    case |= {axis: tuple(c) if isinstance(c, list) else c for axis, c in given.items()}
    if not is_legal(case):
        raise argparse.ArgumentTypeError("the case is not a legal run")
    return case


def _drill(bench: Bench, args: argparse.Namespace) -> int:
    results = Results(args.out)
    records = [record for record in results.records if record["seed"] == args.seed]
    end = time.monotonic() + 60 * args.minutes
    while time.monotonic() < end:
        number = len(records)
        case = draw(random.Random(f"{args.seed} {number}"))
        start = time.monotonic()
        wrong = bench.judge(case)
        record = {"seed": args.seed, "number": number, "case": case, "wrong": wrong}
        record["s"] = time.monotonic() - start
        if wrong:
            print(f"case {number}: {wrong}", flush=True)
            record["simplest"] = shrink(bench.judge, case, args.shrink_s)
            print(f"    again: {command(record['simplest'])}", flush=True)
        records.append(results.add(**record))
    return _sum_up(records)


def command(case: Case) -> str:
    """What runs a case alone: the choices that are not the simplest."""
    given = {axis: case[axis] for axis, choices in axes().items() if case[axis] != choices[0]}
    return f"python scripts/drills/fuzz.py --case {shlex.quote(json.dumps(given))}"


def _sum_up(records: list[dict]) -> int:
    print(f"{len(records)} cases in {sum(record['s'] for record in records) / 60:.0f} minutes")
    for axis, choices in axes().items():
        met = Counter(json.dumps(record["case"][axis]) for record in records)
        counts = [f"{choice!r} {met[json.dumps(choice)]}" for choice in choices]
        print(f"  {axis}: {', '.join(counts)}")
    wrong = [record for record in records if record["wrong"]]
    print(f"failed: {len(wrong)}")
    for record in wrong:
        print(f"  {record['number']}: {record['wrong'].splitlines()[0]}")
        print(f"    {command(record['simplest'])}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
