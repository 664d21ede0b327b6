"""Tests of meters with inputs whose results are known."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from optimus.bench.meters import _non_gemm_share, paired

CPU, CUDA = torch.autograd.DeviceType.CPU, torch.autograd.DeviceType.CUDA


def event(key: str, device_type, cpu: float, device: float) -> SimpleNamespace:
    """Return a fake entry of `key_averages()` with the attributes that `_non_gemm_share` reads."""
    return SimpleNamespace(
        key=key, device_type=device_type, self_cpu_time_total=cpu, self_device_time_total=device
    )


def test_time_on_a_device_counts_once():
    """On a GPU, the profiler reports the time of a torch kernel twice: for the kernel and for the
    op that launches the kernel. The profiler reports the time of an Optimus kernel once, for the
    kernel. `_non_gemm_share` counts each kernel once."""
    events = [
        event("aten::mm", CPU, 5, 60),
        event("nvjet_gemm", CUDA, 0, 60),
        event("aten::copy_", CPU, 3, 20),
        event("Memcpy DtoD", CUDA, 0, 20),
        event("optimus::experts", CPU, 9, 0),
        event("swiglu_kernel", CUDA, 0, 20),
    ]
    assert _non_gemm_share(events, "cuda") == pytest.approx(0.4)
    assert _non_gemm_share(events, "cpu") == pytest.approx(12 / 17)


def test_averages_of_the_profiler_on_a_cpu():
    a = torch.randn(64, 64)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        (a @ a).relu()
    assert 0 < _non_gemm_share(profiler.key_averages(), "cpu") < 1


def test_block_with_fewer_rounds_is_paired_in_these():
    assert paired([20.0], [10.0, 1.0]) == paired([20.0, 1.0], [10.0]) == [2.0, 2.0, 2.0]
