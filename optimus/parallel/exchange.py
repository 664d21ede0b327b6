"""Collectives that autograd goes through. Names say what forward does, then what backward does.

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
    """x on every rank; the gradient is the sum of all ranks'."""
    return _ThereAndBack.apply(x, lambda x: x.view_as(x), lambda grad: _summed(grad, group))


def sum_then_identity(x: Tensor, group: Group) -> Tensor:
    """The sum of all ranks' x; every rank's gradient is that of the sum."""
    return _ThereAndBack.apply(x, lambda x: _summed(x, group), lambda grad: grad)


def gather_then_scatter_sum(x: Tensor, group: Group, dim: int = 0) -> Tensor:
    """All ranks' x one behind the other along `dim`; each gets the sum of the gradients of its
    own."""
    return _ThereAndBack.apply(
        x, lambda x: _gathered(x, group, dim), lambda grad: _scattered_sum(grad, group, dim)
    )


def gather_then_slice(x: Tensor, group: Group, dim: int = 0) -> Tensor:
    """All ranks' x one behind the other along `dim`, where all ranks then compute the same: each
    takes the gradient of its own, unsummed."""

    def own(grad: Tensor) -> Tensor:
        return grad.chunk(group.size, dim)[group.rank].contiguous()

    return _ThereAndBack.apply(x, lambda x: _gathered(x, group, dim), own)


def scatter_sum_then_gather(x: Tensor, group: Group, dim: int = 0) -> Tensor:
    """This rank's part, along `dim`, of the sum of all ranks' x."""
    return _ThereAndBack.apply(
        x, lambda x: _scattered_sum(x, group, dim), lambda grad: _gathered(grad, group, dim)
    )


def exchange_rows(x: Tensor, sent: list[int], received: list[int], group: Group) -> Tensor:
    """x [sum(sent), ...]: the first sent[0] rows go to rank 0, and so on; returns
    [sum(received), ...], by rank. Gradients travel back the same way."""
    return _ThereAndBack.apply(
        x,
        lambda x: all_to_all_rows(x.contiguous(), sent, received, group),
        lambda grad: all_to_all_rows(grad.contiguous(), received, sent, group),
    )


class _ThereAndBack(torch.autograd.Function):
    """`there` of x, and `back` of its gradient."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, there: Callable[[Tensor], Tensor], back: Callable[[Tensor], Tensor]
    ) -> Tensor:
        ctx.back = back
        return there(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return ctx.back(grad), None, None


def _summed(x: Tensor, group: Group) -> Tensor:
    total = x.clone(memory_format=torch.contiguous_format)
    all_reduce_sum(total, group)
    return total


def _gathered(x: Tensor, group: Group, dim: int) -> Tensor:
    """Collectives lay ranks out along the first dim; other dims are brought there and back."""
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
