"""Table of the axes of parallelism: pipeline (pp), data (dp), expert (ep) and tensor (tp).

Other packages derive from the table the coordinates of ranks, the process groups, the axes over
which gradients are summed, the ranks whose losses count, and the ranks that `optimus plan` lists.
Section `[parallel]` of a configuration sets the size of each axis.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

Axes = tuple[str, ...]
"""Names of axes, in the order of `AXES`."""


class Axis(NamedTuple):
    """Properties of an axis of parallelism."""

    ranks_have: Literal["other layers", "other data", "parts of the data", "the same data"]
    """Difference between the ranks along the axis: their layers, their data, or the part of the
    same data that they process. Ranks with "parts of the data" each compute a summand of the losses
    and of every gradient. Ranks with "the same data" compute the same losses, and only the losses
    of the first rank count."""
    divides: tuple[str, ...] = ()
    """Settings that the size of the axis must divide."""


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
"""All axes, from the outermost to the innermost; consecutive ranks differ first along tp."""


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
"""Axes along which the ranks of one replica of the model differ; dp is the number of replicas."""
WITHIN_BLOCK = tuple(
    name for name, axis in AXES.items() if axis.divides or "parts" in axis.ranks_have
)
"""Axes along which ranks communicate inside a transformer block."""
# Other packages assume that a pipeline stage is a range of consecutive ranks and that dp is the
# outermost axis within a stage.
assert list(AXES)[:2] == ["pp", "dp"]
