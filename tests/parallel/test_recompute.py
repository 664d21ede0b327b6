"""Tests of activation recomputation. Recomputation needs less memory, and the gradients are
bit-identical to the gradients without recomputation."""

from __future__ import annotations

import pytest
import torch

from optimus.model.deferred_gradients import DeferredGradients
from optimus.model.init import initialise_
from optimus.model.transformer import Transformer
from optimus.parallel.deferred_linear import DeferredLinears
from optimus.parallel.recompute import (
    KeptBytes,
    Recompute,
    measure_recompute,
    recompute_disabled,
)
from optimus_kernels.experts_loop import extra_rows
from tests.kit.runs.tiny import DENSE, VOCAB, tiny_config

TOKENS = torch.randint(0, VOCAB, (2, 32), generator=torch.Generator().manual_seed(1))


def make(
    modules: tuple[str, ...], dtype=torch.float32, defers: bool = False, **overrides
) -> Transformer:
    model = Transformer(tiny_config("d", "r", **overrides).model)
    Recompute(modules).apply(model)
    if defers:
        DeferredLinears().apply(model)
    initialise_(model, 4)
    return model.to(dtype)


def run_pass(model: Transformer) -> tuple[int, dict[str, torch.Tensor]]:
    """Run forward and backward. Return the number of bytes that forward keeps for backward, and the
    results.

    The results are the gradients by parameter name, and the loss under the key "loss".
    """
    with KeptBytes(model) as kept:
        terms = model.losses(TOKENS)
        objective = terms.ce_sum + terms.aux + terms.z
    objective.backward()
    gradients = {name: p.grad for name, p in model.named_parameters()}
    return kept.total, gradients | {"loss": objective.detach()}


SPARSE = [
    ("norm",),
    ("attention",),
    ("moe",),
    ("experts",),
    ("norm", "attention"),
    ("norm", "moe"),
    ("norm", "attention", "experts"),
    ("moe", "experts"),
    ("attention", "moe"),
    ("norm", "attention", "moe"),
    ("block",),
    ("norm", "block"),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("overrides", [{}, DENSE], ids=["olmoe", "olmo"])
def test_any_subset_keeps_less_and_changes_no_bit(dtype, overrides):
    everything, expected = run_pass(make((), dtype, **overrides))
    kept = {}
    for modules in SPARSE:
        if overrides and {"moe", "experts"} & set(modules):
            continue
        kept[modules], gradients = run_pass(make(modules, dtype, **overrides))
        different = [name for name in expected if not torch.equal(expected[name], gradients[name])]
        assert not different, modules
        assert kept[modules] < everything, modules
    for fewer, more in (
        (("norm", "attention"), ("attention",)),
        (("norm", "attention"), ("norm",)),
        (("block",), ("norm", "attention")),
        (("block",), ("norm", "attention", "moe")),
        (("moe",), ("experts",)),
        (("norm", "attention", "experts"), ("norm", "attention")),
    ):
        if fewer in kept and more in kept:
            assert kept[fewer] < kept[more], (fewer, more)


def test_bytes_that_each_module_drops():
    """If a module is recomputed, the number of bytes that are kept for backward must decrease by
    the bytes of the tensors that the module no longer keeps."""
    everything, _ = run_pass(make(()))
    layers, elements = 2, TOKENS.numel() * 32
    norm, _ = run_pass(make(("norm",)))
    scales = layers * 2 * TOKENS.numel() * 4  # RMSNorm saves one fp32 scale per token
    assert everything - norm == layers * 2 * elements * 4 + scales
    block, _ = run_pass(make(("block",)))
    rope = 2 * 32 * 16 * 4
    assert block - run_pass(make((), model__num_layers=1))[0] < elements * 4 + rope
    experts, _ = run_pass(make(("experts",)))
    config = tiny_config("d", "r").model
    rows = TOKENS.numel() * config.num_experts_per_tok
    rows += extra_rows(torch.zeros(1))  # padding rows, if oneDNN computes the products
    assert everything - experts == layers * rows * 2 * config.intermediate_size * 4


def test_a_norm_is_recomputed_once_for_all_uses_of_its_output():
    model = make(("norm",))
    calls = []
    block = model.blocks["0"]
    block.attention_norm.register_forward_pre_hook(lambda *_: calls.append(torch.is_grad_enabled()))
    run_pass(model)
    # The three calls are: the forward, a recomputation of the input of q, k and v, and a
    # recomputation for the backward of the norm.
    assert calls == [True, False, True]


def test_deferred_weight_gradients_have_the_same_bits():
    expected = run_pass(make(()))[1]
    for modules in (("norm",), ("experts",), ("norm", "attention", "moe"), ("block",)):
        model = make(modules, defers=True)
        terms = model.losses(TOKENS)
        with DeferredGradients() as deferred:
            (terms.ce_sum + terms.aux + terms.z).backward()
        deferred.compute()
        for name, parameter in model.named_parameters():
            assert torch.equal(parameter.grad, expected[name]), (modules, name)


def test_disabled_or_without_gradient_nothing_is_recomputed():
    everything, _ = run_pass(make(()))
    for sparse in ("moe", "experts"):
        model = make(("norm", "attention", sparse))
        with recompute_disabled(model):
            assert run_pass(model)[0] == everything
        model.zero_grad()
        assert run_pass(model)[0] < everything
    with torch.no_grad():
        assert model.losses(TOKENS).ce_sum.grad_fn is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_measuring_the_cost_changes_nothing(dtype):
    model = make(("moe",), dtype)
    cost = measure_recompute(model, (2, 32, 32), dtype, seed=0)
    assert 0 < cost.kept_bytes[1] < cost.kept_bytes[0] and min(cost.seconds) > 0
    assert "MB kept for backward instead of" in str(cost)
    assert all(parameter.grad is None for parameter in model.parameters())
    whole = run_pass(make((), dtype))[0] - run_pass(make(("moe",), dtype))[0]
    assert cost.kept_bytes[0] - cost.kept_bytes[1] == pytest.approx(whole, rel=0.05)
