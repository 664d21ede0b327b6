"""Tests of model-only saves: memory, lost writes, several files, checksums."""

from __future__ import annotations

import fcntl
import gc
import itertools
import math
import os
import shutil
import subprocess
import threading
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch

from optimus.checkpoint import store, weights
from optimus.checkpoint.index import ADAMW_STATES
from optimus.checkpoint.save import RankStates
from optimus.checkpoint.slices import ParamSlice, StateSlice, intersect, slices_to_write, whole_box
from optimus.checkpoint.weights import ModelSaver, open_weights
from optimus.chunks.buffers import StateShard
from optimus.chunks.groups import ParamProcessGroups
from optimus.chunks.layout import Parameter, lay_out
from optimus.config import ModelConfig, make_config
from optimus.distributed.groups import plan_groups
from optimus.distributed.mesh import Mesh
from optimus.errors import CheckpointError
from optimus.hf import plan_hf
from optimus.io import safetensors
from optimus.io.safetensors import (
    Checksum,
    PlannedTensor,
    TensorWriter,
    create_files,
    plan_files,
)
from optimus.launch.environment import read_launch_env
from optimus.parallel.placement import whole_model
from tests.kit.layouts.reshard import all_shapes, pairwise, turns_of
from tests.kit.ranks.processes import peak_of
from tests.kit.runs.saves import SYNC_AND_ASYNC
from tests.kit.runs.tiny import tiny_tree
from tests.kit.runs.training import Ended, run_with

LARGE = {"model__hidden_size": 256, "model__vocab_size": 1 << 16, "model__num_experts": 32}
LARGE |= {"model__intermediate_size": 512, "model__num_attention_heads": 4, "model__num_layers": 2}


def masters_of(shapes: dict[str, tuple[int, ...]]) -> RankStates:
    """Return all master weights of a model on one rank, without moments."""
    home = ParamProcessGroups()
    chunks = lay_out([Parameter(name, shape) for name, shape in shapes.items()], 1 << 24).chunks
    shards = [StateShard(chunk, 0, home, {"master": torch.ones(chunk.length)}) for chunk in chunks]
    boxes = {name: whole_box(shape) for name, shape in shapes.items()}
    return RankStates(
        plan_groups(Mesh(), 0), torch.device("cpu"), shards, ADAMW_STATES, boxes, shapes
    )


def peak_of_saving(tree: dict[str, Any], folder: str, staged: bool) -> tuple[int, int]:
    """Save a model. Return (peak increase of memory during the save, size of the model), both in
    bytes."""
    config = make_config(tree).model
    shapes = {name: tuple(p.shape) for name, p in whole_model(config).named_parameters()}
    states, limits = masters_of(shapes), {"limit_s": 60.0, "begin_s": 60.0}

    def save() -> None:
        saver = ModelSaver(states, config, "balanced", staged=staged, **limits)
        path = Path(folder) / f"m{len(os.listdir(folder))}"
        async_save = saver.begin(states, path, lambda directory: None, step=1)
        assert async_save.drain().failure is None

    return peak_of(save), 2 * sum(map(math.prod, shapes.values()))


@SYNC_AND_ASYNC
def test_a_rank_allocates_memory_for_a_batch_or_for_its_staged_slices(ranks, tmp_path, async_save):
    tree = tiny_tree("d", "r", **LARGE, train__dtype="bf16")
    [(peak, size)] = ranks(1, peak_of_saving, tree, str(tmp_path), async_save)
    assert size > 100e6
    assert peak - async_save * size < 32e6, f"{peak / 1e6:.1f} MB for a model of {size / 1e6:.1f}"
    store.read_manifest(tmp_path / "m1").verify()


def lose_a_write() -> None:
    """Patch the second rank so that one of its writes is lost, although the write is reported as
    successful."""
    plain, lost = safetensors._write_at, []

    def put(fd: int, data: memoryview, at: int) -> None:
        if read_launch_env().rank == 1 and not lost and len(data) > 2:
            lost.append(fd)
            data = data[:0]
        plain(fd, data, at)

    safetensors._write_at = put


def leave_some_out() -> None:
    """Patch the second rank so that it does not write three of its slices."""
    plain, left = weights._params_of, []

    def params_of(state_slice: StateSlice) -> Iterator[tuple[ParamSlice, int]]:
        for pair in plain(state_slice):
            if read_launch_env().rank == 1 and len(left) < 3:
                left.append(pair)
            else:
                yield pair

    weights._params_of = params_of


def break_file(how: Callable[[Path], None]) -> None:
    """Patch the commit so that `how` damages the file of the first model-only checkpoint after all
    ranks have written."""
    plain, done = weights.write_hf_json, []

    def write(directory: Path, *arguments: Any) -> None:
        if not done:
            how(directory / "model.safetensors")
        done.append(directory)
        plain(directory, *arguments)

    weights.write_hf_json = write


