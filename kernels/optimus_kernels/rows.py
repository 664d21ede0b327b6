"""Assignment of tokens to the rows of experts (`route`), and the ops `gather` and `reduce_rows`.

There are T tokens, K experts per token, N = T*K slots and E local experts. Slot t*K + k is the pair
of token t and its k-th expert. A row has D elements: the input or the output of a local expert for
one slot. `route` sorts rows by expert and then by slot, so that the result is deterministic.
`gather` copies the token of each row: out[r] = x[token[r]], or zeros if token[r] is -1.
`reduce_rows` adds the rows of each token: out[t] = sum over k of w[t, k] * y[row[t, k]]. The terms
are added in fp32, in the order of k and without atomics. Without weights, `reduce_rows` is the
gradient of `gather`, and `gather` is the gradient of `reduce_rows`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from optimus_kernels import library
from optimus_kernels.ops import (
    check_index,
    check_operands,
    compute_dtype,
    debug,
    define,
    shapes,
)


class Rows(NamedTuple):
    """Assignment of slots to rows, as int32 tensors. Slot t*K + k is the pair of token t and its
    k-th expert."""

    offsets: Tensor
    """[E+1]: expert e has rows offsets[e] to offsets[e+1] - 1. There are R = offsets[E] rows."""
    token: Tensor
    """[N]: token[r] is the token of row r. Elements from R = offsets[E] on are -1."""
    slot: Tensor
    """[N]: slot[r] is the slot of row r. Elements from R = offsets[E] on are -1."""
    row: Tensor
    """[T, K]: row[t, k] is the row of slot t*K + k; -1 if the expert of the slot is not local."""


def route(chosen: Tensor, first_expert: int, num_experts: int, *, of: int | None = None) -> Rows:
    """Assign a row to each slot with a local expert. A slot is a pair of a token and one of the
    token's chosen experts.

    Args:
        chosen: int64 [T, K], the indices of each token's experts.
        first_expert: index of the first local expert.
        num_experts: number E of local experts. The slots of other experts do not get rows.
        of: total number of experts. With OPTIMUS_KERNELS_DEBUG=1, an index in `chosen` outside [0,
            of) raises ValueError. None disables this check.

    Returns:
        The rows of each expert, the token and slot of each row, and the row of each slot.

    Raises:
        ValueError: `chosen` is not int64 [T, K], or `num_experts` is negative.
    """
    return Rows(*_route(chosen, first_expert, num_experts, of))


def route_reference(chosen: Tensor, first_expert: int, num_experts: int) -> Rows:
    """Reference implementation of `route` in plain torch."""
    slots, top_k = chosen.numel(), chosen.shape[1]
    expert = chosen.flatten() - first_expert
    expert = torch.where((expert >= 0) & (expert < num_experts), expert, num_experts)
    ends = torch.zeros(num_experts + 1, dtype=torch.int64, device=chosen.device)
    ends.scatter_add_(0, expert, torch.ones_like(expert))
    offsets = torch.cat([ends.new_zeros(1), ends[:num_experts].cumsum(0)])
    slot = expert.argsort(stable=True)
    index = torch.arange(slots, device=chosen.device)
    unused = index >= offsets[num_experts]
    row = torch.empty_like(slot)
    row[slot] = index.masked_fill(unused, -1)
    slot = slot.masked_fill(unused, -1)
    token = slot.div(max(top_k, 1), rounding_mode="floor").masked_fill(unused, -1)
    return Rows(offsets.int(), token.int(), slot.int(), row.int().view_as(chosen))


def _check_route(
    chosen: Tensor, first_expert: int, num_experts: int, of: int | None = None
) -> None:
    if chosen.dim() != 2 or chosen.dtype is not torch.int64:
        raise ValueError(
            f"route: chosen is {chosen.dtype} {list(chosen.shape)}; it must be int64 [T, K]"
        )
    if num_experts < 0:
        raise ValueError(f"route: num_experts = {num_experts} must not be negative")


def _empty_rows(
    chosen: Tensor, first_expert: int, num_experts: int, of: int | None = None
) -> tuple[Tensor, ...]:
    slots = chosen.shape[0] * chosen.shape[1]
    shapes = ((num_experts + 1,), (slots,), (slots,), tuple(chosen.shape))
    return tuple(chosen.new_empty(shape, dtype=torch.int32) for shape in shapes)


@define(
    "route(Tensor chosen, SymInt first_expert, SymInt num_experts, SymInt? of=None)"
    " -> (Tensor, Tensor, Tensor, Tensor)",
    _empty_rows,
    _check_route,
)
def _route(
    chosen: Tensor, first_expert: int, num_experts: int, of: int | None = None
) -> tuple[Tensor, ...]:
    if of is not None and debug():
        wrong = ((chosen < 0) | (chosen >= of)).nonzero().tolist()
        if wrong:
            token, k = wrong[0]
            raise ValueError(
                f"route: {len(wrong)} expert indices in chosen are outside 0 to {of - 1}; "
                f"the first is {int(chosen[token, k])} for token {token}"
            )
    kernels = library.native(chosen, any_dtype=True)
    if kernels is None:
        return tuple(route_reference(chosen, first_expert, num_experts))
    chosen = chosen.contiguous()
    offsets, token, slot, row = _empty_rows(chosen, first_expert, num_experts)
    words = kernels.route_scratch(*chosen.shape, num_experts)
    scratch = chosen.new_empty(words, dtype=torch.int32)
    pointers = (t.data_ptr() for t in (offsets, token, slot, row, scratch))
    sizes = (*chosen.shape, first_expert, num_experts)
    kernels.call("route", chosen, chosen.data_ptr(), *sizes, *pointers, words)
    return offsets, token, slot, row


def gather_reference(x: Tensor, token: Tensor, row: Tensor) -> Tensor:
    """Reference implementation of `gather` in plain torch."""
    if not len(x):
        return x.new_zeros(len(token), x.shape[1])
    copies = x.index_select(0, token.clamp(min=0).long())
    return copies.masked_fill((token < 0).unsqueeze(1), 0)


def _check_gather(x: Tensor, token: Tensor, row: Tensor) -> None:
    if (x.dim(), token.dim(), row.dim()) != (2, 1, 2):
        raise ValueError(
            f"gather: x {list(x.shape)}, token {list(token.shape)}, row {list(row.shape)}; they "
            "must be x [T, D], token [R], row [T, K]"
        )
    check_operands("gather", {"x": x}, {"token": token, "row": row})


def gather_into(x: Tensor, token: Tensor, start: int, out: Tensor, count: int = -1) -> Tensor:
    """Copy x[token[start : start + count]] to out[:count]. Return `out`.

    `count` defaults to the number of rows of `out`. The operands must be contiguous; the function
    does not check this. -1 in `token` is allowed only with compiled kernels.
    """
    count = out.shape[0] if count < 0 else count
    kernels = library.native(x)
    if kernels is None:
        torch.index_select(x, 0, token[start : start + count], out=out[:count])
        return out
    # Slicing `token` would take as long as launching the kernel.
    code, tokens = library.DTYPES[x.dtype], token.data_ptr() + 4 * start
    kernels.call("gather", x, code, x.data_ptr(), tokens, count, x.shape[1], out.data_ptr())
    return out


def _backward_gather(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    token, row = ctx.saved_tensors
    return torch.ops.optimus.reduce_rows(grad, None, row, token * row.shape[1]), None, None


@define(
    "gather(Tensor x, Tensor token, Tensor row) -> Tensor",
    lambda x, token, row: x.new_empty(token.shape[0], x.shape[1]),
    _check_gather,
    _backward_gather,
    lambda ctx, inputs, output: ctx.save_for_backward(*inputs[1:]),
)
def gather(x: Tensor, token: Tensor, row: Tensor) -> Tensor:
    """Copy each token to the rows of the token's experts.

    Args:
        x: [T, D], the tokens, in fp32, bf16, fp16 or fp64.
        token: int32 [R], the token of each row, from `route`. For -1, the row is set to zeros.
            Other values must be in [0, T); OPTIMUS_KERNELS_DEBUG=1 checks this.
        row: int32 [T, K], the rows of each token, from `route`. Only the gradient uses it.

    Returns:
        [R, D] in the dtype of x.

    Raises:
        ValueError: a tensor has the wrong number of dims.
        TypeError: dtypes or devices do not match.
    """
    check_index("gather", "token", token, x.shape[0])
    if library.native(x) is None:
        return gather_reference(x, token, row)
    x, token = x.contiguous(), token.contiguous()
    return gather_into(x, token, 0, x.new_empty(token.shape[0], x.shape[1]))


def reduce_reference(y: Tensor, weights: Tensor | None, row: Tensor, slot: Tensor) -> Tensor:
    """Reference implementation of `reduce_rows` in plain torch."""
    compute = compute_dtype(y.dtype)
    out = torch.zeros(row.shape[0], y.shape[1], dtype=compute, device=y.device)
    if not len(y):
        return out.to(y.dtype)
    for k in range(row.shape[1]):
        rows_of_k = row[:, k]
        term = y.index_select(0, rows_of_k.clamp(min=0).long()).to(compute)
        if weights is not None:
            term = term * weights[:, k, None].to(compute)
        out = out + term.masked_fill((rows_of_k < 0).unsqueeze(1), 0)
    return out.to(y.dtype)


def reduce_backward_reference(
    grad: Tensor, y: Tensor, weights: Tensor, slot: Tensor
) -> tuple[Tensor, Tensor]:
    """Reference implementation of `reduce_rows_backward` in plain torch."""
    compute = compute_dtype(y.dtype)
    used_rows = (slot >= 0).nonzero().flatten()
    slots = slot[used_rows].long()
    grad_of_row = grad[slots // max(1, weights.shape[1])].to(compute)
    dy = torch.zeros(y.shape, dtype=compute, device=y.device)
    dy[used_rows] = weights.flatten()[slots, None].to(compute) * grad_of_row
    dweights = torch.zeros(weights.numel(), dtype=compute, device=y.device)
    dweights[slots] = (grad_of_row * y[used_rows].to(compute)).sum(1)
    return dy.to(y.dtype), dweights.view(weights.shape)


def _check_reduce(y: Tensor, weights: Tensor | None, row: Tensor, slot: Tensor) -> None:
    if (y.dim(), row.dim(), slot.dim()) != (2, 2, 1):
        raise ValueError(
            f"reduce_rows: y {list(y.shape)}, row {list(row.shape)}, slot {list(slot.shape)}; they "
            "must be y [R, D], row [T, K], slot [R]"
        )
    if weights is not None and weights.shape != row.shape:
        raise ValueError(
            f"reduce_rows: weights {list(weights.shape)} must have the shape of row, "
            f"{list(row.shape)}"
        )
    check_operands("reduce_rows", {"y": y, "weights": weights}, {"row": row, "slot": slot})


def _empty_reduce(y: Tensor, weights: Tensor | None, row: Tensor, slot: Tensor) -> Tensor:
    return y.new_empty(row.shape[0], y.shape[1])


def _save_reduce(ctx: Any, inputs: tuple, output: Tensor) -> None:
    y, weights, row, slot = inputs
    ctx.save_for_backward(None if weights is None else y, weights, row, slot)


def _backward_reduce(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    y, weights, row, slot = ctx.saved_tensors
    if weights is None:
        token = slot.div(max(1, row.shape[1]), rounding_mode="floor")
        return torch.ops.optimus.gather(grad, token, row), None, None, None
    dy, dweights = torch.ops.optimus.reduce_rows_backward(grad, y, weights, slot)
    return dy, dweights.to(weights.dtype), None, None


def _check_reduce_backward(grad: Tensor, y: Tensor, weights: Tensor, slot: Tensor) -> None:
    values = {"grad": grad, "y": y, "weights": weights}
    fits = (y.dim(), weights.dim()) == (2, 2) and slot.shape == y.shape[:1]
    if not fits or grad.shape != (weights.shape[0], y.shape[1]):
        raise ValueError(
            "reduce_rows_backward: grad [T, D], y [R, D], weights [T, K], slot [R] do not match: "
            + shapes({**values, "slot": slot})
        )
    check_operands("reduce_rows_backward", values, {"slot": slot})


def _empty_reduce_backward(
    grad: Tensor, y: Tensor, weights: Tensor, slot: Tensor
) -> tuple[Tensor, Tensor]:
    return y.new_empty(y.shape), weights.new_empty(weights.shape, dtype=compute_dtype(y.dtype))


@define(
    "reduce_rows(Tensor y, Tensor? weights, Tensor row, Tensor slot) -> Tensor",
    _empty_reduce,
    _check_reduce,
    _backward_reduce,
    _save_reduce,
)
def reduce_rows(y: Tensor, weights: Tensor | None, row: Tensor, slot: Tensor) -> Tensor:
    """Compute the weighted sum of each token's rows.

    Args:
        y: [R, D], the rows to add.
        weights: [T, K] of y's dtype, the weight of each row. If it is None, all weights are 1.
        row: int32 [T, K], the indices of each token's rows, from `route`. Indices of -1 are
            ignored. Other values must be in [0, R); OPTIMUS_KERNELS_DEBUG=1 checks this.
        slot: int32 [R], the slot t*K + k of each row, from `route`. Only the gradient uses it.

    Returns:
        [T, D] in the dtype of y.
    """
    check_index("reduce_rows", "row", row, y.shape[0])
    kernels = library.native(y)
    if kernels is None:
        return reduce_reference(y, weights, row, slot)
    y, row = y.contiguous(), row.contiguous()
    weights = None if weights is None else weights.contiguous()
    out = _empty_reduce(y, weights, row, slot)
    factors = None if weights is None else weights.data_ptr()
    ins = (library.DTYPES[y.dtype], y.data_ptr(), factors, row.data_ptr())
    kernels.call("reduce", y, *ins, *row.shape, y.shape[1], out.data_ptr())
    return out


@define(
    "reduce_rows_backward(Tensor grad, Tensor y, Tensor weights, Tensor slot) -> (Tensor, Tensor)",
    _empty_reduce_backward,
    _check_reduce_backward,
)
def reduce_rows_backward(
    grad: Tensor, y: Tensor, weights: Tensor, slot: Tensor
) -> tuple[Tensor, Tensor]:
    """Backward of `reduce_rows`. Compute the gradients of y and of the weights.

    Args:
        grad: [T, D], the gradient of the output of `reduce_rows`.
        y: [R, D].
        weights: [T, K].
        slot: int32 [R]. slot[r] is t*K + k if row r belongs to the k-th expert of token t.

    Returns:
        dy [R, D], with dy[r] = weights[t, k] * grad[t], and dweights [T, K], which contains the dot
        products of grad[t] and y[r]. dweights is fp32, or fp64 if y is fp64.
    """
    check_index("reduce_rows_backward", "slot", slot, weights.numel())
    kernels = library.native(y)
    if kernels is None:
        return reduce_backward_reference(grad, y, weights, slot)
    ins = [t.contiguous() for t in (grad, y, weights, slot)]
    dy, dweights = _empty_reduce_backward(grad, y, weights, slot)
    outs = (dy.data_ptr(), dweights.zero_().data_ptr())
    sizes = (len(y), weights.shape[1], y.shape[1])
    code = library.DTYPES[y.dtype]
    kernels.call("reduce_backward", y, code, *(t.data_ptr() for t in ins), *sizes, *outs)
    return dy, dweights
