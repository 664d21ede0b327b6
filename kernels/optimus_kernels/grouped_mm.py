"""Grouped matrix products: each expert's rows with that expert's weights, and its weight gradient.

E experts; expert e has rows offsets[e] to offsets[e+1] - 1. Two forms of the same products:
"torch" is torch's grouped_mm, one launch with no copy of offsets to the host; "loop" is one product
for each expert into slices of the result, which is faster on CPUs and knows every dtype. Rows from
offsets[E] on are undefined in results.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from optimus_kernels.checks import check_offsets, check_operands
from optimus_kernels.ops import define

FORMS = ("auto", "torch", "loop")
_ROW_BYTES = 16
"""What torch's grouped_mm wants strides to be a multiple of."""
_form = "auto"
torch_grouped_mm: Any = getattr(F, "grouped_mm", None) or getattr(torch, "_grouped_mm", None)
"""torch.nn.functional's since 2.10, before that the private op of the same meaning."""


def set_form(name: str) -> None:
    """What all products of this process use. "auto": loop on CPUs, torch where it works."""
    global _form
    if name not in FORMS:
        raise ValueError(f"grouped_gemm {name!r}: it is one of {', '.join(FORMS)}")
    _form = name


def form(like: Tensor, *widths: int) -> str:
    """The form, torch or loop, for tensors of this device and dtype whose rows have `widths`.

    Torch's wants rows of a multiple of 16 bytes; without them "auto" takes the loop, and "torch" is
    a ValueError.
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
            f"it takes rows of a multiple of {_ROW_BYTES} bytes, and these have {sizes} numbers of "
            f"{like.dtype}"
        )
    return ""


def grouped_mm(rows: Tensor, weights: Tensor, offsets: Tensor) -> Tensor:
    """rows [R, A], weights [E, A, B] (each matrix dense, or the transpose of a dense one), offsets
    int32 [E+1] -> [R, B] = rows of expert e @ weights[e]."""
    return _grouped_mm(rows, weights, offsets)


def grouped_mm_weight(a: Tensor, b: Tensor, offsets: Tensor) -> Tensor:
    """a [R, A], b [R, B] -> [E, A, B] = (a of expert e)^T @ (b of expert e); zeros without rows."""
    return _grouped_mm_weight(a, b, offsets)


def reference(rows: Tensor, weights: Tensor, offsets: Tensor) -> Tensor:
    """The twin: a mask for each expert."""
    place = torch.arange(len(rows), device=rows.device)
    out = rows.new_zeros(len(rows), weights.shape[2])
    for e in range(len(weights)):
        here = ((place >= offsets[e]) & (place < offsets[e + 1])).unsqueeze(1)
        out = torch.where(here, rows @ weights[e], out)
    return out


def reference_weight(a: Tensor, b: Tensor, offsets: Tensor) -> Tensor:
    """The weight gradient's twin."""
    place = torch.arange(len(a), device=a.device)
    parts = []
    for e in range(len(offsets) - 1):
        here = ((place >= offsets[e]) & (place < offsets[e + 1])).unsqueeze(1)
        parts.append(torch.where(here, a, 0).t() @ torch.where(here, b, 0))
    return torch.stack(parts) if parts else a.new_zeros(0, a.shape[1], b.shape[1])


def _torch_products(rows: Tensor, weights: Tensor, offsets: Tensor) -> Tensor:
    return torch_grouped_mm(rows, weights, offs=offsets[1:])


def _torch_weight_products(a: Tensor, b: Tensor, offsets: Tensor) -> Tensor:
    return torch_grouped_mm(a.t(), b, offs=offsets[1:])


def _loop_products(rows: Tensor, weights: Tensor, offsets: Tensor) -> Tensor:
    out = rows.new_zeros(len(rows), weights.shape[2])
    bounds = offsets.tolist()
    for e, matrix in enumerate(weights.unbind(0)):
        if bounds[e] < bounds[e + 1]:
            part = slice(bounds[e], bounds[e + 1])
            torch.mm(rows[part], matrix, out=out[part])
    return out


