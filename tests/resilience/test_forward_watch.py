"""Tests of the detection of non-finite values in forward and backward on one rank."""

from __future__ import annotations

import torch
from torch import nn

from optimus.resilience.finite import is_finite
from optimus.resilience.nonfinite import ForwardWatch


def test_large_values_whose_sum_overflows_are_finite():
    large = torch.full((8,), 3e38)
    assert torch.isinf(large.sum()) and is_finite(large)
    assert not is_finite(torch.tensor([1.0, torch.inf, 2.0]))


class Broken(nn.Module):
    """Module that computes NaN from finite numbers."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.nan


def test_the_innermost_module_that_made_a_nan_is_named():
    model = nn.Sequential(nn.Identity(), nn.Sequential(nn.Identity(), Broken()), nn.Identity())
    watch = ForwardWatch()
    with watch.over(model):
        model(torch.ones(2))
    assert watch.module == "1.1"
