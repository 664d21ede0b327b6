#!/usr/bin/env python3
"""Mutate files of all formats that Optimus reads, and check the commands that read these files.

    python scripts/drills/hostile_files.py --cases 20000 | --every-field
        [--seed S] [--jobs 2] [--only FORMAT] [--case K] [--out findings.jsonl]

A case is a file with a mutation, and a command that reads the file. tests/kit/faults/judge.py draws
the cases at random. Together, --seed, --only and the number of a case determine the case. With
--every-field, the cases are not random: each field of each format gets each wrong value in turn. A
finding is a case in which the command breaks a rule of judge.py, for example by a traceback.
Findings are appended to --out, with the seed and the number of the case; `--case K` repeats case K
and prints its output. The table at the end contains, for each format, the number of cases with each
outcome. Exit status 0: no finding.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "kernels")]
os.environ |= {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "OPTIMUS_IPEX": "0"}

from tests.kit.faults.arena import Arena  # noqa: E402
from tests.kit.faults.formats import Format  # noqa: E402
from tests.kit.faults.judge import all_cases, describe, draw  # noqa: E402

_PROGRESS_S = 5.0
_OUTCOMES = ("refused", "same", "other", "finding")


def main() -> int:
    args = _arguments()
    with tempfile.TemporaryDirectory(dir=args.dir, ignore_cleanup_errors=True) as folder:
        arena = Arena(Path(folder))
        start = time.monotonic()
        arena.prepare()
        print(f"samples ready in {time.monotonic() - start:.1f} s", flush=True)
        formats = [entry for entry in arena.formats if args.only.lower() in entry.name.lower()]
        if not formats:
            names = ", ".join(entry.name for entry in arena.formats)
            print(f"--only {args.only}: no such format; use one of {names}", file=sys.stderr)
            return 2
        return _drill(arena, formats, args)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", type=int, default=1000, help="number of cases (default: 1000)")
    parser.add_argument("--every-field", action="store_true", help="change each field in turn")
    parser.add_argument("--seed", type=int, default=0, help="seed of the cases (default: 0)")
    parser.add_argument("--jobs", type=int, default=2, help="number of workers (default: 2)")
    parser.add_argument("--only", default="", help="only formats whose name contains this text")
    parser.add_argument("--case", type=int, help="run only this case, and print its output")
    parser.add_argument("--out", default="-", help="file of the findings, in JSON lines; -: none")
    parser.add_argument(
        "--dir", default="/dev/shm", help="directory of the files (default: /dev/shm)"
    )
    args = parser.parse_args()
    if not os.path.isdir(args.dir):
        args.dir = None
    return args


def _drill(arena: Arena, formats: list[Format], args: argparse.Namespace) -> int:
    if args.every_field:
        cases = all_cases(formats, arena.samples)
        if args.case is not None:
            cases = itertools.islice(cases, args.case, args.case + 1)
    else:
        numbers = range(args.cases) if args.case is None else [args.case]
        cases = (draw(args.seed, number, formats, arena.samples) for number in numbers)
    counts: dict[str, Counter[str]] = {entry.name: Counter() for entry in formats}
    kinds: Counter[tuple[str, str]] = Counter()
    start = last_report = time.monotonic()
    done = 0
    for case, verdict in arena.run(cases, args.jobs):
        done += 1
        counts[case.format.name][verdict.outcome] += 1
        if verdict.outcome == "finding":
            record = describe(case, verdict)
            kinds[case.format.name, verdict.kind] += 1
            if kinds[case.format.name, verdict.kind] <= 3:
                print(f"case {case.number}, {case.format.name}: {verdict.kind}", flush=True)
            if args.out != "-":
                with open(args.out, "a", encoding="utf-8") as file:
                    print(json.dumps(record), file=file)
        if args.case is not None:
            print(json.dumps(describe(case, verdict), indent=1))
            print(verdict.output)
        if time.monotonic() - last_report > _PROGRESS_S:
            last_report = time.monotonic()
            rate = done / (last_report - start)
            print(f"{done} cases, {rate:.1f}/s, findings: {kinds.total()}", flush=True)
    _sum_up(counts, done, time.monotonic() - start)
    return 1 if kinds else 0


def _sum_up(counts: dict[str, Counter[str]], done: int, seconds: float) -> None:
    print(f"{'format':<28}{'cases':>7}" + "".join(f"{name:>9}" for name in _OUTCOMES))
    for name, outcomes in counts.items():
        row = "".join(f"{outcomes[outcome]:>9}" for outcome in _OUTCOMES)
        print(f"{name:<28}{outcomes.total():>7}{row}")
    total = sum(counts.values(), Counter())
    summary = ", ".join(f"{outcome} {total[outcome]}" for outcome in _OUTCOMES)
    print(f"{done} cases in {seconds:.1f} s, {done / max(seconds, 1e-9):.1f}/s: {summary}")
    print(f"findings: {total['finding']}")


if __name__ == "__main__":
    sys.exit(main())
