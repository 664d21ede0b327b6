from __future__ import annotations

import pytest
import torch

from optimus.model.router import Router
from tests.model.small import relative, small_config, small_model, some_tokens

E, K, T = 5, 2, 40


def make_router(**fields) -> Router:
    torch.manual_seed(0)
    router = Router(small_config(**fields))
    torch.nn.init.normal_(router.weight)
    return router


def test_probabilities_are_fp32_in_a_bf16_model():
    router = make_router().bfloat16()
    x = torch.randn(T, 32).bfloat16()
    weights, _, routing = router(x)
    assert weights.dtype is torch.bfloat16
    assert routing.mean_prob.dtype is torch.float32 and routing.z.dtype is torch.float32
    probs = torch.nn.functional.linear(x, router.weight).float().softmax(-1)
    torch.testing.assert_close(routing.mean_prob, probs.mean(0))
    assert torch.equal(weights, probs.topk(K).values.bfloat16())


@pytest.mark.parametrize("normalised", [False, True])
@pytest.mark.parametrize("output", ["weights", "mean_prob", "z"])
def test_gradients_are_those_of_the_definition(output, normalised):
    router = make_router(norm_topk_prob=normalised)
    x = torch.randn(T, 32, requires_grad=True)
    leaves = (x, router.weight)
    weights, experts, routing = router(x)
    logits = (x @ router.weight.t()).double()
    probs = logits.exp() / logits.exp().sum(1, keepdim=True)
    chosen = probs.gather(1, experts)
    if normalised:
        chosen = chosen / chosen.sum(1, keepdim=True)
    z = logits.exp().sum(1).log().square().mean()
    ours = {"weights": weights, "mean_prob": routing.mean_prob, "z": routing.z}[output]
    theirs = {"weights": chosen, "mean_prob": probs.mean(0), "z": z}[output]
    probe = torch.randn(theirs.shape)
    gradients = torch.autograd.grad((ours * probe).sum(), leaves, retain_graph=True)
    expected = torch.autograd.grad((theirs * probe).sum(), leaves)
    for value, definition in zip(gradients, expected, strict=True):
        assert definition.norm() > 0 and relative(value, definition) < 1e-5


def test_losses_follow_their_formulas_on_a_model():
    """The model's z-loss, and the two forms of its load-balancing loss (of OLMo and of Hugging
    Face), must be equal to losses that the test computes from the router's inputs."""
    model = small_model("olmoe", init_std=0.5)
    routings = []
    for block in model.blocks.values():
        block.mlp.router.register_forward_hook(
            lambda module, inputs, _: routings.append((inputs[0], module.weight))
        )
    terms = model.losses(some_tokens())
    auxes, zs, shares, means = [], [], [], []
    for x, weight in routings:
        logits = (x @ weight.t()).double()
        probs = logits.softmax(-1)
        chosen = probs.topk(K).indices
        share = torch.stack([(chosen == e).sum() for e in range(E)]) / chosen.numel()
        shares.append(share * K)
        means.append(probs.mean(0))
        auxes.append(E * (share * probs.mean(0)).sum())
        zs.append(logits.logsumexp(-1).square().mean())
    assert float(terms.aux) == pytest.approx(float(sum(auxes)) / 2, rel=1e-6)
    assert float(terms.z) == pytest.approx(float(sum(zs)) / 2, rel=1e-6)
    pooled = E * (torch.stack(shares).mean(0) * torch.stack(means).mean(0)).sum()
    model.config = model.config.model_copy(update={"aux_loss_form": "hf"})
    assert float(model.losses(some_tokens()).aux) == pytest.approx(float(pooled), rel=1e-6)


def test_uniform_routing_takes_experts_in_turn():
    router, x = make_router(router="uniform"), torch.randn(T + 1, 32, requires_grad=True)
    weights, experts, routing = router(x)
    probs = torch.softmax(x @ router.weight.t(), dim=-1)
    for token in range(T + 1):
        for slot in range(K):
            assert experts[token, slot] == (token * K + slot) % E
            torch.testing.assert_close(weights[token, slot], probs[token, experts[token, slot]])
    assert routing.counts.sum() == (T + 1) * K
    assert routing.counts.max() - routing.counts.min() == 1
    torch.testing.assert_close(routing.mean_prob, probs.mean(0))
    weights[:, 0].sum().backward()
    assert router.weight.grad.abs().sum() > 0 and x.grad.abs().sum() > 0


def test_uniform_routing_can_be_normalised():
    weights, _, _ = make_router(router="uniform", norm_topk_prob=True)(torch.randn(T, 32))
    torch.testing.assert_close(weights.sum(1), torch.ones(T))
