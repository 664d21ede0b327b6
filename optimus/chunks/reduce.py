"""Adding up a chunk's gradients over ranks, once a step.

The loss carries the global scale, so it is a pure sum. Where states are
divided each of the n ranks that add comes to hold 1/n of the chunk, a piece, and pieces are put
together to the shard that the rank updates.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from optimus.chunks.memory import Piece
from optimus.chunks.pieces import Buffer
from optimus.distributed.collectives import (
    Transfer,
    all_gather,
    all_reduce_sum,
    begin_all_reduce_sum,
    begin_reduce_scatter_sum,
)

_UNDER_WAY = 2
"""Buffers that may travel at once: a backend may hold a copy of each."""


class FastReduction:
    """Microbatches add up locally; one reduce-scatter a step, waited for in `finish` if `overlap`.

    What is undivided is added up where it lies, shards where they are wanted; only another dtype
    or a shard of several pieces takes memory on the way.
    """

    def __init__(self, buffers: Sequence[Buffer], dtype: torch.dtype, overlap: bool) -> None:
        self._buffers, self._dtype = list(buffers), dtype
        self._at_once = _UNDER_WAY if overlap else 0
        self._under_way: deque[tuple[Buffer, Transfer]] = deque()
        self._pieces: list[tuple[Buffer, Tensor]] = []

    def add(self, one: Buffer) -> None:
        """Add up one more buffer."""
        self._buffers.append(one)

    def start(self) -> None:
        self._wait(0)  # for what a step left behind that was given up
        self._pieces.clear()
        for one in self._buffers:
            one.grads.zero_()

    def pieces(self) -> Iterator[Piece]:
        """Nothing is held between steps."""
        return iter(())

    def after(self, one: Buffer) -> None:
        """Behind the last backward of a step that adds to this buffer."""
        group = one.home.adders
        if group.size == 1:
            return
        self._wait(max(0, self._at_once - 1))
        travelling = one.grads.to(self._dtype)
        if one.home.shards.size == 1:
            transfer = begin_all_reduce_sum(travelling, group)
        else:
            whole = one.home.spread.size == 1 and one.grad.dtype is self._dtype
            piece = one.grad if whole else travelling.new_empty(len(travelling) // group.size)
            transfer = begin_reduce_scatter_sum(piece, travelling, group)
        self._under_way.append((one, transfer))
        self._wait(self._at_once)

    def _wait(self, remaining: int) -> None:
        while len(self._under_way) > remaining:
            one, transfer = self._under_way.popleft()
            result = transfer.wait()
            into = one.grads if one.home.shards.size == 1 else one.grad
            if result.data_ptr() == into.data_ptr():
                continue
            if len(result) == len(into):
                into.copy_(result)
            else:  # other ranks' pieces are fetched in `finish`, so that all do it at one time
                self._pieces.append((one, result))

    def finish(self) -> None:
        self._wait(0)
        for one, piece in self._pieces:
            all_gather(one.grad, piece.to(one.grad.dtype), one.home.spread)
        self._pieces.clear()
        for one in self._buffers:
            all_reduce_sum(one.grad, one.home.partial_over)
