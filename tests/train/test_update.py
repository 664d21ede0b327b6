"""One update equals plain torch code: objective, global scale, clipping, learning rate, AdamW."""

from __future__ import annotations

import pytest
import torch

from optimus.config import Config, make_config
from optimus.distributed.world import start_world
from optimus.model.init import initialise_
from optimus.model.transformer import Transformer
from tests.kit.layouts.whole import whole_of
from tests.kit.runs.tiny import tiny_tree
from tests.kit.runs.training import local_batch, make_microbatch, make_updater

TREE = tiny_tree(
    "d",
    "r",
    model__aux_loss_coef=0.5,
    model__z_loss_coef=0.25,
    optim__clip_norm=0.1,
    optim__weight_decay=0.3,
    optim__warmup_steps=4,
    optim__betas=[0.8, 0.9],
)
STEP = 2
"""Step number of the only update, in the middle of the warm-up."""
RATE = 3e-3 * 2 / 4
MICROBATCHES = [make_microbatch(n) for n in range(8)]


def by_hand(tree: dict) -> tuple[dict[str, torch.Tensor], float, float]:
    """Run one update in plain torch. Return the weights after the update, the loss, and the
    gradient norm before clipping."""
    config = make_config(tree)
    model, optim = make_model(config), config.optim
    adamw = torch.optim.AdamW(
        model.parameters(),
        lr=RATE,
        betas=optim.betas,
        eps=optim.eps,
        weight_decay=optim.weight_decay,
    )
    loss = backward_by_hand(model, config)
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), optim.clip_norm)
    adamw.step()
    return {n: p.detach() for n, p in model.named_parameters()}, loss, float(norm)


def make_model(config: Config) -> Transformer:
    model = Transformer(config.model)
    initialise_(model, 0)
    return model


def backward_by_hand(model: Transformer, config: Config) -> float:
    """Compute `.grad` of each parameter in one backward pass over the whole batch. Return the
    cross-entropy of the batch, the mean over all targets."""
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
    return float(loss)


def single_update(tree: dict) -> tuple[dict[str, torch.Tensor], float, float]:
    _, _, groups, _, shard, _, updater = make_updater(tree)
    result = updater.run(STEP, local_batch(groups))
    assert result.lr == RATE
    weights = {name: p.detach().clone() for name, p in shard.model.named_parameters()}
    return weights, result.loss, result.grad_norm


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("deterministic", [True, False])
@pytest.mark.parametrize("clip_norm", [0.1, 0.0])
def test_update_equals_plain_torch(ranks, size, deterministic, clip_norm):
    tree = TREE | {"train": TREE["train"] | {"deterministic": deterministic}}
    tree["optim"] = TREE["optim"] | {"clip_norm": clip_norm or 1e9, "eps": 1e-3}
    assert_is_by_hand(ranks, size, tree)


def test_an_update_adds_the_gradients_of_both_ends_of_tied_embeddings(ranks):
    """The first and the last pipeline stage share a weight. The first stage uses it as the
    embedding, and the last stage uses it as the head. The update must use the sum of
    both gradients."""
    tree = TREE | {"model": TREE["model"] | {"tie_embeddings": True}, "parallel": {"pp": 2}}
    assert_is_by_hand(ranks, 2, tree | {"optim": TREE["optim"] | {"eps": 1e-3}})


def assert_is_by_hand(ranks, size: int, tree: dict) -> None:
    expected, loss, norm = by_hand(tree)
    assert norm > 0.2  # so that a limit of 0.1 clips
    for weights, our_loss, our_norm in ranks(size, single_update, tree, start_world=False):
        assert our_loss == pytest.approx(loss, abs=1e-6)
        assert our_norm == pytest.approx(norm, rel=1e-5)
        for name, weight in weights.items():
            torch.testing.assert_close(weight, expected[name], rtol=0, atol=2e-6)


CLIPPING = {
    "clipped": ({"clip_norm": 0.1}, True),
    "below the limit": ({"clip_norm": 1e9}, False),
    "off": ({"clip_norm": 0.0}, False),
    "not in the warm-up": ({"clip_norm": 0.1, "clip_after_warmup": True}, False),
    "after the warm-up": ({"clip_norm": 0.1, "clip_after_warmup": True, "warmup_steps": 1}, True),
}
"""For each case: the optimizer settings, and True if the update clips gradients."""


def moments_after_single_update(trees: list[dict]) -> list[dict[str, dict[str, torch.Tensor]]]:
    """Run one update with each configuration. Return the moments `exp_avg` and `exp_avg_sq` of
    every parameter."""
    world, results = start_world(device="cpu"), []
    for tree in trees:
        _, _, groups, _, _, states, updater = make_updater(tree, world)
        updater.run(STEP, local_batch(groups))
        results.append({state: whole_of(states, state) for state in ("exp_avg", "exp_avg_sq")})
    return results


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize(("dtype", "within"), [("fp32", 1e-5), ("fp16", 1e-2)])
def test_moments_are_those_of_the_clipped_unscaled_gradient(ranks, size, dtype, within):
    """After one update, the moments follow from the clipped gradient without the loss scale. The
    test compares moments, not parameters, because AdamW's update of parameters does not depend on
    the scale of gradients. `within` is the tolerance of the relative error."""
    numbers = TREE["train"] | {"dtype": dtype, "deterministic": dtype == "fp32", "threads": 1}
    trees = [
        TREE | {"train": numbers, "optim": TREE["optim"] | optim} for optim, _ in CLIPPING.values()
    ]
    config = make_config(TREE)
    model, (beta1, beta2) = make_model(config), config.optim.betas
    backward_by_hand(model, config)
    norm = torch.nn.utils.get_total_norm([p.grad for p in model.parameters()])
    assert norm > 0.2  # so that a limit of 0.1 clips
    for results in ranks(size, moments_after_single_update, trees, start_world=False):
        for (name, (_, clips)), moments in zip(CLIPPING.items(), results, strict=True):
            for parameter_name, parameter in model.named_parameters():
                gradient = parameter.grad * (0.1 / norm if clips else 1.0)
                expected = {
                    "exp_avg": (1 - beta1) * gradient,
                    "exp_avg_sq": (1 - beta2) * gradient**2,
                }
                for state, moment in expected.items():
                    error = (moments[state][parameter_name] - moment).norm() / moment.norm()
                    assert error < within, f"{name}: {state} of {parameter_name}"