def rewrite(change: Callable[[bytes, int], bytes]) -> Callable[[], None]:
    """Return a function that patches the commit as `break_file` does. The damaged file has the
    content `change(content, end of the header in bytes)`."""

    def how(path: Path) -> None:
        content = path.read_bytes()
        path.write_bytes(change(content, 8 + int.from_bytes(content[:8], "little")))

    return partial(break_file, how)


DAMAGE = {
    "write lost": lose_a_write,
    "left out": leave_some_out,
    "odd": lambda: break_file(lambda path: os.truncate(path, path.stat().st_size - 1)),
    "longer": rewrite(lambda content, head: content + bytes(2)),
    "header lost": rewrite(lambda content, head: bytes(head) + content[head:]),
    "moved": rewrite(lambda c, head: c[:head] + c[head + 2 :] + c[head : head + 2]),
    "hole": rewrite(lambda c, head: c[:head] + bytes(4096) + c[head + 4096 :]),
}


def run_with_damage(tree: dict[str, Any], how: str) -> Ended:
    DAMAGE[how]()
    return run_with(tree, lambda step: None)


@SYNC_AND_ASYNC
@pytest.mark.parametrize("how", DAMAGE)
def test_lost_writes_are_detected_before_the_commit(ranks, tiny_data, tmp_path, how, async_save):
    settings = {"train__max_steps": 9, "checkpoint__model_interval": 3, "checkpoint__interval": 0}
    tree = tiny_tree(tiny_data, tmp_path, **settings, checkpoint__async_save=async_save)
    ended = ranks(2, run_with_damage, tree, how, start_world=False)
    assert [rank[:2] for rank in ended] == [(0, "")] * 2
    (warning,) = ended[0].warnings()
    word = " bytes, but " if how in ("odd", "longer") else " does not contain the bytes"
    assert "step 3 is not saved: model.safetensors" in warning and word in warning
    names = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
    assert names == ["model-00000006", "model-00000009", "step-00000009"]


def save_in_files_of(limit: int, path: Path) -> tuple[ModelConfig, RankStates]:
    """Save a model with random weights, with at most `limit` bytes in each file. Return the
    configuration of the model and the saved states."""
    weights.plan_hf = partial(plan_hf, file_bytes=limit)
    config = make_config(tiny_tree("d", "r")).model
    shapes = {name: tuple(p.shape) for name, p in whole_model(config).named_parameters()}
    states = masters_of(shapes)
    for shard in states.shards:
        shard.states["master"].normal_()
    saver = ModelSaver(states, config, "paper", staged=False, limit_s=60.0, begin_s=60.0)
    saver.begin(states, path, lambda directory: None, step=1).drain()
    return config, states


@pytest.fixture
def plans(monkeypatch):
    monkeypatch.setattr(weights, "plan_hf", plan_hf)


@pytest.mark.usefixtures("plans")
@pytest.mark.parametrize("limit", [20_000, 1 << 40])
def test_a_large_model_is_saved_in_several_files(tmp_path, limit):
    transformers = pytest.importorskip("transformers")
    _, states = save_in_files_of(limit, tmp_path / "m")
    store.read_manifest(tmp_path / "m").verify()
    assert (len(list((tmp_path / "m").glob("*.safetensors"))) > 1) == (limit == 20_000)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "m").state_dict()
    chunk = states.shards[0]
    slot = next(slot for slot in chunk.chunk.slots if slot.name == "embed.weight")
    ours = chunk.states["master"][slot.start : slot.stop].view(slot.shape).bfloat16()
    assert torch.equal(theirs["model.embed_tokens.weight"], ours)


@pytest.mark.usefixtures("plans")
def test_a_file_that_is_not_in_the_manifest_is_refused(tmp_path):
    config, _ = save_in_files_of(20_000, tmp_path / "several")
    save_in_files_of(1 << 40, tmp_path / "one")
    with open_weights(config, tmp_path / "several") as weights:
        assert len(list(weights)) == len(weights.slices)
    shutil.copy(tmp_path / "one" / "model.safetensors", tmp_path / "several")
    with pytest.raises(CheckpointError, match=r"model.safetensors: .* manifest does not list this"):
        open_weights(config, tmp_path / "several")


def run_with_small_files(tree: dict[str, Any]) -> Ended:
    weights.plan_hf = partial(plan_hf, file_bytes=20_000)
    return run_with(tree, lambda step: None)


