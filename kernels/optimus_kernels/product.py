"""One expert's matrix products: our own bf16 kernel on CPUs with AMX, torch's mm elsewhere, which
`fastest_library` sends to oneDNN where torch's own choice is the slower one.

The kernel (csrc/cpu/amx_avx512.cpp) compiles nothing for new numbers of rows, takes a call of 3 us
where mm takes 20, and adds as it writes.

A product that is added to fp32 sums is first rounded to its operands' dtype, and a fp32 one is made
whole before it is added: the bits that autograd gives, which makes a gradient and then adds it. A
BLAS that begins with the sum, or adds it block by block (MKL's addmm from 385 rows on), gives
others, and gradients would depend on how many microbatches a rank adds up (CONTRACT.md,
"Deterministic mode").
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
"""What torch's profiler shows of the kernel's products."""
_PIECE = 1 << 16
"""Elements to widen at a time, so that they stay in the second-level cache."""
_EXACT = 1e-5
"""Relative error below which a product of 256 x 256 was computed in fp32; bf16 gives 2e-3."""


def own(like: Tensor) -> Callable[..., int] | None:
    """The kernel for products of such tensors; None: mm does them."""
    if like.dtype is not torch.bfloat16 or not like.is_cpu:
        return None
    found = backend.active(like.device).library
    return None if found is None else _bind(found)


def by_onednn(like: Tensor) -> bool:
    """Whether torch's products of such tensors are oneDNN's within `fastest_library`."""
    if not like.is_cpu:
        return False
    if like.dtype is torch.float32:
        return _onednn_is_better()
    return like.dtype in (torch.bfloat16, torch.float16)


def library_of(like: Tensor) -> str:
    """The name of what computes torch's products of such tensors within `fastest_library`."""
    if not like.is_cpu:
        return like.device.type
    if by_onednn(like):
        return "oneDNN"
    return "MKL" if torch.backends.mkl.is_available() else "BLAS"


@contextlib.contextmanager
def fastest_library(like: Tensor) -> Iterator[None]:
    """Within, fp32 products on CPUs of other makers than Intel go to oneDNN: MKL, torch's choice,
    is half as fast there. Other threads' products do, too, and stay fp32's."""
    if like.dtype is torch.float32 and by_onednn(like):
        with onednn():
            yield
    else:
        yield


_lock = threading.Lock()
_inside, _before = 0, "none"


@contextlib.contextmanager
def onednn() -> Iterator[None]:
    """Within, torch's fp32 products on CPUs go to oneDNN, which computes in fp32 or, if the
    processor has AMX, in bf16. A setting of the process: the last of its threads to leave puts it
    back."""
    global _inside, _before
    mkldnn: Any = torch.backends.mkldnn  # makes its attributes when it is imported
    settings = mkldnn.matmul
    with _lock:
        if not _inside:
            _before = settings.fp32_precision
            settings.fp32_precision = "bf16"
        _inside += 1
    try:
        yield
    finally:
        with _lock:
            _inside -= 1
            if not _inside:
                settings.fp32_precision = _before


@functools.cache
def onednn_is_exact() -> bool:
    """Whether oneDNN can be had for fp32 products, from torch 2.9 on, and computes in fp32."""
    if not hasattr(torch.backends.mkldnn, "matmul") or not torch.backends.mkldnn.is_available():
        return False
    a = torch.linspace(-1, 1, 1 << 16).sin().view(256, 256)
    with onednn():
        found = a @ a.t()
    exact = a.double() @ a.double().t()
    return bool((found - exact).norm() <= _EXACT * exact.norm())


@functools.cache
def _onednn_is_better() -> bool:
    """By rule rather than by the clock, so that ranks on equal machines agree."""
    return torch.backends.mkl.is_available() and not _made_by_intel() and onednn_is_exact()


def _made_by_intel() -> bool:
    """Also where nobody can tell."""
    try:
        found = re.search(r"^vendor_id\s*:\s*(\S+)", Path("/proc/cpuinfo").read_text(), re.M)
    except OSError:
        return True
    return found is None or found[1] == "GenuineIntel"


def product(
    a: Tensor, b: Tensor, out: Tensor, add: bool = False, room: Tensor | None = None
) -> None:
    """out = a @ b, or that much more. a [M, K], b [K, N] of one dtype, out [M, N] dense, of this
    dtype or (where gradients are summed) another. The kernel takes dense operands and transposes of
    dense ones; mm does any others. `room`: memory for M * N elements of a's dtype, fresh if None,
    which is used where `needs_room` says so.
    """
    kernel = own(a)
    if not (kernel is not None and _dense(a) and _dense(b) and out.is_contiguous()):
        kernel = None
    if _goes_by_room(kernel is not None, a, out.dtype, add):
        value = a.new_empty(out.shape) if room is None else room[: out.numel()].view(out.shape)
        product(a, b, value)
        _add(value, out) if add else out.copy_(value)
        return
    if kernel is not None:
        how = int(add) + int(out.dtype != a.dtype)  # 2: round, then add to fp32
        if torch.autograd._profiler_enabled():
            with torch.profiler.record_function(PROFILED_AS):
                return _call(kernel, a, b, out, how)
        return _call(kernel, a, b, out, how)
    if add:
        out.addmm_(a, b)
    else:
        torch.mm(a, b, out=out)


def needs_room(like: Tensor, out: torch.dtype, add: bool) -> bool:
    """Whether products of such dense tensors are made apart from where they go."""
    return _goes_by_room(own(like) is not None, like, out, add)


def _goes_by_room(ours: bool, like: Tensor, out: torch.dtype, add: bool) -> bool:
    if add and out is torch.float32 and ours:
        return False
    return out != like.dtype or (add and out.itemsize > 2)


def _add(value: Tensor, out: Tensor) -> None:
    if value.dtype == out.dtype or not out.is_cpu or not out.is_contiguous():
        out.add_(value)
        return
    # On a CPU torch widens the whole operand first, in fresh memory.
    pieces = zip(out.view(-1).split(_PIECE), value.view(-1).split(_PIECE), strict=True)
    for piece, more in pieces:
        piece.add_(more)


def _dense(matrix: Tensor) -> bool:
    return matrix.is_contiguous() or matrix.t().is_contiguous()


def _call(kernel: Callable[..., int], a: Tensor, b: Tensor, out: Tensor, how: int) -> None:
    rows, depth = a.shape
    a_transposed, b_transposed = not a.is_contiguous(), not b.is_contiguous()
    ins = (a.data_ptr(), a_transposed, b.data_ptr(), b_transposed)
    code = kernel(*ins, out.data_ptr(), how, rows, b.shape[1], depth)
    assert not code


@functools.cache
def _bind(library: ctypes.CDLL) -> Callable[..., int] | None:
    """None where processor, system or compiler has no AMX, and for test libraries without it."""
    if not hasattr(library, "optimus_cpu_has_gemm") or not library.optimus_cpu_has_gemm():
        return None
    function = library.optimus_cpu_gemm
    function.argtypes, function.restype = _ARGUMENTS, _I
    return function
