"""Tests of runs on full and on read-only disks, and a short drill in which runs are killed."""

from __future__ import annotations

from pathlib import Path

import pytest

from data_prep.cli import main
from optimus.io import files
from tests.data_prep.corpus import in_child, refused, run_arguments, tree
from tests.kit.faults.disk import small_disk
from tests.kit.ranks.processes import ROOT, python


@pytest.fixture
def disk(tmp_path):
    """Mount a file system of 16 kB. Return (path of the file system, function that remounts the
    file system with other options)."""
    with small_disk(tmp_path / "disk", "16k") as remount:
        yield tmp_path / "disk", remount


@pytest.mark.parametrize("strategy", ["gather", "bucket"])
def test_a_full_disk_leaves_no_wrong_file(made, disk, strategy, capsys):
    """After each failure the test makes the disk larger, so that the next run fails at a later step
    or succeeds."""
    mount, remount = disk
    out, expected = mount / "data", tree(made.data)
    arguments = run_arguments(made.text, made.tokenizer, out, "--strategy", strategy)
    failures, size = 0, 16
    while status := main(arguments):
        assert status == 1
        error = capsys.readouterr().err.splitlines()[-1]
        assert error.startswith(f"optimus-data: error: {mount}") and "No space left" in error
        for name, content in tree(out).items():
            assert files.is_temporary(name) or "spill" in name or expected[name] == content, name
        assert not (out / "manifest.json").exists()
        failures, size = failures + 1, size + 36
        remount(f"size={size}k")
    assert failures >= 5
    assert tree(out) == expected


def test_full_disk_with_two_workers_is_an_error(made, disk, capfd):
    mount, remount = disk
    out = mount / "data"
    arguments = run_arguments(made.text, made.tokenizer, out, "--workers", "2")
    remount("size=100k")
    assert in_child(lambda: main(arguments)) == 1
    error = capfd.readouterr().err.splitlines()[-1]
    assert error.startswith(f"optimus-data: error: {mount}") and "No space left" in error
    remount("size=4000k")
    assert main(arguments) == 0
    assert tree(out) == tree(made.data)


def test_a_read_only_disk_is_refused(made, disk, capsys):
    mount, remount = disk
    remount("ro")
    error = refused(capsys, run_arguments(made.text, made.tokenizer, mount / "data"))
    assert f"--out '{mount / 'data'}' cannot be made: Read-only" in error
    refused(capsys, run_arguments(made.text, made.tokenizer, mount), "is not writable")


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="needs /proc (Linux)")
def test_drill_of_kills_passes_with_four_kills():
    drill = ROOT / "scripts" / "drills" / "data_kill.py"
    command = ["--kills", "4", "--files", "40", "--workers", "2", "--strategy", "bucket"]
    done = python(str(drill), *command)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "all byte-identical" in done.stdout
