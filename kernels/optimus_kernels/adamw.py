"""adamw_: one update of AdamW over a flat chunk, in place, in one pass over its states.

What torch.optim.AdamW(fused=True) does, with the casts around it: the gradient is read as it was
accumulated (bf16, fp16 or fp32), scaled, and the updated master is written in the parameter's dtype
too. 28 bytes a parameter travel instead of 44 in three passes.

Every element is rounded as torch's kernel rounds whole vectors on AVX2 and AVX-512, hence a
tensor's length, its cuts, threads and the backend change no bit; torch's own last elements
(length mod 16) differ. The twin rounds alike, so it gives these bits on any machine.
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
"""Elements that the twin takes at once: its temporaries are of this length."""


class Numbers(NamedTuple):
    """What an update multiplies with: OptimusAdamw of interface.h, in its order.

    All computed in fp64, as torch does, and rounded to fp32 once when used.
    """

    grad_scale: float
    decay: float
    lerp: float
    beta2: float
    one_minus_beta2: float
    root_bias2: float
    eps: float
    minus_step: float


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
    """Update master, exp_avg, exp_avg_sq (fp32 [n]) in place with grad (fp32, bf16 or fp16 [n]).

    param_out: bf16 or fp16 [n], is given master rounded to nearest even (NaN stays NaN); None
    where the master itself is the parameter. step counts from 1. grad_scale (a clipping factor, the
    inverse of a loss scale) multiplies the widened gradient in fp32, with one rounding: the same
    bits as `grad.float().mul_(grad_scale)` before. NaN and infinities pass through: looking at the
    gradients is the caller's.

    Tensors are contiguous and do not overlap. Raises ValueError and TypeError for others.
    """
    numbers = (lr, beta1, beta2, eps, weight_decay, step, grad_scale)
    _adamw(master, exp_avg, exp_avg_sq, grad, param_out, *numbers)


def numbers_of(
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    step: int,
    grad_scale: float,
) -> Numbers:
    """The update's numbers, in fp64."""
    return Numbers(
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
    numbers: Numbers,
) -> None:
    """The twin in plain torch, to the bit."""
    flat = [t.view(-1) for t in (master, exp_avg, exp_avg_sq, grad)]
    copies = None if param_out is None else param_out.view(-1)
    for begin in range(0, master.numel(), _SLICE):
        part = slice(begin, begin + _SLICE)
        p, m, v, g = (t[part] for t in flat)
        _update(p, m, v, g.float(), numbers)
        if copies is not None:
            copies[part] = p


def _update(p: Tensor, m: Tensor, v: Tensor, g: Tensor, n: Numbers) -> None:
    g = g * n.grad_scale
    near = _fp32(n.lerp) < 0.5  # torch's lerp starts from the nearer end
    weight = _fp32(n.lerp) if near else _fp32(_fp32(n.lerp) - 1)
    m.copy_(_fused(weight, g - m, m if near else g))
    v.copy_(_fused(g * n.one_minus_beta2, g, v * n.beta2))
    root = v.double().sqrt().float()  # torch.sqrt of fp32 is not rounded right everywhere
    size = root / _as_fp32(n.root_bias2, v) + n.eps
    p.copy_(p * n.decay + (m * n.minus_step) / size)


def _fused(a: Tensor | float, b: Tensor, c: Tensor) -> Tensor:
    """a * b + c of fp32 numbers with one rounding, which torch has no op for.

    The product is exact in fp64. The sum is rounded to odd there: what is lost is kept in the last
    bit, so that rounding on to fp32 is right.
    """
    x = a * b.double()
    y = c.double()
    total = x + y
    back = total - x
    lost = (x - (total - back)) + (y - back)
    even = (total.view(torch.int64) & 1) == 0
    inexact = (lost != 0) & lost.isfinite()
    towards = torch.where(lost > 0, math.inf, -math.inf).to(total.dtype)
    odd = torch.nextafter(total, towards)
    return torch.where(inexact & even, odd, total).float()


def _fp32(value: float) -> float:
    return ctypes.c_float(value).value


def _as_fp32(value: float, like: Tensor) -> Tensor:
    """As a tensor: torch divides by a number through its inverse on some devices."""
    return torch.full((), value, dtype=torch.float32, device=like.device)


def _check(
    master: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor, grad: Tensor, param_out: Tensor | None,
    beta1: float, beta2: float, step: int,
) -> None:  # fmt: skip
    given = {"master": master, "exp_avg": exp_avg, "exp_avg_sq": exp_avg_sq, "grad": grad}
    if param_out is not None:
        given["param_out"] = param_out
    halves = (torch.bfloat16, torch.float16)
    allowed = {"grad": (torch.float32, *halves), "param_out": halves}
    for name, tensor in given.items():
        if tensor.shape != master.shape or not tensor.is_contiguous():
            raise ValueError(
                f"adamw_: {name} {list(tensor.shape)} must be contiguous and of master's shape "
                f"{list(master.shape)}"
            )
        if tensor.device != master.device:
            raise ValueError(f"adamw_: {name} is on {tensor.device}, master on {master.device}")
        if tensor.dtype not in allowed.get(name, (torch.float32,)):
            wanted = ", ".join(map(str, allowed.get(name, (torch.float32,))))
            raise TypeError(f"adamw_: {name} is {tensor.dtype}; it must be {wanted}")
    if step < 1 or not (0 <= beta1 < 1 and 0 <= beta2 < 1):
        raise ValueError(
            f"adamw_: step {step} counts from 1, and beta1 {beta1} and beta2 {beta2} lie in [0, 1)"
        )


def _run(
    master: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor, grad: Tensor, param_out: Tensor | None,
    lr: float, beta1: float, beta2: float, eps: float, weight_decay: float,
    step: int, grad_scale: float,
) -> None:  # fmt: skip
    _check(master, exp_avg, exp_avg_sq, grad, param_out, beta1, beta2, step)
    numbers = numbers_of(lr, beta1, beta2, eps, weight_decay, step, grad_scale)
    kernels = library.native(master)
    if kernels is None:
        reference(master, exp_avg, exp_avg_sq, grad, param_out, numbers)
        return
    with_numbers = (ctypes.c_float * len(numbers))(*numbers)
    copy: tuple[int, int | None] = (0, None)
    if param_out is not None:
        copy = (library.DTYPES[param_out.dtype], param_out.data_ptr())
    states = (t.data_ptr() for t in (grad, master, exp_avg, exp_avg_sq))
    kernels.call(
        "adamw", master, library.DTYPES[grad.dtype], copy[0], ctypes.addressof(with_numbers),
        master.numel(), *states, copy[1],
    )  # fmt: skip


def _fake(
    master: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor, grad: Tensor, param_out: Tensor | None,
    lr: float, beta1: float, beta2: float, eps: float, weight_decay: float,
    step: int, grad_scale: float,
) -> None:  # fmt: skip
    _check(master, exp_avg, exp_avg_sq, grad, param_out, beta1, beta2, step)


_adamw = define(
    "adamw_(Tensor(a!) master, Tensor(b!) exp_avg, Tensor(c!) exp_avg_sq, Tensor grad, "
    "Tensor(d!)? param_out, float lr, float beta1, float beta2, float eps, float weight_decay, "
    "int step, float grad_scale) -> ()",
    _run,
    _fake,
)
