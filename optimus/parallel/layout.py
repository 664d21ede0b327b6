"""Layout: an immutable description of the pipeline stages and parameters of one rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from optimus.distributed.mesh import Coordinate, Mesh
from optimus.parallel.pipeline.actions import Schedule
from optimus.parallel.placement import Placement


@dataclass(frozen=True)
class Layout:
    """Description of one rank: its coordinate, pipeline stages, schedule and parameter slices."""

    mesh: Mesh
    coordinate: Coordinate
    schedule: Schedule
    layers: tuple[Sequence[int], ...]
    """The indices of the layers of each pipeline stage, for the stages of all ranks."""
    placements: dict[str, Placement]
    """Maps the name of each parameter to its placement on this rank."""
    sequence_shares: int = 1
    """The number of shares into which sequence parallelism divides a sequence; 1 without sequence
    parallelism."""

    @property
    def stages(self) -> range:
        """Return the indices of this rank's stages, in ascending order."""
        return self.schedule.stages_of(self.coordinate.pp)

    @property
    def has_first(self) -> bool:
        return self.stages[0] == 0

    @property
    def has_last(self) -> bool:
        return self.stages[-1] == self.schedule.num_stages - 1

    def boundary_shape(self, batch: int, seq_len: int, hidden_size: int) -> tuple[int, int, int]:
        """Return the shape [B, S, D] of the tensor that a stage sends to the next stage. S is the
        length of this rank's share of the sequence."""
        return batch, seq_len // self.sequence_shares, hidden_size

    def stage_of(self, name: str) -> int:
        """Return the index of the pipeline stage that uses a weight. The stage must be on this
        rank.

        Args:
            name: name of a parameter, or a key of `Transformer.shared_uses`.
        """
        if name.startswith("blocks."):
            layer = int(name.split(".")[1])
            return next(s for s in self.stages if layer in self.layers[s])
        if name.startswith("embed.") and self.has_first:
            return 0
        return self.schedule.num_stages - 1
