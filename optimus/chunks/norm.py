"""The norm of what several ranks hold in pieces: fast, or the same bits however it is cut."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from optimus.distributed.collectives import Group, all_reduce_sum
from optimus_kernels.squares import new_bins, square_bins_, total_of

_BLOCK = 1 << 16


def fast_norm(flats: Sequence[Tensor], device: torch.device, group: Group) -> float:
    """The 2-norm over the group's ranks of 1-D tensors."""
    total = torch.zeros((), dtype=torch.float64, device=device)
    for flat in flats:
        total += _square_sum(flat)
    all_reduce_sum(total, group)
    return math.sqrt(float(total))


def exact_norm(flats: Sequence[Tensor], device: torch.device, group: Group) -> float:
    """The 2-norm over the group's ranks of fp32 tensors, the same bits however they are cut at
    multiples of 32 elements and spread over ranks. NaN if any value is not finite."""
    bins = new_bins(device)
    for flat in flats:
        square_bins_(bins, flat)
    all_reduce_sum(bins, group)
    return math.sqrt(total_of(bins))


def _square_sum(flat: Tensor) -> Tensor:
    """fp64 scalar: norms of blocks in fp32 (fast), squared and added in fp64."""
    norm = partial(torch.linalg.vector_norm, dtype=torch.float32)
    blocks = torch.stack([norm(part) for part in flat.split(_BLOCK)])
    total = blocks.double().square().sum()
    if math.isfinite(float(total)):
        return total
    return flat.double().square().sum()  # squares beyond fp32, although each value may be finite
