"""Functions that measure time, peak FLOP/s and saved activations, for benchmarks."""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from optimus import platform
from optimus_kernels import product

GEMMS = (
    "aten::mm",
    "aten::addmm",
    "aten::bmm",
    "aten::_grouped_mm",
    "aten::mkldnn_linear",
    "optimus::product",
)
"""Names that the ops for matrix products have in a profile of torch."""


def clocked(
    run: Callable[[], Any], device: torch.device, grad: Tensor | None = None
) -> tuple[tuple[float, float], tuple[float, float]]:
    """Measure the time of a function and, if `grad` is given, of a backward pass of its result.

    Args:
        run: Function to measure. With `grad`, the function returns a tensor.
        device: Device on which the function runs.
        grad: Gradient of the result of `run`, for the backward pass; None to measure only `run`.

    Returns:
        Two pairs (wall-clock seconds, CPU seconds): for `run` alone, and for `run` followed by the
        backward pass.
    """
    platform.synchronize(device)
    wall, cpu = time.perf_counter(), time.process_time()
    out = run()
    platform.synchronize(device)
    forward = (time.perf_counter() - wall, time.process_time() - cpu)
    if grad is not None:
        out.backward(grad)
        platform.synchronize(device)
    return forward, (time.perf_counter() - wall, time.process_time() - cpu)


def turns(names: Iterable[str], rounds: int) -> Iterator[tuple[int, str]]:
    """Yield (round, name) in the order in which the caller must time the programs `names`.

    Each program runs once in each round, so that other load on the machine affects all programs.
    The first program of a round changes from round to round. Round 0 is for warm-up; `rounds` timed
    rounds follow.
    """
    names = list(names)
    for number in range(rounds + 1):
        first = number % len(names)
        for name in (*names[first:], *names[:first]):
            yield number, name


def paired(ours: Sequence[float], theirs: Sequence[float]) -> list[float]:
    """Return the minimum, median and maximum of the ratios ours[i] / theirs[i], where i is a round.
    If the lists differ in length, the last rounds of the longer list are ignored."""
    ratios = sorted(a / b for a, b in zip(ours, theirs, strict=False))
    return [ratios[0], statistics.median(ratios), ratios[-1]]


class PeakGemm:
    """A large matrix product, whose measured speed serves as the peak FLOP/s of the device.

    In fp32 on a CPU, the product is timed with torch's default library and with oneDNN, and the
    faster time is used. oneDNN is not timed on CPUs with AMX, where oneDNN computes fp32 products
    in bf16.

    Attributes:
        flops: FLOPs of the product.
    """

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        size = 1536 if device.type == "cpu" else 8192
        self.flops = 2.0 * size**3
        self._a, self._b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
        self._out = torch.empty_like(self._a)
        self._libraries: list[Callable] = [contextlib.nullcontext]
        if device.type == "cpu" and dtype is torch.float32 and product.onednn_is_exact():
            self._libraries.append(product.onednn)

    def time(self, device: torch.device) -> tuple[float, float]:
        """Return (wall-clock seconds, CPU seconds) of the matrix product with the fastest of the
        libraries."""
        times = []
        for library in self._libraries:
            with library():
                times.append(clocked(lambda: torch.mm(self._a, self._b, out=self._out), device)[1])
        return min(times)


def clear_gradients(block: nn.Module, x: Tensor) -> None:
    """Free the gradients of a block's parameters and input."""
    x.grad = None
    block.zero_grad(set_to_none=True)


def saved_bytes(block: nn.Module, x: Tensor) -> int:
    """Return the size in bytes of all tensors that autograd saves in `block(x)` for the backward
    pass. `x` is included if autograd saves it; the parameters are excluded."""
    weights = {p.untyped_storage().data_ptr() for p in block.parameters()}
    saved: dict[int, Tensor] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage().data_ptr()
        if storage not in weights:
            saved[storage] = tensor.detach()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        block(x)
    return sum(tensor.untyped_storage().nbytes() for tensor in saved.values())


def non_gemm_share(block: nn.Module, x: Tensor, grad: Tensor, device: torch.device) -> float:
    """Profile a forward and backward pass of `block`. Return the fraction of time outside matrix
    products."""
    activity = torch.profiler.ProfilerActivity
    activities = [activity.CPU]
    if device.type != "cpu":
        activities.append(getattr(activity, device.type.upper()))
    with torch.profiler.profile(activities=activities) as profiler:
        block(x).backward(grad)
        platform.synchronize(device)
    clear_gradients(block, x)
    return _non_gemm_share(profiler.key_averages(), device.type)


def _non_gemm_share(events: Iterable, device_type: str) -> float:
    # On an accelerator, the profile has the time of a kernel twice: in the event of the kernel and
    # in the event of the op that starts it. The time of matrix products is the sum over ops, whose
    # names are known. The total time is the sum over kernels, because some kernels of Optimus are
    # started without an op.
    on_cpu = torch.autograd.DeviceType.CPU
    ops = [event for event in events if event.device_type == on_cpu]
    if device_type == "cpu":
        total = sum(event.self_cpu_time_total for event in ops)
        products = sum(event.self_cpu_time_total for event in ops if event.key in GEMMS)
    else:
        rest = [event for event in events if event.device_type != on_cpu]
        total = sum(event.self_device_time_total for event in rest)
        products = sum(event.self_device_time_total for event in ops if event.key in GEMMS)
    return 1 - products / total if total else float("nan")
