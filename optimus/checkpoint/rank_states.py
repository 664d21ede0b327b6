"""What one rank holds of the states of a run, as checkpoints see it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from optimus.checkpoint.pieces import Box, Held, Span
from optimus.chunks.buffers import StateShard
from optimus.chunks.layout import STATES
from optimus.distributed.groups import Groups


@dataclass(frozen=True)
class RankStates:
    """What one rank holds of the states, and what that is of the model."""

    groups: Groups
    shards: Sequence[StateShard]
    boxes: Mapping[str, Box]
    """Of the parameters here."""
    shapes: Mapping[str, Sequence[int]]
    """Of all whole parameters."""
    on_both_ends: tuple[str, ...] = ()
    """What the first and the last of several pipeline stages hold both: tied embeddings."""

    @property
    def held(self) -> list[Held]:
        return [
            Held(one.chunk, one.first, one.groups.copy_axes, one.groups.is_tied_copy)
            for one in self.shards
        ]

    @property
    def device(self) -> torch.device:
        return self.shards[0].states["master"].device

    def parts(self, spans: Sequence[Span]) -> list[tuple[str, Span]]:
        """The states that there are of these spans, state by state."""
        return [(s, span) for s in STATES for span in spans if s in self.shards[span.held].states]

    def memory(self, state: str, span: Span) -> Tensor:
        """A state of a span, as it lies."""
        return self.shards[span.held].states[state][span.start : span.stop]
