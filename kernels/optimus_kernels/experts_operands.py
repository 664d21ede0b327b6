"""What the experts' ops take: looked at, and dense where the kernels go by addresses."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from optimus_kernels.checks import check_index, check_offsets, check_operands, shapes
from optimus_kernels.route import Rows


class Saved(NamedTuple):
    """What both passes take, in the order of the ops."""

    x: Tensor
    weights: Tensor
    gate_up: Tensor
    down: Tensor
    offsets: Tensor
    token: Tensor
    slot: Tensor
    row: Tensor

    @property
    def rows(self) -> Rows:
        return Rows(*self[4:])


Into = tuple[Tensor, Tensor, bool]
"""Memory for the gradients of gate_up and down, and whether to add to what is there."""


def check(op: str, saved: Saved, **more: Tensor) -> None:
    """Of shapes, dtypes and devices; `more` are values beside x and the weights."""
    x, weights, gate_up, down, *rows = saved
    named = {"x": x, "weights": weights, "gate_up": gate_up, "down": down}
    if [value.dim() for value in named.values()] != [2, 2, 3, 3]:
        raise ValueError(
            f"{op}: {shapes(named)}; they must be x [T, D], weights [T, K], gate_up "
            "[E, 2F, D], down [E, D, F]"
        )
    held, inner, hidden = gate_up.shape[0], down.shape[2], x.shape[1]
    if gate_up.shape != (held, 2 * inner, hidden) or down.shape != (held, hidden, inner):
        raise ValueError(
            f"{op}: {shapes(named)}; gate_up must be [E, 2F, D] and down [E, D, F] for x [T, D]"
        )
    if saved.offsets.shape != (held + 1,):
        raise ValueError(
            f"{op}: routed for {saved.offsets.shape[0] - 1} experts, but gate_up "
            f"{list(gate_up.shape)} holds {held}"
        )
    if saved.row.shape != weights.shape or weights.shape[0] != x.shape[0]:
        raise ValueError(
            f"{op}: {shapes(named)}, routed slots {list(saved.row.shape)}; T or K do not match"
        )
    if saved.token.dim() != 1 or saved.token.shape != saved.slot.shape:
        raise ValueError(
            f"{op}: rows.token {list(saved.token.shape)} and rows.slot {list(saved.slot.shape)} "
            "must both be [N], or both shortened to the R rows held"
        )
    indices = zip(("offsets", "token", "slot", "row"), rows, strict=True)
    check_operands(op, {**named, **more}, {f"rows.{name}": index for name, index in indices})


def check_backward(op: str, grad: Tensor, saved: Saved, h: Tensor | None) -> None:
    if h is None:
        check(op, saved, grad=grad)
    else:
        check(op, saved, grad=grad, h=h)
    rows, wide = saved.token.shape[0], saved.gate_up.shape[1]
    if grad.shape != saved.x.shape or (h is not None and h.shape != (rows, wide)):
        raise ValueError(
            f"{op}: grad {list(grad.shape)} must be {list(saved.x.shape)}, as x is, and h "
            f"{None if h is None else list(h.shape)} [{rows}, {wide}] or None"
        )


def dense(op: str, saved: Saved) -> Saved:
    """With indices that the loop may take by address; the weights may lie in any order."""
    x, weights, gate_up, down, *rows = saved
    taken = Saved(
        x.contiguous(), weights.contiguous(), gate_up, down, *(index.contiguous() for index in rows)
    )
    check_offsets(op, taken.offsets, taken.token.shape[0])
    check_index(op, "rows.token", taken.token, x.shape[0])
    check_index(op, "rows.slot", taken.slot, weights.numel())
    check_index(op, "rows.row", taken.row, taken.token.shape[0])
    return taken


def dense_backward(
    op: str, grad: Tensor, saved: Saved, h: Tensor | None
) -> tuple[Tensor, Saved, Tensor | None]:
    """A backward's operands, looked at and taken."""
    check_backward(op, grad, saved, h)
    return grad.contiguous(), dense(op, saved), None if h is None else h.contiguous()
