"""Sums whose bits do not depend on who adds what first."""

from __future__ import annotations

import torch
from torch import Tensor

from optimus.distributed.collectives import Group, all_reduce_sum

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
