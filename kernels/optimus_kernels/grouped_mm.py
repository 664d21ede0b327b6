"""Grouped matrix products: the rows of each expert times the expert's weights, and weight
gradients.

Expert e has rows offsets[e] to offsets[e+1] - 1. In the result, the values of all rows after the
rows of the last expert are undefined.

There are two implementations. The implementation "torch" calls torch's grouped_mm. The
implementation "loop" calls torch.mm once per expert. "loop" is faster on CPUs and supports every
dtype.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from optimus_kernels.ops import check_offsets, check_operands, define

FORMS = ("auto", "torch", "loop")
_ROW_BYTES = 16
"""Alignment in bytes that torch's grouped_mm requires for strides."""
_form = "auto"
torch_grouped_mm: Any = getattr(F, "grouped_mm", None) or getattr(torch, "_grouped_mm", None)
"""torch's grouped_mm, under its public or its earlier private name. None if torch does not have
it."""


def set_form(name: str) -> None:
    """Select the implementation of all grouped products of this process.

    Args:
        name: "loop", "torch" or "auto". "auto" selects "loop" on CPUs and for operands that torch
            does not support, and "torch" for all other operands.

    Raises:
        ValueError: `name` is unknown.
    """
    global _form
    if name not in FORMS:
        raise ValueError(f"grouped_gemm {name!r}: unknown name; use one of {', '.join(FORMS)}")
    _form = name


def form(like: Tensor, *widths: int) -> str:
    """Return the implementation for operands with the device and dtype of `like`.

    Args:
        like: tensor with the operands' device and dtype.
        widths: number of elements in a row, for each operand and for the result. "torch" requires
            that the size of each row is a multiple of 16 bytes.

    Returns:
        "torch" or "loop".

    Raises:
        ValueError: `set_form` selected "torch", and torch does not support these operands.
    """
    if _form == "loop" or (_form == "auto" and like.is_cpu):
        return "loop"
    why_not = _why_not_torch(like, widths)
    if _form == "torch" and why_not:
        raise ValueError(f"grouped_gemm 'torch': {why_not}; use loop or auto")
    return "loop" if why_not else "torch"


def _why_not_torch(like: Tensor, widths: Sequence[int]) -> str:
    if not torch_form_works(like.device.type, like.dtype):
        return (
            f"torch {torch.__version__} has no grouped product of {like.dtype} on "
            f"{like.device.type}"
        )
    if any(width * like.element_size() % _ROW_BYTES for width in widths):
        sizes = ", ".join(str(width) for width in widths)
        return (
            f"the size of a row must be a multiple of {_ROW_BYTES} bytes, but rows have {sizes} "
            f"elements of {like.dtype}"
        )
    return ""


def reference(rows: Tensor, weights: Tensor, offsets: Tensor) -> Tensor:
    """Reference implementation of `grouped_mm` in plain torch."""
    index = torch.arange(len(rows), device=rows.device)
    out = rows.new_zeros(len(rows), weights.shape[2])
    for e in range(len(weights)):
        of_expert = ((index >= offsets[e]) & (index < offsets[e + 1])).unsqueeze(1)
        out = torch.where(of_expert, rows @ weights[e], out)
    return out


def reference_weight(a: Tensor, b: Tensor, offsets: Tensor) -> Tensor:
    """Reference implementation of `grouped_mm_weight` in plain torch."""
    index = torch.arange(len(a), device=a.device)
    products = []
    for e in range(len(offsets) - 1):
        of_expert = ((index >= offsets[e]) & (index < offsets[e + 1])).unsqueeze(1)
        products.append(torch.where(of_expert, a, 0).t() @ torch.where(of_expert, b, 0))
    return torch.stack(products) if products else a.new_zeros(0, a.shape[1], b.shape[1])


@functools.cache
def torch_form_works(device: str, dtype: torch.dtype) -> bool:
    """Return True if torch supports `grouped_mm` and `grouped_mm_weight` for a device type and
    dtype."""
    # The only reliable test is to run the products.
    try:
        rows = torch.zeros(16, 16, device=device, dtype=dtype)
        weights = torch.zeros(2, 16, 16, device=device, dtype=dtype)
        offsets = torch.tensor([0, 8, 16], device=device, dtype=torch.int32)
        torch_grouped_mm(rows, weights.mT, offs=offsets[1:])
        torch_grouped_mm(rows.t(), rows, offs=offsets[1:])
    except (RuntimeError, NotImplementedError, TypeError, ValueError):
        return False
    return True


