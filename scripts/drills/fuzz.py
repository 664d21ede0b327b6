#!/usr/bin/env python3
"""Train random models on random layouts with interruptions, and compare with runs on one process.

    python scripts/drills/fuzz.py [--minutes M] [--seed S] [--out fuzz.jsonl] [--case JSON]

A case has a model, a batch, and two layouts. A run under the first layout is ended early, for
example by a kill, and a run under the second layout resumes from the checkpoint of the first run.
tests/kit/faults/fuzz.py draws the cases at random. Results are appended to --out; the same command
continues after the last result. If a case fails, it is reduced to a simpler case that also fails,
and the command for the simpler case is printed. The summary contains the number of cases, the
frequency of each value of each setting, and the failures. Exit status 0: all results agree with the
runs on one process.
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

from tests.kit.faults.fuzz import Case, CaseRunner, axes, draw, is_legal, shrink  # noqa: E402
from tests.kit.ranks.pool import RankPool  # noqa: E402


def main() -> int:
    args = _arguments()
    with tempfile.TemporaryDirectory() as folder, closing(RankPool(folder)) as pool:
        runner = CaseRunner(pool, Path(folder))
        if args.case is None:
            return _drill(runner, args)
        failure = runner.judge(args.case)
        print(failure or "passed")
        return 1 if failure else 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=10.0, help="time limit for new cases")
    parser.add_argument("--seed", type=int, default=0, help="seed of the cases")
    parser.add_argument("--out", default="fuzz.jsonl", help="file of the results; -: none")
    parser.add_argument(
        "--shrink-s", type=float, default=300.0, help="time limit to reduce a case that fails"
    )
    parser.add_argument("--case", type=_case, help="run only this case")
    return parser.parse_args()


def _case(text: str) -> Case:
    """Return the case that `text`, a JSON object, describes. The keys of the object are axes
    (settings of a case), such as "dtype". An axis that is missing in the object gets its first,
    simplest choice."""
    chosen = json.loads(text)
    case = {axis: choices[0] for axis, choices in axes().items()}
    if unknown := set(chosen) - set(case):
        raise argparse.ArgumentTypeError(
            f"unknown axes of a case: {', '.join(sorted(unknown))}; use the axes in "
            "tests/kit/faults/fuzz.py"
        )
    case |= {axis: tuple(c) if isinstance(c, list) else c for axis, c in chosen.items()}
    if not is_legal(case):
        raise argparse.ArgumentTypeError(
            "this case is not legal: Optimus rejects one of its runs, or its results cannot be "
            "compared with those of a single process; change the case"
        )
    return case


def _drill(runner: CaseRunner, args: argparse.Namespace) -> int:
    results = Results(args.out)
    records = [record for record in results.records if record["seed"] == args.seed]
    end = time.monotonic() + 60 * args.minutes
    while time.monotonic() < end:
        number = len(records)
        case = draw(random.Random(f"{args.seed} {number}"))
        start = time.monotonic()
        failure = runner.judge(case)
        record = {"seed": args.seed, "number": number, "case": case, "wrong": failure}
        record["s"] = time.monotonic() - start
        if failure:
            print(f"case {number}: {failure}", flush=True)
            record["simplest"] = shrink(runner.judge, case, args.shrink_s)
            print(f"    to repeat: {command(record['simplest'])}", flush=True)
        records.append(results.add(**record))
    return _sum_up(records)


def command(case: Case) -> str:
    """Return the shell command that runs only `case`. The JSON object in the command contains only
    axes (settings of a case) with a value other than their first choice."""
    chosen = {axis: case[axis] for axis, choices in axes().items() if case[axis] != choices[0]}
    return f"python scripts/drills/fuzz.py --case {shlex.quote(json.dumps(chosen))}"


def _sum_up(records: list[dict]) -> int:
    print(f"{len(records)} cases in {sum(record['s'] for record in records) / 60:.0f} minutes")
    for axis, choices in axes().items():
        drawn = Counter(json.dumps(record["case"][axis]) for record in records)
        counts = [f"{choice!r} {drawn[json.dumps(choice)]}" for choice in choices]
        print(f"  {axis}: {', '.join(counts)}")
    failures = [record for record in records if record["wrong"]]
    print(f"failed: {len(failures)}")
    for record in failures:
        print(f"  {record['number']}: {record['wrong'].splitlines()[0]}")
        print(f"    {command(record['simplest'])}")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
