#!/usr/bin/env python3
"""Break real runs as they save, again and again, and hold them against an unbroken one.

    python scripts/drills/checkpoint_kill.py random --kills 1000 [--work DIR] [--asynchronous]
    python scripts/drills/checkpoint_kill.py points
    python scripts/drills/checkpoint_kill.py errors
    python scripts/drills/checkpoint_kill.py power

`random`: SIGKILL at random moments, of either rank or both, then the same command again, to the
end. `points`: a death before and behind every file call of a save, and half-way through each write.
`errors`: every call of a save fails (ENOSPC, EIO) or is short; the run must go on. `power`: the
calls of a run are recorded, and the power is cut after each: all that the disk may hold then is
looked at. Results are added to --work line by line, and what stands there is not done again: give
the same command to go on. Exit status 0: a valid checkpoint was always found, nothing of another
step was loaded, and every run ended with the losses and states of the unbroken one, to the bit.
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
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from results import Results

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "kernels")]
os.environ.setdefault("OMP_NUM_THREADS", "1")

from tests.kit.faults import broken_runs, power_check  # noqa: E402
from tests.kit.faults.disk import Breakage, why_not  # noqa: E402
from tests.kit.ranks.pool import RankPool, RanksFailed  # noqa: E402
from tests.kit.runs.results import assert_same_run  # noqa: E402
from tests.kit.runs.tiny import make_tiny_data  # noqa: E402

LONG = {
    "train__max_steps": 40,
    "checkpoint__interval": 2,
    "checkpoint__model_interval": 5,
    "checkpoint__keep_models": 2,
}
"""Of the runs that are killed at random: 20 full checkpoints, 8 models."""


def sum_up(records: Sequence[dict[str, Any]], what: str) -> int:
    """Say it all in a few lines; the exit status."""
    broken = [one for one in records if one.get("broken")]
    seconds = sum(one["s"] for one in records)
    print(f"{len(records)} {what}, {seconds:.0f} s; broken: {len(broken)}")
    for one in broken[:20]:
        print(f"  {one}")
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
    with _scratch(work) as scratch, broken_runs.breaking_pool(scratch) as pool:
        if args.what == "random":
            return kill_at_random(pool, data, work, results, args, settings)
        if args.what == "power":
            return cut_power(pool, data, scratch, args, settings)
        return break_calls(pool, data, scratch, results, args, settings)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=("random", "points", "errors", "power"))
    parser.add_argument("--work", type=Path, default=Path("checkpoint-kill"), help="kept between")
    parser.add_argument("--asynchronous", action="store_true", help="checkpoint.async_save")
    parser.add_argument("--kills", type=int, default=1000, help="of random: in all")
    parser.add_argument("--first", type=int, default=0, help="of points, errors: so many; 0: all")
    parser.add_argument("--samples", type=int, default=10_000, help="of power: whole disks")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


@contextmanager
def _scratch(work: Path) -> Iterator[Path]:
    """A place for what is not kept; what a drill that was interrupted left there goes."""
    scratch = work / "scratch"
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir()
    yield scratch.resolve()
    shutil.rmtree(scratch, ignore_errors=True)


def kill_at_random(
    pool: RankPool,
    data: Path,
    work: Path,
    results: Results,
    args: argparse.Namespace,
    settings: dict[str, Any],
) -> int:
    """Lives of random length, until so many of them have been cut short."""
    unbroken, run = (work.resolve() / name for name in ("unbroken", "run"))
    tree = broken_runs.a_tree(data, run, **LONG, **settings)
    whole_s = _unbroken(pool, broken_runs.a_tree(data, unbroken, **LONG, **settings), work)
    print(f"unbroken: {whole_s:.1f} s; {len(results.records)} lives lived already", flush=True)
    killed = sum(bool(one["killed"]) for one in results.records)
    while killed < args.kills:
        rng = random.Random(f"{args.seed} {len(results.records)}")
        record = results.add(**_life(pool, tree, run, unbroken, whole_s, rng))
        killed += bool(record["killed"])
        if record["broken"]:
            print(f"WRONG: {record}")
            break
        if killed % 20 == 0 and record["killed"]:
            print(f"{killed} kills, at step {record['step']}", flush=True)
    ways = Counter(str(one["killed"]) for one in results.records)
    print(f"killed ranks: {dict(ways)} ([]: a run that came to its end and was compared)")
    steps = Counter(one["step"] % 2 for one in results.records)
    assert not steps[1], "a full checkpoint that nobody asked for"
    return sum_up(results.records, "lives")


def _unbroken(pool: RankPool, tree: dict[str, Any], work: Path) -> float:
    """Make the unbroken run if it is not there; how long one takes."""
    told = work / "unbroken.json"
    if not told.exists():
        for _ in range(2):  # the first starts the pool, too
            shutil.rmtree(tree["train"]["run_dir"], ignore_errors=True)
            begun = time.monotonic()
            assert not broken_runs.live(pool, tree)
        told.write_text(json.dumps(time.monotonic() - begun))
    return json.loads(told.read_text())


def _life(
    pool: RankPool,
    tree: dict[str, Any],
    run: Path,
    unbroken: Path,
    whole_s: float,
    rng: random.Random,
) -> dict[str, Any]:
    """Start the run or go on with it, kill it, look what is left; what became of it."""
    begun, before = time.monotonic(), broken_runs.look(run)
    who, after = rng.choice(((0,), (1,), (0, 1))), rng.random() * whole_s / 2
    ended = broken_runs.live(pool, tree, deaths=dict.fromkeys(who, after), grace_s=0.5)
    killed = [one.rank for one in ended if one.how == "died"]
    broken = ""
    try:
        step = broken_runs.look(run)
        assert step >= before, f"step {step}, though {before} had been there"
        if not ended:
            assert_same_run(run, unbroken)
            shutil.rmtree(run)
    except Exception as error:
        step, broken = -2, repr(error)
    record = {"killed": killed, "after_s": after, "step": step, "broken": broken}
    return record | {"s": time.monotonic() - begun}


def break_calls(
    pool: RankPool,
    data: Path,
    scratch: Path,
    results: Results,
    args: argparse.Namespace,
    settings: dict[str, Any],
) -> int:
    """Every call of one save: deaths, or errors."""
    save = broken_runs.prepare(pool, data, scratch, **settings)
    points = args.what == "points"
    cases = save.cases() if points else save.errors()
    do = broken_runs.break_save if points else broken_runs.fail_save
    done = {one["case"] for one in results.records}
    left = [case for case in cases if _name(case) not in done]
    random.Random(args.seed).shuffle(left)
    left = left[: args.first or None]
    print(f"{len(cases)} cases, {len(done)} done, {len(left)} to do now", flush=True)
    for number, case in enumerate(left, 1):
        begun, broken, outcome = time.monotonic(), "", None
        run = scratch / f"run-{number}"
        try:
            outcome = do(pool, data, run, save, case)
        except (Exception, RanksFailed) as error:
            broken = f"{type(error).__name__}: {error}"
            shutil.rmtree(run, ignore_errors=True)
        seconds = time.monotonic() - begun
        results.add(case=_name(case), outcome=outcome, broken=broken, s=seconds)
        if broken or number % 20 == 0:
            print(f"{number}/{len(left)} {_name(case)}: {broken or 'holds'}", flush=True)
    print(dict(Counter(str(one["outcome"]) for one in results.records)))
    return sum_up(results.records, "cases")


def _name(case: Breakage) -> str:
    span = f"{case.first}" if case.first == case.last else f"{case.first}-{case.last}"
    return f"rank {case.rank} {case.action.name} at {span}"


def cut_power(
    pool: RankPool, data: Path, scratch: Path, args: argparse.Namespace, settings: dict[str, Any]
) -> int:
    """Record a whole run and cut the power after each of its calls."""
    root = scratch / "disk-of-the-run"
    root.mkdir()
    begun = time.monotonic()
    calls = broken_runs.record(pool, data, root, scratch / "power.log", **settings)
    summary = power_check.replay(calls, root, args.samples, args.seed, args.asynchronous)
    faults = summary.faults
    print(f"{vars(summary) | {'faults': len(faults)}}, {time.monotonic() - begun:.0f} s")
    for fault in faults[:20]:
        print(f"  {fault}")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
