"""Small corpora with all kinds of input, and functions that run `optimus-data` on them."""

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
"""Text of a document that contains the text of the special token."""


def words(rng: random.Random, count: int) -> str:
    """Return text of `count` words with capitals, digits, accents, other scripts, newlines and runs
    of spaces."""
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
    chunks = [
        rng.choice(stock) if rng.random() < 0.3 else "".join(rng.choices("abcdefgh", k=5))
        for _ in range(count)
    ]
    return " ".join(chunks)


def write_corpus(folder: Path, seed: int = 0) -> None:
    """Write a source tree, JSON lines and gzip files: 300 documents, 90 kB."""
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
    """Return arguments of `optimus-data run` with which the run has several units of work and
    several shards."""
    return [
        *("run", "--input", str(folder), "--tokenizer", str(tokenizer), "--out", str(out)),
        *("--context", str(CONTEXT), "--eval-fraction", "0.15", "--seed", "5", "--workers", "1"),
        *("--unit-size", "6000", "--shard-size", "8192", *more),
    ]


def write_sentencepiece(path: Path, sentences: list[str]) -> None:
    """Train a small sentencepiece model. Skip the test if the package is not installed."""
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
    """Return a dict that maps the relative path of each file in `folder` and its subfolders to the
    content."""
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def refused(capsys, arguments: Sequence[str], *needles: str) -> str:
    """Assert that a command exits with 2, and that it prints a single error line, which contains
    all of `needles`. Return the line."""
    capsys.readouterr()
    assert main(arguments) == 2, arguments
    lines = [line for line in capsys.readouterr().err.splitlines() if "optimus-data" in line]
    assert len(lines) == 1 and lines[0].startswith("optimus-data: error: "), lines
    assert all(needle in lines[0] for needle in needles), lines
    return lines[0]


def in_child(work: Callable[[], int]) -> int:
    """Call `work` in a forked process, which exits with the result of `work`. Return the exit
    status, or minus the number of the signal that ended the process."""
    pid = os.fork()
    if pid == 0:
        status = 99
        try:
            status = work()
        finally:
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def measured(arguments: Sequence[str]) -> tuple[int, int, str]:
    """Run `optimus-data` in a new process. Return exit status, peak memory in bytes, and standard
    error.

    The peak is VmHWM in /proc/self/status. `ru_maxrss` would include the memory of the process that
    forked the new process.
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
    """Return the peak memory in bytes of a command that succeeds."""
    status, peak, error = measured(arguments)
    assert status == 0, error
    return peak


def run_killed_at(arguments: Sequence[str], commit: int, before: bool) -> int:
    """Run a command in a child process that kills itself before or after it commits file number
    `commit` by a rename. Return the exit status, or minus the number of the signal."""

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
    arguments: Sequence[str], observe: Callable[[], int] = lambda: 0, commits: int = 8
) -> tuple[int, int]:
    """Repeat a command, and kill each run, until a run ends without a kill. No work is then left,
    and the command runs once more.

    The first `commits` runs are killed before the rename of a commit: run n before the rename of
    commit n. The next `commits` runs are killed after the rename of the same commits. Then this
    sequence begins again. `observe` is called after each killed run.

    Returns:
        (number of killed runs, largest result of `observe`).
    """
    kills = largest = 0
    while status := run_killed_at(arguments, 1 + kills % commits, kills // commits % 2 == 0):
        assert status == -signal.SIGKILL
        kills, largest = kills + 1, max(largest, observe())
    assert main(arguments) == 0
    return kills, largest


def shards(dataset: Path) -> np.ndarray:
    """Return all rows of the shards of a data set, [N, C], read with numpy only."""
    names = sorted((dataset / "shards").glob("*.npy"))
    return np.concatenate([np.load(name, mmap_mode="r") for name in names])


def documents(folder: Path) -> Iterator[tuple[str, int, str]]:
    """Yield (file, line number, text) of each document of a corpus."""
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
