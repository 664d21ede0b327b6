"""Tests of differentiable collectives against results that a single process computes."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from optimus.parallel import exchange
from tests.kit.ranks.worlds import everyone

SIZE = 2


def numbers(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


SENT = [[1, 3], [2, 0]]
"""SENT[s][r] is the number of rows that rank s sends to rank r."""


def forward_and_backward(name: str, dim: int) -> tuple[Tensor, Tensor]:
    """Run the collective `name` on the input of this rank. Return this rank's output, and the
    gradient of this rank's input."""
    group = everyone()
    x = numbers(group.rank, 4, 6).requires_grad_()
    if name == "exchange_rows":
        received = [row[group.rank] for row in SENT]
        x = numbers(group.rank, sum(SENT[group.rank]), 6).requires_grad_()
        out = exchange.exchange_rows(x, SENT[group.rank], received, group)
    elif name in ("identity_then_sum", "sum_then_identity"):
        out = getattr(exchange, name)(x, group)
    else:
        out = getattr(exchange, name)(x, group, dim)
    (grad,) = torch.autograd.grad(out, x, numbers(10 + group.rank, *out.shape))
    return out.detach(), grad


def dense(name: str, dim: int) -> list[tuple[Tensor, Tensor]]:
    """Return the expected output and the expected gradient of the input, for each rank."""
    x = [numbers(rank, 4, 6) for rank in range(SIZE)]

    def output_grads(*shape: int) -> list[Tensor]:
        return [numbers(10 + rank, *shape) for rank in range(SIZE)]

    if name == "identity_then_sum":
        return [(x[rank], sum(output_grads(4, 6))) for rank in range(SIZE)]
    if name == "sum_then_identity":
        return [(sum(x), output_grads(4, 6)[rank]) for rank in range(SIZE)]
    if name == "exchange_rows":
        x = [numbers(rank, sum(SENT[rank]), 6) for rank in range(SIZE)]
        pieces = [rows.split(SENT[rank]) for rank, rows in enumerate(x)]
        out = [torch.cat([pieces[s][r] for s in range(SIZE)]) for r in range(SIZE)]
        grads = [
            numbers(10 + r, *out[r].shape).split([row[r] for row in SENT]) for r in range(SIZE)
        ]
        return [(out[r], torch.cat([grads[to][r] for to in range(SIZE)])) for r in range(SIZE)]
    if name == "scatter_sum_then_gather":
        out = sum(x).chunk(SIZE, dim)
        grad = torch.cat(output_grads(*out[0].shape), dim)
        return [(out[rank], grad) for rank in range(SIZE)]
    whole = torch.cat(x, dim)
    grads = output_grads(*whole.shape)
    if name == "gather_then_scatter_sum":
        return [(whole, sum(grads).chunk(SIZE, dim)[rank]) for rank in range(SIZE)]
    assert name == "gather_then_slice"
    return [(whole, grads[rank].chunk(SIZE, dim)[rank]) for rank in range(SIZE)]


@pytest.mark.parametrize(
    ("name", "dim"),
    [
        ("identity_then_sum", 0),
        ("sum_then_identity", 0),
        ("gather_then_scatter_sum", 0),
        ("gather_then_scatter_sum", 1),
        ("gather_then_slice", 1),
        ("scatter_sum_then_gather", 0),
        ("scatter_sum_then_gather", 1),
        ("exchange_rows", 0),
    ],
)
def test_forward_and_backward_are_the_dense_formula(ranks, name, dim):
    results = ranks(SIZE, forward_and_backward, name, dim)
    for (out, grad), (expected, slope) in zip(results, dense(name, dim), strict=True):
        assert torch.equal(out, expected)
        assert torch.equal(grad, slope)
