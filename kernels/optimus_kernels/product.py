"""Matrix products for a single expert.

On CPUs with AMX, the kernel in csrc/cpu/amx_avx512.cpp computes products of bf16 operands. torch.mm
computes all other products. The kernel has less overhead than torch.mm, and can add the product to
the output.

A product is computed completely and rounded before it is added to an fp32 output. The output is
therefore bitwise equal to a gradient that autograd accumulates.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import re
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from optimus_kernels import backend

_P, _I, _L = ctypes.c_void_p, ctypes.c_int, ctypes.c_int64
_ARGUMENTS = (_P, _I, _P, _I, _P, _I, _L, _L, _L)
PROFILED_AS = "optimus::product"
"""Name of the AMX kernel's products in torch's profiler."""
_WIDEN_ELEMENTS = 1 << 16
"""Number of elements that are converted to fp32 at a time. The converted elements fit in the L2
cache."""
_FP32_ERROR = 1e-5
"""Limit of the relative error of a 256 x 256 product in fp32. A larger error shows that the product
was computed in a narrower dtype. The error in bf16 is 2e-3."""


def amx_kernel(like: Tensor) -> Callable[..., int] | None:
    """Return the AMX kernel for operands with the device and dtype of `like`. Return None if there
    is no such kernel. The products must then be computed by torch.mm."""
    if like.dtype is not torch.bfloat16 or not like.is_cpu:
        return None
    library = backend.active(like.device).library
    return None if library is None else _bind(library)


def by_onednn(like: Tensor) -> bool:
    """Return True if torch.mm uses oneDNN for operands with the device and dtype of `like`, inside
    the context `fastest_library(like)`."""
    if not like.is_cpu:
        return False
    if like.dtype is torch.float32:
        return _onednn_is_better()
    return like.dtype in (torch.bfloat16, torch.float16)


def library_of(like: Tensor) -> str:
    """Return the name of the library that torch.mm uses inside the context `fastest_library(like)`.

    Args:
        like: tensor with the operands' device and dtype.

    Returns:
        "oneDNN", "MKL" or "BLAS" on a CPU, else the device type.
    """
    if not like.is_cpu:
        return like.device.type
    if by_onednn(like):
        return "oneDNN"
    return "MKL" if torch.backends.mkl.is_available() else "BLAS"


@contextlib.contextmanager
def fastest_library(like: Tensor) -> Iterator[None]:
    """Context manager that makes torch use oneDNN for fp32 products on CPUs that are not made by
    Intel.

    On these CPUs, oneDNN is faster than MKL, torch's default.

    The setting applies to all threads.

    Args:
        like: tensor with the operands' device and dtype. If the dtype is not fp32 or the device is
            not a CPU, the setting is not changed.
    """
    if like.dtype is torch.float32 and by_onednn(like):
        with onednn():
            yield
    else:
        yield


_lock = threading.Lock()
_num_inside, _default_precision = 0, "none"


@contextlib.contextmanager
def onednn() -> Iterator[None]:
    """Context manager that makes torch use oneDNN for fp32 products on CPUs. On CPUs with AMX,
    oneDNN computes these products in bf16.

    The setting applies to all threads.
    """
    global _num_inside, _default_precision
    mkldnn: Any = torch.backends.mkldnn  # its attributes are created on import
    settings = mkldnn.matmul
    with _lock:
        if not _num_inside:
            _default_precision = settings.fp32_precision
            settings.fp32_precision = "bf16"
        _num_inside += 1
    try:
        yield
    finally:
        with _lock:
            _num_inside -= 1
            if not _num_inside:
                settings.fp32_precision = _default_precision


@functools.cache
def onednn_is_exact() -> bool:
    """Return True if oneDNN is available and computes fp32 products in fp32, not in bf16."""
    if not hasattr(torch.backends.mkldnn, "matmul") or not torch.backends.mkldnn.is_available():
        return False
    a = torch.linspace(-1, 1, 1 << 16).sin().view(256, 256)
    with onednn():
        product = a @ a.t()
    exact = a.double() @ a.double().t()
    return bool((product - exact).norm() <= _FP32_ERROR * exact.norm())


@functools.cache
def _onednn_is_better() -> bool:
    """Return True if torch must use oneDNN instead of MKL for fp32 products on this CPU."""
    # Times are not measured, so that ranks on equal machines agree. MKL is used if the vendor of
    # the processor is unknown.
    if not torch.backends.mkl.is_available():
        return False
    try:
        vendor = re.search(r"^vendor_id\s*:\s*(\S+)", Path("/proc/cpuinfo").read_text(), re.M)
    except OSError:
        return False
    return vendor is not None and vendor[1] != "GenuineIntel" and onednn_is_exact()


def product(
    a: Tensor, b: Tensor, out: Tensor, add: bool = False, scratch: Tensor | None = None
) -> None:
    """Write the product a @ b to `out`, or add the product to `out`.

    Args:
        a: [M, K].
        b: [K, N] of the same dtype.
        out: [M, N], contiguous. The dtype of `out` can differ from the dtype of a and b.
        add: True to add the product to `out`; False to overwrite `out`.
        scratch: tensor with at least M * N elements and the dtype of `a`. It is overwritten if
            `needs_scratch` returns True. None: memory is allocated when needed.
    """
    kernel = amx_kernel(a)
    if not (kernel is not None and _dense(a) and _dense(b) and out.is_contiguous()):
        kernel = None
    if _uses_scratch(kernel is not None, a, out.dtype, add):
        value = (
            a.new_empty(out.shape) if scratch is None else scratch[: out.numel()].view(out.shape)
        )
        product(a, b, value)
        _add(value, out) if add else out.copy_(value)
        return
    if kernel is not None:
        # Argument `add` of optimus_cpu_gemm: 0 write, 1 add, 2 round and then add to fp32.
        mode = int(add) + int(out.dtype != a.dtype)
        if torch.autograd._profiler_enabled():
            with torch.profiler.record_function(PROFILED_AS):
                return _call(kernel, a, b, out, mode)
        return _call(kernel, a, b, out, mode)
    if add:
        out.addmm_(a, b)
    else:
        torch.mm(a, b, out=out)


def needs_scratch(like: Tensor, out: torch.dtype, add: bool) -> bool:
    """Return True if `product` needs scratch memory for the product before it writes to `out`.

    Args:
        like: tensor with the device and dtype of the operands. Each operand or its transpose must
            be contiguous.
        out: dtype of the output.
        add: True to add the product to the output; False to overwrite the output.
    """
    return _uses_scratch(amx_kernel(like) is not None, like, out, add)


def _uses_scratch(has_kernel: bool, like: Tensor, out: torch.dtype, add: bool) -> bool:
    if add and out is torch.float32 and has_kernel:
        return False
    return out != like.dtype or (add and out.itemsize > 2)


def _add(value: Tensor, out: Tensor) -> None:
    if value.dtype == out.dtype or not out.is_cpu or not out.is_contiguous():
        out.add_(value)
        return
    # On a CPU add_ would first convert all of `value` to the dtype of `out`, in new memory.
    blocks = zip(
        out.view(-1).split(_WIDEN_ELEMENTS), value.view(-1).split(_WIDEN_ELEMENTS), strict=True
    )
    for target, addend in blocks:
        target.add_(addend)


def _dense(matrix: Tensor) -> bool:
    return matrix.is_contiguous() or matrix.t().is_contiguous()


def _call(kernel: Callable[..., int], a: Tensor, b: Tensor, out: Tensor, mode: int) -> None:
    rows, depth = a.shape
    a_transposed, b_transposed = not a.is_contiguous(), not b.is_contiguous()
    ins = (a.data_ptr(), a_transposed, b.data_ptr(), b_transposed)
    code = kernel(*ins, out.data_ptr(), mode, rows, b.shape[1], depth)
    assert not code


@functools.cache
def _bind(library: ctypes.CDLL) -> Callable[..., int] | None:
    """Return the AMX kernel of a library; None if the library or the CPU does not support AMX."""
    if not hasattr(library, "optimus_cpu_has_gemm") or not library.optimus_cpu_has_gemm():
        return None
    function = library.optimus_cpu_gemm
    function.argtypes, function.restype = _ARGUMENTS, _I
    return function
