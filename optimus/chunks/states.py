"""One chunk on one rank: parameters, gradients, and its shard of the optimizer's states."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from optimus.chunks.layout import Chunk, Slot
from optimus.chunks.memory import Piece
from optimus.chunks.setting import PLAIN, Setting
from optimus.distributed.collectives import ALONE, Group, all_gather


@dataclass(frozen=True)
class Home:
    """Whose a parameter's gradient is: the key of its class, equal on all ranks that add it.

    The ranks of `adders` hold copies and add up gradients, in rank order; those of `shards` divide
    the optimizer's state, every rank of `spread` the same part. A rank's number in `adders` is its
    number in `shards` times the size of `spread` plus its number there.
    """

    stage: int = 0
    """Pipeline stage with which its gradient is ready."""
    adders: Group = ALONE
    shards: Group = ALONE
    spread: Group = ALONE
    partial_over: Group = ALONE
    """Ranks whose gradients are parts of one besides: tensor-parallel ones, of some norms."""
    copies: tuple[str, ...] = ()
    """Axes along which ranks hold the same part of the states."""
    far_copy: bool = False
    """Whether another stage holds the parameter too and counts it."""
    setting: Setting = PLAIN
    """How the optimizer treats it."""
    first_copy: bool = field(default=True, compare=False)
    """Whether this rank is the first of those that hold the same part of the states."""

    @property
    def counts(self) -> bool:
        """Whether what this rank holds counts in the norm: one of all copies does."""
        return self.first_copy and not self.far_copy


@dataclass(frozen=True)
class StateShard:
    """This rank's part of the states of one chunk, for checkpoints: from its element `first` on."""

    chunk: Chunk
    first: int
    home: Home
    states: Mapping[str, Tensor]
    """Flat fp32 [L / shards], by name: the memory that AdamW updates."""


class ShardPart(NamedTuple):
    """The part of one parameter in this rank's shard of a state."""

    name: str
    shape: tuple[int, ...]
    """Of the parameter as this rank holds it."""
    start: int
    """The first element, of the flattened parameter."""
    values: Tensor
    """Flat."""


class ChunkStates:
    """What a rank keeps of a chunk of L elements, with its shard of L / shards.

    `params` [L] in the training dtype; `grads` [L] in the gradients', where backward adds; `shard`
    [L / shards], the rank's part of the parameters; `master`, `exp_avg`, `exp_avg_sq`, `grad`
    [L / shards] fp32. In fp32 training the master is the shard; undivided, `grad` is `grads`.

    `divided`: the rank keeps its shard of the parameters apart, and `params` may be without memory.
    """

    def __init__(
        self,
        chunk: Chunk,
        home: Home,
        dtype: torch.dtype,
        grad_dtype: torch.dtype,
        device: torch.device,
        divided: bool = False,
    ) -> None:
        self.chunk, self.home = chunk, home
        self.divided = divided and home.shards.size > 1
        length, shard = chunk.length, chunk.shard_length
        self.params = torch.zeros(length, dtype=dtype, device=device)
        self.grads = torch.zeros(length, dtype=grad_dtype, device=device)
        self.grad = self.grads
        if home.shards.size > 1:
            self.grad = torch.zeros(shard, dtype=torch.float32, device=device)
        first = home.shards.rank * shard
        self.own = slice(first, first + shard)
        """This rank's part of the chunk."""
        self.shard = self.params[self.own]
        if self.divided:
            self.shard = torch.zeros(shard, dtype=dtype, device=device)
        if dtype is torch.float32:
            self.master = self.shard
        else:
            self.master = torch.zeros(shard, dtype=torch.float32, device=device)
        self.exp_avg, self.exp_avg_sq = (torch.zeros_like(self.master) for _ in range(2))

    def pieces(self) -> Iterator[Piece]:
        """Everything that this holds."""
        yield Piece("parameters", self.params, self.chunk)
        yield Piece("parameters", self.shard, self.chunk)
        yield Piece("gradients", self.grads, self.chunk)
        yield Piece("gradients", self.grad, self.chunk)
        yield Piece("masters", self.master, self.chunk)
        yield Piece("moments", self.exp_avg, self.chunk)
        yield Piece("moments", self.exp_avg_sq, self.chunk)

    def view(self, flat: Tensor, slot: Slot) -> Tensor:
        """A parameter's part of a flat [L] buffer."""
        return flat[slot.start : slot.stop].view(slot.shape)

    def whole(self, flat: Tensor) -> Tensor:
        """A flat [L / shards] buffer put together to [L]; itself where it is not divided. A
        collective of the ranks that divide it."""
        if self.home.shards.size == 1:
            return flat
        out = flat.new_empty(self.chunk.length)
        all_gather(out, flat, self.home.shards)
        return out

    def named_grads(self) -> Iterator[tuple[str, Tensor]]:
        """What backward has added, by parameter."""
        for slot in self.chunk.slots:
            yield slot.name, self.view(self.grads, slot)

    def piece_of(self, flat: Tensor, slot: Slot) -> tuple[Tensor, slice] | None:
        """Where a parameter meets this rank's shard: that part of a flat [L / shards] buffer, and
        which elements of the flattened parameter they are; None if they do not meet."""
        start, stop = max(slot.start, self.own.start), min(slot.stop, self.own.stop)
        if start >= stop:
            return None
        here = flat[start - self.own.start : stop - self.own.start]
        return here, slice(start - slot.start, stop - slot.start)