def _loop_weight_products(a: Tensor, b: Tensor, offsets: Tensor) -> Tensor:
    bounds = offsets.tolist()
    out = a.new_zeros(len(bounds) - 1, a.shape[1], b.shape[1])
    for e, into in enumerate(out.unbind(0)):
        if bounds[e] < bounds[e + 1]:
            part = slice(bounds[e], bounds[e + 1])
            torch.mm(a[part].t(), b[part], out=into)
    return out


_products = {"torch": _torch_products, "loop": _loop_products}
_weight_products = {"torch": _torch_weight_products, "loop": _loop_weight_products}


@functools.cache
def torch_form_works(device: str, dtype: torch.dtype) -> bool:
    """Whether torch has it for this device and dtype: the only sure way is to try both products."""
    try:
        rows = torch.zeros(16, 16, device=device, dtype=dtype)
        weights = torch.zeros(2, 16, 16, device=device, dtype=dtype)
        offsets = torch.tensor([0, 8, 16], device=device, dtype=torch.int32)
        _torch_products(rows, weights.mT, offsets)
        _torch_weight_products(rows, rows, offsets)
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


def _run(rows: Tensor, weights: Tensor, offsets: Tensor) -> Tensor:
    _check(rows, weights, offsets)
    check_offsets("grouped_mm", offsets, len(rows))
    widths = weights.shape[1:]
    return _products[form(rows, *widths)](rows, weights, offsets)


def _fake(rows: Tensor, weights: Tensor, offsets: Tensor) -> Tensor:
    _check(rows, weights, offsets)
    return rows.new_empty(rows.shape[0], weights.shape[2])


def _save(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    rows, weights, offsets = ctx.saved_tensors
    grad = grad.contiguous()  # sums hand out stride-0 gradients, which grouped_mm refuses
    return (
        torch.ops.optimus.grouped_mm(grad, weights.mT, offsets),
        torch.ops.optimus.grouped_mm_weight(rows, grad, offsets),
        None,
    )


def _run_weight(a: Tensor, b: Tensor, offsets: Tensor) -> Tensor:
    _check_weight(a, b, offsets)
    check_offsets("grouped_mm_weight", offsets, len(a))
    return _weight_products[form(a, a.shape[1], b.shape[1])](a, b, offsets)


def _fake_weight(a: Tensor, b: Tensor, offsets: Tensor) -> Tensor:
    _check_weight(a, b, offsets)
    return a.new_empty(offsets.shape[0] - 1, a.shape[1], b.shape[1])


def _check_weight(a: Tensor, b: Tensor, offsets: Tensor) -> None:
    fits = (a.dim(), b.dim(), offsets.dim()) == (2, 2, 1) and a.shape[0] == b.shape[0]
    if not fits or not offsets.shape[0]:
        raise ValueError(
            "grouped_mm_weight: a [R, A], b [R, B], offsets [E+1] do not match: "
            f"{list(a.shape)}, {list(b.shape)}, {list(offsets.shape)}"
        )
    check_operands("grouped_mm_weight", {"a": a, "b": b}, {"offsets": offsets})


def _backward_weight(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    a, b, offsets = ctx.saved_tensors
    grad = grad.contiguous()
    return (
        torch.ops.optimus.grouped_mm(b, grad.mT, offsets),
        torch.ops.optimus.grouped_mm(a, grad, offsets),
        None,
    )


_grouped_mm = define(
    "grouped_mm(Tensor rows, Tensor weights, Tensor offsets) -> Tensor",
    _run,
    _fake,
    _backward,
    _save,
)
_grouped_mm_weight = define(
    "grouped_mm_weight(Tensor a, Tensor b, Tensor offsets) -> Tensor",
    _run_weight,
    _fake_weight,
    _backward_weight,
    _save,
)