def test_several_ranks_write_several_files(ranks, tiny_data, tmp_path):
    """Two ranks write more than three files. Some files contain data of only one rank."""
    tree = tiny_tree(tiny_data, tmp_path, train__stop_at_step=1, checkpoint__model_interval=1)
    ended = ranks(2, run_with_small_files, tree, start_world=False)
    assert [rank[:2] for rank in ended] == [(0, "")] * 2
    path = store.model_path(tmp_path, 1)
    store.read_manifest(path).verify()
    assert len(list(path.glob("*.safetensors"))) > 3


def test_all_ranks_together_write_each_element_once(monkeypatch):
    monkeypatch.setattr(weights, "BATCH_ELEMENTS", 100)
    for layout in sorted({layout for pair in pairwise() for layout in pair})[::3]:
        holdings = layout.holdings()
        mesh, shapes = holdings.mesh, all_shapes(holdings)
        seen = {name: numpy.zeros(math.prod(shape), int) for name, shape in shapes.items()}
        for rank in range(mesh.world_size):
            holding, coordinate = holdings.of(rank), mesh.coordinate(rank)
            turns = turns_of(holdings.config, mesh, coordinate)
            slices = slices_to_write(
                holding.shards, holding.boxes, mesh, coordinate, layout.scatter, turns
            )
            for param, _ in itertools.chain(*map(weights._params_of, slices)):
                assert param.stop - param.start <= 100
                box = whole_box(shapes[param.name])
                for start, _, length in intersect(box, param).tolist():
                    seen[param.name][start : start + length] += 1
        assert all((count == 1).all() for count in seen.values()), layout


def test_staged_states_may_be_freed_while_they_are_written(tmp_path, monkeypatch):
    """A staged save keeps no reference to the states, not even to fp32 copies of frozen
    parameters."""
    config = make_config(tiny_tree("d", "r")).model
    shapes = {name: tuple(p.shape) for name, p in whole_model(config).named_parameters()}
    states, gate, plain = masters_of(shapes), threading.Event(), ModelSaver._write

    def write(*arguments: Any) -> Any:
        assert gate.wait(60)
        return plain(*arguments)

    monkeypatch.setattr(ModelSaver, "_write", write)
    saver = ModelSaver(states, config, "balanced", staged=True, limit_s=60.0, begin_s=60.0)
    async_save = saver.begin(states, tmp_path / "m", lambda directory: None, step=1)
    copy = weakref.ref(states.shards[0].states["master"])
    del states
    gc.collect()
    assert copy() is None
    gate.set()
    assert async_save.drain().failure is None


def test_checksums_add_up_and_depend_on_positions():
    content = torch.randint(0, 1 << 15, (300_000,), dtype=torch.int16).numpy().tobytes()
    whole = Checksum().plus(memoryview(content), 64)
    cuts, added = [0, 2, 131_042, 131_044, 400_000, len(content)], Checksum()
    for low, high in itertools.pairwise(cuts):
        added = added.plus(memoryview(content)[low:high], 64 + low)
    assert added == whole
    for size in (2, 4096, 2 * 65521):
        moved = memoryview(content[size:] + content[:size])
        assert Checksum().plus(moved, 64).weighted_sum != whole.weighted_sum


@pytest.mark.parametrize("is_nfs", [True, False])
def test_only_nfs_writes_synchronously(tmp_path, monkeypatch, is_nfs):
    """A writer opens files with O_DSYNC only on NFS: without O_DSYNC, an NFS client would send
    whole cached pages, which could overwrite bytes of other writers. A writer never creates a file,
    on any file system."""
    command = ["stat", "-f", "-c", "%t", tmp_path]
    file_system = int(subprocess.run(command, capture_output=True, check=True).stdout, 16)
    assert safetensors._NFS_MAGIC == 0x6969 != file_system
    if is_nfs:
        monkeypatch.setattr(safetensors, "_NFS_MAGIC", file_system)
    plan = plan_files([PlannedTensor("a", "a", 0, torch.bfloat16, (100,))])
    with TensorWriter(tmp_path, plan) as writer:
        with pytest.raises(FileNotFoundError):
            writer.write("a", 0, torch.ones(10))
        create_files(tmp_path, plan)
        (path,) = tmp_path.iterdir()
        assert path.stat().st_size == plan.sizes[path.name]
        writer.write("a", 40, torch.ones(10))
        (fd,) = writer._fds.values()
        is_exact = bool(fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DSYNC)
        assert is_exact == is_nfs


def test_a_disk_that_writes_no_bytes_is_an_error(tmp_path, monkeypatch):
    plan = plan_files([PlannedTensor("a", "a", 0, torch.bfloat16, (100,))])
    create_files(tmp_path, plan)
    monkeypatch.setattr(os, "pwrite", lambda fd, data, at: 0)
    with TensorWriter(tmp_path, plan) as writer, pytest.raises(OSError, match="Input/output"):
        writer.write("a", 0, torch.ones(10))
