"""Differentiable collectives, named by the operation of forward and then that of backward.

Dims: T tokens, S sequence, B batch, D hidden; n ranks of the group.
"""

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
    """Return x; its gradient is the sum of all ranks' gradients."""
    return _Exchange.apply(x, lambda x: x.view_as(x), lambda grad: _summed(grad, group))


def sum_then_identity(x: Tensor, group: Group) -> Tensor:
    """Return the sum of all ranks' x; the gradient of x is the gradient of the sum."""
    return _Exchange.apply(x, lambda x: _summed(x, group), lambda grad: grad)


def gather_then_scatter_sum(x: Tensor, group: Group, dim: int = 0) -> Tensor:
    """Return all ranks' x, concatenated along `dim`; the gradient of x is the sum over ranks of the
    gradients of its slice."""
    return _Exchange.apply(
        x, lambda x: _gathered(x, group, dim), lambda grad: _scattered_sum(grad, group, dim)
    )


def gather_then_slice(x: Tensor, group: Group, dim: int = 0) -> Tensor:
    """Return all ranks' x, concatenated along `dim`; the gradient of x is this rank's slice of the
    result's gradient.

    All ranks must compute the same from the result: its gradient is then complete on every rank and
    needs no sum.
    """

    def slice_grad(grad: Tensor) -> Tensor:
        return grad.chunk(group.size, dim)[group.rank].contiguous()

    return _Exchange.apply(x, lambda x: _gathered(x, group, dim), slice_grad)


def scatter_sum_then_gather(x: Tensor, group: Group, dim: int = 0) -> Tensor:
    """Return this rank's slice, along `dim`, of the sum of all ranks' x; the gradient of x is
    gathered from all ranks."""
    return _Exchange.apply(
        x, lambda x: _scattered_sum(x, group, dim), lambda grad: _gathered(grad, group, dim)
    )


def exchange_rows(x: Tensor, sent: list[int], received: list[int], group: Group) -> Tensor:
    """Exchange rows between all ranks; gradients travel back the same way.

    Args:
        x: [sum(sent), ...], rows in the order of the ranks that they go to.
        sent: the number of rows that go to each rank.
        received: the number of rows that come from each rank.
        group: the ranks.

    Returns:
        [sum(received), ...], rows in the order of the ranks that they come from.
    """
    return _Exchange.apply(
        x,
        lambda x: all_to_all_rows(x.contiguous(), sent, received, group),
        lambda grad: all_to_all_rows(grad.contiguous(), received, sent, group),
    )


class _Exchange(torch.autograd.Function):
    """Function that applies `exchange` to x in forward and `exchange_back` to the gradient."""

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
        return ctx.exchange_back(grad), None, None


def _summed(x: Tensor, group: Group) -> Tensor:
    total = x.clone(memory_format=torch.contiguous_format)
    all_reduce_sum(total, group)
    return total


def _gathered(x: Tensor, group: Group, dim: int) -> Tensor:
    """Return all ranks' x, concatenated along `dim`.

    `dim` is moved to the front and back again, since collectives concatenate along the first dim.
    """
    front = x.movedim(dim, 0).contiguous()
    out = front.new_empty(group.size * front.shape[0], *front.shape[1:])
    all_gather(out, front, group)
    return out.movedim(0, dim)


def _scattered_sum(x: Tensor, group: Group, dim: int) -> Tensor:
    front = x.movedim(dim, 0).contiguous()
    assert front.shape[0] % group.size == 0, (tuple(x.shape), dim, group.size)
    out = front.new_empty(front.shape[0] // group.size, *front.shape[1:])
    reduce_scatter_sum(out, front, group)
    return out.movedim(0, dim)
