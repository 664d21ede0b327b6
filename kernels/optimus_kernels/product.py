"""One expert's matrix products: our own bf16 kernel on CPUs with AMX, torch's mm elsewhere.

The kernel (csrc/cpu/amx_avx512.cpp) compiles nothing for new numbers of rows, takes a call of 3 us
where mm takes 20, and adds as it writes.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable

import torch
from torch import Tensor

from optimus_kernels import backend

_P, _I, _L = ctypes.c_void_p, ctypes.c_int, ctypes.c_int64
_ARGUMENTS = (_P, _I, _P, _I, _P, _I, _L, _L, _L)
PROFILED_AS = "optimus::product"
"""What torch's profiler shows of the kernel's products."""


def own(like: Tensor) -> Callable[..., int] | None:
    """The kernel for products of such tensors; None: mm does them."""
    if like.dtype is not torch.bfloat16 or not like.is_cpu:
        return None
    found = backend.active(like.device).library
    return None if found is None else _bind(found)


def product(a: Tensor, b: Tensor, out: Tensor, add: bool = False) -> None:
    """out = a @ b, or that much more. a [M, K], b [K, N] of one dtype, out [M, N] dense, of this
    dtype or (where gradients are summed) another. The kernel takes dense operands and transposes of
    dense ones; mm does any others.
    """
    if out.dtype != a.dtype:
        value = a.new_empty(out.shape)
        product(a, b, value)
        out.add_(value) if add else out.copy_(value)
        return
    kernel = own(a)
    if kernel is not None and _dense(a) and _dense(b) and out.is_contiguous():
        if torch.autograd._profiler_enabled():
            with torch.profiler.record_function(PROFILED_AS):
                return _call(kernel, a, b, out, add)
        return _call(kernel, a, b, out, add)
    if add:
        out.addmm_(a, b)
    else:
        torch.mm(a, b, out=out)


def _dense(matrix: Tensor) -> bool:
    return matrix.is_contiguous() or matrix.t().is_contiguous()


def _call(kernel: Callable[..., int], a: Tensor, b: Tensor, out: Tensor, add: bool) -> None:
    rows, depth = a.shape
    a_transposed, b_transposed = not a.is_contiguous(), not b.is_contiguous()
    ins = (a.data_ptr(), a_transposed, b.data_ptr(), b_transposed)
    code = kernel(*ins, out.data_ptr(), add, rows, b.shape[1], depth)
    assert not code


@functools.cache
def _bind(library: ctypes.CDLL) -> Callable[..., int] | None:
    """None where processor, system or compiler has no AMX, and for test libraries without it."""
    if not hasattr(library, "optimus_cpu_has_gemm") or not library.optimus_cpu_has_gemm():
        return None
    function = library.optimus_cpu_gemm
    function.argtypes, function.restype = _ARGUMENTS, _I
    return function
