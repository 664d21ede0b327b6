"""Tests of experts that receive no token in a step. The gradients of these experts are zero, and
all ranks still call the same collectives."""

from __future__ import annotations

import re

import pytest
import torch

from optimus.data.loader import Microbatch
from optimus.observe.events import TrafficMeter
from tests.kit.layouts.whole import WholeModel
from tests.kit.runs.tiny import tiny_tree
from tests.kit.runs.training import make_microbatch, make_updater

WIDE = {"model__num_experts": 8, "optim__chunk_length": 2000, "optim__clip_norm": 0.0}


def train_on_a_token(tree: dict, token: int | None) -> dict | None:
    """Run two updates in which every token is `token`. If `token` is None, tokens differ.

    Return a dict: the number of rows of each expert, loss and gradient norm of the second update,
    the number of calls of each collective, the initial and the final masters, and the gradients.
    On rank 0, masters and gradients are those of the whole model. On other ranks, they are empty
    dicts.
    """
    meter = TrafficMeter()
    config, _, groups, plan, shard, states, updater = make_updater(tree, recorder=meter)
    whole = WholeModel(config, shard.layout, groups)
    initial = {name: m.clone() for name, m in whole.gather(states, "master").items()}
    meter.clear()
    for step in (1, 2):
        result = updater.run(step, [batch(token, n) for n in range(plan.microbatches_per_rank)])
    calls = {key: entry[0] for key, entry in meter.counts.items()}
    grads = {name: g.clone() for name, g in whole.gather(states, "grad").items()}
    masters = {name: m.clone() for name, m in whole.gather(states, "master").items()}
    return {
        "initial": initial,
        "grads": grads,
        "masters": masters,
        "rows": result.expert_rows,
        "calls": calls,
        "loss": result.loss,
        "norm": result.grad_norm,
    }


def batch(token: int | None, seed: int) -> Microbatch:
    return make_microbatch(seed) if token is None else Microbatch(torch.full((1, 32), token))


@pytest.mark.parametrize("deterministic", [True, False])
@pytest.mark.parametrize(
    ("size", "layout"),
    [
        pytest.param(2, {"optim__sharding": "so"}, id="dp2-so"),
        pytest.param(2, {"parallel__ep": 2, "optim__sharding": "epso"}, id="ep2-epso"),
        pytest.param(
            2,
            {"parallel__ep": 2, "parallel__ep_dispatch": "alltoall"},
            id="ep2-alltoall",
        ),
        pytest.param(4, {"parallel__ep": 2, "optim__sharding": "epso"}, id="dp2-ep2-epso"),
        pytest.param(4, {"parallel__ep": 4}, id="ep4"),
        pytest.param(2, {"parallel__tp": 2}, id="tp2"),
        pytest.param(4, {"parallel__pp": 2, "parallel__ep": 2}, id="pp2-ep2"),
    ],
)
def test_unrouted_experts_count_as_zeros(ranks, size, layout, deterministic):
    if deterministic and "parallel__ep_dispatch" in layout:
        pytest.skip("deterministic runs refuse alltoall")
    run = WIDE | {"train__deterministic": deterministic}
    (single,) = ranks(1, train_on_a_token, tiny_tree("d", "r", **run), 7, start_world=False)
    results = ranks(size, train_on_a_token, tiny_tree("d", "r", **run, **layout), 7,
                    start_world=False)  # fmt: skip
    many = results[0]
    rows = many["rows"]
    assert torch.equal(rows, single["rows"])
    unrouted = rows == 0
    assert unrouted.sum() == 2 * (8 - 2)  # 2 layers, each with 2 of 8 experts chosen
    lr = 3e-3 * torch.tensor([1 / 3, 2 / 3], dtype=torch.float64)
    kept = float((1 - 0.1 * lr).prod())
    for layer in range(2):
        for kind in ("gate_up", "down"):
            name = f"blocks.{layer}.mlp.experts.{kind}"
            still = unrouted[layer]
            assert many["grads"][name][still].abs().max() == 0
            assert many["grads"][name][~still].abs().sum() > 0
            # With zero gradients, only weight decay changes the masters.
            torch.testing.assert_close(
                many["masters"][name][still], many["initial"][name][still] * kept, rtol=1e-6, atol=0
            )
    for name, gradient in single["grads"].items():
        if re.search(r"\.[qk]_(proj|norm)\.", name):
            continue  # equal tokens: only rounding errors
        error = (many["grads"][name] - gradient).norm() / gradient.norm().clamp_min(1e-30)
        assert error < 1e-5, f"{name}: {error:.1e}"
    assert many["loss"] == pytest.approx(single["loss"], rel=1e-5)
    everywhere = ranks(size, train_on_a_token, tiny_tree("d", "r", **run, **layout), None,
                       start_world=False)  # fmt: skip
    for routed_to_all, routed_to_few in zip(everywhere, results, strict=True):
        assert routed_to_few["calls"] == routed_to_all["calls"]
