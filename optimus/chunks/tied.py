"""Further uses of a parameter (tied embeddings): each with a gradient of its own."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from optimus.chunks.layout import Parameter, lay_out
from optimus.chunks.memory import Piece
from optimus.chunks.states import Home
from optimus.distributed.collectives import ALONE


@dataclass(frozen=True)
class Use:
    """A further use of a parameter, with a leaf of its own over the same storage, such as the
    output head's of tied embeddings: one accumulator for each use."""

    name: str
    leaf: Tensor
    owner: str


class UseBuffer:
    """The gradient of a further use, added up over ranks like that of an undivided chunk: every
    rank that adds it wants the whole sum."""

    def __init__(self, use: Use, home: Home, dtype: torch.dtype) -> None:
        self.use, self.home = use, replace(home, shards=ALONE, spread=home.adders)
        shape, adders = tuple(use.leaf.shape), home.adders.size
        (chunk,) = lay_out([Parameter(use.name, shape, None, adders)], 1).chunks
        (slot,) = chunk.slots
        self.grads = self.grad = torch.zeros(chunk.length, dtype=dtype, device=use.leaf.device)
        self.total = self.grads[slot.start : slot.stop].view(shape)
        """Where backward adds, and in the end the sum, of the leaf's shape."""

    def pieces(self) -> Iterator[Piece]:
        """Everything that this holds itself; a piece of the sum is the reduction's."""
        yield Piece("tied", self.grads)

    def named_grads(self) -> Iterator[tuple[str, Tensor]]:
        yield self.use.name, self.total
