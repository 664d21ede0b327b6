"""2-norms of sharded tensors: a fast norm, and a norm with the same bits for any shards."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from optimus.distributed.collectives import Group, all_reduce_sum
from optimus_kernels import new_bins, square_bins_, total_of

_BLOCK = 1 << 16


def fast_norm(flats: Sequence[Tensor], device: torch.device, group: Group) -> float:
    """Return the 2-norm of 1-D tensors over the ranks of a group."""
    total = torch.zeros((), dtype=torch.float64, device=device)
    for flat in flats:
        total += _square_sum(flat)
    all_reduce_sum(total, group)
    return math.sqrt(float(total))


def exact_norm(flats: Sequence[Tensor], device: torch.device, group: Group) -> float:
    """Return the 2-norm of fp32 tensors over the ranks of a group; NaN if a value is not finite.

    The result has the same bits for all ways to cut the tensors at multiples of 32 elements and to
    distribute them over ranks.
    """
    bins = new_bins(device)
    for flat in flats:
        square_bins_(bins, flat)
    all_reduce_sum(bins, group)
    return math.sqrt(total_of(bins))


def _square_sum(flat: Tensor) -> Tensor:
    """Return the sum of squares as an fp64 scalar. The norms of blocks are computed in fp32, which
    is fast, and squared and added in fp64."""
    norm = partial(torch.linalg.vector_norm, dtype=torch.float32)
    blocks = torch.stack([norm(block) for block in flat.split(_BLOCK)])
    total = blocks.double().square().sum()
    if math.isfinite(float(total)):
        return total
    return flat.double().square().sum()  # finite values whose squares overflow fp32
