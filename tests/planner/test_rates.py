"""Measurement of the rates of a machine."""

from __future__ import annotations

import torch

from optimus import platform
from optimus.planner import rates


def test_a_measurement_frees_the_page_locked_memory(monkeypatch):
    """Otherwise 142 MB would stay locked until the end of the process."""
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