def _check(rows: Tensor, weights: Tensor, offsets: Tensor) -> None:
    fits = rows.dim() == 2 and weights.dim() == 3 and rows.shape[1] == weights.shape[1]
    if not fits or offsets.shape != (weights.shape[0] + 1,):
        raise ValueError(
            "grouped_mm: rows [R, A], weights [E, A, B], offsets [E+1] do not match: "
            f"{list(rows.shape)}, {list(weights.shape)}, {list(offsets.shape)}"
        )
    check_operands("grouped_mm", {"rows": rows, "weights": weights}, {"offsets": offsets})


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    """Backward of `grouped_mm` and of `grouped_mm_weight`. The gradients are grouped products."""
    a, b, offsets = ctx.saved_tensors
    grad = grad.contiguous()  # the gradient of a sum has stride 0, which grouped_mm rejects
    if grad.dim() == 3:  # the result of grouped_mm_weight has 3 dims
        return grouped_mm(b, grad.mT, offsets), grouped_mm(a, grad, offsets), None
    return grouped_mm(grad, b.mT, offsets), grouped_mm_weight(a, grad, offsets), None


def _check_weight(a: Tensor, b: Tensor, offsets: Tensor) -> None:
    fits = (a.dim(), b.dim(), offsets.dim()) == (2, 2, 1) and a.shape[0] == b.shape[0]
    if not fits or not offsets.shape[0]:
        raise ValueError(
            "grouped_mm_weight: a [R, A], b [R, B], offsets [E+1] do not match: "
            f"{list(a.shape)}, {list(b.shape)}, {list(offsets.shape)}"
        )
    check_operands("grouped_mm_weight", {"a": a, "b": b}, {"offsets": offsets})


@define(
    "grouped_mm(Tensor rows, Tensor weights, Tensor offsets) -> Tensor",
    lambda rows, weights, offsets: rows.new_empty(rows.shape[0], weights.shape[2]),
    _check,
    _backward,
)
def grouped_mm(rows: Tensor, weights: Tensor, offsets: Tensor) -> Tensor:
    """Multiply the rows of each expert by the expert's weights.

    Args:
        rows: [R, A], sorted by expert.
        weights: [E, A, B]; each matrix is contiguous or the transpose of a contiguous matrix.
        offsets: int32 [E+1]; expert e has rows offsets[e] to offsets[e+1] - 1.

    Returns:
        [R, B]; the rows of expert e are multiplied by weights[e].
    """
    check_offsets("grouped_mm", offsets, len(rows))
    if form(rows, *weights.shape[1:]) == "torch":
        return torch_grouped_mm(rows, weights, offs=offsets[1:])
    out = rows.new_zeros(len(rows), weights.shape[2])
    bounds = offsets.tolist()
    for e, matrix in enumerate(weights.unbind(0)):
        if bounds[e] < bounds[e + 1]:
            block = slice(bounds[e], bounds[e + 1])
            torch.mm(rows[block], matrix, out=out[block])
    return out


@define(
    "grouped_mm_weight(Tensor a, Tensor b, Tensor offsets) -> Tensor",
    lambda a, b, offsets: a.new_empty(offsets.shape[0] - 1, a.shape[1], b.shape[1]),
    _check_weight,
    _backward,
)
def grouped_mm_weight(a: Tensor, b: Tensor, offsets: Tensor) -> Tensor:
    """Compute a^T @ b for the rows of each expert: the weight gradient of `grouped_mm`.

    Args:
        a: [R, A], sorted by expert.
        b: [R, B], sorted by expert.
        offsets: int32 [E+1]; expert e has rows offsets[e] to offsets[e+1] - 1.

    Returns:
        [E, A, B]; element e is the product for expert e, or zeros if expert e has no rows.
    """
    check_offsets("grouped_mm_weight", offsets, len(a))
    if form(a, a.shape[1], b.shape[1]) == "torch":
        return torch_grouped_mm(a.t(), b, offs=offsets[1:])
    bounds = offsets.tolist()
    out = a.new_zeros(len(bounds) - 1, a.shape[1], b.shape[1])
    for e, result in enumerate(out.unbind(0)):
        if bounds[e] < bounds[e + 1]:
            block = slice(bounds[e], bounds[e + 1])
            torch.mm(a[block].t(), b[block], out=result)
    return out
