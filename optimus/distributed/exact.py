"""Sums whose bits do not depend on the order of additions."""

from __future__ import annotations

import torch
from torch import Tensor

from optimus.distributed.collectives import Group, all_reduce_sum

_UNIT = 2.0**-28
"""Fixed-point unit: the int64 number n represents the value n * _UNIT. Sums below 3e10 in magnitude
fit into int64."""


def exact_sums(terms: list[Tensor], group: Group) -> list[float]:
    """Return the sum of each tensor's values over all ranks of the group.

    The result has the same bits for any order of the additions. Each value is rounded to a multiple
    of 2^-28 before it is added.

    Args:
        terms: 1-D tensors of finite values. All ranks have the same number of tensors; their
            lengths may differ.
        group: Group of the ranks.
    """
    units = [(values.double() / _UNIT).round().to(torch.int64).sum() for values in terms]
    total = torch.stack(units)
    all_reduce_sum(total, group)
    return [count * _UNIT for count in total.tolist()]
