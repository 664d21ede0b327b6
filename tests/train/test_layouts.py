"""Gradients and losses over tensor- and expert-parallel layouts against one process."""

from __future__ import annotations

import pytest
import torch

from optimus.data.loader import Microbatch
from tests.helpers.tiny import DENSE, VOCAB, tiny_tree
from tests.helpers.updates import make_updater
from tests.helpers.whole import WholeModel

MICROBATCHES = [
    torch.randint(0, VOCAB, (1, 32), generator=torch.Generator().manual_seed(n)) for n in range(8)
]


def first_gradients(tree: dict) -> tuple[dict[str, torch.Tensor], list[float]]:
    """Whole gradients before the first update, clipped or not, and the losses of three updates."""
    config, _, groups, _, shard, states, updater = make_updater(tree)
    own = [Microbatch(tokens) for tokens in MICROBATCHES[groups.data.rank :: groups.data.size]]
    losses, gradients = [], {}
    for step in (1, 2, 3):
        result = updater.run(step, own)
        losses += [result.loss, result.aux_loss, result.grad_norm]
        if step == 1:
            whole = WholeModel(config, shard.layout, groups)
            gathered = whole.gather(states.whole("grad"))
            gradients = {name: gradient.clone() for name, gradient in gathered.items()}
    return gradients, losses


def sizes(**axes) -> dict:
    return {f"parallel__{axis}": size for axis, size in axes.items()}


QUERY_GROUPS = {"model__num_attention_heads": 4, "model__num_key_value_heads": 2}
BIAS = {"model__attention_bias": True}


@pytest.mark.parametrize(
    ("size", "layout", "model"),
    [
        pytest.param(2, sizes(tp=2), {}, id="tp2"),
        pytest.param(2, sizes(tp=2), DENSE | QUERY_GROUPS | BIAS, id="tp2-dense-grouped-bias"),
        pytest.param(2, sizes(tp=2, sequence_parallel=True), BIAS, id="tp2-sequence"),
        pytest.param(
            4,
            sizes(tp=2, pp=2, sequence_parallel=True),
            DENSE | {"model__tie_embeddings": True},
            id="tp2-pp2-sequence-dense-tied",
        ),
        pytest.param(2, sizes(ep=2), {}, id="ep2"),
        pytest.param(4, sizes(ep=2), {"model__norm_topk_prob": True}, id="dp2-ep2"),
        pytest.param(4, sizes(ep=2, tp=2), {}, id="ep2-tp2"),
        pytest.param(8, sizes(ep=2, tp=2, pp=2), {"model__tie_embeddings": True}, id="ep2-tp2-pp2"),
        pytest.param(8, sizes(ep=4, pp=2), {}, id="ep4-pp2"),
    ],
)
@pytest.mark.parametrize("deterministic", [True, False])
def test_gradients_are_those_of_one_process(ranks, size, layout, model, deterministic):
    same = {"train__deterministic": deterministic, "optim__clip_norm": 0.0, **model}
    ((one, losses),) = ranks(1, first_gradients, tiny_tree("d", "r", **same), start_world=False)
    results = ranks(size, first_gradients, tiny_tree("d", "r", **same, **layout), start_world=False)
    many = results[0][0]
    assert many.keys() == one.keys()
    for name, gradient in one.items():
        error = (many[name] - gradient).norm() / gradient.norm()
        assert error < 1e-5, f"{name}: {error:.1e}"
    for _, values in results:
        assert values == pytest.approx(losses, rel=1e-5)
