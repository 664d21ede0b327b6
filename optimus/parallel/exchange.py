"""Collectives that autograd goes through. Names say what forward does, then what backward does.

Dims: T tokens, S sequence, B batch, D hidden; n ranks of the group.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from optimus.dist.collectives import (
    Group,
    all_gather,
    all_reduce_sum,
    all_to_all_rows,
    reduce_scatter_sum,
)


def identity_then_sum(x: Tensor, group: Group) -> Tensor:
    """x on every rank; the gradient is the sum of all ranks'."""
    return _IdentityThenSum.apply(x, group)


def sum_then_identity(x: Tensor, group: Group) -> Tensor:
    """The sum of all ranks' x; every rank's gradient is that of the sum."""
    return _SumThenIdentity.apply(x, group)


def gather_then_scatter_sum(x: Tensor, group: Group, dim: int = 0) -> Tensor:
    """All ranks' x one behind the other along `dim`; each gets the sum of the gradients of its
    own."""
    return _GatherThenScatterSum.apply(x, group, dim)


def gather_then_slice(x: Tensor, group: Group, dim: int = 0) -> Tensor:
    """All ranks' x one behind the other along `dim`, where all ranks then compute the same: each
    takes the gradient of its own, unsummed."""
    return _GatherThenSlice.apply(x, group, dim)


def scatter_sum_then_gather(x: Tensor, group: Group, dim: int = 0) -> Tensor:
    """This rank's part, along `dim`, of the sum of all ranks' x."""
    return _ScatterSumThenGather.apply(x, group, dim)


def exchange_rows(x: Tensor, sent: list[int], received: list[int], group: Group) -> Tensor:
    """x [sum(sent), ...]: the first sent[0] rows go to rank 0, and so on; returns
    [sum(received), ...], by rank. Gradients travel back the same way."""
    return _ExchangeRows.apply(x, sent, received, group)


class _IdentityThenSum(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None]:
        grad = grad.clone(memory_format=torch.contiguous_format)
        all_reduce_sum(grad, ctx.group)
        return grad, None


class _SumThenIdentity(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, group: Group) -> Tensor:
        total = x.clone(memory_format=torch.contiguous_format)
        all_reduce_sum(total, group)
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


class _GatherThenScatterSum(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, group: Group, dim: int) -> Tensor:
        ctx.group, ctx.dim = group, dim
        return _gathered(x, group, dim)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None, None]:
        return _scattered_sum(grad, ctx.group, ctx.dim), None, None


class _GatherThenSlice(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, group: Group, dim: int) -> Tensor:
        ctx.group, ctx.dim = group, dim
        return _gathered(x, group, dim)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None, None]:
        own = grad.chunk(ctx.group.size, ctx.dim)[ctx.group.rank]
        return own.contiguous(), None, None


class _ScatterSumThenGather(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, group: Group, dim: int) -> Tensor:
        ctx.group, ctx.dim = group, dim
        return _scattered_sum(x, group, dim)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None, None]:
        return _gathered(grad, ctx.group, ctx.dim), None, None


class _ExchangeRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, sent: list[int], received: list[int], group: Group) -> Tensor:
        ctx.counts, ctx.group = (sent, received), group
        return all_to_all_rows(x.contiguous(), sent, received, group)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None, None, None]:
        sent, received = ctx.counts
        back = all_to_all_rows(grad.contiguous(), received, sent, ctx.group)
        return back, None, None, None


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
