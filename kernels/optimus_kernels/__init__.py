"""Torch ops for mixture-of-experts layers and for the optimizer.

Each op has a schema, a fake implementation for tracing, a reference implementation in plain torch
and, where it is differentiable, a gradient. Importing this package registers `torch.ops.optimus.*`.
The first op that runs compiles or loads the kernels of its device, or falls back to the reference
implementations (`backend`). Each op's file documents the shapes of its operands and results.
"""

from __future__ import annotations

from optimus_kernels.adamw import adamw_
from optimus_kernels.experts import Destination, WeightGrads, WeightWork, experts
from optimus_kernels.gather import gather
from optimus_kernels.grouped_mm import grouped_mm, grouped_mm_weight, set_form
from optimus_kernels.memory import release as release_memory
from optimus_kernels.route import Rows, route
from optimus_kernels.squares import square_bins_
from optimus_kernels.swiglu import swiglu

__all__ = [
    "Destination",
    "Rows",
    "WeightGrads",
    "WeightWork",
    "adamw_",
    "experts",
    "gather",
    "grouped_mm",
    "grouped_mm_weight",
    "release_memory",
    "route",
    "set_form",
    "square_bins_",
    "swiglu",
]
