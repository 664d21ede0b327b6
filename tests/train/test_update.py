"""One update against the same written by hand: objective, global scale, clipping, AdamW."""

from __future__ import annotations

import pytest
import torch

from optimus.config import make_config
from optimus.model.init import initialise_
from optimus.model.transformer import Transformer
from tests.helpers.tiny import tiny_tree
from tests.helpers.updates import make_updater, numbered, own_batch

TREE = tiny_tree(
    "d",
    "r",
    model__aux_loss_coef=0.5,
    model__z_loss_coef=0.25,
    optim__clip_norm=0.1,
    optim__weight_decay=0.3,
    optim__warmup_steps=0,
    optim__schedule="constant",
    optim__betas=[0.8, 0.9],
)
MICROBATCHES = [numbered(n) for n in range(8)]


def by_hand(tree: dict) -> tuple[dict[str, torch.Tensor], float, float]:
    """Weights after one update, the loss and the norm before clipping, in plain torch."""
    config = make_config(tree)
    model = Transformer(config.model)
    initialise_(model, 0)
    optim = config.optim
    adamw = torch.optim.AdamW(
        model.parameters(),
        lr=optim.lr,
        betas=optim.betas,
        eps=optim.eps,
        weight_decay=optim.weight_decay,
    )
    ce, aux, z = [], [], []
    for tokens, _ in MICROBATCHES:
        terms = model.losses(tokens)
        ce.append(terms.ce_sum / (len(MICROBATCHES) * 31))
        aux.append(terms.aux)
        z.append(terms.z)
    loss = sum(ce)
    coefficients = config.model.aux_loss_coef, config.model.z_loss_coef
    mean_aux, mean_z = (sum(terms) / len(terms) for terms in (aux, z))
    (loss + coefficients[0] * mean_aux + coefficients[1] * mean_z).backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), optim.clip_norm)
    adamw.step()
    return {n: p.detach() for n, p in model.named_parameters()}, float(loss), float(norm)


def one_update(tree: dict) -> tuple[dict[str, torch.Tensor], float, float]:
    _, _, groups, _, shard, _, updater = make_updater(tree)
    result = updater.run(1, own_batch(groups))
    weights = {name: p.detach().clone() for name, p in shard.model.named_parameters()}
    return weights, result.loss, result.grad_norm


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("deterministic", [True, False])
@pytest.mark.parametrize("clip_norm", [0.1, 0.0])
def test_an_update_is_what_one_writes_by_hand(ranks, size, deterministic, clip_norm):
    tree = TREE | {"train": TREE["train"] | {"deterministic": deterministic}}
    tree["optim"] = TREE["optim"] | {"clip_norm": clip_norm or 1e9, "eps": 1e-3}
    expected, loss, norm = by_hand(tree)
    assert norm > 0.2  # so that a limit of 0.1 is felt
    for weights, our_loss, our_norm in ranks(size, one_update, tree, start_world=False):
        assert our_loss == pytest.approx(loss, abs=1e-6)
        assert our_norm == pytest.approx(norm, rel=1e-5)
        for name, weight in weights.items():
            torch.testing.assert_close(weight, expected[name], rtol=0, atol=2e-6)
