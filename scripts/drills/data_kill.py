#!/usr/bin/env python3
"""SIGKILL a run of optimus-data again and again, and see that it ends with the same bytes.

    python scripts/drills/data_kill.py --kills 100 [--workers 2] [--world 1] [--seed 0]

A corpus is made, prepared once in peace, and then prepared under kills at random moments: of the
command, of one of its workers, or of all at once. Where a life ends by itself, its output is
compared and another one begun. Exit status 0: every output was byte-identical, no file of a wrong
content ever stood under a final name, and all kills were made.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from tests.kit.ranks.processes import children_of  # noqa: E402

WORDS = "the of and to in is that for it as was with be by on not he his but at are this été 漢字"


@dataclass
class Drill:
    """What is run and what must come out."""

    corpus: Path
    tokenizer: Path
    workers: int
    world: int
    strategy: str

    def command(self, out: Path, rank: int = 0) -> list[str]:
        words = [sys.executable, "-m", "data_prep.cli", "run", "--input", str(self.corpus)]
        words += ["--tokenizer", str(self.tokenizer), "--out", str(out), "--context", "64"]
        words += ["--workers", str(self.workers), "--eval-fraction", "0.1"]
        words += ["--unit-size", "50KB", "--shard-size", "40KB", "--strategy", self.strategy]
        return [*words, "--rank", str(rank), "--world", str(self.world)]

    def start(self, out: Path, rank: int = 0) -> subprocess.Popen:
        return subprocess.Popen(
            self.command(out, rank),
            cwd=ROOT,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )


def write_corpus(folder: Path, files: int, words: int, rng: random.Random) -> None:
    """JSON lines, gzip and plain text."""
    folder.mkdir()
    stock = WORDS.split()
    for number in range(files):
        texts = [" ".join(rng.choices(stock, k=rng.randint(0, 2 * words // 10))) for _ in range(10)]
        if number % 3 == 0:
            (folder / f"{number:03d}.txt").write_text("\n".join(texts))
            continue
        opener, ending = (open, "jsonl") if number % 3 == 1 else (gzip.open, "json.gz")
        with opener(folder / f"{number:03d}.{ending}", "wt") as file:
            for text in texts:
                file.write(json.dumps({"text": text}) + "\n")


def tree(folder: Path) -> dict[str, bytes]:
    """Every file but those that no reader looks at."""
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file() and not path.name.startswith(".")
    }


def differences(out: Path, expected: dict[str, bytes], whole: bool) -> list[str]:
    """Files under final names that are not as they must be; `whole`: none may lack either."""
    found = tree(out) if out.exists() else {}
    wrong = [
        name
        for name, content in found.items()
        if not name.startswith(("spill/", "eval/spill/")) and expected.get(name) != content
    ]
    return wrong + (sorted(expected.keys() - found.keys()) if whole else [])


def kill(process: subprocess.Popen, rng: random.Random) -> str:
    """Kill the command, a worker, or all; how it was done."""
    how = rng.choice(("command", "command", "worker", "all"))
    children = children_of(process.pid)
    if how == "worker" and children:
        os.kill(rng.choice(children), signal.SIGKILL)
    elif how == "all":
        os.killpg(process.pid, signal.SIGKILL)
    else:
        how = "command"
        process.kill()
    process.wait()
    return how


def life(drill: Drill, out: Path, longest_s: float, rng: random.Random) -> str:
    """Start all ranks, kill each at a random moment; how the first one ended ("" by itself)."""
    ranks = [drill.start(out, rank) for rank in range(drill.world)]
    ends = ""
    for process in ranks:
        try:
            status = process.wait(rng.random() * longest_s)
            assert status == 0, f"a run ended with {status} and was not killed"
        except subprocess.TimeoutExpired:
            ends = kill(process, rng)
    return ends


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--world", type=int, default=1)
    parser.add_argument("--strategy", default="gather")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--files", type=int, default=300)
    parser.add_argument(
        "--longest", type=float, default=0.5, help="of a life, in times of the run in peace"
    )
    args = parser.parse_args(argv)
    rng, start = random.Random(args.seed), time.monotonic()
    with tempfile.TemporaryDirectory(prefix="data-kill-") as base:
        drill = Drill(
            Path(base, "text"), Path(base, "t.json"), args.workers, args.world, args.strategy
        )
        write_corpus(drill.corpus, args.files, 2000, rng)
        train = [sys.executable, "-m", "data_prep.cli", "train-tokenizer", "--vocab-size", "300"]
        train += ["--input", str(drill.corpus), "--out", str(drill.tokenizer)]
        subprocess.run(train, cwd=ROOT, check=True, capture_output=True)
        begun = time.monotonic()
        peaceful = [drill.start(Path(base, "peace"), rank) for rank in range(args.world)]
        assert [process.wait() for process in peaceful] == [0] * args.world
        whole_s, expected = time.monotonic() - begun, tree(Path(base, "peace"))
        print(f"in peace: {whole_s:.1f} s, {len(expected)} files", flush=True)
        how: Counter[str] = Counter()
        cycle, out = 1, Path(base, "out1")
        while sum(how.values()) < args.kills:
            ended = life(drill, out, args.longest * whole_s, rng)
            if wrong := differences(out, expected, whole=not ended):
                print(f"WRONG after {sum(how.values())} kills: {wrong[:5]}")
                return 1
            if ended:
                how[ended] += 1
            else:
                cycle, out = cycle + 1, Path(base, f"out{cycle + 1}")
            if sum(how.values()) % 10 == 0 and ended:
                print(f"{sum(how.values())} kills, output {cycle}", flush=True)
        last = [drill.start(out, rank) for rank in range(args.world)]
        assert [process.wait() for process in last] == [0] * args.world
        wrong = differences(out, expected, whole=True)
        left = [path.name for path in out.rglob(".*")]
    print(
        f"{sum(how.values())} kills ({', '.join(f'{n} of {k}' for k, n in how.items())}), {cycle} "
        f"outputs, {time.monotonic() - start:.0f} s: "
        + (f"WRONG {wrong[:5]} {left[:5]}" if wrong or left else "all byte-identical")
    )
    return 1 if wrong or left else 0


if __name__ == "__main__":
    sys.exit(main())
