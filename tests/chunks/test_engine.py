"""The engine on one rank: views, exact updates, accumulation in fp32, tied uses, the norm."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from torch import nn

from optimus.chunks import gradients as gradients_module
from optimus.chunks.engine import ChunkEngine, Use
from optimus.chunks.frozen import FrozenParameters
from optimus.chunks.layout import ALIGNMENT
from optimus.chunks.optimizer import AdamW
from optimus.chunks.states import Home
from optimus.config import OptimConfig
from optimus.model.init import initialise_
from optimus.model.transformer import Transformer
from tests.helpers.tiny import tiny_config
from tests.helpers.whole import whole_of

OPTIM = OptimConfig(lr=1e-2, min_lr=0.0, weight_decay=0.1)


def make_model(**overrides) -> Transformer:
    torch.set_num_threads(1)
    config = tiny_config("d", "r", **overrides)
    model = Transformer(config.model)
    initialise_(model, seed=3)
    return model


def make_engine(model, dtype=torch.float32, chunk_length=4000) -> ChunkEngine:
    engine = ChunkEngine(
        dict(model.named_parameters()),
        lambda name: Home(),
        AdamW(OPTIM),
        dtype=dtype,
        chunk_length=chunk_length,
    )
    model.separate_tied_uses()
    for name, leaf in model.tied_uses().items():
        engine.add_use(Use(name, leaf, "embed.weight"))
    engine.gradients.start()
    return engine


def backward(model, seed=0):
    tokens = torch.randint(0, 320, (2, 16), generator=torch.Generator().manual_seed(seed))
    model.losses(tokens).ce_sum.backward()


def complete(engine: ChunkEngine) -> None:
    engine.gradients.reduce(0)
    engine.gradients.finish()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_parameters_become_aligned_views_with_the_same_values(dtype):
    model = make_model(model__hidden_size=40)
    before = {name: p.detach().to(dtype) for name, p in model.named_parameters()}
    engine = make_engine(model, dtype)
    assert len(engine.chunks) >= 3
    memory = {one.params.untyped_storage().data_ptr() for one in engine.chunks}
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, before[name])
        assert parameter.untyped_storage().data_ptr() in memory
        assert parameter.storage_offset() * dtype.itemsize % 64 == 0


def test_update_equals_torch_adamw_to_the_last_bit():
    model = make_model()
    plain = copy.deepcopy(model)
    engine = make_engine(model)
    optimizer = torch.optim.AdamW(
        plain.parameters(), lr=OPTIM.lr, betas=OPTIM.betas, weight_decay=0.1, fused=True
    )
    for step in range(3):
        engine.gradients.start()
        optimizer.zero_grad()
        backward(model, step)
        backward(plain, step)
        complete(engine)
        norm = torch.nn.utils.get_total_norm([p.grad for p in plain.parameters()])
        assert engine.grad_norm() == pytest.approx(float(norm), rel=1e-6)
        engine.update(OPTIM.lr)
        optimizer.step()
    for (name, ours), theirs in zip(model.named_parameters(), plain.parameters(), strict=True):
        # A tail shorter than a vector takes another formula in torch; ours never has one.
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-7, msg=name)
        if theirs.numel() % ALIGNMENT == 0:
            assert torch.equal(ours, theirs), name


def test_bf16_parameters_follow_fp32_masters():
    model = make_model()
    engine = make_engine(model, torch.bfloat16)
    for seed in range(4):
        backward(model, seed)
    complete(engine)
    before = {name: one.clone() for name, one in whole_of(engine, "master").items()}
    engine.update(1e-5)
    masters = whole_of(engine, "master")
    moved = max(float((masters[name] - before[name]).abs().max()) for name in before)
    assert 0 < moved < 2e-5  # far below a bf16 step of the weights: kept by the masters
    for name, parameter in model.named_parameters():
        assert parameter.dtype is torch.bfloat16
        assert torch.equal(parameter, masters[name].bfloat16())


@pytest.mark.parametrize("natively", [True, False])
def test_bf16_accumulation_over_microbatches_is_fp32(monkeypatch, natively):
    if natively and not gradients_module._WIDENS_NATIVELY:
        pytest.skip("this torch has no Tensor.grad_dtype")
    monkeypatch.setattr(gradients_module, "_WIDENS_NATIVELY", natively)
    model, reference = make_model(), make_model()
    engine = make_engine(model, torch.bfloat16)
    reference.to(torch.bfloat16)
    total = {name: torch.zeros(p.shape) for name, p in reference.named_parameters()}
    for seed in range(5):
        backward(model, seed)
        reference.zero_grad()
        backward(reference, seed)
        for name, parameter in reference.named_parameters():
            total[name] += parameter.grad.float()
    complete(engine)
    for name, gradient in whole_of(engine, "grad").items():
        assert torch.equal(gradient, total[name]), name


def test_tied_embedding_has_one_accumulator_per_use_added_once():
    model = make_model(model__tie_embeddings=True)
    plain = copy.deepcopy(model)
    engine = make_engine(model)
    backward(model)
    backward(plain)
    uses = [model.embed.weight, *model.tied_uses().values()]
    assert len(uses) == 2 and all(leaf.grad.abs().sum() > 0 for leaf in uses)
    complete(engine)
    together = plain.embed.weight.grad
    torch.testing.assert_close(
        whole_of(engine, "grad")["embed.weight"], together, rtol=1e-5, atol=1e-6
    )
    # The norm counts the owner alone, with both uses in it.
    norm = math.sqrt(sum(float(p.grad.double().square().sum()) for p in plain.parameters()))
    assert engine.grad_norm() == pytest.approx(norm, rel=1e-6)
    engine.update(OPTIM.lr)
    tokens = torch.randint(0, 320, (1, 8))
    untouched = make_model(model__tie_embeddings=True)
    untouched.load_state_dict(model.state_dict())
    assert torch.equal(model(tokens), untouched(tokens))


def test_what_is_put_into_frozen_parameters_counts_though_a_save_was_told_of_them():
    named = {"a": nn.Parameter(torch.zeros(3))}
    frozen = FrozenParameters(named, {"a": Home()}, torch.bfloat16, 4)
    told = list(frozen.shards())
    frozen.put("a", torch.ones(2), 1)
    frozen.settle()
    assert told and named["a"].tolist() == [0, 1, 1]


def test_norm_survives_gradients_whose_squares_overflow():
    engine = make_engine(make_model())
    engine.chunks[0].grads[0] = 1e30
    assert engine.grad_norm() == pytest.approx(1e30)
