"""Tests that a run loads the older of two checkpoints if any file of the newer checkpoint is
damaged."""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest

from optimus.checkpoint import store
from optimus.checkpoint.load import load_full
from tests.kit.faults.disk import flip_bit, lengthen, truncate, zero
from tests.kit.runs import saves

FLIPS = int(os.environ.get("OPTIMUS_TEST_FLIPS", "1000"))


@pytest.fixture
def run_dir(tmp_path) -> Path:
    for step in (1, 2):
        saves.save(tmp_path, step)
    return tmp_path


def load_as_a_run_does(run_dir: Path) -> int:
    """Load the newest undamaged checkpoint, check the loaded states, and return the step of the
    checkpoint."""
    damaged = {}
    while True:
        start = store.decide_start(run_dir, "auto", damaged)
        states = saves.make_states(0)
        if not (problem := load_full(states, start.full, "broadcast")):
            break
        damaged[start.full.path] = problem
    for shard in states.shards:
        for slot in shard.chunk.slots:
            for flat in shard.states.values():
                assert (flat[slot.start : slot.stop] == start.step).all()
    return start.step


@pytest.mark.parametrize(
    ("damage", "times"),
    [(flip_bit, FLIPS), (truncate, 100), (zero, 100), (lengthen, 20)],
    ids=["flip", "cut", "zero", "lengthen"],
)
def test_after_any_damage_to_any_file_the_older_checkpoint_is_loaded(
    run_dir, capsys, damage, times
):
    newest, generator = store.full_path(run_dir, 2), random.Random(damage.__name__)
    files = sorted(newest.iterdir())
    assert {path.name for path in files} == {
        "manifest.json",
        "index.jsonl",
        "shard-00000.bin",
        "config.toml",
    }
    for _ in range(times):
        path = generator.choice(files)
        whole = path.read_bytes()
        content = bytearray(whole)
        damage(content, generator)
        path.write_bytes(content)
        assert store.newest_valid(run_dir).step == 1, path.name
        assert "step-00000002" in capsys.readouterr().err
        # A run does not read the padding in a shard file, and so does not detect damage of the
        # padding.
        assert load_as_a_run_does(run_dir) == 1 or path.name == "shard-00000.bin"
        capsys.readouterr()
        path.write_bytes(whole)
    assert store.newest_valid(run_dir).step == 2 == load_as_a_run_does(run_dir)


def test_a_missing_file_is_damage_too(run_dir):
    for path in sorted(store.full_path(run_dir, 2).iterdir()):
        whole = path.read_bytes()
        path.unlink()
        assert store.newest_valid(run_dir).step == 1 == load_as_a_run_does(run_dir)
        path.write_bytes(whole)


def test_files_of_the_other_checkpoint_are_detected(run_dir):
    old, new = (store.full_path(run_dir, step) for step in (1, 2))
    for path in sorted(new.iterdir()):
        whole = path.read_bytes()
        path.write_bytes((old / path.name).read_bytes())
        assert store.newest_valid(run_dir).step == 1, path.name
        assert store.decide_start(run_dir, "auto").step == 1, path.name
        path.write_bytes(whole)
