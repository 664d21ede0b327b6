"""The op `swiglu`, a = silu(g) * u for h = [g, u], and its backward op `swiglu_backward`.

The output of the experts is out = sum of w * (a Wd^T), with routing weights w and down projection
Wd. Let dout be the gradient of `out`, and let da = dout Wd. The gradient of w is the dot product
<da, a>, and the gradient of a is w * da. Backward also returns w * a, for the gradient of Wd.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from optimus_kernels import library
from optimus_kernels.ops import check_index, check_operands, compute_dtype, define, shapes


def reference(h: Tensor) -> Tensor:
    """Reference implementation of `swiglu` in plain torch."""
    g, u = h.to(compute_dtype(h.dtype)).chunk(2, dim=1)
    return (F.silu(g) * u).to(h.dtype)


def reference_backward(
    h: Tensor, da: Tensor, weights: Tensor, slot: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Reference implementation of `swiglu_backward` in plain torch."""
    compute = compute_dtype(h.dtype)
    g, u = h.to(compute).chunk(2, dim=1)
    is_row = slot >= 0
    used_rows = is_row.nonzero().flatten()
    slots = slot[used_rows].long()
    w = h.new_zeros(len(h), 1, dtype=compute)
    w[used_rows, 0] = weights.flatten()[slots].to(compute)
    d, silu = da.to(compute), F.silu(g)
    a = silu * u
    dweights = torch.zeros(weights.numel(), dtype=compute, device=h.device)
    dweights[slots] = (d * a).sum(1)[used_rows]
    wd = w * d
    dh = torch.cat([torch.ops.aten.silu_backward(wd * u, g), wd * silu], dim=1)
    scaled = w * a
    if len(used_rows) < len(h):  # h and da may have NaN in rows without a slot
        dh, scaled = (torch.where(is_row.unsqueeze(1), value, 0) for value in (dh, scaled))
    return dh.to(h.dtype), scaled.to(h.dtype), dweights.view(weights.shape)


def _check(h: Tensor) -> None:
    if h.dim() != 2 or h.shape[1] % 2:
        raise ValueError(f"swiglu: h {list(h.shape)} must be [R, 2F], with an even second dim")
    check_operands("swiglu", {"h": h}, {})


def swiglu_into(h: Tensor, start: int, out: Tensor, count: int) -> Tensor:
    """Write swiglu(h[start : start + count]) to out[:count] and return `out`. The operands must be
    contiguous; the function does not check this."""
    kernels = library.native(h)
    if kernels is None:
        out[:count] = reference(h[start : start + count])
        return out
    inner = h.shape[1] // 2
    rows = h.data_ptr() + start * 2 * inner * h.element_size()
    kernels.call("swiglu", h, library.DTYPES[h.dtype], rows, count, inner, out.data_ptr())
    return out


def _empty(h: Tensor) -> Tensor:
    return h.new_empty(h.shape[0], h.shape[1] // 2)


def _backward(ctx: Any, grad: Tensor) -> Tensor:
    (h,) = ctx.saved_tensors
    unit_weights = h.new_ones(h.shape[0], 1)
    slot = torch.arange(h.shape[0], dtype=torch.int32, device=h.device)
    return torch.ops.optimus.swiglu_backward(h, grad, unit_weights, slot)[0]


def _check_backward(h: Tensor, da: Tensor, weights: Tensor, slot: Tensor) -> None:
    values = {"h": h, "da": da, "weights": weights}
    fits = h.dim() == weights.dim() == 2 and h.shape[1] % 2 == 0
    if not fits or da.shape != (h.shape[0], h.shape[1] // 2) or slot.shape != h.shape[:1]:
        raise ValueError(
            "swiglu_backward: h [R, 2F], da [R, F], weights [T, K], slot [R] do not match: "
            + shapes({**values, "slot": slot})
        )
    check_operands("swiglu_backward", values, {"slot": slot})


def swiglu_backward_into(
    h: Tensor,
    start: int,
    da: Tensor,
    weights: Tensor,
    slot: Tensor,
    first: int,
    count: int,
    outs: tuple[Tensor, Tensor, Tensor],
) -> None:
    """Compute the gradients of `count` rows. Write them to the tensors `outs`: dh, w * a and
    dweights [T, K].

    The inputs are h[start : start + count], da[:count] and slot[first : first + count]. The
    operands must be contiguous; the function does not check this. The output w * a may be the same
    tensor as `da`. Before the call, dweights must be zero at the slots of these rows.
    """
    kernels = library.native(h)
    if kernels is None:
        slots = slot[first : first + count]
        new = reference_backward(h[start : start + count], da[:count], weights, slots)
        for out, value in zip(outs[:2], new[:2], strict=True):
            out[:count] = value
        outs[2].add_(new[2])
        return
    inner = h.shape[1] // 2
    rows = h.data_ptr() + start * 2 * inner * h.element_size()
    ins = (rows, da.data_ptr(), weights.data_ptr(), slot.data_ptr() + 4 * first)
    code, addresses = library.DTYPES[h.dtype], [t.data_ptr() for t in outs]
    kernels.call("swiglu_backward", h, code, *ins, count, inner, *addresses)


def _fake_backward(
    h: Tensor, da: Tensor, weights: Tensor, slot: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    dweights = weights.new_empty(weights.shape, dtype=compute_dtype(h.dtype))
    return h.new_empty(h.shape), h.new_empty(da.shape), dweights


@define("swiglu(Tensor h) -> Tensor", _empty, _check, _backward)
def swiglu(h: Tensor) -> Tensor:
    """Return silu(g) * u [R, F] for h = [g, u] [R, 2F], computed in fp32 (in fp64 if h is fp64)."""
    if library.native(h) is None:
        return reference(h)
    return swiglu_into(h.contiguous(), 0, _empty(h), h.shape[0])


@define(
    "swiglu_backward(Tensor h, Tensor da, Tensor weights, Tensor slot) -> (Tensor, Tensor, Tensor)",
    _fake_backward,
    _check_backward,
)
def swiglu_backward(
    h: Tensor, da: Tensor, weights: Tensor, slot: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the gradients of SwiGLU's input and of the routing weights.

    Args:
        h: [R, 2F], the pre-activation.
        da: [R, F], the gradient of the weighted activation w * a.
        weights: [T, K] of h's dtype, the routing weights w.
        slot: int32 [R], the index of each row's weight in the flattened `weights`. -1 marks an
            unused row, whose results are zeros.

    Returns:
        dh [R, 2F], w * a [R, F], and dweights [T, K] in fp32 (in fp64 if h is fp64).
    """
    check_index("swiglu_backward", "slot", slot, weights.numel())
    if library.native(h) is None:
        return reference_backward(h, da, weights, slot)
    outs = _fake_backward(h, da, weights, slot)
    outs[2].zero_()
    h, da, weights, slot = (t.contiguous() for t in (h, da, weights, slot))
    swiglu_backward_into(h, 0, da, weights, slot, 0, h.shape[0], outs)
    return outs
