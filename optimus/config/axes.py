"""Table of the axes of parallelism: pipeline (pp), data (dp), expert (ep) and tensor (tp).

Section `[parallel]` of a configuration sets the size of each axis. Other packages use the table to
find the coordinates of ranks, the process groups, the axes over which gradients are summed, the
ranks whose losses count, and the ranks that `optimus plan` lists.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

Axes = tuple[str, ...]
"""Names of axes, in the order of `AXES`."""


class Axis(NamedTuple):
    """Properties of an axis of parallelism."""

    ranks_have: Literal["other layers", "other data", "parts of the data", "the same data"]
    """Layers or data by which the ranks along the axis differ. "other layers": ranks have different
    layers. "other data": ranks read different data. "parts of the data": ranks process parts of the
    same data, and each rank computes a summand of the losses and of every gradient. "the same
    data": ranks process the same data and compute the same losses, and only the losses of the first
    rank count."""
    divides: tuple[str, ...] = ()
    """Settings whose values must be multiples of the size of the axis."""


AXES = {
    "pp": Axis("other layers"),
    "dp": Axis("other data"),
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
"""All axes, from the outermost to the innermost. With increasing rank number, the coordinate of the
innermost axis, tp, changes fastest."""


def _axes(*kinds: str) -> Axes:
    return tuple(name for name, axis in AXES.items() if axis.ranks_have in kinds)


DATA = _axes("other data")
"""Axes along which ranks read different data."""
GRAD_SUM = _axes("other data", "parts of the data")
"""Axes along which gradients are summed."""
SAME_DATA = _axes("the same data")
"""Axes along which ranks compute the same losses."""
UNEQUAL = _axes("other layers", "the same data")
"""Axes along which ranks may have model states of different sizes."""
MODEL = tuple(axis for axis in AXES if axis != "dp")
"""All axes except dp. The size of dp is the number of replicas of the model, so the ranks of one
replica differ only along the other axes."""
WITHIN_BLOCK = tuple(
    name for name, axis in AXES.items() if axis.divides or "parts" in axis.ranks_have
)
"""Axes along which ranks communicate inside a transformer block."""
# Other packages assume that a pipeline stage is a range of consecutive ranks and that dp is the
# outermost axis within a stage.
assert list(AXES)[:2] == ["pp", "dp"]
