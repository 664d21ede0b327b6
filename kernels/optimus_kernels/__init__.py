"""Torch ops for mixture-of-experts layers and for the optimizer.

Importing this package registers the ops as `torch.ops.optimus.*`. The first call of an op on a
device loads the compiled kernels of the device. By default, ops run in plain torch if no kernels
are available.
"""

from __future__ import annotations

from optimus_kernels.adamw import adamw_, adamw_into
from optimus_kernels.cache import KernelError
from optimus_kernels.experts import Destination, WeightGrads, WeightWork, experts
from optimus_kernels.grouped_mm import form, grouped_mm, grouped_mm_weight, set_form
from optimus_kernels.memory import release as release_memory
from optimus_kernels.product import fastest_library, library_of
from optimus_kernels.rows import Rows, gather, route
from optimus_kernels.squares import new_bins, square_bins_, total_of
from optimus_kernels.swiglu import swiglu

__all__ = [
    "Destination",
    "KernelError",
    "Rows",
    "WeightGrads",
    "WeightWork",
    "adamw_",
    "adamw_into",
    "experts",
    "fastest_library",
    "form",
    "gather",
    "grouped_mm",
    "grouped_mm_weight",
    "library_of",
    "new_bins",
    "release_memory",
    "route",
    "set_form",
    "square_bins_",
    "swiglu",
    "total_of",
]
