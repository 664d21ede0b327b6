"""Ops of the mixture of experts and of the optimizer: each with a schema, a fake, a twin in plain
torch and, where it has one, a gradient.

Importing this makes `torch.ops.optimus.*` exist; nothing is compiled until an op runs, and then by
`backend`, which falls back to the twins. Dims and meanings are said in each op's file.
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
