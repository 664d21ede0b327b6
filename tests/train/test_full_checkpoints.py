"""Full checkpoints load bit-identically under another layout, and all ranks together read each byte
only once."""

from __future__ import annotations

import errno
import math
import os
import shutil
import zlib
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from optimus.checkpoint import index as index_module
from optimus.checkpoint import load as load_module
from optimus.checkpoint import shard_file, store
from optimus.checkpoint.index import ADAMW_STATES
from optimus.checkpoint.load import load_full
from optimus.checkpoint.save import RankStates
from optimus.checkpoint.shard_file import ShardReader
from optimus.config import make_config
from optimus.errors import CheckpointError
from optimus.observe.metrics import read_json_lines
from optimus.rank.model import RankModel
from optimus.rank.states import states_of_rank
from tests.kit.faults.disk import flip
from tests.kit.runs.results import assert_same_run
from tests.kit.runs.saves import save_full
from tests.kit.runs.tiny import small_batch_tree, tiny_tree
from tests.kit.runs.training import make_rank_model, run_and_catch, run_tree, train_on

BLOCK = 10_000


class Built(NamedTuple):
    """States and model of a rank."""

    states: RankStates
    shard: RankModel


def build(tree: dict[str, Any]) -> Built:
    # Small sizes, so that a file has many blocks and stripes.
    shard_file.BLOCK_BYTES = index_module.BLOCK_BYTES = BLOCK
    load_module.STRIPE = 3000
    config, _, groups, _, shard = make_rank_model(tree)
    engine = shard.make_states(initial=False)
    return Built(states_of_rank(config.model, shard.layout, groups, engine), shard)


