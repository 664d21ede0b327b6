"""Operands of the experts' ops: checks, and contiguous copies for the kernels."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from optimus_kernels.ops import check_index, check_offsets, check_operands, shapes
from optimus_kernels.rows import Rows


class Operands(NamedTuple):
    """Operands of the experts' forward and backward ops, in the order of the ops' schemas. See
    `rows.Rows` for `offsets`, `token`, `slot` and `row`."""

    x: Tensor
    """[T, D], the inputs of the experts."""
    weights: Tensor
    """[T, K], routing weights."""
    gate_up: Tensor
    """[E, 2F, D], the gate and up projections."""
    down: Tensor
    """[E, D, F], the down projections."""
    offsets: Tensor
    token: Tensor
    slot: Tensor
    row: Tensor

    @property
    def rows(self) -> Rows:
        return Rows(*self[4:])


class WeightGrads(NamedTuple):
    """Tensors to which backward writes the weight gradients. These tensors and the weights can have
    different dtypes."""

    gate_up: Tensor
    """[E, 2F, D], the gradient of gate_up."""
    down: Tensor
    """[E, D, F], the gradient of down."""
    add: bool
    """True to add the gradients to the tensors; False to overwrite the tensors."""


def check(op: str, operands: Operands, **more: Tensor | None) -> None:
    """Check the operands of an op.

    Args:
        op: name of the op, for error messages.
        operands: the operands.
        more: further operands by name. Only their dtypes and devices are checked. None values are
            skipped.

    Raises:
        ValueError: shapes do not match.
        TypeError: dtypes or devices do not match.
    """
    x, weights, gate_up, down, *rows = operands
    named = {"x": x, "weights": weights, "gate_up": gate_up, "down": down}
    if [value.dim() for value in named.values()] != [2, 2, 3, 3]:
        raise ValueError(
            f"{op}: {shapes(named)}; they must be x [T, D], weights [T, K], gate_up "
            "[E, 2F, D], down [E, D, F]"
        )
    experts, inner, hidden = gate_up.shape[0], down.shape[2], x.shape[1]
    if gate_up.shape != (experts, 2 * inner, hidden) or down.shape != (experts, hidden, inner):
        raise ValueError(
            f"{op}: {shapes(named)}; gate_up must be [E, 2F, D] and down [E, D, F] for x [T, D]"
        )
    if operands.offsets.shape != (experts + 1,):
        raise ValueError(
            f"{op}: gate_up {list(gate_up.shape)} has {experts} experts, but `rows` is the result "
            f"of route for {operands.offsets.shape[0] - 1} experts; call route with "
            f"num_experts={experts}"
        )
    if operands.row.shape != weights.shape or weights.shape[0] != x.shape[0]:
        raise ValueError(
            f"{op}: {shapes(named)}, rows.row {list(operands.row.shape)}; weights and rows.row "
            "must be [T, K] for x [T, D]"
        )
    if operands.token.dim() != 1 or operands.token.shape != operands.slot.shape:
        raise ValueError(
            f"{op}: rows.token {list(operands.token.shape)} and rows.slot "
            f"{list(operands.slot.shape)} must be 1-D and of the same size; cut both to the "
            "same length"
        )
    indices = zip(("offsets", "token", "slot", "row"), rows, strict=True)
    check_operands(op, {**named, **more}, {f"rows.{name}": index for name, index in indices})


def check_backward(op: str, grad: Tensor, operands: Operands, h: Tensor | None) -> None:
    """Raise ValueError or TypeError unless the operands of a backward pass match."""
    check(op, operands, grad=grad, h=h)
    rows, columns = operands.token.shape[0], operands.gate_up.shape[1]
    if grad.shape != operands.x.shape or (h is not None and h.shape != (rows, columns)):
        raise ValueError(
            f"{op}: grad {list(grad.shape)} must have the shape of x, {list(operands.x.shape)}, "
            f"and h {None if h is None else list(h.shape)} must be [{rows}, {columns}] or None"
        )


def dense(op: str, operands: Operands) -> Operands:
    """Check the indices in `offsets`, `token`, `slot` and `row`. Return `operands` with contiguous
    tensors, except gate_up and down, which are returned unchanged."""
    x, weights, gate_up, down, *rows = operands
    # Kernels receive addresses without strides, so these operands must be contiguous.
    result = Operands(
        x.contiguous(), weights.contiguous(), gate_up, down, *(index.contiguous() for index in rows)
    )
    check_offsets(op, result.offsets, result.token.shape[0])
    check_index(op, "rows.token", result.token, x.shape[0])
    check_index(op, "rows.slot", result.slot, weights.numel())
    check_index(op, "rows.row", result.row, result.token.shape[0])
    return result


def dense_backward(
    op: str, grad: Tensor, operands: Operands, h: Tensor | None
) -> tuple[Tensor, Operands, Tensor | None]:
    """Check the indices in `operands`. Return `grad`, `operands` and `h` with contiguous tensors,
    except the weights `gate_up` and `down`, which are returned unchanged."""
    return grad.contiguous(), dense(op, operands), None if h is None else h.contiguous()
