"""Meters on figures that are known."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from optimus.bench.meters import _share_of_others, paired

CPU, CUDA = torch.autograd.DeviceType.CPU, torch.autograd.DeviceType.CUDA


def event(key: str, where, cpu: float, device: float) -> SimpleNamespace:
    """The fields of one of the profiler's averages that are read."""
    return SimpleNamespace(
        key=key, device_type=where, self_cpu_time_total=cpu, self_device_time_total=device
    )


def test_time_on_a_device_counts_once():
    """As on a card: an op and its kernel both carry the kernel's time; ours have no op."""
    events = [
        event("aten::mm", CPU, 5, 60),
        event("nvjet_gemm", CUDA, 0, 60),
        event("aten::copy_", CPU, 3, 20),
        event("Memcpy DtoD", CUDA, 0, 20),
        event("optimus::experts", CPU, 9, 0),
        event("swiglu_kernel", CUDA, 0, 20),
    ]
    assert _share_of_others(events, "cuda") == pytest.approx(0.4)
    assert _share_of_others(events, "cpu") == pytest.approx(12 / 17)


def test_on_a_cpu_the_profilers_own_averages_count():
    a = torch.randn(64, 64)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        (a @ a).relu()
    assert 0 < _share_of_others(profiler.key_averages(), "cpu") < 1


def test_a_block_too_slow_for_more_than_one_round_is_paired_with_that():
    assert paired([20.0], [10.0, 1.0]) == paired([20.0, 1.0], [10.0]) == [2.0, 2.0, 2.0]
