"""Gradients added up microbatch by microbatch, each rank holding a piece of every sum.

Each microbatch's gradient of a chunk is added up over ranks as soon as it is complete; a rank keeps
1/n of the sum over n ranks, and the buffer's memory goes until the next backward (ZeRO-2) or, where
just the order of microbatches is wanted, is cleared for it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

import torch
from torch import Tensor

from optimus.chunks.memory import Piece
from optimus.chunks.states import ChunkStates, Home
from optimus.chunks.storage import Kept, Memory
from optimus.distributed.collectives import (
    Group,
    all_gather,
    all_reduce_sum,
    all_to_all,
    reduce_scatter_sum,
)


class Buffer(Protocol):
    """What gradients accumulate in: a chunk, or a further use of a parameter."""

    home: Home
    grads: Tensor
    """fp32 [L]: of one microbatch."""
    grad: Tensor
    """fp32 [L / shards]: the sum, for the update; `grads` itself where it is not divided."""

    def named_grads(self) -> Iterator[tuple[str, Tensor]]:
        """`grads` by parameter, in order of first use."""


class PieceReduction:
    """Sums that are made microbatch by microbatch, each rank holding its piece of every buffer.

    `ordered`: contributions are exchanged and added in the order of microbatch numbers, so that no
    layout changes a bit: microbatch i of data rank d of w is number i * w + d, so after each
    backward every rank adds its piece of ranks 0, 1, ..., w-1 in that order. Otherwise they are
    added on the way, in `dtype`. Buffers that one rank alone adds to stay as they are.
    """

    def __init__(
        self, buffers: Sequence[Buffer], ordered: bool, dtype: torch.dtype, memory: Memory
    ) -> None:
        self._ordered, self._dtype, self._memory = ordered, dtype, memory
        self._buffers: list[Buffer] = []
        self._pieces: dict[Buffer, Tensor] = {}
        for one in buffers:
            self.add(one)

    def add(self, one: Buffer) -> None:
        """Keep gradients of one more buffer in pieces."""
        self._buffers.append(one)
        if (count := one.home.adders.size) > 1:
            is_shard = one.home.spread.size == 1
            self._pieces[one] = (
                one.grad if is_shard else one.grads.new_zeros(len(one.grads) // count)
            )
            self._memory.free(one.grads)

    def pieces(self) -> Iterator[Piece]:
        """Everything that is held between steps, beside the buffers."""
        for one, tensor in self._pieces.items():
            chunk = one.chunk if isinstance(one, ChunkStates) else None
            kept = isinstance(self._memory, Kept)
            yield Piece(
                "tied" if chunk is None else "deterministic" if kept else "gradients", tensor, chunk
            )

    def start(self) -> None:
        """Before the first backward of a step."""
        self.release()
        for one in self._buffers:
            self._pieces.get(one, one.grads).zero_()

    def fill(self, one: Buffer) -> None:
        """Before a backward that adds to the buffer."""
        if not self._memory.holds(one.grads):
            self._memory.allocate(one.grads)
            one.grads.zero_()

    def holds(self, one: Buffer) -> bool:
        """Whether the buffer has memory: what backward has added since `fill` is in it."""
        return self._memory.holds(one.grads)

    def after(self, one: Buffer) -> None:
        """Behind every backward that adds to the buffer: add it up, and give its memory back."""
        if one not in self._pieces or not self.holds(one):
            return
        piece = self._pieces[one]
        if self._ordered:
            _add_in_rank_order(piece, one.grads, one.home.adders)
        else:
            travelling = one.grads.to(self._dtype)
            part = travelling.new_empty(len(piece))
            reduce_scatter_sum(part, travelling, one.home.adders)
            piece.add_(part)
        self._memory.free(one.grads)

    def finish(self) -> None:
        """Put pieces together to what each rank updates; undivided buffers are whole again."""
        for one in self._buffers:
            if one in self._pieces:
                if one.grad is one.grads:
                    self._memory.allocate(one.grads)
                all_gather(one.grad, self._pieces[one], one.home.spread)
            all_reduce_sum(one.grad, one.home.partial_over)

    def release(self) -> None:
        """After the update."""
        for one in self._pieces:
            if self.holds(one):
                self._memory.free(one.grads)


def _add_in_rank_order(total: Tensor, grads: Tensor, group: Group) -> None:
    """Add to this rank's piece [L / n] of a sum what each of n ranks has for it in its `grads` [L],
    rank 0 first."""
    received = torch.empty_like(grads)
    all_to_all(received, grads, group)
    for contribution in received.chunk(group.size):
        total.add_(contribution)
