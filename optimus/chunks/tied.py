"""Further uses of a parameter (tied embeddings): each with a gradient of its own (CONTRACT.md)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from optimus.chunks.layout import Parameter, lay_out
from optimus.chunks.memory import Piece
from optimus.chunks.states import Home
from optimus.dist.collectives import ALONE, Transfer, begin_all_reduce_sum


@dataclass(frozen=True)
class Use:
    """A further use of a parameter, with a leaf of its own over the same storage, such as the
    output head's of tied embeddings: one accumulator for each use (CONTRACT.md)."""

    name: str
    leaf: Tensor
    owner: str


class WholeUse:
    """The gradient of a further use, kept whole on every rank that adds it."""

    def __init__(self, use: Use, home: Home, dtype: torch.dtype) -> None:
        self.use, self.home = use, home
        self._under_way: Transfer | None = None
        self.grads = torch.zeros(use.leaf.shape, dtype=dtype, device=use.leaf.device)
        self.grad = self.target = self.total = self.grads
        """Where backward adds, and the sum: of the leaf's shape."""

    def pieces(self) -> Iterator[Piece]:
        """Everything that this holds."""
        yield Piece("tied", self.grads)

    def named_grads(self) -> Iterator[tuple[str, Tensor]]:
        yield self.use.name, self.grads

    def start(self) -> None:
        self.finish()
        self.grads.zero_()

    def after(self) -> None:
        self._under_way = begin_all_reduce_sum(self.grads, self.home.adders)

    def finish(self) -> None:
        if self._under_way is not None:
            self._under_way.wait()
            self._under_way = None


class UseInPieces:
    """The gradient of a further use, added up like that of an undivided chunk (PieceReduction):
    every rank that adds it wants the whole sum."""

    def __init__(self, use: Use, home: Home) -> None:
        self.use, self.home = use, replace(home, shards=ALONE, spread=home.adders)
        shape, adders = tuple(use.leaf.shape), home.adders.size
        (chunk,) = lay_out([Parameter(use.name, shape, None, adders)], 1).chunks
        (slot,) = chunk.slots
        self.grads = torch.zeros(chunk.length, dtype=torch.float32, device=use.leaf.device)
        self.grad = self.grads
        self.target = self.total = self.grads[slot.start : slot.stop].view(shape)

    def pieces(self) -> Iterator[Piece]:
        """Everything that this holds itself; its piece of the sum is the reduction's."""
        yield Piece("tied", self.grads)

    def named_grads(self) -> Iterator[tuple[str, Tensor]]:
        yield self.use.name, self.target

    def start(self) -> None:
        """The reduction does."""

    def finish(self) -> None:
        """The reduction does."""
