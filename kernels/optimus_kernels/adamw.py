"""`adamw_`: in-place AdamW update of flat fp32 parameters, in one pass over memory.

The op computes the update of torch.optim.AdamW(fused=True). Gradients may be bf16, fp16 or fp32.
The op can also write the updated parameters in bf16 or fp16. The bits of an element's result do not
depend on the tensor length, the number of threads or the backend.
"""

from __future__ import annotations

import ctypes
import math
from typing import NamedTuple

import torch
from torch import Tensor

from optimus_kernels import library
from optimus_kernels.ops import define

_SLICE = 1 << 18
"""Number of elements that the reference implementation updates at a time, to limit its memory."""


class Coefficients(NamedTuple):
    """Scalar coefficients of an AdamW update, in the order of the C struct OptimusAdamw
    (interface.h)."""

    grad_scale: float
    decay: float
    lerp: float
    beta2: float
    one_minus_beta2: float
    root_bias2: float
    eps: float
    minus_step: float


def coefficients_of(
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    step: int,
    grad_scale: float,
) -> Coefficients:
    """Return the coefficients of the AdamW update with the number `step`. The first update has the
    number 1."""
    return Coefficients(
        grad_scale=grad_scale,
        decay=1 - lr * weight_decay,
        lerp=1 - beta1,
        beta2=beta2,
        one_minus_beta2=1 - beta2,
        root_bias2=math.sqrt(1 - beta2**step),
        eps=eps,
        minus_step=-lr / (1 - beta1**step),
    )


def reference(
    master: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    grad: Tensor,
    param_out: Tensor | None,
    coefficients: Coefficients,
) -> None:
    """Reference implementation of `adamw_` in plain torch. The kernels compute bitwise equal
    results."""
    flat = [t.view(-1) for t in (master, exp_avg, exp_avg_sq, grad)]
    params = None if param_out is None else param_out.view(-1)
    for begin in range(0, master.numel(), _SLICE):
        chunk = slice(begin, begin + _SLICE)
        p, m, v, g = (t[chunk] for t in flat)
        _update(p, m, v, g.float(), coefficients)
        if params is not None:
            params[chunk] = p


def _update(p: Tensor, m: Tensor, v: Tensor, g: Tensor, n: Coefficients) -> None:
    # Every operation has the rounding of torch's fused kernel for full AVX2 or AVX-512 vectors.
    g = g * n.grad_scale
    from_m = _fp32(n.lerp) < 0.5  # as torch's lerp, start from the nearer of m and g
    weight = _fp32(n.lerp) if from_m else _fp32(_fp32(n.lerp) - 1)
    m.copy_(_fused(weight, g - m, m if from_m else g))
    v.copy_(_fused(g * n.one_minus_beta2, g, v * n.beta2))
    root = v.double().sqrt().float()  # fp32 torch.sqrt is not correctly rounded on all CPUs
    # root_bias2 is a tensor, because some devices replace division by a Python number with
    # multiplication by its inverse, which rounds differently.
    root_bias2 = torch.full((), n.root_bias2, dtype=torch.float32, device=v.device)
    denominator = root / root_bias2 + n.eps
    p.copy_(p * n.decay + (m * n.minus_step) / denominator)


def _fused(a: Tensor | float, b: Tensor, c: Tensor) -> Tensor:
    """Return a * b + c for fp32 numbers, with a single rounding to fp32 (fused multiply-add)."""
    # The product is exact in fp64. The sum is rounded to fp64 with rounding to odd: the last bit of
    # an inexact sum is 1. Rounding this sum to fp32 then has the same result as a single rounding
    # of the exact sum.
    product = a * b.double()
    addend = c.double()
    total = product + addend
    rest = total - product  # Knuth's TwoSum gives the exact error
    remainder = (product - (total - rest)) + (addend - rest)
    even = (total.view(torch.int64) & 1) == 0
    inexact = (remainder != 0) & remainder.isfinite()
    direction = torch.where(remainder > 0, math.inf, -math.inf).to(total.dtype)
    odd = torch.nextafter(total, direction)
    return torch.where(inexact & even, odd, total).float()


def _fp32(value: float) -> float:
    return ctypes.c_float(value).value


def _check(
    master: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor, grad: Tensor, param_out: Tensor | None,
    lr: float, beta1: float, beta2: float, eps: float, weight_decay: float, step: int, *_: float,
) -> None:  # fmt: skip
    tensors = {"master": master, "exp_avg": exp_avg, "exp_avg_sq": exp_avg_sq, "grad": grad}
    if param_out is not None:
        tensors["param_out"] = param_out
    half_dtypes = (torch.bfloat16, torch.float16)
    allowed = {"grad": (torch.float32, *half_dtypes), "param_out": half_dtypes}
    for name, tensor in tensors.items():
        if tensor.shape != master.shape or not tensor.is_contiguous():
            raise ValueError(
                f"adamw_: {name} {list(tensor.shape)} must be contiguous and have the shape of "
                f"master, {list(master.shape)}"
            )
        if tensor.device != master.device:
            raise ValueError(f"adamw_: {name} is on {tensor.device}; move it to {master.device}")
        if tensor.dtype not in allowed.get(name, (torch.float32,)):
            expected = ", ".join(map(str, allowed.get(name, (torch.float32,))))
            raise TypeError(f"adamw_: {name} is {tensor.dtype}; use {expected}")
    if step < 1 or not (0 <= beta1 < 1 and 0 <= beta2 < 1):
        raise ValueError(
            f"adamw_: step = {step}, beta1 = {beta1}, beta2 = {beta2}; step must be at least 1, "
            "beta1 and beta2 at least 0 and less than 1"
        )


