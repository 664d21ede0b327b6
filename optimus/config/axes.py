"""The axes of parallelism, in a table from which all that counts ranks follows: places, groups, who
adds and who shards, whose losses count, what a plan lists. Each has a size in `[parallel]`.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

Axes = tuple[str, ...]


class Axis(NamedTuple):
    """What one axis does to a run."""

    ranks_have: Literal["other layers", "other data", "parts of the data", "the same data"]
    """How ranks differ along it. Those with parts of the same tokens have each a share of their
    losses and of every gradient; of those with the same data the first one's losses count."""
    divides: tuple[str, ...] = ()
    """Settings that its size must divide."""


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
"""From the outermost to the innermost (CONTRACT.md, "Ranks")."""


def _axes(*which: str) -> Axes:
    return tuple(name for name, axis in AXES.items() if axis.ranks_have in which)


DATA = _axes("other data")
ADDED = _axes("other data", "parts of the data")
"""Along which gradients are added."""
SAME = _axes("the same data")
UNLIKE = _axes("other layers", "the same data")
"""Along which ranks may hold more or less than each other."""
MODEL = tuple(axis for axis in AXES if axis != "dp")
"""Of the ranks of one replica, of which dp makes as many as the world holds."""
BLOCK = tuple(axis for axis, one in AXES.items() if one.divides or "parts" in one.ranks_have)
"""Along which ranks talk within a block."""
assert list(AXES)[:2] == ["pp", "dp"]  # stages are runs of ranks; a shard lies outside its pieces
