"""Saving and loading one process's states: what a chunk lacks, other types, what does not fit."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from optimus.checkpoint import load, manager
from optimus.checkpoint.load import load_full, read_whole
from optimus.checkpoint.pieces import Span
from optimus.checkpoint.rank_states import RankStates
from optimus.checkpoint.save import save_full
from optimus.errors import CheckpointError, OptimusError
from tests.helpers import kill_points


def with_a_master_alone(step: int) -> RankStates:
    """The first chunk has no moments, and its master is of two bytes: frozen parameters."""
    states = kill_points.make_states(step)
    first, *others = states.shards
    values = torch.arange(first.chunk.length) + step
    frozen = replace(first, states={"master": values.to(torch.bfloat16)})
    return replace(states, shards=[frozen, *others])


def save(states: RankStates, path: Path) -> None:
    save_full(states, path, "balanced", lambda directory: None, step=1)


def test_a_chunk_may_lack_moments_and_be_of_two_bytes(tmp_path):
    saved, loaded = with_a_master_alone(5), with_a_master_alone(0)
    save(saved, tmp_path / "c")
    manifest = manager.read_manifest(tmp_path / "c")
    manifest.verify()
    assert load_full(loaded, manifest, "broadcast") == ""
    for one, other in zip(saved.shards, loaded.shards, strict=True):
        assert one.states.keys() == other.states.keys()
        for slot in one.chunk.slots:
            where = slice(slot.start, slot.stop)
            for state, flat in one.states.items():
                assert torch.equal(flat[where], other.states[state][where])
    problem = load_full(kill_points.make_states(0), manifest, "broadcast")
    assert problem == f"{tmp_path}/c: the index holds not every state of parameter a"


def test_states_that_are_not_in_host_memory_come_in_bounded_batches(monkeypatch):
    spans = [("master", Span(0, 0, size, ())) for size in (10, 20, 30, 5)]
    monkeypatch.setattr(load, "HOST_BYTES", 120)
    assert [len(batch) for batch in load._batches(spans)] == [2, 1, 1]


def test_parameters_of_another_model_are_named(tmp_path):
    save(kill_points.make_states(1), tmp_path / "c")
    manifest = manager.read_manifest(tmp_path / "c")
    tensors = {name: torch.empty(shape) for name, shape in kill_points.SHAPES.items()}
    read_whole(manifest, tensors)
    wrong = {
        "parameter c has no place": {name: tensors[name] for name in "ab"},
        "parameter d is missing": tensors | {"d": torch.empty(1)},
        r"parameter b has shape \[33\], this model's has \[34\]": tensors | {"b": torch.empty(34)},
    }
    for words, into in wrong.items():
        with pytest.raises(CheckpointError, match=words):
            read_whole(manifest, into)


def test_companions_that_cannot_be_written_leave_nothing(tmp_path):
    def write(directory: Path) -> None:
        raise OSError(28, "No space left on device", str(directory / "config.toml"))

    states = kill_points.make_states(1)
    with pytest.raises(OptimusError, match=r"^c not written: .*config.toml: No space left"):
        save_full(states, tmp_path / "c", "balanced", write, step=1)
    assert list(tmp_path.iterdir()) == []


def test_too_little_room_is_told_before_anything_is_written(tmp_path, monkeypatch):
    free = shutil.disk_usage(tmp_path)._replace(free=3000)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: free)
    with pytest.raises(OptimusError, match=r"step-00000001 not written: .* 0.000 GB free.*room"):
        kill_points.save(tmp_path, 1)
    assert list((tmp_path / "checkpoints").iterdir()) == []


def test_slots_alternate_and_no_mixture_is_ever_read(tmp_path):
    """Shard files of another step, of the same size, in their place."""
    for step in (1, 2, 3):
        kill_points.save(tmp_path, step)
    names = sorted(path.name for path in manager.checkpoints_dir(tmp_path).iterdir())
    assert names == ["step-00000002", "step-00000003"]
    kill_points.look(tmp_path, (3,))
    old, new = (manager.full_path(tmp_path, step) / "shard-00000.bin" for step in (2, 3))
    shutil.copyfile(old, new)
    with pytest.raises(CheckpointError, match="belongs to another checkpoint"):
        manager.read_manifest(new.parent).check()
    assert kill_points.look(tmp_path, (2,)) == 2
