"""Tests of a run whose optimizer has one moment instead of AdamW's two: planned and actual memory,
checkpoints, and the bits of a resumed run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from optimus.checkpoint import index as index_module
from optimus.checkpoint import save as save_module
from optimus.checkpoint import store
from optimus.checkpoint.load import load_full
from optimus.chunks.buffers import ChunkState
from optimus.chunks.optimizer import AdamW
from optimus.config import make_config
from optimus.distributed.mesh import Mesh
from optimus.planner.states import plan_ranks
from optimus.rank import states as states_module
from optimus.rank.states import plan_rank, states_of_rank
from tests.kit.runs.results import assert_same_run
from tests.kit.runs.tiny import small_batch_tree, tiny_tree
from tests.kit.runs.training import make_microbatch, make_rank_model, make_updater, run_tree

STATES = ("master", "momentum")
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])


class MomentumSGD:
    """SGD with a momentum of 0.9 and without weight decay."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.moments = {"momentum": dtype}
        self.num_updates = 0

    def update(self, state: ChunkState, lr: float, grad_scale: float) -> None:
        momentum = state.moments["momentum"]
        momentum.mul_(0.9).add_(state.grad, alpha=grad_scale)
        state.master.sub_(lr * momentum)
        state.shard.copy_(state.master)


def use_momentum(dtype: torch.dtype) -> None:
    """Replace the optimizer of runs in this process by `MomentumSGD` with a moment of dtype
    `dtype`."""
    states_module.make_optimizer = lambda optim: MomentumSGD(dtype)
    save_module.KNOWN_STATES = index_module.KNOWN_STATES = (index_module.ADAMW_STATES, STATES)


def run_with_momentum(tree: dict[str, Any], dtype: torch.dtype) -> None:
    use_momentum(dtype)
    run_tree(tree)


@DTYPES
@pytest.mark.parametrize("layout", [{}, {"parallel__pp": 2}], ids=["dp2", "pp2"])
def test_resumed_run_has_the_same_bits(ranks, tiny_data, tmp_path, monkeypatch, dtype, layout):
    """A run that is stopped after step 2 and resumed must have the bits of a run that is not
    stopped."""
    settings = {"train__max_steps": 4, "train__dtype": "bf16", "checkpoint__interval": 2} | layout
    for name, stops in (("whole", [0]), ("resumed", [2, 0])):
        for stop in stops:
            run = settings | {"train__stop_at_step": stop}
            tree = small_batch_tree(tiny_data, tmp_path / name, **run)
            ranks(2, run_with_momentum, tree, dtype, start_world=False, timeout_s=120)
    monkeypatch.setattr(index_module, "KNOWN_STATES", (STATES,))
    for path in store.find_all(tmp_path / "whole"):
        manifest = store.read_manifest(path)
        manifest.verify()
        assert manifest.index().states == STATES
    assert_same_run(tmp_path / "whole", tmp_path / "resumed")


def bytes_of_momentum(tree: dict[str, Any], dtype: torch.dtype) -> list[dict[str, int]]:
    """Run an update with `MomentumSGD`. Return the planned bytes, and the actual bytes after the
    update, each as a dict by kind of state."""
    use_momentum(dtype)
    config, _, groups, batch, _, states, updater = make_updater(tree)
    updater.run(1, [make_microbatch(1)] * batch.microbatches_per_rank)
    planned = plan_rank(config, groups.mesh, groups.coordinate).engine.state_bytes()
    return [planned, states.state_bytes()]


@DTYPES
def test_plan_counts_the_declared_moments(ranks, dtype):
    settings = {"train__dtype": "bf16", "checkpoint__async_save": True}
    tree = tiny_tree("d", "r", optim__sharding="epso", **settings)
    ((planned, actual), _) = ranks(2, bytes_of_momentum, tree, dtype, start_world=False)
    assert planned == actual
    assert planned["moments"] == planned["masters"] * dtype.itemsize // 4
    config, mesh = make_config(tree), Mesh(dp=2)
    ((_, adamw),) = plan_ranks(config, mesh)
    assert adamw["moments"] == 2 * adamw["masters"]
    moments = MomentumSGD(dtype).moments.values()
    ((_, momentum),) = plan_ranks(config, mesh, [moment.itemsize for moment in moments])
    assert momentum["moments"] == planned["moments"]
    saved = adamw["staging"] - momentum["staging"]
    assert saved == pytest.approx(adamw["masters"], rel=0.05), "a moment less is copied and written"


def load_with_momentum(tree: dict[str, Any], path: Path) -> str:
    use_momentum(torch.float32)
    config, _, groups, _, shard = make_rank_model(tree)
    engine = shard.make_states(initial=False)
    states = states_of_rank(config.model, shard.layout, groups, engine)
    return load_full(states, store.read_manifest(path), "broadcast")


def test_checkpoint_of_another_optimizer_is_refused(ranks, tiny_data, tmp_path):
    tree = tiny_tree(tiny_data, tmp_path, train__max_steps=4, train__stop_at_step=1)
    ranks(1, run_tree, tree, start_world=False)
    (path,) = (p for p in store.find_all(tmp_path) if p.name.startswith("step"))
    (problem,) = ranks(1, load_with_momentum, tree, path, start_world=False)
    assert "states master, exp_avg, exp_avg_sq, but the optimizer of this run has master" in problem


def test_states_of_adamw_in_files_are_those_it_declares():
    assert ("master", *AdamW.moments) == index_module.ADAMW_STATES
