"""Table of the axes of parallelism: pipeline (pp), data (dp), expert (ep) and tensor (tp).

Section `[parallel]` of a configuration sets the size of each axis. Other packages derive the layout
of ranks and the process groups from the table.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

Axes = tuple[str, ...]
"""Names of axes, in the order of `AXES`."""


class Axis(NamedTuple):
    """Properties of an axis of parallelism."""

    ranks_have: Literal["other layers", "other data", "parts of the data", "the same data"]
    """Difference between the ranks along the axis.

    "other layers": Each rank computes different layers.

    "other data": Each rank reads different data.

    "parts of the data": Each rank processes a part of the same data. Losses and gradients are sums
    over the ranks.

    "the same data": All ranks process the same data and compute the same losses.
    """
    divides: tuple[str, ...] = ()
    """Keys of the settings whose values must be multiples of the size of the axis."""


AXES = {
    "pp": Axis("other layers"),
    # optim.sharding = "so" needs dp outside ep: the gradient reduction gathers a shard from slices
    # on the ranks along ep, and these slices are adjacent in the chunk only if dp is outside ep.
    "dp": Axis("other data"),
    # ep divides only experts. All other parameters have a copy on each rank along ep, as along dp.
    # Ranks along ep therefore read different data, and a batch is divided over dp * ep ranks.
    "ep": Axis("other data", divides=("model.num_experts",)),
    "tp": Axis(
        "the same data",
        divides=(
            "model.num_attention_heads",
            "model.num_key_value_heads",
            "model.intermediate_size",
        ),
    ),
}
"""All axes, from the outermost to the innermost. Along the innermost axis, tp, the rank numbers are
consecutive."""


def _axes(*kinds: str) -> Axes:
    return tuple(name for name, axis in AXES.items() if axis.ranks_have in kinds)


DATA = _axes("other data")
"""Axes along which ranks read different data."""
GRAD_SUM = _axes("other data", "parts of the data")
"""Axes along which gradients are summed."""
SAME_DATA = _axes("the same data")
"""Axes along which ranks compute the same losses."""
UNEQUAL = _axes("other layers", "the same data")
"""Axes along which the model states of ranks can have different sizes."""
MODEL = tuple(axis for axis in AXES if axis != "dp")
"""Axes along which the ranks of one model replica differ: all axes except dp."""
WITHIN_BLOCK = tuple(
    name for name, axis in AXES.items() if axis.divides or "parts" in axis.ranks_have
)
"""Axes along which ranks communicate inside a transformer block."""
# Other packages assume that a pipeline stage is a range of consecutive ranks and that dp is the
# outermost axis within a stage.
assert list(AXES)[:2] == ["pp", "dp"]
