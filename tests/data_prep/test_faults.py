"""Full and read-only disks, flipped bits, cut files, a short drill of kills."""

from __future__ import annotations

import os
import random
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from data_prep.cli import main
from data_prep.verify import verify
from optimus import files
from tests.data_prep.corpus import in_child, run_arguments, tree

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def small_disk(tmp_path):
    """A tmpfs and a way to set its size; skips where this user may not mount."""
    place = tmp_path / "disk"
    place.mkdir()

    def mount(options: str) -> bool:
        command = ["mount", "-t", "tmpfs", "-o", options, "none", str(place)]
        return subprocess.run(command, capture_output=True).returncode == 0

    if shutil.which("mount") is None or os.geteuid() != 0 or not mount("size=16k"):
        pytest.skip("only root may mount a tmpfs; test_identity limits the size of files instead")
    yield place, lambda size: mount(f"remount,size={size}k") or pytest.fail("cannot remount")
    subprocess.run(["umount", str(place)], check=True)


@pytest.mark.parametrize("strategy", ["gather", "bucket"])
def test_a_full_disk_leaves_no_wrong_file(made, small_disk, strategy, capsys):
    """It fills up at one step after the other; each time the message says so."""
    place, resize = small_disk
    out, expected = place / "data", tree(made.data)
    arguments = run_arguments(made.text, made.tokenizer, out, "--strategy", strategy)
    failures, size = 0, 16
    while status := main(arguments):
        assert status == 1
        error = capsys.readouterr().err.splitlines()[-1]
        assert error.startswith(f"optimus-data: error: {place}") and "No space left" in error
        for name, content in tree(out).items():
            assert files.is_temporary(name) or "spill" in name or expected[name] == content, name
        assert not (out / "manifest.json").exists()
        failures, size = failures + 1, size + 36
        resize(size)
    assert failures >= 5
    assert tree(out) == expected


def test_a_full_disk_with_two_workers(made, small_disk, capfd):
    place, resize = small_disk
    out = place / "data"
    arguments = run_arguments(made.text, made.tokenizer, out, "--workers", "2")
    resize(100)
    assert in_child(lambda: main(arguments)) == 1
    error = capfd.readouterr().err.splitlines()[-1]
    assert error.startswith(f"optimus-data: error: {place}") and "No space left" in error
    resize(4000)
    assert main(arguments) == 0
    assert tree(out) == tree(made.data)


def test_a_read_only_disk_is_refused(made, tmp_path, small_disk, capsys):
    place, _ = small_disk
    remount = ["mount", "-o", "remount,ro", str(place)]
    subprocess.run(remount, check=True)
    assert main(run_arguments(made.text, made.tokenizer, place / "data")) == 2
    assert f"--out '{place / 'data'}' cannot be made: Read-only" in capsys.readouterr().err
    assert main(run_arguments(made.text, made.tokenizer, place)) == 2
    assert "may not be written to" in capsys.readouterr().err


def test_random_flips_and_cuts_are_found(made, tmp_path):
    """One bit, one byte lost from the end, a stretch set to zero, bytes exchanged: anywhere."""
    copy, rng = tmp_path / "data", random.Random(7)
    shutil.copytree(made.data, copy)
    everything = tree(copy)
    names = sorted(everything)
    total = [len(everything[name]) for name in names]
    for turn in range(160):
        name = rng.choice(names) if turn % 2 else rng.choices(names, total)[0]
        content, damaged = everything[name], bytearray(everything[name])
        place = rng.randrange(len(content))
        how = rng.choice(("flip", "flip", "flip", "cut", "zero", "swap"))
        if how == "flip":
            damaged[place] ^= 1 << rng.randrange(8)
        elif how == "cut":
            del damaged[place:]
        elif how == "zero":
            damaged[place : place + 512] = bytes(len(damaged[place : place + 512]))
        else:
            other = rng.randrange(len(content))
            damaged[place], damaged[other] = damaged[other], damaged[place]
        if damaged == content:
            continue
        (copy / name).write_bytes(damaged)
        assert any(str(copy) in line for line in verify(copy)), (how, name, place)
        (copy / name).write_bytes(content)
    assert list(verify(copy)) == []


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="reads /proc")
def test_the_drill_of_kills_in_short():
    drill = ROOT / "scripts" / "drills" / "data_kill.py"
    command = [sys.executable, str(drill), "--kills", "4", "--files", "40"]
    command += ["--world", "2", "--workers", "1", "--strategy", "bucket"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "all byte-identical" in done.stdout
