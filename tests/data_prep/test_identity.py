"""Runs write the same bytes with any number of workers and kills. A run in the directory of a data
set with other inputs or options is refused."""

from __future__ import annotations

import os
import resource
import shutil
import signal
import subprocess
import sys

import pytest

from data_prep.cli import main
from data_prep.pipeline.verify import verify
from optimus.io import files
from tests.data_prep.corpus import (
    in_child,
    killed_until_done,
    refused,
    run_arguments,
    train_arguments,
    tree,
)
from tests.kit.ranks.processes import ROOT


@pytest.mark.parametrize("workers", [2, 3])
def test_bytes_do_not_depend_on_workers(made, tmp_path, workers):
    out = tmp_path / "data"
    arguments = run_arguments(made.text, made.tokenizer, out, "--workers", str(workers))
    assert main(arguments) == 0
    assert tree(out) == tree(made.data)


def test_run_on_a_finished_data_set_changes_nothing(made):
    before = {path: path.stat().st_mtime_ns for path in made.data.rglob("*") if path.is_file()}
    assert main(run_arguments(made.text, made.tokenizer, made.data)) == 0
    after = {path: path.stat().st_mtime_ns for path in made.data.rglob("*") if path.is_file()}
    assert after == before


def test_kills_at_each_commit_change_no_byte(made, tmp_path):
    """A unit of work has six commits. A run that is killed before the sixth commit does not
    complete the unit, and the next run makes the unit again."""
    out = tmp_path / "data"

    def damages() -> int:
        return (out / "manifest.json").exists() and len(list(verify(out)))

    kills, worst = killed_until_done(run_arguments(made.text, made.tokenizer, out), damages)
    assert kills >= 24 and worst == 0
    assert tree(out) == tree(made.data), "no temporary file is left"


def test_two_concurrent_runs_write_the_same_bytes(made, tmp_path):
    out = tmp_path / "data"
    command = [sys.executable, "-m", "data_prep.cli"]
    command += run_arguments(made.text, made.tokenizer, out)
    both = [subprocess.Popen(command, cwd=ROOT, stdout=-3, stderr=-3) for _ in range(2)]
    assert [process.wait() for process in both] == [0, 0]
    assert main(run_arguments(made.text, made.tokenizer, out)) == 0
    assert tree(out) == tree(made.data)


def test_limit_of_file_size_leaves_no_wrong_file(made, tmp_path, capfd):
    """The limit of the file size acts as a full disk: a write in the middle of a file fails."""
    out = tmp_path / "data"
    arguments = run_arguments(made.text, made.tokenizer, out, "--shard-size", "100000")

    def limited() -> int:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (40_000, 40_000))
        return main(arguments)

    assert in_child(limited) == 1
    error = capfd.readouterr().err.splitlines()[-1]
    assert error.startswith("optimus-data: error: ") and "File too large" in error
    assert not (out / "manifest.json").exists()
    whole = tmp_path / "whole"
    assert main(run_arguments(made.text, made.tokenizer, whole, "--shard-size", "100000")) == 0
    expected = tree(whole)
    for name, content in tree(out).items():
        assert files.is_temporary(name) or expected[name] == content
    assert main(arguments) == 0
    assert tree(out) == expected


@pytest.fixture
def finished(made, tmp_path):
    """Return a corpus, a tokenizer and a data set, which the test can change."""
    text, tokenizer, out = tmp_path / "text", tmp_path / "tokenizer.json", tmp_path / "data"
    shutil.copytree(made.text, text)
    shutil.copy(made.tokenizer, tokenizer)
    assert main(run_arguments(text, tokenizer, out)) == 0
    return text, tokenizer, out


def test_changed_inputs_are_refused(finished, capsys):
    text, tokenizer, out = finished
    arguments, victim = run_arguments(text, tokenizer, out), text / "tree" / "deep" / "m01.py"
    before, original = tree(out), victim.read_bytes()
    status = victim.stat()
    victim.write_bytes(b"X" + original[1:])  # size and time are the same
    os.utime(victim, ns=(status.st_atime_ns, status.st_mtime_ns))
    refused(capsys, arguments, "m01.py", "changed since")
    victim.write_bytes(original + b"more")
    refused(capsys, arguments, "m01.py", f"of {len(original)} bytes, now {len(original) + 4}")
    victim.unlink()
    refused(capsys, arguments, "m01.py", "not among the inputs now")
    victim.write_bytes(original)
    (text / "new.txt").write_text("new")
    refused(capsys, arguments, "new.txt", "not among them")
    (text / "new.txt").unlink()
    assert main(arguments) == 0
    assert tree(out) == before


@pytest.mark.parametrize(
    ("more", "needle"),
    [
        (["--context", "32"], "context = 16, now 32"),
        (["--seed", "6"], "seed = 5, now 6"),
        (["--eval-fraction", "0.2"], "eval_fraction = 0.15, now 0.2"),
        (["--eval-fraction", "0"], "eval_fraction = 0.15, now 0.0"),
        (["--text-field", "id"], "text_field = text, now id"),
        (["--unit-size", "7000"], "--unit-size"),
        (["--shard-size", "4096"], "instances_per_shard = 256, now 128"),
        (["--carry-tails"], "carry_tails = False, now True"),
    ],
)
def test_changed_parameters_are_refused(made, capsys, more, needle):
    before = tree(made.data)
    arguments = run_arguments(made.text, made.tokenizer, made.data, *more)
    refused(capsys, arguments, needle, str(made.data))
    assert tree(made.data) == before


def test_a_changed_tokenizer_is_refused(made, tmp_path, capsys):
    assert main(train_arguments(made.text, tmp_path / "other.json", 300)) == 0
    arguments = run_arguments(made.text, tmp_path / "other.json", made.data)
    refused(capsys, arguments, "tokenizer sha256")


def test_missing_and_damaged_files_are_made_again(finished):
    text, tokenizer, out = finished
    before = tree(out)
    (out / "shards" / "shard-00001.npy").unlink()
    (out / "tokens" / "unit-00002.json").unlink()
    (out / "eval" / "tokens" / "unit-00000.docs.npy").write_bytes(b"short")
    (out / "manifest.json").unlink()
    files.temporary_name(out / "left").write_bytes(b"of a killed run")
    foreign = out / "tokens" / ".mine.tmp"
    foreign.write_bytes(b"of another program")
    os.utime(foreign, (0, 0))
    assert main(run_arguments(text, tokenizer, out)) == 0
    assert foreign.read_bytes() == b"of another program"
    foreign.unlink()
    assert tree(out) == before
