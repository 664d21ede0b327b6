"""Tests of tensor-parallel loss, norm over heads and embedding against the undivided modules."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from optimus.config import ModelConfig, make_config
from optimus.model.layers import Embedding, RMSNorm
from optimus.parallel.placement import share
from optimus.parallel.tensor import (
    DividedRMSNorm,
    TensorParallel,
    VocabularyParallelEmbedding,
    VocabularyParallelLoss,
)
from tests.kit.ranks.worlds import everyone
from tests.kit.runs.tiny import tiny_tree

V, D, N = 11, 8, 6  # V is not a multiple of the number of ranks


def numbers(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


TARGETS = torch.tensor([0, 5, 10, 4, 5, 6])


def cross_entropy(scale: float) -> tuple[Tensor, Tensor]:
    group = everyone()
    start, stop = share(V, group.rank, group.size)
    logits = (numbers(0, N, V) * scale)[:, start:stop].clone().requires_grad_()
    loss = VocabularyParallelLoss(group, start)(logits, TARGETS)
    (grad,) = torch.autograd.grad(loss, logits, torch.tensor(0.3))
    return loss.detach(), grad


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("scale", [1.0, 200.0])  # the exponential of 200 overflows fp32
def test_the_loss_over_a_divided_vocabulary(ranks, size, scale):
    whole = (numbers(0, N, V) * scale).requires_grad_()
    loss = torch.nn.functional.cross_entropy(whole, TARGETS, reduction="sum")
    (grad,) = torch.autograd.grad(loss, whole, torch.tensor(0.3))
    results = ranks(size, cross_entropy, scale)
    for local, _ in results:
        torch.testing.assert_close(local, loss.detach(), rtol=1e-6, atol=1e-5)
    torch.testing.assert_close(torch.cat([g for _, g in results], 1), grad, rtol=1e-5, atol=1e-6)


def divided_norm() -> tuple[Tensor, Tensor, Tensor]:
    group = everyone()
    norm = DividedRMSNorm(D // group.size, 1e-5, group)
    columns = slice(*share(D, group.rank, group.size))
    norm.weight.data.copy_(numbers(1, D)[columns])
    x = numbers(0, N, D)[:, columns].clone().requires_grad_()
    out = norm(x)
    grads = torch.autograd.grad(out, (x, norm.weight), numbers(2, N, D)[:, columns])
    return out.detach(), *grads


def test_a_norm_over_divided_heads(ranks):
    norm = RMSNorm(D, 1e-5)
    norm.weight.data.copy_(numbers(1, D))
    x = numbers(0, N, D).requires_grad_()
    out = norm(x)
    expected = (out.detach(), *torch.autograd.grad(out, (x, norm.weight), numbers(2, N, D)))
    results = ranks(2, divided_norm)
    for index, whole in enumerate(expected):
        joined = torch.cat([result[index] for result in results], -1)
        torch.testing.assert_close(joined, whole, rtol=1e-5, atol=1e-6)


def _config(padding: int) -> ModelConfig:
    model = make_config(tiny_tree("d", "r")).model
    sizes = {"vocab_size": V, "hidden_size": D, "pad_token_id": padding}
    return model.model_copy(update=sizes)


def embedding(padding: int, sequence_parallel: bool) -> tuple[Tensor, Tensor]:
    group = everyone()
    start, stop = share(V, group.rank, group.size)
    style = TensorParallel(group, sequence_parallel)
    table = VocabularyParallelEmbedding(_config(padding), style, start)
    table.weight = torch.nn.Parameter(numbers(0, V, D)[start:stop].clone())
    out = table(TARGETS.view(1, N))
    out_grad = numbers(3, 1, N, D)
    if sequence_parallel:
        out_grad = out_grad.chunk(group.size, 1)[group.rank]
    (grad,) = torch.autograd.grad(out, table.weight, out_grad)
    return out.detach(), grad


@pytest.mark.parametrize("padding", [-1, 0, 5, 10])
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_an_embedding_of_a_divided_vocabulary(ranks, padding, sequence_parallel):
    table = Embedding(_config(padding))
    table.weight.data.copy_(numbers(0, V, D))
    out = table(TARGETS.view(1, N))
    (grad,) = torch.autograd.grad(out, table.weight, numbers(3, 1, N, D))
    results = ranks(2, embedding, padding, sequence_parallel)
    assert torch.equal(torch.cat([g for _, g in results]), grad)
    if sequence_parallel:
        assert torch.equal(torch.cat([local for local, _ in results], 1), out.detach())
    else:
        assert all(torch.equal(local, out.detach()) for local, _ in results)
    if padding >= 0:
        assert not grad[padding].any()
