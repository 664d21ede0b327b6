"""Host memory into which a rank copies its share of a checkpoint, so that training goes on."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from optimus import platform
from optimus.checkpoint.pieces import Scatter, Span, spans_to_write
from optimus.checkpoint.rank_states import RankStates
from optimus.checkpoint.shards import aligned
from optimus.checkpoint.stream import PIECE


def share_of(states: RankStates, scatter: Scatter) -> list[tuple[str, Span]]:
    """Which states of which spans this rank writes."""
    groups = states.groups
    spans = spans_to_write(
        states.held, states.boxes, groups.mesh, groups.coordinate, scatter, states.on_both_ends
    )
    return states.parts(spans)


def staging_bytes(parts: Sequence[tuple[str, Span]], dtype: torch.dtype = torch.float32) -> int:
    """What a `Staging` of these states of spans takes."""
    return sum(aligned((span.stop - span.start) * dtype.itemsize) for _, span in parts)


class Staging:
    """Memory for these states of spans as a checkpoint keeps them; made once, used again."""

    def __init__(
        self,
        parts: Sequence[tuple[str, Span]],
        device: torch.device,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        """`device`: where the states lie. For another than the CPU the memory is pinned."""
        size = staging_bytes(parts, dtype) // dtype.itemsize
        self._flat = torch.empty(size, dtype=dtype, pin_memory=device.type != "cpu")
        self._flat.zero_()  # its pages are there before the first copy
        self._places: dict[tuple[str, Span], torch.Tensor] = {}
        at = 0
        for state, span in parts:
            length = span.stop - span.start
            self._places[state, span] = self._flat[at : at + length]
            at += aligned(length * dtype.itemsize) // dtype.itemsize

    def fill(self, states: RankStates) -> None:
        """Take the states as they are now."""
        for (state, span), place in self._places.items():
            # A device takes memory for what it brings to another type: for little at once.
            parts = zip(place.split(PIECE), states.memory(state, span).split(PIECE), strict=True)
            for part, source in parts:
                part.copy_(source, non_blocking=True)
        platform.synchronize(states.device)

    def taken(self, state: str, span: Span) -> torch.Tensor:
        """What `fill` took of a state of a span."""
        return self._places[state, span]
