"""reduce_rows: out[t] = sum over k of w[t, k] * y[row[t, k]] for each token t.

The terms are added in fp32, in the order of k and without atomics. Without weights, the op is the
gradient of `gather`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from optimus_kernels import library
from optimus_kernels.ops import check_index, check_operands, compute_dtype, define, shapes


def reduce_rows(y: Tensor, weights: Tensor | None, row: Tensor, slot: Tensor) -> Tensor:
    """Sum the rows of each token, multiplied by their weights.

    Args:
        y: [R, D], the rows to add.
        weights: [T, K] of y's dtype. None: all weights are 1.
        row: int32 [T, K], the rows of each token, from `route`. -1 adds nothing. Other values must
            be in [0, R); OPTIMUS_KERNELS_DEBUG=1 checks this.
        slot: int32 [R], the slot t*K + k of each row, from `route`. Only the gradient uses it.

    Returns:
        [T, D] of y's dtype.
    """
    return _reduce(y, weights, row, slot)


def reduce_rows_backward(
    grad: Tensor, y: Tensor, weights: Tensor, slot: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the gradients of `reduce_rows` for y and weights.

    Args:
        grad: [T, D], the gradient of the output.
        y: [R, D].
        weights: [T, K].
        slot: int32 [R]. slot[r] is t*K + k if row r belongs to the k-th expert of token t.

    Returns:
        dy [R, D], with dy[r] = weights[t, k] * grad[t], and dweights [T, K], the dot products of
        grad[t] and y[r]. dweights is fp32, or fp64 if y is fp64.
    """
    return _reduce_backward(grad, y, weights, slot)


def reference(y: Tensor, weights: Tensor | None, row: Tensor, slot: Tensor) -> Tensor:
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


def reference_backward(
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


def _check(y: Tensor, weights: Tensor | None, row: Tensor, slot: Tensor) -> None:
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


def _run(y: Tensor, weights: Tensor | None, row: Tensor, slot: Tensor) -> Tensor:
    check_index("reduce_rows", "row", row, y.shape[0])
    kernels = library.native(y)
    if kernels is None:
        return reference(y, weights, row, slot)
    y, row = y.contiguous(), row.contiguous()
    weights = None if weights is None else weights.contiguous()
    out = _fake(y, weights, row, slot)
    factors = None if weights is None else weights.data_ptr()
    ins = (library.DTYPES[y.dtype], y.data_ptr(), factors, row.data_ptr())
    kernels.call("reduce", y, *ins, *row.shape, y.shape[1], out.data_ptr())
    return out


def _fake(y: Tensor, weights: Tensor | None, row: Tensor, slot: Tensor) -> Tensor:
    return y.new_empty(row.shape[0], y.shape[1])


def _save(ctx: Any, inputs: tuple, output: Tensor) -> None:
    y, weights, row, slot = inputs
    ctx.top_k = row.shape[1]
    ctx.save_for_backward(None if weights is None else y, weights, row, slot)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    y, weights, row, slot = ctx.saved_tensors
    if weights is None:
        token = slot.div(max(1, ctx.top_k), rounding_mode="floor")
        return torch.ops.optimus.gather(grad, token, row), None, None, None
    dy, dweights = torch.ops.optimus.reduce_rows_backward(grad, y, weights, slot)
    return dy, dweights.to(weights.dtype), None, None


def _check_backward(grad: Tensor, y: Tensor, weights: Tensor, slot: Tensor) -> None:
    values = {"grad": grad, "y": y, "weights": weights}
    fits = (y.dim(), weights.dim()) == (2, 2) and slot.shape == y.shape[:1]
    if not fits or grad.shape != (weights.shape[0], y.shape[1]):
        raise ValueError(
            "reduce_rows_backward: grad [T, D], y [R, D], weights [T, K], slot [R] do not match: "
            + shapes({**values, "slot": slot})
        )
    check_operands("reduce_rows_backward", values, {"slot": slot})


def _run_backward(grad: Tensor, y: Tensor, weights: Tensor, slot: Tensor) -> tuple[Tensor, Tensor]:
    check_index("reduce_rows_backward", "slot", slot, weights.numel())
    kernels = library.native(y)
    if kernels is None:
        return reference_backward(grad, y, weights, slot)
    ins = [t.contiguous() for t in (grad, y, weights, slot)]
    dy, dweights = _fake_backward(grad, y, weights, slot)
    outs = (dy.data_ptr(), dweights.zero_().data_ptr())
    sizes = (len(y), weights.shape[1], y.shape[1])
    code = library.DTYPES[y.dtype]
    kernels.call("reduce_backward", y, code, *(t.data_ptr() for t in ins), *sizes, *outs)
    return dy, dweights


def _fake_backward(grad: Tensor, y: Tensor, weights: Tensor, slot: Tensor) -> tuple[Tensor, Tensor]:
    return y.new_empty(y.shape), weights.new_empty(weights.shape, dtype=compute_dtype(y.dtype))


_reduce = define(
    "reduce_rows(Tensor y, Tensor? weights, Tensor row, Tensor slot) -> Tensor",
    _run,
    _fake,
    _check,
    _backward,
    _save,
)
_reduce_backward = define(
    "reduce_rows_backward(Tensor grad, Tensor y, Tensor weights, Tensor slot) -> (Tensor, Tensor)",
    _run_backward,
    _fake_backward,
    _check_backward,
)
