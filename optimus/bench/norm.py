"""The exact sum of squares of fp32 gradients: the kernel against its twin and against reading."""

from __future__ import annotations

from typing import Any

import torch

from optimus.bench.meters import clocked
from optimus.bench.pairs import paired
from optimus_kernels.squares import BLOCK, new_bins, reference, square_bins_


def bench_norm(size: int, rounds: int, clock: int, device: torch.device) -> dict[str, Any]:
    """Seconds by round of `size` gradients, on the wall (clock 0) or of the processor (1), and
    paired ratios to ours. `read` is torch's plain sum of the same numbers."""
    flat = torch.randn(max(BLOCK, size - size % BLOCK), device=device)
    bins = new_bins(device)
    ways = {
        "ours": lambda: square_bins_(bins, flat),
        "twin": lambda: reference(bins, flat),
        "read": flat.sum,
    }
    times: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(rounds + 1):
        for name, way in ways.items():
            taken = clocked(way, device)[0][clock]
            if number:  # the first round warms up
                times[name].append(taken)
    ratios = {name: paired(times[name], times["ours"]) for name in ("twin", "read")}
    return {"seconds": times, "ours_is_faster_paired": ratios}
