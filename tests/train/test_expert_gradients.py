"""Tests of expert gradients. Experts write gradients directly to chunks. The updates must be
bit-identical to updates for which autograd adds the gradients."""

from __future__ import annotations

import functools
import hashlib
from typing import NamedTuple

import pytest
import torch

from optimus.chunks import grad_reducer
from optimus.distributed.world import World, start_world
from optimus.errors import NonFiniteError
from optimus.rank.model import RankModel
from optimus_kernels import experts_loop
from tests.kit.layouts.whole import whole_of
from tests.kit.runs.tiny import CONTEXT, tiny_tree
from tests.kit.runs.training import local_batch, make_updater

BATCH, STEPS = 8, 2


class Updates(NamedTuple):
    results: list[tuple[float, ...]]
    states: dict[str, str]
    """SHA-256 of each gradient and each master parameter, by name."""
    buffers: int
    """Number of backward passes of expert layers that allocated gradients outside chunks."""


def run_both(tree: dict, natively: bool = True) -> tuple[Updates, Updates]:
    """Run the same updates in two ways. Return the results of the run in which experts write
    gradients to chunks, and the results of the run in which autograd adds the gradients. If
    `natively` is False, Optimus converts bf16 gradients to fp32, as with torch before 2.9."""
    torch.set_num_threads(1)
    grad_reducer._WIDENS_NATIVELY &= natively
    world = start_world(device="cpu")
    by_autograd = run_updates(tree, world, lambda shard, states: None)
    return run_updates(tree, world, RankModel.write_gradients_to_chunks), by_autograd


def run_updates(tree: dict, world: World, write_gradients_to_chunks) -> Updates:
    plain_add, plain_fresh = RankModel.write_gradients_to_chunks, experts_loop.fresh_grads
    made = []

    def fresh(parameters):
        made.append(1)
        return plain_fresh(parameters)

    RankModel.write_gradients_to_chunks, experts_loop.fresh_grads = write_gradients_to_chunks, fresh
    try:
        return record_updates(tree, world, made)
    finally:
        RankModel.write_gradients_to_chunks, experts_loop.fresh_grads = plain_add, plain_fresh


def record_updates(tree: dict, world: World, made: list[int]) -> Updates:
    config, _, groups, _, shard, states, updater = make_updater(tree, world)
    if config.train.compile:
        shard.model.compile_blocks()
    results = []
    for step in range(1, STEPS + 1):
        result = updater.run(step, local_batch(groups, BATCH))
        results.append((result.loss, result.aux_loss, result.z_loss, result.grad_norm))
    whole = {
        f"{kind} {n}": t for kind in ("grad", "master") for n, t in whole_of(states, kind).items()
    }
    digests = {n: hashlib.sha256(t.numpy().tobytes()).hexdigest() for n, t in whole.items()}
    return Updates(results, digests, len(made))


BF16, FAST = {"train__dtype": "bf16"}, {"train__deterministic": False, "train__threads": 1}
RECOMPUTE = {"recompute__modules": ["norm", "moe"]}


def sizes(**axes) -> dict:
    return {f"parallel__{axis}": size for axis, size in axes.items()}


@pytest.mark.parametrize(
    ("size", "settings"),
    [
        pytest.param(1, {}, id="fp32"),
        pytest.param(1, BF16, id="bf16"),
        pytest.param(1, BF16 | FAST | RECOMPUTE, id="bf16-fast-recompute"),
        pytest.param(2, {}, id="dp2"),
        pytest.param(2, BF16 | {"model__tie_embeddings": True}, id="dp2-bf16-tied"),
        pytest.param(2, FAST | {"optim__sharding": "epso"}, id="dp2-fast-epso"),
        pytest.param(2, sizes(tp=2), id="tp2"),
        pytest.param(2, sizes(ep=2, ep_dispatch="alltoall") | FAST, id="ep2-alltoall"),
        pytest.param(4, sizes(ep=2, pp=2, schedule="zb-h1") | BF16 | RECOMPUTE, id="ep2-zb-h1"),
    ],
)
def test_updates_equal_those_of_autograd_bit_for_bit(ranks, size, settings):
    tree = tiny_tree("d", "r", train__global_batch_tokens=BATCH * CONTEXT, **settings)
    for direct, plain in ranks(size, run_both, tree, start_world=False):
        assert direct.results == plain.results
        assert direct.states == plain.states
        assert direct.buffers == 0
        assert (plain.buffers == 0) == (settings.get("parallel__schedule") == "zb-h1")


def test_updates_equal_with_widening_in_a_hook(ranks):
    tree = tiny_tree("d", "r", **BF16)
    ((direct, plain),) = ranks(1, run_both, tree, False, start_world=False)
    assert (direct.results, direct.states) == (plain.results, plain.states)
    assert direct.buffers == 0 < plain.buffers


def test_compiled_blocks_use_autograd(monkeypatch):
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager"))
    torch.compiler.reset()
    tree = tiny_tree("d", "r", **FAST, train__compile=True, model__num_layers=1)
    direct, plain = run_both(tree)
    assert (direct.results, direct.states) == (plain.results, plain.states)
    assert direct.buffers == plain.buffers > 0


def test_nonfinite_expert_gradient_is_detected(tmp_path):
    """An expert writes NaN directly to a chunk, so no hook of autograd sees the NaN. The check of
    gradients must find the NaN and name the parameter."""
    torch.set_num_threads(1)
    plain = experts_loop.swiglu_backward_into

    def broken(h, start, da, weights, slot, first, count, outs) -> None:
        plain(h, start, da, weights, slot, first, count, outs)
        outs[1][0, 0] = torch.nan  # affects only the gradient of down

    experts_loop.swiglu_backward_into = broken
    try:
        with pytest.raises(NonFiniteError, match=r"gradient of blocks\.1\.mlp\.experts\.down"):
            run_updates(
                tiny_tree("d", tmp_path),
                start_world(device="cpu"),
                RankModel.write_gradients_to_chunks,
            )
    finally:
        experts_loop.swiglu_backward_into = plain
