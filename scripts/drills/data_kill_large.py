#!/usr/bin/env python3
"""SIGKILL the tokenizing of large files, and see what each kill lost.

    python scripts/drills/data_kill_large.py --work DIR --gigabytes 20 --kills 8 [--to-the-end]

A .txt file, one document, and a .jsonl file of so many GB each are made of the Python sources of
this machine, and tokenized by two workers. After each kill of the whole command the next life must
go on behind the last checkpoint of each file. Lost are the seconds since that checkpoint, and the
seconds that the next life takes until it tokenizes again: it reads the file up to there. With
`--to-the-end` the bytes are compared with those of an unbroken run. DIR keeps the files.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import sysconfig
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from data_kill import tree

ROOT = Path(__file__).resolve().parents[2]
KINDS = ("txt", "jsonl")


def sources() -> list[str]:
    """Python modules of this machine, some 100 MB at most."""
    texts, size = [], 0
    for path in sorted(Path(sysconfig.get_path("stdlib")).rglob("*.py")):
        text = path.read_text(errors="ignore")
        texts.append(text)
        size += len(text)
        if size > 100_000_000:
            break
    return texts


def write_corpus(folder: Path, size: int) -> None:
    """Files of `size` bytes of the same documents, each with its number before it."""
    texts = sources()
    for kind in KINDS:
        path = folder / f"large.{kind}"
        if path.exists() and path.stat().st_size >= size:
            continue
        bodies = [json.dumps(text)[1:-1] if kind == "jsonl" else text for text in texts]
        head, tail = ('{"text": "', '"}\n') if kind == "jsonl" else ("", "\n")
        with open(path, "wb", 1 << 22) as file:
            number = 0
            while file.tell() < size:
                body = bodies[number % len(bodies)]
                file.write(f"{head}Document {number}: {body}{tail}".encode())
                number += 1


def start(folder: Path, tokenizer: Path, out: Path) -> subprocess.Popen:
    words = [sys.executable, "-m", "data_prep.cli", "tokenize", "--input", str(folder)]
    words += ["--tokenizer", str(tokenizer), "--out", str(out), "--workers", "2"]
    with open(out.with_suffix(".log"), "ab") as log:
        return subprocess.Popen(words, cwd=ROOT, stdout=log, stderr=log, start_new_session=True)


def checkpoints(out: Path) -> dict[str, list[Path]]:
    """Those of each unit, in order."""
    found: dict[str, list[Path]] = {}
    for path in sorted((out / "tokens").glob("unit-*.part-*")):
        found.setdefault(path.name.split(".")[0], []).append(path)
    return found


def place_of(checkpoint: Path) -> int:
    """Bytes of its file that a checkpoint has behind it."""
    with open(checkpoint, "rb") as file:
        head = json.loads(file.read(int.from_bytes(file.read(8), "little")))
    return head["state"]["start"]["offset"]


def wait_for_new(
    process: subprocess.Popen, out: Path, before: dict[str, list[Path]], seconds: float
) -> dict[str, float]:
    """Seconds until each unit has a checkpoint that was not there, at most `seconds`."""
    begun, new = time.time(), {}
    while time.time() - begun < seconds and process.poll() is None:
        for unit, parts in checkpoints(out).items():
            if len(parts) > len(before.get(unit, [])) and unit not in new:
                new[unit] = parts[len(before.get(unit, []))].stat().st_mtime - begun
        time.sleep(0.05)
    return new


def lives(
    folder: Path, tokenizer: Path, out: Path, kills: int, longest_s: float, rng: random.Random
) -> Iterator[dict[str, float | str]]:
    """Kill so many times; what each kill lost, file by file. The last life is killed, too."""
    killed_at, before = 0.0, checkpoints(out)
    for number in range(kills + 1):
        places = {unit: place_of(parts[-1]) for unit, parts in before.items()}
        stamps = {path: path.stat().st_mtime for parts in before.values() for path in parts}
        process = start(folder, tokenizer, out)
        new = wait_for_new(process, out, before, rng.uniform(0.5, 1) * longest_s)
        for path, stamp in stamps.items():
            with contextlib.suppress(FileNotFoundError):  # its unit is complete
                assert path.stat().st_mtime == stamp, f"{path} was made a second time"
        for unit, place in places.items():
            yield {
                "kill": float(number),
                "file": KINDS[::-1][int(unit[-1])],
                "resumed_at_MB": place / 1e6,
                "since_checkpoint_s": killed_at - stamps[before[unit][-1]],
                "until_next_checkpoint_s": new.get(unit, float("nan")),
                "between_checkpoints_s": _between(before[unit]),
            }
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            killed_at = time.time()
        process.wait()
        time.sleep(0.5)  # workers die with their parent
        before = checkpoints(out)


def _between(parts: Sequence[Path]) -> float:
    """Seconds between two checkpoints, the median; nan where there is but one."""
    times = [path.stat().st_mtime for path in parts if path.exists()]
    steps = [late - early for early, late in itertools.pairwise(times)]
    return statistics.median(steps) if steps else float("nan")


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--gigabytes", type=float, default=20)
    parser.add_argument("--kills", type=int, default=8)
    parser.add_argument("--longest", type=float, default=60, help="seconds of a life")
    parser.add_argument("--to-the-end", action="store_true")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    folder, tokenizer = args.work / f"text-{args.gigabytes:g}GB", args.work / "t.json"
    folder.mkdir(parents=True, exist_ok=True)
    write_corpus(folder, int(args.gigabytes * 1e9))
    if not tokenizer.exists():
        words = [sys.executable, "-m", "data_prep.cli", "train-tokenizer", "--vocab-size", "8000"]
        words += ["--input", f"{sysconfig.get_path('stdlib')}/[a-m]*.py", "--out", str(tokenizer)]
        subprocess.run(words, cwd=ROOT, check=True)
    out = args.work / f"killed-{args.gigabytes:g}GB"
    rng = random.Random(args.seed)
    for lost in lives(folder, tokenizer, out, args.kills, args.longest, rng):
        shown = {k: v if isinstance(v, str) else round(v, 2) for k, v in lost.items()}
        print(json.dumps(shown), flush=True)
    if not args.to_the_end:
        return 0
    whole, seconds = args.work / f"whole-{args.gigabytes:g}GB", []
    for target in (out, whole):
        begun = time.monotonic()
        assert start(folder, tokenizer, target).wait() == 0, f"see {target}.log"
        seconds.append(time.monotonic() - begun)
    same = tree(out) == tree(whole)
    print(
        f"{args.kills} kills: {'byte-identical' if same else 'WRONG'}; the last life took "
        f"{seconds[0]:.0f} s, the unbroken run {seconds[1]:.0f} s"
    )
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main())
