"""Small corpora of every kind that is read, and the ways to run `optimus-data` on them."""

from __future__ import annotations

import gzip
import json
import os
import random
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest

from data_prep.cli import main
from tests.kit.ranks.processes import ROOT

CONTEXT = 16
EOS = "<|endoftext|>"
SPECIAL = f"a {EOS} b{EOS}{EOS}"
"""A document whose text spells the special token."""


def words(rng: random.Random, count: int) -> str:
    """Text with capitals, digits, accents, other scripts, newlines and runs of blanks."""
    stock = [
        "def",
        "return",
        "self.x",
        "été",
        "übung",
        "Ωμέγα",
        "漢字",
        "🙂",
        "1234",
        "  ",
        "\n\t",
        "x=",
    ]
    parts = [
        rng.choice(stock) if rng.random() < 0.3 else "".join(rng.choices("abcdefgh", k=5))
        for _ in range(count)
    ]
    return " ".join(parts)


def write_corpus(folder: Path, seed: int = 0) -> None:
    """A source tree, JSON lines and gzip files; some 300 documents, 90 kB."""
    rng = random.Random(seed)
    (folder / "tree" / "deep").mkdir(parents=True)
    for number in range(40):
        name = folder / "tree" / ("deep" if number % 3 else "") / f"m{number:02d}.py"
        name.write_bytes((words(rng, rng.randint(5, 120)) + "\r\n").encode())
    (folder / "tree" / "__init__.py").write_bytes(b"")
    (folder / "tree" / "special.txt").write_bytes(SPECIAL.encode())
    for name, opener in (("a.jsonl", open), ("b.jsonl.gz", gzip.open), ("c.json.gz", gzip.open)):
        with opener(folder / name, "wt", encoding="utf-8", newline="\n") as file:
            for number in range(80):
                text = "" if number == 7 else words(rng, rng.randint(1, 70))
                text = SPECIAL if number == 11 else text
                file.write(
                    json.dumps({"id": f"{name}-{number}", "text": text})
                    + "\n" * (1 + (number == 20))
                )
    with gzip.open(folder / "d.txt.gz", "wt", encoding="utf-8") as file:
        file.write(words(rng, 200))


def train_arguments(folder: Path, out: Path, vocab_size: int = 400) -> list[str]:
    return [
        *("train-tokenizer", "--input", str(folder), "--out", str(out)),
        *("--vocab-size", str(vocab_size)),
    ]


def run_arguments(folder: Path, tokenizer: Path, out: Path, *more: str) -> list[str]:
    """`run` with so small units and shards that there are several of each."""
    return [
        *("run", "--input", str(folder), "--tokenizer", str(tokenizer), "--out", str(out)),
        *("--context", str(CONTEXT), "--eval-fraction", "0.15", "--seed", "5", "--workers", "1"),
        *("--unit-size", "6000", "--shard-size", "8192", *more),
    ]


def write_sentencepiece(path: Path, sentences: list[str]) -> None:
    """Train a small sentencepiece model. Skips where the package is missing."""
    sentencepiece = pytest.importorskip("sentencepiece")
    with open(path, "wb") as file:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(sentences),
            model_writer=file,
            vocab_size=300,
            hard_vocab_limit=False,
            byte_fallback=True,
            minloglevel=2,
        )


def tree(folder: Path) -> dict[str, bytes]:
    """Every file below `folder` with its content."""
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def refused(capsys, arguments: Sequence[str], *told: str) -> str:
    """The command ends with 2, and all that it says beside progress is one line with all of `told`;
    that line."""
    capsys.readouterr()
    assert main(arguments) == 2, arguments
    lines = [line for line in capsys.readouterr().err.splitlines() if "optimus-data" in line]
    assert len(lines) == 1 and lines[0].startswith("optimus-data: error: "), lines
    assert all(needle in lines[0] for needle in told), lines
    return lines[0]


def in_child(work: Callable[[], int]) -> int:
    """`work()`'s exit status, or minus the signal that ended it, in a forked process."""
    pid = os.fork()
    if pid == 0:
        status = 99
        try:
            status = work()
        finally:
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def measured(arguments: Sequence[str]) -> tuple[int, int, str]:
    """`optimus-data` in a process of its own: its exit status, its most bytes, standard error.

    Asked of the kernel by VmHWM: `ru_maxrss` would count what forked the process, too.
    """
    code = (
        "import sys; from data_prep.cli import main; status = main(sys.argv[1:]); "
        "print(open('/proc/self/status').read()); sys.exit(status)"
    )
    words = [sys.executable, "-c", code, *arguments]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True)
    line = next(line for line in done.stdout.splitlines() if line.startswith("VmHWM"))
    return done.returncode, int(line.split()[1]) << 10, done.stderr


def peak_memory(arguments: Sequence[str]) -> int:
    """The most bytes of memory of a command that succeeds."""
    status, peak, error = measured(arguments)
    assert status == 0, error
    return peak


def run_killed_at(arguments: Sequence[str], commit: int, before: bool) -> int:
    """Run in a child that SIGKILLs itself just before or after its `commit`-th rename."""

    def work() -> int:
        from optimus.io import files

        real, count = files.commit, iter(range(1, 1 << 30))

        def commit_or_die(temporary, final):
            last = next(count) == commit
            if last and before:
                os.kill(os.getpid(), signal.SIGKILL)
            real(temporary, final)
            if last:
                os.kill(os.getpid(), signal.SIGKILL)

        files.commit = commit_or_die
        sys.stdout = sys.stderr = open(os.devnull, "w")  # noqa: SIM115
        return main(arguments)

    return in_child(work)


def killed_until_done(
    arguments: Sequence[str], look: Callable[[], int] = lambda: 0, commits: int = 8
) -> tuple[int, int]:
    """Life after life, each killed at its 1st, 2nd, ... 8th commit, before the rename or after,
    until one comes to its end; another finds all done. How many were killed, and the most that
    `look` told between two."""
    kills = most = 0
    while status := run_killed_at(arguments, 1 + kills % commits, kills // commits % 2 == 0):
        assert status == -signal.SIGKILL
        kills, most = kills + 1, max(most, look())
    assert main(arguments) == 0
    return kills, most


def shards(dataset: Path) -> np.ndarray:
    """All rows of a data set's shards, [N, C], without our reader."""
    names = sorted((dataset / "shards").glob("*.npy"))
    return np.concatenate([np.load(name, mmap_mode="r") for name in names])


def documents(folder: Path) -> Iterator[tuple[str, int, str]]:
    """(file, line, text) of every document of a corpus, read in the plainest way there is."""
    for path in sorted(folder.rglob("*"), key=str):
        if path.is_dir():
            continue
        data = path.read_bytes()
        if path.suffix == ".gz":
            data = gzip.decompress(data)
        if ".json" in path.name:
            for line, text in enumerate(data.decode().split("\n"), 1):
                if text:
                    yield str(path), line, json.loads(text)["text"]
        else:
            yield str(path), 0, data.decode()
