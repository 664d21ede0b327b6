"""2-norms of sharded tensors: a fast norm, and a norm whose bits do not depend on the sharding."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from optimus.distributed.collectives import Group, all_reduce_sum
from optimus_kernels import new_bins, square_bins_, total_of

_BLOCK = 1 << 16


def squares_of(flat: Tensor, exact: bool) -> Tensor:
    """Return the sum of the squares of a 1-D tensor, on the device of the tensor. For `fast_norm`,
    the result is an fp64 scalar. For `exact_norm` (if `exact`), the result is an exact sum in the
    form of the int64 bins of `optimus_kernels.square_bins_`."""
    if exact:
        bins = new_bins(flat.device)
        square_bins_(bins, flat)
        return bins
    # The norm of each block is computed in fp32, which is fast. The squares of these norms are
    # added in fp64.
    return _block_norms(flat).double().square().sum()


def new_total(exact: bool, device: torch.device) -> Tensor:
    """Return a zero on `device`. The results of `squares_of` with the same `exact` can be added to
    it."""
    return new_bins(device) if exact else torch.zeros((), dtype=torch.float64, device=device)


def fast_norm(
    flats: Sequence[Tensor], known: Sequence[Tensor | None], device: torch.device, group: Group
) -> float:
    """Return the 2-norm of 1-D tensors over the ranks of a group.

    Args:
        flats: The tensors of this rank, on the device or on the host.
        known: For each tensor, the result of `squares_of`; None if the result is not known.
        device: Device of collectives.
        group: The ranks.
    """
    total = new_total(False, device)
    squares = []
    for flat, square in zip(flats, known, strict=True):
        squares.append((squares_of(flat, False) if square is None else square).to(device))
    # Squares of finite fp32 values can overflow fp32. A sum with an overflow is computed again in
    # fp64. All sums are checked together, so that the host waits for the device only once.
    if squares and not bool(torch.stack(squares).isfinite().all()):
        squares = [flat.double().square().sum().to(device) for flat in flats]
    for square in squares:
        total += square
    all_reduce_sum(total, group)
    return math.sqrt(float(total))


def _block_norms(flat: Tensor) -> Tensor:
    """Return the 2-norms of the blocks of a 1-D tensor, in fp32."""
    norm = partial(torch.linalg.vector_norm, dtype=torch.float32)
    if flat.is_cpu and flat.dtype is not torch.float32:
        # On a CPU, the norm over a dim of a 16-bit tensor takes five times as long as this loop.
        return torch.stack([norm(block) for block in flat.split(_BLOCK)])
    # One launch for all blocks: 10^9 elements have 15,259 blocks, and a GPU needs about 10 us for
    # the launch of a norm, longer than for the norm of a block.
    whole = flat.numel() // _BLOCK * _BLOCK
    norms = norm(flat[:whole].view(-1, _BLOCK), dim=1)
    return norms if whole == flat.numel() else torch.cat([norms, norm(flat[whole:]).view(1)])


def exact_norm(
    flats: Sequence[Tensor], known: Sequence[Tensor | None], device: torch.device, group: Group
) -> float:
    """Return the 2-norm of fp32 tensors over the ranks of a group; NaN if a value is not finite.

    The tensors can be cut at any multiples of 32 elements, and the pieces can be distributed over
    ranks in any way: the result always has the same bits. The arguments are those of `fast_norm`.
    """
    total = new_total(True, device)
    on_host = total if device.type == "cpu" else new_bins(torch.device("cpu"))
    for flat, bins in zip(flats, known, strict=True):
        into = on_host if flat.is_cpu else total
        if bins is None:
            square_bins_(into, flat)
        else:
            into += bins
    if on_host is not total:
        total += on_host.to(device)
    all_reduce_sum(total, group)
    return math.sqrt(total_of(total))
