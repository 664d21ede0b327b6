#!/usr/bin/env python3
"""Interrupt saves of training runs, resume the runs, and compare the results with an undisturbed
run.

    python scripts/drills/checkpoint_kill.py random --kills 1000 [--work DIR] [--asynchronous]
    python scripts/drills/checkpoint_kill.py points
    python scripts/drills/checkpoint_kill.py errors
    python scripts/drills/checkpoint_kill.py power

A file call is a system call on a file, such as write or rename. `random` kills rank 0, rank 1 or
both ranks with SIGKILL at random moments, and resumes the run after each kill until the run ends.
`points` kills a rank before and after each file call of a save, and in the middle of each write.
`errors` makes each file call of a save fail (ENOSPC, EIO) or write too few bytes; the run must
continue. `power` records the file calls of a run, simulates a power cut after each call, and
examines the possible states of the disk after the power cut.

Results are appended to a file in --work; the same command continues after the last result. Exit
status 0: there was always a valid checkpoint, no run loaded the states of a wrong step, and each
run ended with the same bits of losses and states as the undisturbed run.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from results import Results

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "kernels")]
os.environ.setdefault("OMP_NUM_THREADS", "1")

from tests.kit.faults import broken_runs, power_check  # noqa: E402
from tests.kit.faults.disk import Breakage, why_not  # noqa: E402
from tests.kit.ranks.pool import RankPool  # noqa: E402
from tests.kit.runs.results import assert_same_run  # noqa: E402
from tests.kit.runs.tiny import make_tiny_data  # noqa: E402

LONG = {
    "train__max_steps": 40,
    "checkpoint__interval": 2,
    "checkpoint__model_interval": 5,
    "checkpoint__keep_models": 2,
}
"""Settings of the runs with random kills. With these settings, a run saves 20 full checkpoints and
8 model-only checkpoints."""


def sum_up(records: Sequence[dict[str, Any]], unit: str) -> int:
    """Print the number of records, the number of records with a failed check (key `broken`), and
    the first 20 records with a failed check. Return the exit status. `unit` is the noun for the
    records in the printed text, such as "cases"."""
    broken = [record for record in records if record.get("broken")]
    seconds = sum(record["s"] for record in records)
    print(f"{len(records)} {unit}, {seconds:.0f} s; broken: {len(broken)}")
    for record in broken[:20]:
        print(f"  {record}")
    return 1 if broken else 0


def main() -> int:
    args = _arguments()
    if why := why_not():
        print(f"checkpoint_kill: {why}", file=sys.stderr)
        return 2
    work = args.work / (args.what + ("-asynchronous" if args.asynchronous else ""))
    work.mkdir(parents=True, exist_ok=True)
    data = args.work / "tiny" / "data"
    if not (data / "manifest.json").exists():
        shutil.rmtree(data.parent, ignore_errors=True)
        make_tiny_data(data.parent)
    settings = {"checkpoint__async_save": True} if args.asynchronous else {}
    results = Results(work / "results.jsonl")
    scratch = work.resolve() / "scratch"
    shutil.rmtree(scratch, ignore_errors=True)  # left by an interrupted drill
    scratch.mkdir()
    with broken_runs.breaking_pool(scratch) as pool:
        if args.what == "random":
            status = kill_at_random(pool, data, work, results, args, settings)
        elif args.what == "power":
            status = cut_power(pool, data, scratch, args, settings)
        else:
            status = break_calls(pool, data, scratch, results, args, settings)
    shutil.rmtree(scratch, ignore_errors=True)
    return status


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=("random", "points", "errors", "power"))
    parser.add_argument(
        "--work", type=Path, default=Path("checkpoint-kill"), help="directory of data and results"
    )
    parser.add_argument("--asynchronous", action="store_true", help="set checkpoint.async_save")
    parser.add_argument("--kills", type=int, default=1000, help="random: number of kills")
    parser.add_argument(
        "--first", type=int, default=0, help="points, errors: number of cases to run; 0: all"
    )
    parser.add_argument(
        "--samples", type=int, default=10_000, help="power: number of random disk states"
    )
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def kill_at_random(
    pool: RankPool,
    data: Path,
    work: Path,
    results: Results,
    args: argparse.Namespace,
    settings: dict[str, Any],
) -> int:
    """Start, kill and resume runs until `args.kills` kills are done. Return the exit status."""
    unbroken, run = (work.resolve() / name for name in ("unbroken", "run"))
    tree = broken_runs.make_tree(data, run, **LONG, **settings)
    whole_s = _unbroken(pool, broken_runs.make_tree(data, unbroken, **LONG, **settings), work)
    print(f"unbroken run: {whole_s:.1f} s; starts so far: {len(results.records)}", flush=True)
    killed = sum(bool(record["killed"]) for record in results.records)
    while killed < args.kills:
        rng = random.Random(f"{args.seed} {len(results.records)}")
        record = results.add(**_start_and_kill(pool, tree, run, unbroken, whole_s, rng))
        killed += bool(record["killed"])
        if record["broken"]:
            print(f"WRONG: {record}")
            break
        if killed % 20 == 0 and record["killed"]:
            print(f"{killed} kills, at step {record['step']}", flush=True)
    kills = Counter(str(record["killed"]) for record in results.records)
    print(f"number of starts by list of killed ranks: {dict(kills)}; [] is a run that ended")
    steps = Counter(record["step"] % 2 for record in results.records)
    assert not steps[1], "a full checkpoint of an odd step, although saves are due at even steps"
    return sum_up(results.records, "starts")


def _unbroken(pool: RankPool, tree: dict[str, Any], work: Path) -> float:
    """Return the duration in seconds of a run without kills. If the duration is not stored in
    `work`, first do this run and store its duration."""
    duration = work / "unbroken.json"
    if not duration.exists():
        for _ in range(2):  # the first run also starts the pool
            shutil.rmtree(tree["train"]["run_dir"], ignore_errors=True)
            start = time.monotonic()
            assert not broken_runs.run_ranks(pool, tree)
        duration.write_text(json.dumps(time.monotonic() - start))
    return float(json.loads(duration.read_text()))


def _start_and_kill(
    pool: RankPool,
    tree: dict[str, Any],
    run: Path,
    unbroken: Path,
    whole_s: float,
    rng: random.Random,
) -> dict[str, Any]:
    """Start or resume the run in `run`, kill ranks at a random moment, and verify all checkpoints.
    If the run ends before the kill, compare the results of the run with `unbroken`, the folder of a
    run without kills. Return a record for Results."""
    start, before = time.monotonic(), broken_runs.newest_step(run)
    victims, after_s = rng.choice(((0,), (1,), (0, 1))), rng.random() * whole_s / 2
    kills = dict.fromkeys(victims, after_s)
    outcomes = broken_runs.run_ranks(pool, tree, kills=kills, grace_s=0.5)
    killed = [outcome.rank for outcome in outcomes if outcome.how == "died"]
    broken = ""
    try:
        step = broken_runs.newest_step(run)
        assert step >= before, f"the newest checkpoint is of step {step}, but was of step {before}"
        if not outcomes:
            assert_same_run(run, unbroken)
            shutil.rmtree(run)
    except Exception as error:
        step, broken = -2, repr(error)
    record = {"killed": killed, "after_s": after_s, "step": step, "broken": broken}
    return record | {"s": time.monotonic() - start}


def break_calls(
    pool: RankPool,
    data: Path,
    scratch: Path,
    results: Results,
    args: argparse.Namespace,
    settings: dict[str, Any],
) -> int:
    """Repeat a save once for each of its file calls, and disturb this file call: kill the rank at
    the call, or let the call fail. Return the exit status."""
    save = broken_runs.record_save(pool, data, scratch, **settings)
    points = args.what == "points"
    cases = save.kills() if points else save.errors()
    break_save: Callable[..., int | str]
    break_save = broken_runs.kill_save if points else broken_runs.fail_save
    done = {record["case"] for record in results.records}
    remaining = [case for case in cases if _name(case) not in done]
    random.Random(args.seed).shuffle(remaining)
    remaining = remaining[: args.first or None]
    print(f"{len(cases)} cases, {len(done)} done, {len(remaining)} to do now", flush=True)
    for number, case in enumerate(remaining, 1):
        start, broken, outcome = time.monotonic(), "", None
        run = scratch / f"run-{number}"
        try:
            outcome = break_save(pool, data, run, save, case)
        except Exception as error:
            broken = f"{type(error).__name__}: {error}"
            shutil.rmtree(run, ignore_errors=True)
        seconds = time.monotonic() - start
        results.add(case=_name(case), outcome=outcome, broken=broken, s=seconds)
        if broken or number % 20 == 0:
            print(f"{number}/{len(remaining)} {_name(case)}: {broken or 'passed'}", flush=True)
    print(dict(Counter(str(record["outcome"]) for record in results.records)))
    return sum_up(results.records, "cases")


def _name(case: Breakage) -> str:
    span = f"{case.first}" if case.first == case.last else f"{case.first}-{case.last}"
    return f"rank {case.rank} {case.action.name} at {span}"


def cut_power(
    pool: RankPool, data: Path, scratch: Path, args: argparse.Namespace, settings: dict[str, Any]
) -> int:
    """Record the file calls of a run, and simulate a power cut after each call. Return the exit
    status."""
    root = scratch / "disk-of-the-run"
    root.mkdir()
    start = time.monotonic()
    calls = broken_runs.record_run(pool, data, root, scratch / "power.log", **settings)
    summary = power_check.replay(calls, root, args.samples, args.seed, args.asynchronous)
    faults = summary.faults
    print(f"{vars(summary) | {'faults': len(faults)}}, {time.monotonic() - start:.0f} s")
    for fault in faults[:20]:
        print(f"  {fault}")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
