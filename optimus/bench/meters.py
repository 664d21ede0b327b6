"""What the benchmarks measure with: clocks, turns, the machine's peak, memory."""

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


def clocked(
    run: Callable[[], Any], device: torch.device, grad: Tensor | None = None
) -> tuple[tuple[float, float], tuple[float, float]]:
    """(wall, processor) seconds of run(), and of it with its backward."""
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
    """Who runs when, by round: all once in each, and each in its turn the first, so that a noisy
    machine disturbs all alike. Round 0 comes before the others, to warm up."""
    names = list(names)
    for number in range(rounds + 1):
        first = number % len(names)
        for name in (*names[first:], *names[:first]):
            yield number, name


def paired(ours: Sequence[float], theirs: Sequence[float]) -> list[float]:
    """Least, median and greatest ratio of times of one round; a slow one may have fewer rounds."""
    ratios = sorted(a / b for a, b in zip(ours, theirs, strict=False))
    return [ratios[0], statistics.median(ratios), ratios[-1]]


class PeakGemm:
    """A large product of the case's dtype, timed in turn with the blocks: the machine's peak.

    In fp32 on a CPU both of torch's libraries are tried, and the faster one counts, if it computes
    in fp32 (oneDNN does not on machines with AMX).
    """

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        size = 1536 if device.type == "cpu" else 8192
        self.flops = 2.0 * size**3
        self._a, self._b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
        self._out = torch.empty_like(self._a)
        self._ways: list[Callable] = [contextlib.nullcontext]
        if device.type == "cpu" and dtype is torch.float32 and product.onednn_is_exact():
            self._ways.append(product.onednn)

    def time(self, device: torch.device) -> tuple[float, float]:
        """Wall and processor seconds of the faster way."""
        found = []
        for way in self._ways:
            with way():
                found.append(clocked(lambda: torch.mm(self._a, self._b, out=self._out), device)[1])
        return min(found)


def clear_gradients(block: nn.Module, x: Tensor) -> None:
    """Let go of the gradients of a pass."""
    x.grad = None
    block.zero_grad(set_to_none=True)


def saved_bytes(block: nn.Module, x: Tensor) -> int:
    """Bytes of what autograd keeps from forward for backward, parameters apart, x included."""
    weights = {p.untyped_storage().data_ptr() for p in block.parameters()}
    kept: dict[int, Tensor] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage().data_ptr()
        if storage not in weights:
            kept[storage] = tensor.detach()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        out = block(x)
    total = sum(tensor.untyped_storage().nbytes() for tensor in kept.values())
    del out
    return total


def non_gemm_share(block: nn.Module, x: Tensor, grad: Tensor, device: torch.device) -> float:
    """Share of a pass outside of torch's matrix products, by torch's profiler."""
    activity = torch.profiler.ProfilerActivity
    activities = [activity.CPU]
    if device.type != "cpu":
        activities.append(getattr(activity, device.type.upper()))
    with torch.profiler.profile(activities=activities) as profiler:
        block(x).backward(grad)
        platform.synchronize(device)
    clear_gradients(block, x)
    return _share_of_others(profiler.key_averages(), device.type)


def _share_of_others(events: Iterable, kind: str) -> float:
    """Of torch's profiler's averages: the share that is not torch's matrix products.

    On a device an op and the kernels it launched both show the kernels' time. It is counted at the
    ops, whose names are known, and the whole at the kernels: our launchers are called past torch's
    ops, and some of theirs come from no op.
    """
    on_cpu = torch.autograd.DeviceType.CPU
    ops = [event for event in events if event.device_type == on_cpu]
    if kind == "cpu":
        total = sum(event.self_cpu_time_total for event in ops)
        products = sum(event.self_cpu_time_total for event in ops if event.key in GEMMS)
    else:
        rest = [event for event in events if event.device_type != on_cpu]
        total = sum(event.self_device_time_total for event in rest)
        products = sum(event.self_device_time_total for event in ops if event.key in GEMMS)
    return 1 - products / total if total else float("nan")
