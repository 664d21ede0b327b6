"""Tests of the measurement of rates: FLOP/s, and bytes per second between memories."""

from __future__ import annotations

import torch

from optimus import platform
from optimus.peak import Peak, setup_of
from optimus.planner import rates


def test_a_measurement_frees_the_page_locked_memory(monkeypatch):
    """If the measurement did not free its page-locked buffers, 142 MB would stay locked until the
    end of the process."""
    made: list[int] = []
    freed: list[int] = []
    new = platform.host_zeros

    def record(length: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        flat = new(length, dtype, device)
        made.append(flat.data_ptr())
        return flat

    monkeypatch.setattr(platform, "host_zeros", record)
    monkeypatch.setattr(platform, "free_host", lambda flat: freed.append(flat.data_ptr()))
    monkeypatch.setattr(rates, "_RUNS", 1)
    measured = rates.measure_links(torch.device("cpu"), 1)
    assert sorted(made) == sorted(freed) and len(made) == 6
    assert all(rate > 0 for values in measured.values() for rate in values)


def test_the_rate_of_products_is_that_of_the_dtype(monkeypatch, tmp_path):
    """The FLOP/s of matrix products are measured and cached for each dtype. The cached value of one
    dtype is not used for another dtype."""
    monkeypatch.setenv("OPTIMUS_PEAK_CACHE", str(tmp_path))
    peaks = {torch.float32: 1e10, torch.bfloat16: 1e11}

    def peak_of(device: torch.device, dtype: torch.dtype, library: str, log) -> Peak:
        return Peak(setup_of(device, dtype, library), peaks[dtype], 0.0, "", "")

    monkeypatch.setattr(rates, "find_peak", peak_of)
    monkeypatch.setattr(rates, "measure_links", lambda device, threads: {"to_host": [1e9]})
    for dtype, name in 2 * [(torch.float32, "fp32"), (torch.bfloat16, "bf16")]:
        links = rates.find_links(torch.device("cpu"), dtype, print)
        assert links.flops_of(name) == peaks[dtype] and not links.missing_rate(name)
        assert links.to_host == 1e9
    assert links.missing_rate("fp32").startswith("links.flops_fp32 is not known")
