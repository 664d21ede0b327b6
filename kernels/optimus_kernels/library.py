"""Python bindings of the C interface, csrc/include/interface.h."""

from __future__ import annotations

import ctypes
import functools
from typing import Any

import torch
from torch import Tensor

from optimus_kernels import backend

DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}

_P, _L, _I = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int
SIGNATURES: dict[str, tuple[Any, ...]] = {
    "route": (_P, _L, _L, _L, _L, _P, _P, _P, _P, _P, _L, _P),
    "gather": (_I, _P, _P, _L, _L, _P, _P),
    "swiglu": (_I, _P, _L, _L, _P, _P),
    "swiglu_backward": (_I, _P, _P, _P, _P, _L, _L, _P, _P, _P, _P),
    "reduce": (_I, _P, _P, _P, _L, _L, _L, _P, _P),
    "reduce_backward": (_I, _P, _P, _P, _P, _L, _L, _L, _P, _P, _P),
    "adamw": (_I, _I, _P, _L, _P, _P, _P, _P, _P, _P),
}
_CODES = {-1: "the dtype is not fp32, bf16 or fp16", -2: "a size is negative or too large"}


class Native:
    """Python wrapper of a compiled library's C functions, which launch kernels on one type of
    device."""

    def __init__(self, library: ctypes.CDLL, device: str) -> None:
        self._device = device
        self._functions = {}
        for name, types in SIGNATURES.items():
            function = getattr(library, f"optimus_{name}")
            function.argtypes, function.restype = types, _I
            self._functions[name] = function
        self.route_scratch = library.optimus_route_scratch
        self.route_scratch.argtypes, self.route_scratch.restype = (_L, _L, _L), _L
        # Only the CPU library has the following functions, which are not in interface.h. With valid
        # arguments, these functions always succeed. Libraries of tests may lack these functions.
        self.square_bins = getattr(library, "optimus_cpu_square_bins", None)
        if self.square_bins is not None:
            self.square_bins.argtypes, self.square_bins.restype = (_P, _L, _P), _I
        self.adamw_into = getattr(library, "optimus_cpu_adamw_into", None)
        if self.adamw_into is not None:
            self.adamw_into.argtypes = (*SIGNATURES["adamw"][:-1], _P, _P, _P)
            self.adamw_into.restype = _I

    def call(self, name: str, on: Tensor, *arguments: int | None) -> None:
        """Launch the kernel optimus_<name> on the current stream of `on`'s device.

        `arguments` are all arguments of the C function (SIGNATURES[name]) except the last argument,
        which is the stream. Tensors are passed as addresses.

        Raises:
            RuntimeError: the launch failed.
        """
        if self._device == "cpu":
            code = self._functions[name](*arguments, None)
        else:
            module = getattr(torch, self._device)
            with module.device(on.device):
                stream = module.current_stream(on.device)
                handle = stream.cuda_stream if self._device == "cuda" else stream.sycl_queue
                code = self._functions[name](*arguments, handle)
        if code:
            reason = _CODES.get(code, f"the {self._device} runtime's error {code}")
            raise RuntimeError(f"optimus_{name} failed: {reason}")


def native(tensor: Tensor, any_dtype: bool = False) -> Native | None:
    """Return the compiled kernels for the device of `tensor`.

    Return None if no compiled kernels are active on the device. If `any_dtype` is False, also
    return None if the kernels do not support the dtype of `tensor`.
    """
    if not any_dtype and tensor.dtype not in DTYPES:
        return None
    active = backend.active(tensor.device)
    return None if active.library is None else _bind(active.library, tensor.device.type)


_bind = functools.cache(Native)
