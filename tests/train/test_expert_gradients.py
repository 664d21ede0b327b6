"""Updates in which experts add their gradients to the chunks themselves: the bits of autograd's."""

from __future__ import annotations

import functools
import hashlib
from typing import NamedTuple

import pytest
import torch

from optimus.chunks import gradients as gradients_module
from optimus.distributed.world import World, start_world
from optimus.errors import NonFiniteError
from optimus.rank.model import RankModel
from optimus_kernels import experts_loop
from tests.helpers.tiny import CONTEXT, tiny_tree
from tests.helpers.updates import make_updater, own_batch
from tests.helpers.whole import whole_of

BATCH, STEPS = 8, 2


class Seen(NamedTuple):
    results: list[tuple[float, ...]]
    states: dict[str, str]
    """Digests of gradients and masters on this rank, by name."""
    buffers: int
    """Gradients that were made apart, an expert layer's backward each."""


def two_ways(tree: dict, natively: bool = True) -> tuple[Seen, Seen]:
    """Updates with gradients that go straight to chunks, and with those that autograd adds."""
    torch.set_num_threads(1)
    gradients_module._WIDENS_NATIVELY &= natively
    world = start_world(device="cpu")
    by_autograd = updates(tree, world, lambda shard, states: None)
    return updates(tree, world, RankModel.write_gradients_to_chunks), by_autograd


def updates(tree: dict, world: World, write_gradients_to_chunks) -> Seen:
    plain_add, plain_fresh = RankModel.write_gradients_to_chunks, experts_loop.fresh_grads
    made = []

    def fresh(parameters):
        made.append(1)
        return plain_fresh(parameters)

    RankModel.write_gradients_to_chunks, experts_loop.fresh_grads = write_gradients_to_chunks, fresh
    try:
        return watch(tree, world, made)
    finally:
        RankModel.write_gradients_to_chunks, experts_loop.fresh_grads = plain_add, plain_fresh


def watch(tree: dict, world: World, made: list[int]) -> Seen:
    config, _, groups, _, shard, states, updater = make_updater(tree, world)
    if config.train.compile:
        shard.model.compile_blocks()
    results = []
    for step in range(1, STEPS + 1):
        result = updater.run(step, own_batch(groups, BATCH))
        results.append((result.loss, result.aux_loss, result.z_loss, result.grad_norm))
    whole = {
        f"{kind} {n}": t for kind in ("grad", "master") for n, t in whole_of(states, kind).items()
    }
    digests = {n: hashlib.sha256(t.numpy().tobytes()).hexdigest() for n, t in whole.items()}
    return Seen(results, digests, len(made))


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
def test_updates_are_those_of_autograd_to_the_bit(ranks, size, settings):
    tree = tiny_tree("d", "r", train__global_batch_tokens=BATCH * CONTEXT, **settings)
    for straight, plain in ranks(size, two_ways, tree, start_world=False):
        assert straight.results == plain.results
        assert straight.states == plain.states
        assert straight.buffers == 0
        assert (plain.buffers == 0) == (settings.get("parallel__schedule") == "zb-h1")


def test_on_torch_that_widens_in_a_hook(ranks):
    tree = tiny_tree("d", "r", **BF16)
    ((straight, plain),) = ranks(1, two_ways, tree, False, start_world=False)
    assert (straight.results, straight.states) == (plain.results, plain.states)
    assert straight.buffers == 0 < plain.buffers


def test_compiled_blocks_go_by_autograd(monkeypatch):
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager"))
    torch.compiler.reset()
    tree = tiny_tree("d", "r", **FAST, train__compile=True, model__num_layers=1)
    straight, plain = two_ways(tree)
    assert (straight.results, straight.states) == (plain.results, plain.states)
    assert straight.buffers == plain.buffers > 0


def test_a_gradient_that_is_not_finite_is_seen(tmp_path):
    """The watch looks at chunks, whoever adds to them."""
    torch.set_num_threads(1)
    plain = experts_loop.swiglu_backward_into

    def broken(h, start, da, weights, slot, first, count, outs) -> None:
        plain(h, start, da, weights, slot, first, count, outs)
        outs[1][0, 0] = torch.nan  # of down's gradient alone

    experts_loop.swiglu_backward_into = broken
    try:
        with pytest.raises(NonFiniteError, match=r"gradient of blocks\.1\.mlp\.experts\.down"):
            updates(
                tiny_tree("d", tmp_path),
                start_world(device="cpu"),
                RankModel.write_gradients_to_chunks,
            )
    finally:
        experts_loop.swiglu_backward_into = plain
