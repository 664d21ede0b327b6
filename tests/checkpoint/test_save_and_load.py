"""Tests of saving and loading the states of a process: frozen chunks, other shapes, damage."""

from __future__ import annotations

import os
import shutil
import threading
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from optimus.checkpoint import load, store
from optimus.checkpoint import save as save_module
from optimus.checkpoint.load import load_full
from optimus.checkpoint.save import FullSaver, RankStates
from optimus.checkpoint.slices import StateSlice
from optimus.errors import CheckpointError, OptimusError
from tests.kit.runs import saves
from tests.kit.runs.results import read_whole


def with_a_master_alone(step: int) -> RankStates:
    """Return states in which the first chunk is frozen: the chunk has a bf16 master and no
    moments."""
    states = saves.make_states(step)
    first, *others = states.shards
    values = torch.arange(first.chunk.length) + step
    frozen = replace(first, states={"master": values.to(torch.bfloat16)})
    return replace(states, shards=[frozen, *others])


def save(states: RankStates, path: Path) -> None:
    saves.save_full(states, path, step=1)


def test_a_frozen_chunk_without_moments_is_saved_and_loaded(tmp_path):
    saved, loaded = with_a_master_alone(5), with_a_master_alone(0)
    settings = {"optim.frozen": ["*"]}
    saves.save_full(saved, tmp_path / "c", step=1, settings=settings)
    manifest = store.read_manifest(tmp_path / "c")
    manifest.verify()
    assert load_full(loaded, manifest, "broadcast") == ""
    for shard, other in zip(saved.shards, loaded.shards, strict=True):
        assert shard.states.keys() == other.states.keys()
        for slot in shard.chunk.slots:
            elements = slice(slot.start, slot.stop)
            for state, flat in shard.states.items():
                assert torch.equal(flat[elements], other.states[state][elements])
    problem = load_full(saves.make_states(0), manifest, "broadcast")
    assert problem == f"{tmp_path}/c: the checkpoint lacks moments of parameter a"


def test_device_states_are_read_in_bounded_batches(monkeypatch):
    slices = [("master", StateSlice(0, 0, size, ())) for size in (10, 20, 30, 5)]
    monkeypatch.setattr(load, "HOST_BYTES", 120)
    assert [len(batch) for batch in load._batches(slices)] == [2, 1, 1]


def test_parameters_of_another_model_are_named(tmp_path):
    save(saves.make_states(1), tmp_path / "c")
    manifest = store.read_manifest(tmp_path / "c")
    tensors = {name: torch.empty(shape) for name, shape in saves.SHAPES.items()}
    read_whole(manifest, tensors)
    wrong = {
        "tensor c does not exist in this model": {name: tensors[name] for name in "ab"},
        "tensor d is missing": tensors | {"d": torch.empty(1)},
        r"tensor b has shape \[33\], but this model needs \[34\]": tensors | {"b": torch.empty(34)},
    }
    for words, into in wrong.items():
        with pytest.raises(CheckpointError, match=words):
            read_whole(manifest, into)


@pytest.mark.parametrize("harm", ["cut", "another"])
def test_a_damaged_shard_file_is_not_committed(tmp_path, harm):
    """A save checks the header and the size of each shard file before the commit. If a file is
    damaged, the save fails, and earlier checkpoints remain."""
    for step in (1, 2):
        saves.save(tmp_path, step)

    def write(directory: Path) -> None:
        saves.write_config(directory)
        shard = directory / "shard-00000.bin"
        if harm == "cut":
            os.truncate(shard, shard.stat().st_size - 1)
        else:
            shutil.copyfile(store.full_path(tmp_path, 2) / shard.name, shard)

    messages = {
        "cut": r"shard-00000.bin: the file has \d+ bytes, but the index says \d+",
        "another": "belongs to another checkpoint",
    }
    with pytest.raises(OptimusError, match=messages[harm]):
        states = saves.make_states(3)
        saves.save_full(states, store.full_path(tmp_path, 3), write, step=3)
    names = sorted(path.name for path in store.checkpoints_dir(tmp_path).iterdir())
    assert names == ["step-00000001", "step-00000002"]


def test_an_unexpected_error_at_the_start_of_a_save_is_raised_on_all_ranks(tmp_path, monkeypatch):
    monkeypatch.setattr(FullSaver, "_plan", object())
    monkeypatch.setattr(save_module, "create_files", lambda directory, plan: 1 / 0)
    with pytest.raises(
        OptimusError, match="step-00000001 not written: ZeroDivisionError: division"
    ):
        saves.save(tmp_path, 1)
    assert list((tmp_path / "checkpoints").iterdir()) == []


def test_a_hanging_directory_is_reported_in_time(tmp_path, monkeypatch):
    resume = threading.Event()
    monkeypatch.setattr(save_module.store, "create", lambda *_: resume.wait(10))
    states = saves.make_states(1)
    saver = FullSaver(states, "balanced", limit_s=0.1)
    with pytest.raises(OptimusError, match=r"c not created within 0.1 s: .* is slow or hangs"):
        saver.begin(states, tmp_path / "c", lambda directory: None, step=1)
    resume.set()


def test_staged_states_may_change_at_once(tmp_path):
    states = saves.make_states(3)
    saver = FullSaver(states, "balanced", staged=True)
    for step in (3, 4):  # both saves use the same memory
        for shard in states.shards:
            for flat in shard.states.values():
                flat.fill_(step)
        async_save = saver.begin(states, tmp_path / f"{step}", saves.write_config, step=step)
        for shard in states.shards:
            for flat in shard.states.values():
                flat.fill_(99)
        assert async_save.drain().failure is None
        whole = {name: torch.empty(shape) for name, shape in saves.SHAPES.items()}
        read_whole(store.read_manifest(tmp_path / f"{step}"), whole, "exp_avg")
        assert all((tensor == step).all() for tensor in whole.values())
