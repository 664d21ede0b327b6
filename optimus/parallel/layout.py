"""Layout: the stages and parameters of one rank as a value."""

from __future__ import annotations

from dataclasses import dataclass

from optimus.distributed.mesh import Coordinate, Mesh
from optimus.parallel.pipeline.actions import Schedule
from optimus.parallel.placement import Placement

FURTHER_USES = {"head.weight": "embed.weight"}
"""Tied parameters by the name of their further use: the head uses embed.weight again."""


@dataclass(frozen=True)
class Layout:
    """The stages, actions and parameters of one rank."""

    mesh: Mesh
    coordinate: Coordinate
    schedule: Schedule
    layers: tuple[range, ...]
    """The layers of each stage of the whole run."""
    placements: dict[str, Placement]
    """The placement of each parameter on this rank, by name."""
    sequence_shares: int = 1
    """The number of tp ranks that share the sequence of the residual stream; 1 without sequence
    parallelism."""

    @property
    def stages(self) -> range:
        """Return the stages of this rank, first to last."""
        return self.schedule.stages_of(self.coordinate.pp)

    @property
    def has_first(self) -> bool:
        return self.stages[0] == 0

    @property
    def has_last(self) -> bool:
        return self.stages[-1] == self.schedule.num_stages - 1

    def owner_of(self, name: str) -> str:
        """Return `name` if it is a parameter on this rank, or the parameter on this rank of which
        `name` is a further use; else ""."""
        owner = name if name in self.placements else FURTHER_USES.get(name, "")
        return owner if owner in self.placements else ""

    def is_far_copy(self, name: str) -> bool:
        """Return whether this rank has a parameter for its further use only. Another stage, that of
        its first use, updates and saves it."""
        return name in FURTHER_USES.values() and not self.has_first

    def stage_of(self, name: str) -> int:
        """Return the stage of this rank that a parameter, or a further use of one, belongs to."""
        if name.startswith("blocks."):
            layer = int(name.split(".")[1])
            return next(s for s in self.stages if layer in self.layers[s])
        if name.startswith("embed.") and self.has_first:
            return 0
        return self.schedule.num_stages - 1
