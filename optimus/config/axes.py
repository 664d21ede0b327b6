"""The axes of parallelism, in one table.

Ranks, process groups, gradient sums, the counting of losses and the ranks that a plan lists are all
derived from this table. `[parallel]` has the size of each axis.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

Axes = tuple[str, ...]
"""Names of axes, in the order of `AXES`."""


class Axis(NamedTuple):
    """An axis of parallelism: how its ranks differ, and the settings that its size must divide."""

    ranks_have: Literal["other layers", "other data", "parts of the data", "the same data"]
    """The difference between ranks along the axis. Ranks with parts of the data each compute a part
    of the losses and of every gradient. Of ranks with the same data, the losses of the first one
    count."""
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
"""All axes, from the outermost to the innermost (CONTRACT.md, "Ranks")."""


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
"""Axes of the ranks that form one replica of the model; dp is the number of replicas."""
WITHIN_BLOCK = tuple(
    name for name, axis in AXES.items() if axis.divides or "parts" in axis.ranks_have
)
"""Axes along which ranks communicate inside a block."""
# Other packages rely on it: a pipeline stage is a range of consecutive ranks, and dp is the
# outermost axis within a stage.
assert list(AXES)[:2] == ["pp", "dp"]
