"""The experts' two passes as grouped products over all rows: nothing waits for the host."""

from __future__ import annotations

from torch import Tensor

from optimus_kernels.experts_loop import Kept
from optimus_kernels.experts_operands import Into, Saved
from optimus_kernels.gather import gather
from optimus_kernels.grouped_mm import grouped_mm, grouped_mm_weight
from optimus_kernels.reduction import reduce_rows
from optimus_kernels.route import Rows
from optimus_kernels.swiglu import swiglu, swiglu_backward


def forward(saved: Saved, keep: bool) -> tuple[Tensor, Tensor]:
    """-> out [T, D] and h [N, 2F], or [0] unless `keep`."""
    x, rows = saved.x, saved.rows
    h = _hidden(x, saved.gate_up, rows)
    y = grouped_mm(swiglu(h), saved.down.mT, rows.offsets)
    out = reduce_rows(y, saved.weights, rows.row, rows.slot)
    return out, h if keep else x.new_empty(0)


def backward(
    grad: Tensor, saved: Saved, h: Tensor | None, into: Into | None, keep: bool = False
) -> tuple[Tensor, Tensor, Kept | None]:
    """-> dx [T, D], dweights [T, K] (fp32 or fp64), and with `keep` what `weight_grads` wants;
    weight gradients go `into`, if anywhere.

    dx comes first: under expert parallelism its way back overlaps the weight gradients.
    """
    (x, weights, gate_up, down, *_), rows = saved, saved.rows
    h = _hidden(x, gate_up, rows) if h is None else h
    dy = gather(grad, rows.token, rows.row)
    da = grouped_mm(dy, down, rows.offsets)
    dh, scaled, dweights = swiglu_backward(h, da, weights, rows.slot)
    dx = reduce_rows(grouped_mm(dh, gate_up, rows.offsets), None, rows.row, rows.slot)
    kept = Kept(dh, scaled)
    if into is not None:
        _weight_grads(dy, x, rows, kept, into)
    return dx, dweights, kept if keep else None


def weight_grads(grad: Tensor, x: Tensor, rows: Rows, kept: Kept, into: Into) -> None:
    """The weight gradients that `backward` left to do."""
    _weight_grads(gather(grad, rows.token, rows.row), x, rows, kept, into)


def _weight_grads(dy: Tensor, x: Tensor, rows: Rows, kept: Kept, into: Into) -> None:
    copies = gather(x, rows.token, rows.row)
    for target, a, b in ((into[1], dy, kept.scaled), (into[0], kept.dh, copies)):
        product = grouped_mm_weight(a, b, rows.offsets)
        target.add_(product) if into[2] else target.copy_(product)


def _hidden(x: Tensor, gate_up: Tensor, rows: Rows) -> Tensor:
    copies: Tensor = gather(x, rows.token, rows.row)
    return grouped_mm(copies, gate_up.mT, rows.offsets)
