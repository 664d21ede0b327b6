"""Sums whose bits do not depend on the order of additions."""

from __future__ import annotations

import torch
from torch import Tensor

from optimus.distributed.collectives import Group, all_reduce_sum

_UNIT = 2.0**-28
"""Value of the integer 1. Sums below 3e10 in magnitude fit into int64; rounding changes a value by
less than 2e-9."""


def exact_sums(terms: list[Tensor], group: Group) -> list[float]:
    """Return, for each tensor, the sum of its values over all ranks of the group, in fixed point.

    Each value is rounded to a multiple of 2^-28, so that integers are added, whose sum has the same
    bits in any order.

    Args:
        terms: 1-D tensors of finite values, the same number on all ranks; lengths may differ.
        group: The ranks.
    """
    units = [(values.double() / _UNIT).round().to(torch.int64).sum() for values in terms]
    total = torch.stack(units)
    all_reduce_sum(total, group)
    return [count * _UNIT for count in total.tolist()]
