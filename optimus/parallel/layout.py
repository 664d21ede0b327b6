"""A rank's share of the run as one value: its stages, its parameters, who adds what."""

from __future__ import annotations

from dataclasses import dataclass

from optimus.distributed.mesh import Mesh, Place
from optimus.parallel.pipeline.actions import Schedule
from optimus.parallel.placement import Placement

FURTHER_USES = {"head.weight": "embed.weight"}
"""Names under which a tied parameter is used once more: that parameter."""


@dataclass(frozen=True)
class Layout:
    """What one rank holds and does."""

    mesh: Mesh
    place: Place
    schedule: Schedule
    layers: tuple[range, ...]
    """By stage."""
    placements: dict[str, Placement]
    """Of the parameters here, by name."""
    sequence_shares: int = 1
    """Tensor-parallel ranks over which the sequence is divided between blocks."""

    @property
    def stages(self) -> range:
        """The stages of this rank, first to last."""
        return self.schedule.stages_of(self.place.pp)

    @property
    def has_first(self) -> bool:
        return self.stages[0] == 0

    @property
    def has_last(self) -> bool:
        return self.stages[-1] == self.schedule.num_stages - 1

    def owner_of(self, name: str) -> str:
        """The parameter here behind a name: itself, or that of which the name is a further use; ""
        for a name of neither."""
        owner = name if name in self.placements else FURTHER_USES.get(name, "")
        return owner if owner in self.placements else ""

    def is_far_copy(self, name: str) -> bool:
        """Whether a parameter lies here for a further use and another stage answers for it."""
        return name in FURTHER_USES.values() and not self.has_first

    def stage_of(self, name: str) -> int:
        """The stage of this rank that a parameter, or a further use of one, belongs to."""
        if name.startswith("blocks."):
            layer = int(name.split(".")[1])
            return next(s for s in self.stages if layer in self.layers[s])
        if name.startswith("embed.") and self.has_first:
            return 0
        return self.schedule.num_stages - 1
