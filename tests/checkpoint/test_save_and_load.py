"""Saving and loading one process's states: what a chunk lacks, other types, what does not fit."""

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
from tests.helpers import small_saves
from tests.helpers.whole import read_whole


def with_a_master_alone(step: int) -> RankStates:
    """The first chunk has no moments, and its master is of two bytes: frozen parameters."""
    states = small_saves.make_states(step)
    first, *others = states.shards
    values = torch.arange(first.chunk.length) + step
    frozen = replace(first, states={"master": values.to(torch.bfloat16)})
    return replace(states, shards=[frozen, *others])


def save(states: RankStates, path: Path) -> None:
    small_saves.save_full(states, path, step=1)


def test_a_chunk_may_lack_moments_and_be_of_two_bytes(tmp_path):
    saved, loaded = with_a_master_alone(5), with_a_master_alone(0)
    settings = {"optim.frozen": ["*"]}
    small_saves.save_full(saved, tmp_path / "c", step=1, settings=settings)
    manifest = store.read_manifest(tmp_path / "c")
    manifest.verify()
    assert load_full(loaded, manifest, "broadcast") == ""
    for one, other in zip(saved.shards, loaded.shards, strict=True):
        assert one.states.keys() == other.states.keys()
        for slot in one.chunk.slots:
            where = slice(slot.start, slot.stop)
            for state, flat in one.states.items():
                assert torch.equal(flat[where], other.states[state][where])
    problem = load_full(small_saves.make_states(0), manifest, "broadcast")
    assert problem == f"{tmp_path}/c: the index holds not every state of parameter a"


def test_states_that_are_not_in_host_memory_come_in_bounded_batches(monkeypatch):
    slices = [("master", StateSlice(0, 0, size, ())) for size in (10, 20, 30, 5)]
    monkeypatch.setattr(load, "HOST_BYTES", 120)
    assert [len(batch) for batch in load._batches(slices)] == [2, 1, 1]


def test_parameters_of_another_model_are_named(tmp_path):
    save(small_saves.make_states(1), tmp_path / "c")
    manifest = store.read_manifest(tmp_path / "c")
    tensors = {name: torch.empty(shape) for name, shape in small_saves.SHAPES.items()}
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
def test_a_shard_file_that_is_not_as_written_is_not_sealed(tmp_path, harm):
    """Its header and size are compared before the seal: both slots stay."""
    for step in (1, 2):
        small_saves.save(tmp_path, step)

    def write(directory: Path) -> None:
        small_saves.write_config(directory)
        shard = directory / "shard-00000.bin"
        if harm == "cut":
            os.truncate(shard, shard.stat().st_size - 1)
        else:
            shutil.copyfile(store.full_path(tmp_path, 2) / shard.name, shard)

    told = {
        "cut": r"shard-00000.bin: \d+ bytes, not \d+",
        "another": "belongs to another checkpoint",
    }
    with pytest.raises(OptimusError, match=told[harm]):
        states = small_saves.make_states(3)
        small_saves.save_full(states, store.full_path(tmp_path, 3), write, step=3)
    names = sorted(path.name for path in store.checkpoints_dir(tmp_path).iterdir())
    assert names == ["step-00000001", "step-00000002"]


def test_what_no_rank_expects_as_a_save_begins_is_told_to_all(tmp_path, monkeypatch):
    monkeypatch.setattr(FullSaver, "_prepare", lambda saver, directory: 1 / 0)
    with pytest.raises(
        OptimusError, match="step-00000001 not written: ZeroDivisionError: division"
    ):
        small_saves.save(tmp_path, 1)
    assert list((tmp_path / "checkpoints").iterdir()) == []


def test_a_directory_that_hangs_is_told_in_time(tmp_path, monkeypatch):
    go_on = threading.Event()
    monkeypatch.setattr(save_module.store, "create", lambda *_: go_on.wait(10))
    states = small_saves.make_states(1)
    saver = FullSaver(states, "balanced", limit_s=0.1)
    with pytest.raises(OptimusError, match=r"c not opened within 0.1 s: .* is slow or hangs"):
        saver.begin(states, tmp_path / "c", lambda directory: None, step=1)
    go_on.set()


def test_staged_states_may_change_at_once(tmp_path):
    states = small_saves.make_states(3)
    saver = FullSaver(states, "balanced", staged=True)
    for step in (3, 4):  # the same memory serves every save
        for one in states.shards:
            for flat in one.states.values():
                flat.fill_(step)
        under_way = saver.begin(states, tmp_path / f"{step}", small_saves.write_config, step=step)
        for one in states.shards:
            for flat in one.states.values():
                flat.fill_(99)
        assert under_way.drain().failure is None
        whole = {name: torch.empty(shape) for name, shape in small_saves.SHAPES.items()}
        read_whole(store.read_manifest(tmp_path / f"{step}"), whole, "exp_avg")
        assert all((tensor == step).all() for tensor in whole.values())
