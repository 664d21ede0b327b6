"""Forward and backward of the experts with grouped matrix products. Each product is a single call
for all experts. The host does not wait for the device."""

from __future__ import annotations

from torch import Tensor

from optimus_kernels.experts_loop import DeferredInputs
from optimus_kernels.experts_operands import Operands, WeightGrads
from optimus_kernels.grouped_mm import grouped_mm, grouped_mm_weight
from optimus_kernels.rows import Rows, gather, reduce_rows
from optimus_kernels.swiglu import swiglu, swiglu_backward


def forward(operands: Operands, save_h: bool) -> tuple[Tensor, Tensor]:
    """Return the output [T, D] of the experts and the pre-activation h [N, 2F]. N is the number of
    elements of `operands.token`. If `save_h` is False, h is an empty tensor."""
    x, rows = operands.x, operands.rows
    h = _hidden(x, operands.gate_up, rows)
    y = grouped_mm(swiglu(h), operands.down.mT, rows.offsets)
    out = reduce_rows(y, operands.weights, rows.row, rows.slot)
    return out, h if save_h else x.new_empty(0)


def backward(
    grad: Tensor,
    operands: Operands,
    h: Tensor | None,
    into: WeightGrads | None,
    defer: bool = False,
) -> tuple[Tensor, Tensor, DeferredInputs | None]:
    """Compute the gradients of the experts. If `into` is not None, write the weight gradients to
    its tensors.

    Returns:
        dx [T, D], the gradient of the inputs; dweights [T, K] (fp32 or fp64), the gradient of the
        routing weights; and the inputs for `weight_grads` (None unless `defer`).
    """
    (x, weights, gate_up, down, *_), rows = operands, operands.rows
    h = _hidden(x, gate_up, rows) if h is None else h
    dy = gather(grad, rows.token, rows.row)
    da = grouped_mm(dy, down, rows.offsets)
    dh, scaled, dweights = swiglu_backward(h, da, weights, rows.slot)
    dx = reduce_rows(grouped_mm(dh, gate_up, rows.offsets), None, rows.row, rows.slot)
    deferred = DeferredInputs(dh, scaled)
    if into is not None:
        _weight_grads(dy, x, rows, deferred, into)
    return dx, dweights, deferred if defer else None


def weight_grads(
    grad: Tensor, x: Tensor, rows: Rows, deferred: DeferredInputs, into: WeightGrads
) -> None:
    """Compute the weight gradients that `backward` deferred, and write them to `into`."""
    _weight_grads(gather(grad, rows.token, rows.row), x, rows, deferred, into)


def _weight_grads(
    dy: Tensor, x: Tensor, rows: Rows, deferred: DeferredInputs, into: WeightGrads
) -> None:
    copies = gather(x, rows.token, rows.row)
    for target, a, b in ((into.down, dy, deferred.scaled), (into.gate_up, deferred.dh, copies)):
        product = grouped_mm_weight(a, b, rows.offsets)
        target.add_(product) if into.add else target.copy_(product)


def _hidden(x: Tensor, gate_up: Tensor, rows: Rows) -> Tensor:
    copies: Tensor = gather(x, rows.token, rows.row)
    return grouped_mm(copies, gate_up.mT, rows.offsets)
