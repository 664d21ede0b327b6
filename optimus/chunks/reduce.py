"""Adding up a chunk's gradients over ranks: fast, or in an order that no layout changes.

The loss carries the global scale (CONTRACT.md, "Ranks"), so both are pure sums. Either way each of
the n ranks that add comes to hold 1/n of the chunk, a piece, and pieces are put together to the
shard that the rank updates: all of the chunk where states are not divided.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from optimus.chunks.memory import Piece
from optimus.chunks.states import ChunkStates
from optimus.dist.collectives import (
    all_gather,
    all_reduce_sum,
    all_to_all,
    reduce_scatter_sum,
)


class FastReduction:
    """Microbatches add up locally; one reduce-scatter a step."""

    def __init__(self, chunks: list[ChunkStates], dtype: torch.dtype) -> None:
        self._chunks, self._dtype = chunks, dtype

    def start(self) -> None:
        for one in self._chunks:
            one.grads.zero_()

    def pieces(self) -> Iterator[Piece]:
        """Nothing is held between steps."""
        return iter(())

    def after(self, one: ChunkStates) -> None:
        """Behind the last backward of a step that adds to this chunk."""
        group = one.home.adders
        if group.size == 1:
            return
        if one.home.shards.size == 1 and one.home.spread.size == group.size:
            _all_reduce(one.grads, one, self._dtype)
            return
        travelling = one.grads.to(self._dtype)
        piece = travelling.new_empty(len(travelling) // group.size)
        reduce_scatter_sum(piece, travelling, group)
        _join(one, piece.float())

    def finish(self) -> None:
        for one in self._chunks:
            all_reduce_sum(one.grad, one.home.partial_over)


class OrderedReduction:
    """Every microbatch's gradient is added in the order of microbatch numbers.

    Microbatch i of data rank d is number i * w + d: after each backward the ranks exchange pieces,
    and each adds its piece of ranks 0, 1, ..., w-1 in that order. Peak extra memory: a piece of
    every chunk, and one chunk.
    """

    def __init__(self, chunks: list[ChunkStates]) -> None:
        self._chunks = chunks
        self._sums = {
            one.chunk.number: one.grads.new_zeros(len(one.grads) // one.home.adders.size)
            for one in chunks
        }

    def start(self) -> None:
        for one in self._chunks:
            one.grads.zero_()
            self._sums[one.chunk.number].zero_()

    def pieces(self) -> Iterator[Piece]:
        """Everything that is held between steps."""
        for one in self._chunks:
            yield Piece("deterministic", self._sums[one.chunk.number], one.chunk)

    def after(self, one: ChunkStates) -> None:
        """Behind every backward that adds to this chunk."""
        group, total = one.home.adders, self._sums[one.chunk.number]
        if group.size == 1:
            total.add_(one.grads)
        else:
            received = torch.empty_like(one.grads)
            all_to_all(received, one.grads, group)
            for contribution in received.chunk(group.size):
                total.add_(contribution)
        one.grads.zero_()

    def finish(self) -> None:
        for one in self._chunks:
            _join(one, self._sums[one.chunk.number])
            all_reduce_sum(one.grad, one.home.partial_over)


def _all_reduce(flat: Tensor, one: ChunkStates, dtype: torch.dtype) -> None:
    travelling = flat.to(dtype)
    all_reduce_sum(travelling, one.home.adders)
    if travelling is not flat:
        flat.copy_(travelling)


def _join(one: ChunkStates, piece: Tensor) -> None:
    """From this rank's piece to the shard it updates, which the ranks of `spread` share."""
    all_gather(one.grad, piece, one.home.spread)