def whole(state: str, name: str, shape: tuple[int, ...]) -> Tensor:
    """Return a tensor of the shape `shape` with random values for the state `state` of the
    parameter `name`. The values differ between states and between names. Some values are -0.0."""
    seed = zlib.crc32(f"{state}.{name}".encode())
    tensor = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    tensor.view(-1)[:: max(1, tensor.numel() // 7)] = -0.0  # adding 0.0 would change it
    return tensor


def slices(built: Built):
    """Yield for each state of each parameter: the state's name, the memory of this rank's slice,
    and the expected values of the slice."""
    for shard in built.states.shards:
        for slot in shard.chunk.slots:
            low = max(slot.start, shard.first)
            high = min(slot.stop, shard.first + shard.chunk.shard_length)
            placement = built.shard.layout.placements[slot.name]
            for state in ADAMW_STATES:
                local = placement.slice_of(whole(state, slot.name, placement.shape)).reshape(-1)
                memory = shard.states[state]
                if low < high:
                    actual = memory[low - shard.first : high - shard.first]
                    yield state, actual, local[low - slot.start : high - slot.start]


def save(tree: dict[str, Any], final: str) -> None:
    built = build(tree)
    for _, memory, value in slices(built):
        memory.copy_(value)
    config = make_config(tree)
    save_full(built.states, Path(final), scatter=config.checkpoint.scatter, step=1)


def load(tree: dict[str, Any], final: str) -> dict[str, int]:
    """Load the checkpoint `final`, and compare every bit with the saved values. Return the number
    of files that this rank opened (`opens`) and the number of bytes that it read (`bytes`)."""
    built, manifest = build(tree), store.read_manifest(final)
    for shard in built.states.shards:
        for memory in shard.states.values():
            memory.fill_(math.nan)
    shard_file.traffic.update(opens=0, bytes=0)
    method = make_config(tree).checkpoint.distribute
    assert load_full(built.states, manifest, method) == ""
    for state, memory, value in slices(built):
        assert torch.equal(memory.view(torch.int32), value.view(torch.int32)), state
    return dict(shard_file.traffic)


@pytest.mark.parametrize(
    ("sharding", "distribute"),
    [("none", "broadcast"), ("none", "all_reduce"), ("epso", "broadcast")],
)
@pytest.mark.parametrize(
    ("size", "sizes"),
    [(4, {"dp": 4}), (4, {"dp": 2, "ep": 2}), (4, {"pp": 2, "dp": 2}), (4, {"dp": 2, "tp": 2})],
    ids=["dp4", "dp2-ep2", "pp2-dp2", "dp2-tp2"],
)
def test_each_byte_is_read_once_by_the_whole_job(
    ranks, tmp_path, size, sizes, sharding, distribute
):
    """Several ranks need the same bytes, but only one of these ranks reads the bytes from the
    file."""
    settings = {f"parallel__{axis}": count for axis, count in sizes.items()}
    settings |= {"optim__sharding": sharding, "checkpoint__distribute": distribute}
    tree = tiny_tree("d", "r", **settings)
    ranks(size, save, tree, str(tmp_path / "c"), start_world=False)
    read = ranks(size, load, tree, str(tmp_path / "c"), start_world=False)
    index = store.read_manifest(tmp_path / "c").index()
    assert sum(count["opens"] for count in read) == len(index.shards) == size
    headers = size * shard_file.HEADER_BYTES
    total = sum(shard.size for shard in index.shards)
    assert sum(count["bytes"] for count in read) == total + headers
    assert max(count["bytes"] for count in read) < 1.1 * (total + headers) / size


@pytest.mark.parametrize("method", ["broadcast", "all_reduce"])
def test_tied_embeddings_of_both_end_stages_are_loaded_bit_for_bit(ranks, tmp_path, method):
    """The first and the last stage load the same embedding, but the optimizer shards of the two
    stages contain different ranges of the embedding."""
    tied = {"model__tie_embeddings": True, "parallel__pp": 2, "checkpoint__distribute": method}
    saved = tiny_tree("d", "r", parallel__tp=2, optim__sharding="so", **tied)
    loaded = tiny_tree("d", "r", parallel__dp=2, optim__sharding="epso", **tied)
    for function, tree in ((save, saved), (load, loaded)):
        ranks(4, function, tree, str(tmp_path / "c"), start_world=False)


def test_damage_during_loading_makes_a_run_load_the_older_checkpoint(ranks, tiny_data, tmp_path):
    """The checkpoint of step 3 is damaged, so the run resumes from step 2. The result must equal
    the result of an uninterrupted run."""
    few = {"train__max_steps": 4, "checkpoint__interval": 1, "optim__sharding": "so"}
    train_on(ranks, 2, small_batch_tree(tiny_data, tmp_path / "unbroken", **few))
    run = tmp_path / "run"
    train_on(ranks, 2, small_batch_tree(tiny_data, run, train__stop_at_step=3, **few))
    flip(store.full_path(run, 3) / "shard-00001.bin", 0.5)
    train_on(ranks, 2, small_batch_tree(tiny_data, run, **few))
    assert_same_run(tmp_path / "unbroken", run)
    quarantined = [p.name for p in (run / "checkpoints" / "set-aside").iterdir()]
    assert len(quarantined) == 1 and quarantined[0].startswith("step-00000003")
    (cut,) = (run / "log").glob("metrics-cut-*.jsonl")
    assert [line["step"] for line in read_json_lines(cut)] == [3]


def fail_a_read_once(tree: dict[str, Any]) -> None:
    """Train. On each rank, the first read of shard-00001.bin fails. Rank 1 wrote this file."""
    plain, failures = ShardReader.read, [errno.EIO]

    def read(reader: ShardReader, *arguments: Any) -> None:
        if reader.path.name == "shard-00001.bin" and failures:
            raise CheckpointError(f"{reader.path}: {os.strerror(failures.pop())}")
        plain(reader, *arguments)

    shard_file.ShardReader.read = read
    run_tree(tree)
    assert os.environ["RANK"] == "0" or not failures


def test_read_that_fails_once_keeps_the_newest_checkpoint(ranks, tiny_data, tmp_path):
    few = {"train__max_steps": 4, "checkpoint__interval": 1, "optim__sharding": "so"}
    train_on(ranks, 2, small_batch_tree(tiny_data, tmp_path, train__stop_at_step=3, **few))
    tree = small_batch_tree(tiny_data, tmp_path, **few)
    ranks(2, fail_a_read_once, tree, start_world=False, timeout_s=120)
    assert store.newest_valid(tmp_path).step == 4
    assert not (tmp_path / "checkpoints" / "set-aside").exists()


def test_run_that_falls_back_to_a_model_starts_with_zero_moments(ranks, tiny_data, tmp_path):
    """The only full checkpoint is damaged near its end, so some moments are loaded before the
    error. The run then starts from the model-only checkpoint, and must set all moments to zero."""
    few = {"train__max_steps": 5, "checkpoint__interval": 0, "optim__sharding": "so"}
    few |= {"checkpoint__model_interval": 2}
    run, fresh = tmp_path / "run", tmp_path / "fresh"
    train_on(ranks, 2, small_batch_tree(tiny_data, run, train__stop_at_step=2, **few))
    few |= {"checkpoint__load": "model@2"}
    train_on(ranks, 2, small_batch_tree(tiny_data, run, train__stop_at_step=3, **few))
    shutil.copytree(run, fresh)
    shutil.rmtree(store.full_path(fresh, 3))
    flip(store.full_path(run, 3) / "shard-00001.bin", 0.99)
    for path in (run, fresh):
        train_on(ranks, 2, small_batch_tree(tiny_data, path, **few))
    assert_same_run(run, fresh)


def test_run_without_a_valid_full_checkpoint_does_not_start_again(ranks, tiny_data, tmp_path):
    tree = small_batch_tree(tiny_data, tmp_path, train__stop_at_step=2, checkpoint__interval=1)
    train_on(ranks, 1, tree)
    for step in (1, 2):
        flip(store.full_path(tmp_path, step) / "shard-00000.bin", 0.9)
    before = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
    longer = tree | {"train": tree["train"] | {"stop_at_step": 3}}
    words = ranks(2, run_and_catch, longer, start_world=False)
    assert words[0] == words[1] and words[0][0] == 2
    assert "none of 2 full checkpoints is valid" in words[0][1]
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == before