@define(
    "adamw_(Tensor(a!) master, Tensor(b!) exp_avg, Tensor(c!) exp_avg_sq, Tensor grad, "
    "Tensor(d!)? param_out, float lr, float beta1, float beta2, float eps, float weight_decay, "
    "int step, float grad_scale=1.0) -> ()",
    lambda *_: None,
    _check,
)
def adamw_(
    master: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    grad: Tensor,
    param_out: Tensor | None,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    step: int,
    grad_scale: float = 1.0,
) -> None:
    """Update master, exp_avg and exp_avg_sq in place by one step of AdamW.

    The tensors must not overlap; the op does not detect overlap. If an element of the gradient is
    NaN or infinite, the same element of every output is not finite.

    Args:
        master: fp32 [n], the master weights.
        exp_avg: fp32 [n], the first moment.
        exp_avg_sq: fp32 [n], the second moment.
        grad: fp32, bf16 or fp16 [n], the gradient.
        param_out: bf16 or fp16 [n], output for the updated parameter. None if `master` is the
            parameter itself.
        lr, beta1, beta2, eps, weight_decay: as for torch.optim.AdamW.
        step: number of this update, counted from 1.
        grad_scale: factor that multiplies the gradient before the update, such as a clipping
            factor.

    Raises:
        ValueError: a shape, device or number is invalid, or a tensor is not contiguous.
        TypeError: a tensor has a dtype that is not listed above.
    """
    coefficients = coefficients_of(lr, beta1, beta2, eps, weight_decay, step, grad_scale)
    kernels = library.native(master)
    if kernels is None:
        reference(master, exp_avg, exp_avg_sq, grad, param_out, coefficients)
        return
    packed = (ctypes.c_float * len(coefficients))(*coefficients)
    out: tuple[int, int | None] = (0, None)
    if param_out is not None:
        out = (library.DTYPES[param_out.dtype], param_out.data_ptr())
    states = (t.data_ptr() for t in (grad, master, exp_avg, exp_avg_sq))
    kernels.call(
        "adamw", master, library.DTYPES[grad.dtype], out[0], ctypes.addressof(packed),
        master.numel(), *states, out[1],
    )  # fmt: skip


def adamw_into(
    into: tuple[Tensor, Tensor, Tensor],
    master: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    grad: Tensor,
    param_out: Tensor | None,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    step: int,
    grad_scale: float = 1.0,
) -> None:
    """Compute the update of `adamw_`, but write the new master, exp_avg and exp_avg_sq to other
    tensors. The results have the same bits as the results of `adamw_`.

    The compiled kernel for CPUs streams its results to memory. Unlike other stores, streaming
    stores do not read the memory of `into` and `param_out` first. Without this kernel, the states
    are copied and updated in place.

    Args:
        into: The new (master, exp_avg, exp_avg_sq), fp32 [n] each. They must not overlap the other
            tensors.
        master, exp_avg, exp_avg_sq: The states before the update. They are not changed.
        grad, param_out, lr, beta1, beta2, eps, weight_decay, step, grad_scale: As for `adamw_`.

    Raises:
        ValueError, TypeError: As for `adamw_`. The tensors in `into` are also checked.
    """
    numbers = lr, beta1, beta2, eps, weight_decay, step, grad_scale
    kernels = library.native(master)
    if kernels is None or kernels.adamw_into is None:
        for output, values in zip(into, (master, exp_avg, exp_avg_sq), strict=True):
            output.copy_(values)
        new_master, new_exp_avg, new_exp_avg_sq = into
        adamw_(new_master, new_exp_avg, new_exp_avg_sq, grad, param_out, *numbers)
        return
    for states in (into, (master, exp_avg, exp_avg_sq)):
        _check(states[0], states[1], states[2], grad, param_out, *numbers)
    coefficients = coefficients_of(*numbers)
    packed = (ctypes.c_float * len(coefficients))(*coefficients)
    out = (
        (0, None) if param_out is None else (library.DTYPES[param_out.dtype], param_out.data_ptr())
    )
    code = kernels.adamw_into(
        library.DTYPES[grad.dtype], out[0], ctypes.addressof(packed), master.numel(),
        *(tensor.data_ptr() for tensor in (grad, master, exp_avg, exp_avg_sq)), out[1],
        *(tensor.data_ptr() for tensor in into),
    )  # fmt: skip
    assert code == 0, code
