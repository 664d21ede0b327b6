"""Tests of commands whose output pipe is closed, and of the name of the tokenizer's copy in a data
set."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys

import pytest

from data_prep.cli import main
from optimus.data.tokenizer import TextTokenizer, tokenizer_path
from tests.data_prep.corpus import run_arguments, tree, write_sentencepiece
from tests.kit.ranks.processes import ROOT


def run_into_closed_pipe(words: list[str]) -> tuple[int, str]:
    """Return exit status and standard error of a command whose standard output is a closed pipe."""
    read, write = os.pipe()
    os.close(read)
    command = [sys.executable, "-m", "data_prep.cli", *words]
    done = subprocess.run(command, cwd=ROOT, stdout=write, stderr=subprocess.PIPE, text=True)
    os.close(write)
    return done.returncode, done.stderr


@pytest.mark.parametrize(
    "words", [["--help"], ["inspect", "DIR", "0"], ["stats", "DIR"], ["verify", "DIR", "--json"]]
)
def test_closed_pipe_ends_a_command_without_an_error(made, words):
    status, error = run_into_closed_pipe([str(made.data) if w == "DIR" else w for w in words])
    # A shell reports status 141 for a program that SIGPIPE ended. With --help, argparse ignores the
    # error.
    assert status == 141 or (words == ["--help"] and status == 0)
    assert not [line for line in error.splitlines() if "rror" in line or "xception" in line], error


def test_mistake_is_printed_with_a_closed_pipe(made):
    status, error = run_into_closed_pipe(["inspect", "nowhere", "0"])
    assert status == 2 and "nowhere is not a directory" in error


def test_sentencepiece_model_keeps_its_suffix(made, tmp_path, capsys):
    model = tmp_path / "spm.model"
    write_sentencepiece(model, ["abc def ghi jkl mno été"] * 20)
    out, old = tmp_path / "out", tmp_path / "old"
    assert main(run_arguments(made.text, model, out)) == 0
    for folder in (out, out / "eval"):
        assert (folder / "tokenizer.model").read_bytes() == model.read_bytes()
        assert not (folder / "tokenizer.json").exists()
    assert tokenizer_path(out) == out / "tokenizer.model"
    ids = TextTokenizer(tokenizer_path(out)).encode("abc été")
    assert TextTokenizer(tokenizer_path(out)).decode(ids) == "abc été"
    assert main(["verify", str(out)]) == 0 and main(["inspect", str(out), "1"]) == 0

    shutil.copytree(out, old)  # with the name in an earlier version
    for folder in (old, old / "eval"):
        (folder / "tokenizer.model").rename(folder / "tokenizer.json")
    before = tree(old)
    assert main(["verify", str(old)]) == 0 and main(["inspect", str(old), "1"]) == 0
    (old / "shards" / "shard-00000.json").unlink()
    (old / "tokens" / "unit-00001.json").unlink()
    assert main(run_arguments(made.text, model, old)) == 0
    assert tree(old) == before, "a run keeps the name of the copy"
    to = tmp_path / "to"
    assert main(["shuffle", str(old), "--context", "8", "--to", str(to)]) == 0
    assert (to / "tokenizer.model").exists()
