"""`square_bins_`: sum of the squares of a flat tensor. The bits of the sum do not depend on the
order of blocks.

The squares in each block of 32 elements are added in fp64, in a fixed order. The block sums are
then added exactly, as integers. There is a bin for each binary exponent, and the significand of a
block sum is added to the bin of its exponent. A bin has two integers: the sum of the upper halves
of significands, and the sum of the lower halves.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from optimus_kernels import library
from optimus_kernels.ops import define

BLOCK = 32
"""Number of elements in a block. Tensors may be split only at multiples of this number."""
_BINS = 640
_MIN_EXPONENT = -340
"""Binary exponent of the first bin. The bins cover all nonzero, finite block sums."""
_LOW = 27
"""Number of bits in the lower half of a significand. The upper half has 26 bits."""
_SLICE = 1 << 20
"""Number of elements that the reference implementation processes at a time, to limit its memory."""


def new_bins(device: torch.device) -> Tensor:
    """Return new bins for `square_bins_`: an int64 tensor [1281] of zeros.

    Elements 0 to 639 are the sums of the upper halves of significands, one for each exponent.
    Elements 640 to 1279 are the sums of the lower halves. The last element is the number of blocks
    whose sum is not finite.
    """
    return torch.zeros(2 * _BINS + 1, dtype=torch.int64, device=device)


def total_of(bins: Tensor) -> float:
    """Return the sum of all squares that were added to `bins`, in fp64. The result is NaN if the
    sum of any block is not finite."""
    *halves, infinite = bins.tolist()
    if infinite:
        return math.nan
    total = 0
    for exponent in range(_BINS):
        high, low = halves[exponent], halves[_BINS + exponent]
        total += ((high << _LOW) + low) << exponent
    shift = max(0, total.bit_length() - 900)  # an integer of more than 1024 bits overflows
    return math.ldexp(total >> shift, _MIN_EXPONENT - 53 + shift)


def reference(bins: Tensor, flat: Tensor) -> None:
    """Reference implementation of `square_bins_` in plain torch. The kernel computes bitwise equal
    bins."""
    for slice_ in flat.split(_SLICE):
        sums = slice_.view(-1, BLOCK).double().square_()
        while sums.shape[1] > 1:
            sums = torch.add(*sums.chunk(2, dim=1))
        _add_blocks(bins, sums.squeeze(1))


def _add_blocks(bins: Tensor, blocks: Tensor) -> None:
    """Add sums of squares to `bins`. Each element of `blocks` is the sum of a block, an fp64 number
    that is not negative."""
    finite = torch.isfinite(blocks)
    bins[-1] += (~finite).sum()
    fraction, exponent = torch.frexp(torch.where(finite, blocks, 0.0))
    significand = (fraction * 2.0**53).to(torch.int64)
    bin_index = (exponent.long() - _MIN_EXPONENT).clamp_(0, _BINS - 1)
    bins.scatter_add_(0, bin_index, significand >> _LOW)
    bins.scatter_add_(0, bin_index + _BINS, significand & ((1 << _LOW) - 1))


def _check(bins: Tensor, flat: Tensor) -> None:
    if bins.dtype is not torch.int64 or flat.dtype is not torch.float32:
        raise TypeError(f"square_bins_: bins {bins.dtype}, flat {flat.dtype}; use int64 and fp32")
    if bins.shape != (2 * _BINS + 1,) or flat.dim() != 1 or flat.numel() % BLOCK:
        raise ValueError(
            f"square_bins_: bins {list(bins.shape)} must be [{2 * _BINS + 1}], and flat "
            f"{list(flat.shape)} must have one dim whose size is a multiple of {BLOCK}"
        )
    if not (bins.is_contiguous() and flat.is_contiguous()) or bins.device != flat.device:
        raise ValueError("square_bins_: bins and flat must be contiguous and on one device")


@define("square_bins_(Tensor(a!) bins, Tensor flat) -> ()", lambda *_: None, _check)
def square_bins_(bins: Tensor, flat: Tensor) -> None:
    """Add the squares of all elements of `flat` to `bins`, in place.

    Args:
        bins: int64 [1281], from `new_bins`.
        flat: fp32 [n], contiguous; n is a multiple of 32.

    Raises:
        ValueError: a shape, device or layout is invalid.
        TypeError: a dtype is invalid.
    """
    kernels = library.native(flat) if flat.is_cpu else None
    if kernels is None or kernels.square_bins is None:
        reference(bins, flat)
    else:
        kernels.square_bins(flat.data_ptr(), flat.numel(), bins.data_ptr())
