#!/usr/bin/env python3
"""Kill runs of optimus-data many times, resume them, and check that the output is byte-identical.

    python scripts/drills/data_kill.py --kills 100 [--workers 2] [--world 1] [--seed 0]

The drill first prepares a data set from a corpus without kills. Then the drill prepares the same
data set repeatedly, and kills the main process, a worker, or all processes of the command by
SIGKILL at random moments. When a run ends without a kill, the output of this run is compared with
the first output, and the next run writes to a new directory. Exit status 0: the number of kills was
reached, all outputs were byte-identical, and after each kill every file that is not temporary had
its final content.
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
    """Settings of `optimus-data run`, the command that the drill kills."""

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

    def start(self, out: Path, rank: int = 0) -> subprocess.Popen[bytes]:
        """Start the process of one rank of the command, in a new session, and return the
        process."""
        return subprocess.Popen(
            self.command(out, rank),
            cwd=ROOT,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )


def write_corpus(folder: Path, files: int, words: int, rng: random.Random) -> None:
    """Write `files` files to `folder`, each with 10 random texts and about `words` words. The
    formats of successive files alternate between plain text, JSON lines and compressed JSON
    lines."""
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
    """Return a dict that maps the relative path of each file in `folder`, except hidden files, to
    the content of the file."""
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file() and not path.name.startswith(".")
    }


def differences(out: Path, expected: dict[str, bytes], whole: bool) -> list[str]:
    """Return the relative paths of the files in `out` with unexpected content. Hidden files and
    files in the folders for temporary data (spill) are ignored.

    Args:
        out: Directory of the output.
        expected: The expected content of all files, by relative path.
        whole: If true, also return the paths of expected files that do not exist in `out`.
    """
    files = tree(out) if out.exists() else {}
    wrong = [
        name
        for name, content in files.items()
        if not name.startswith(("spill/", "eval/spill/")) and expected.get(name) != content
    ]
    return wrong + (sorted(expected.keys() - files.keys()) if whole else [])


def kill(process: subprocess.Popen[bytes], rng: random.Random) -> str:
    """At random, kill the main process of the command, a worker process, or all processes of the
    command. Return the killed processes: "command", "worker" or "all"."""
    target = rng.choice(("command", "command", "worker", "all"))
    children = children_of(process.pid)
    if target == "worker" and children:
        os.kill(rng.choice(children), signal.SIGKILL)
    elif target == "all":
        os.killpg(process.pid, signal.SIGKILL)
    else:
        target = "command"
        process.kill()
    process.wait()
    return target


def start_and_kill(drill: Drill, out: Path, limit_s: float, rng: random.Random) -> str:
    """Start all ranks of the command, and kill each rank at a random moment within `limit_s`
    seconds, unless the rank ends earlier. Return the result of the last call of `kill` ("command",
    "worker" or "all"); "" if all ranks ended before they were killed."""
    ranks = [drill.start(out, rank) for rank in range(drill.world)]
    target = ""
    for process in ranks:
        try:
            status = process.wait(rng.random() * limit_s)
            assert status == 0, f"a run that was not killed ended with exit status {status}"
        except subprocess.TimeoutExpired:
            target = kill(process, rng)
    return target


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--world", type=int, default=1)
    parser.add_argument("--strategy", default="gather")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--files", type=int, default=300)
    parser.add_argument(
        "--longest", type=float, default=0.5, help="latest kill, as a fraction of a run's duration"
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
        whole_start = time.monotonic()
        unbroken = [drill.start(Path(base, "unbroken"), rank) for rank in range(args.world)]
        assert [process.wait() for process in unbroken] == [0] * args.world
        whole_s, expected = time.monotonic() - whole_start, tree(Path(base, "unbroken"))
        print(f"without kills: {whole_s:.1f} s, {len(expected)} files", flush=True)
        kills: Counter[str] = Counter()
        cycle, out = 1, Path(base, "out1")
        while kills.total() < args.kills:
            target = start_and_kill(drill, out, args.longest * whole_s, rng)
            if wrong := differences(out, expected, whole=not target):
                print(f"WRONG: missing or different files after {kills.total()} kills: {wrong[:5]}")
                return 1
            if target:
                kills[target] += 1
            else:
                cycle, out = cycle + 1, Path(base, f"out{cycle + 1}")
            if kills.total() % 10 == 0 and target:
                print(f"{kills.total()} kills, output {cycle}", flush=True)
        last = [drill.start(out, rank) for rank in range(args.world)]
        assert [process.wait() for process in last] == [0] * args.world
        wrong = differences(out, expected, whole=True)
        wrong += [path.name for path in out.rglob(".*")]  # temporary files
    print(
        f"{kills.total()} kills ({', '.join(f'{n} of {k}' for k, n in kills.items())}), {cycle} "
        f"outputs, {time.monotonic() - start:.0f} s: "
        + (f"WRONG {wrong[:10]}" if wrong else "all byte-identical")
    )
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
