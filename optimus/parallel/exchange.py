"""Differentiable collectives, named after their forward operation and their backward operation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from optimus.distributed.collectives import (
    Group,
    all_gather,
    all_reduce_sum,
    all_to_all_rows,
    reduce_scatter_sum,
)


def identity_then_sum(x: Tensor, group: Group) -> Tensor:
    """Return x unchanged. Backward sums the gradient over all ranks (all-reduce)."""
    return _Exchange.apply(x, lambda x: x.view_as(x), lambda grad: _summed(grad, group))


def sum_then_identity(x: Tensor, group: Group) -> Tensor:
    """Return the sum of x over all ranks (all-reduce). Backward passes the gradient unchanged."""
    return _Exchange.apply(x, lambda x: _summed(x, group), lambda grad: grad)


def gather_then_scatter_sum(x: Tensor, group: Group, dim: int = 0) -> Tensor:
    """Return the concatenation of the tensors x of all ranks along `dim` (all-gather).

    Backward sums the gradient over all ranks and returns this rank's slice of the sum
    (reduce-scatter).
    """
    return _Exchange.apply(
        x, lambda x: _gathered(x, group, dim), lambda grad: _scattered_sum(grad, group, dim)
    )


def gather_then_slice(x: Tensor, group: Group, dim: int = 0) -> Tensor:
    """Return the concatenation of the tensors x of all ranks along `dim` (all-gather).

    Backward returns this rank's slice of the gradient, without communication. Each rank must
    therefore have the complete gradient of the result, not only a summand.
    """

    def slice_grad(grad: Tensor) -> Tensor:
        return grad.chunk(group.size, dim)[group.rank].contiguous()

    return _Exchange.apply(x, lambda x: _gathered(x, group, dim), slice_grad)


def scatter_sum_then_gather(x: Tensor, group: Group, dim: int = 0) -> Tensor:
    """Return this rank's slice, along `dim`, of the sum of x over all ranks (reduce-scatter).

    Backward concatenates the gradients of all ranks (all-gather).
    """
    return _Exchange.apply(
        x, lambda x: _scattered_sum(x, group, dim), lambda grad: _gathered(grad, group, dim)
    )


def exchange_rows(x: Tensor, sent: list[int], received: list[int], group: Group) -> Tensor:
    """Send rows of x to all ranks (all-to-all). Backward sends the gradients of the rows back.

    Args:
        x: [sum(sent), ...], rows ordered by destination rank.
        sent: the number of rows to send to each rank.
        received: the number of rows to receive from each rank.
        group: the ranks that exchange rows.

    Returns:
        [sum(received), ...], received rows ordered by source rank.
    """
    return _Exchange.apply(
        x,
        lambda x: all_to_all_rows(x.contiguous(), sent, received, group),
        lambda grad: all_to_all_rows(grad.contiguous(), received, sent, group),
    )


class _Exchange(torch.autograd.Function):
    """Autograd function. Forward applies `exchange` to x, and backward applies `exchange_back` to
    the gradient."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        exchange: Callable[[Tensor], Tensor],
        exchange_back: Callable[[Tensor], Tensor],
    ) -> Tensor:
        ctx.exchange_back = exchange_back
        return exchange(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        # If several nodes of the graph are ready, autograd runs the node that forward created last.
        # All ranks of a group create the same nodes. Therefore backward starts collectives in the
        # same order on all ranks.
        return ctx.exchange_back(grad), None, None


def _summed(x: Tensor, group: Group) -> Tensor:
    total = x.clone(memory_format=torch.contiguous_format)
    all_reduce_sum(total, group)
    return total


def _gathered(x: Tensor, group: Group, dim: int) -> Tensor:
    """Return the concatenation of the tensors x of all ranks along `dim`."""
    front = x.movedim(dim, 0).contiguous()  # the collective concatenates along the first dim
    out = front.new_empty(group.size * front.shape[0], *front.shape[1:])
    all_gather(out, front, group)
    return out.movedim(0, dim)


def _scattered_sum(x: Tensor, group: Group, dim: int) -> Tensor:
    front = x.movedim(dim, 0).contiguous()
    assert front.shape[0] % group.size == 0, (tuple(x.shape), dim, group.size)
    out = front.new_empty(front.shape[0] // group.size, *front.shape[1:])
    reduce_scatter_sum(out, front, group)
    return out.movedim(0, dim)
