from __future__ import annotations

import math
from functools import partial

import pytest
import torch

from optimus.model.deferred_gradients import DeferredGradients
from optimus.model.layers import Embedding, LayerNorm, RMSNorm
from optimus.model.rope import Rotary, inverse_frequencies, rotate
from tests.model.small import relative, small_config, small_model, some_tokens

WIDE = torch.float64


@pytest.mark.parametrize("make", [RMSNorm, LayerNorm])
def test_norms_of_bf16_compute_in_fp32(make):
    """The norms of a bf16 model compute mean and variance in fp32."""
    narrow = (100 + torch.randn(64, 256)).bfloat16().requires_grad_()
    wide = narrow.detach().to(WIDE).requires_grad_()
    probe = torch.randn(64, 256).bfloat16()
    out = make(256, 1e-5).to(torch.bfloat16)(narrow)
    reference = make(256, 1e-5).to(WIDE)(wide)
    out.backward(probe)
    reference.backward(probe.to(WIDE))
    assert out.dtype is torch.bfloat16
    assert relative(out.to(WIDE), reference) < 2.5e-3  # the error of one rounding
    assert relative(narrow.grad.to(WIDE), wide.grad) < 2.5e-3


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_embedding_gives_padding_no_gradient(dtype):
    embed = Embedding(small_config(pad_token_id=7)).to(dtype)
    torch.nn.init.normal_(embed.weight)
    tokens = torch.tensor([[7, 3, 7], [3, 3, 0]])
    out = embed(tokens)
    assert torch.equal(out, embed.weight[tokens])
    out.backward(torch.ones_like(out))
    assert embed.weight.grad.abs().sum(1).nonzero().flatten().tolist() == [0, 3]
    assert embed.weight.grad[3].tolist() == [3] * 32


def test_embedding_adds_many_gradients_in_fp32():
    embed = Embedding(small_config()).bfloat16()
    torch.nn.init.normal_(embed.weight)
    embed(torch.full((1, 1000), 5)).backward(torch.full((1, 1000, 32), 0.01).bfloat16())
    # A sum in bf16 stops growing once it is 256 times as large as the terms.
    assert embed.weight.grad[5].float().mean() == pytest.approx(10.0, rel=5e-3)


def test_rotation_backwards_is_its_gradient():
    table = Rotary(small_config())(5, torch.device("cpu"))
    x = torch.randn(2, 5, 3, 8, requires_grad=True)
    grad = torch.randn(2, 5, 3, 8)
    first, second = x.chunk(2, -1)
    cos, sin = (angles.unsqueeze(1) for angles in table)
    plain = torch.cat((first * cos - second * sin, second * cos + first * sin), -1)
    torch.testing.assert_close(rotate(x, table), plain)
    expected = torch.autograd.grad(plain, x, grad)[0]
    torch.testing.assert_close(torch.autograd.grad(rotate(x, table), x, grad)[0], expected)


def test_angles_are_not_rounded_with_the_model():
    """Casting the model to bf16 does not cast the rotary angles."""
    model = small_model().bfloat16()
    cos, _ = model.rotary(64, torch.device("cpu"))
    frequency, _ = inverse_frequencies(model.config, 64)
    assert cos.dtype is torch.float32
    assert float(cos[60, 1]) == pytest.approx(math.cos(60 * float(frequency[1])), abs=1e-5)


def test_training_works_after_evaluating_in_inference_mode():
    model = small_model()
    with torch.inference_mode():
        model(some_tokens())
    model.losses(some_tokens()).ce_sum.backward()


def test_embedding_writes_the_gradient_of_autograd_to_other_memory():
    """After `write_gradients_to`, backward adds the gradient to the target tensor. The sum is
    bitwise equal to the old values plus the gradient that autograd computes. Within
    DeferredGradients, backward sets `.grad` and does not change the target."""
    for dtype, into in ((torch.float32,) * 2, (torch.bfloat16, torch.float32)):
        embed = Embedding(small_config(pad_token_id=3)).to(dtype)
        torch.nn.init.normal_(embed.weight)
        generator = torch.Generator().manual_seed(0)
        tokens = torch.randint(len(embed.weight), (4, 100), generator=generator)
        slope = torch.randn(*tokens.shape, embed.weight.shape[1], generator=generator).to(dtype)
        before = torch.randn(embed.weight.shape, generator=generator).to(into)
        embed(tokens).backward(slope)
        expected, embed.weight.grad = before + embed.weight.grad, None
        target = before.clone()
        embed.write_gradients_to(partial(target.view_as, target))
        embed(tokens).backward(slope)
        assert embed.weight.grad is None and torch.equal(target, expected)
        with DeferredGradients():
            embed(tokens).backward(slope)
        assert embed.weight.grad is not None and torch.equal(target, expected)
