"""Sums whose bits do not depend on who adds what first."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from optimus.dist.collectives import Group, all_reduce_sum

_UNIT = 2.0**-28
"""Sums below 3e10 in magnitude fit; a term is off by less than 2e-9."""


def exact_sums(terms: list[Tensor], group: Group) -> list[float]:
    """The sum over the group's ranks of each 1-D tensor's finite values, in fixed point.

    Every term is rounded alone, to a multiple of 2^-28, and integers add up in any order to the
    same bits. Lengths may differ between ranks.
    """
    units = [(values.double() / _UNIT).round().to(torch.int64).sum() for values in terms]
    total = torch.stack(units)
    all_reduce_sum(total, group)
    return [count * _UNIT for count in total.tolist()]


_BLOCK = 32  # elements; what a square sum is cut into wherever a parameter or shard begins
_AT_ONCE = 1 << 20
_LEAST, _BINS = -340, 640  # binary exponents of sums of 32 squares of fp32, and how many there are
_HALF = 1 << 27


def sum_of_squares(flats: Sequence[Tensor], group: Group) -> float:
    """The sum of squares over the group's ranks of fp32 tensors, the same bits however they are cut
    at multiples of 32 elements and spread over ranks. NaN if any value is not finite.

    Squares are added in fp64 within blocks of 32. Blocks are added exactly: their significands as
    integers, a bin for each exponent, in two halves of 27 bits so that 2^36 of them fit.
    """
    device = flats[0].device if flats else torch.device("cpu")
    bins = torch.zeros(2 * _BINS + 1, dtype=torch.int64, device=device)
    for flat in flats:
        assert flat.numel() % _BLOCK == 0, flat.shape
        for part in flat.split(_AT_ONCE):
            _add_blocks(bins, part.view(-1, _BLOCK).double().square_().sum(1))
    all_reduce_sum(bins, group)
    *halves, infinite = bins.tolist()
    if infinite:
        return math.nan
    total = 0
    for exponent in range(_BINS):
        high, low = halves[exponent], halves[_BINS + exponent]
        total += (high * _HALF + low) << exponent
    return math.ldexp(total, _LEAST - 53) if total < 1 << 1000 else _scaled(total)


def _scaled(total: int) -> float:
    shift = total.bit_length() - 900
    return math.ldexp(total >> shift, _LEAST - 53 + shift)


def _add_blocks(bins: Tensor, blocks: Tensor) -> None:
    """fp64 blocks >= 0 into the bins; the last bin counts those that are not finite."""
    finite = torch.isfinite(blocks)
    bins[-1] += (~finite).sum()
    fraction, exponent = torch.frexp(torch.where(finite, blocks, 0.0))
    significand = (fraction * 2.0**53).to(torch.int64)
    place = (exponent.long() - _LEAST).clamp_(0, _BINS - 1)
    bins.scatter_add_(0, place, significand >> 27)
    bins.scatter_add_(0, place + _BINS, significand & (_HALF - 1))
