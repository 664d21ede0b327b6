"""A rank's gradients from backward to the update: where they add up and when they are reduced."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial

import torch
from torch import Tensor

from optimus.chunks.departures import Departures, Parcel
from optimus.chunks.follow import Follower
from optimus.chunks.layout import Slot
from optimus.chunks.memory import Holder, Piece
from optimus.chunks.pieces import Buffer, PieceReduction
from optimus.chunks.rcache import ChunkCache
from optimus.chunks.reduce import FastReduction
from optimus.chunks.states import ChunkStates, Home
from optimus.chunks.storage import Kept, Memory
from optimus.chunks.tied import Use, UseBuffer
from optimus.chunks.units import Unit
from optimus.distributed.collectives import Group, all_reduce_sum

_WIDENS_NATIVELY = hasattr(torch.Tensor, "grad_dtype")  # torch 2.9 and later: fp32 .grad of bf16


class Gradients:
    """Backward adds to chunks, and to a buffer of its own for each further use of a parameter."""

    def __init__(
        self,
        named: Mapping[str, Tensor],
        chunks: Sequence[ChunkStates],
        memory: Memory,
        *,
        deterministic: bool,
        reduce_dtype: torch.dtype,
        grad_dtype: torch.dtype,
        compiled: bool,
        overlap: bool,
        in_pieces: bool,
    ) -> None:
        """`named`: trained parameters in order of first use, views of `chunks`. `in_pieces`: whole
        for one backward only, which waits for `follow`. The rest as for ChunkEngine."""
        self._chunks, self._grad_dtype = list(chunks), grad_dtype
        self._by_name: dict[str, tuple[ChunkStates, Slot]] = {
            slot.name: (one, slot) for one in chunks for slot in one.chunk.slots
        }
        self.before_sum: Callable[[Buffer], None] = lambda one: None
        """Told of what this rank adds to a sum over ranks, which hides whose a NaN is."""
        self._follower: Follower | None = None
        self._uses: list[UseBuffer] = []
        dtypes_agree = all(p.dtype is grad_dtype for p in named.values())
        self._accumulates_natively = dtypes_agree or (_WIDENS_NATIVELY and not compiled)
        # Freed storage takes no new views.
        targets = {name: one.view(one.grads, slot) for name, (one, slot) in self._by_name.items()}
        together = any(one.home.adders.size > 1 for one in chunks)
        if in_pieces or (deterministic and together):
            memory = memory if in_pieces else Kept()
            self._reduction: PieceReduction | FastReduction = PieceReduction(
                self._chunks, deterministic, reduce_dtype, memory
            )
        else:
            self._reduction = FastReduction(self._chunks, reduce_dtype, overlap)
        early = overlap and together and not (deterministic or in_pieces)
        self._departures = Departures(
            self._accumulates_natively, early, lambda one: self.before_sum(one)
        )
        for one in by_first_use(chunks, named):
            names = [slot.name for slot in one.chunk.slots]
            parts = {name: (named[name], targets[name]) for name in names}
            self._depart(one, parts)

    def add_use(self, use: Use, home: Home) -> None:
        """Give a further use of a parameter a gradient buffer of its own."""
        buffer = UseBuffer(use, home, self._grad_dtype)
        self._reduction.add(buffer)
        self._uses.append(buffer)
        self._depart(buffer, {use.name: (use.leaf, buffer.total)})

    def _depart(self, buffer: Buffer, parts: dict[str, tuple[Tensor, Tensor]]) -> None:
        """Let backward add into these parts of the buffer, which leaves for the reduction."""
        for leaf, part in parts.values():
            self._accumulate(leaf, part)
        self._departures.add(Parcel(buffer, parts, partial(self._reduction.after, buffer)))

    def _accumulate(self, leaf: Tensor, target: Tensor) -> None:
        """Let backward add into `target`, in its dtype."""
        if self._accumulates_natively:
            if leaf.dtype is not target.dtype:
                leaf.grad_dtype = target.dtype
            leaf.grad = target
            return

        def widen(leaf: Tensor) -> None:
            if leaf.grad is not None:  # it is where a gradient is put off or written past autograd
                target.add_(leaf.grad)
                leaf.grad = None

        leaf.register_post_accumulate_grad_hook(widen)

    def follow(self, units: Sequence[Unit], cache: ChunkCache | None, early: bool) -> None:
        """Give units' buffers memory when they need it; `early` as for Follower."""
        buffer_of: dict[str, Buffer] = {name: one for name, (one, _) in self._by_name.items()}
        buffer_of |= {use.use.name: use for use in self._uses}
        assert isinstance(self._reduction, PieceReduction), "follow without in_pieces"
        self._follower = Follower(
            units,
            [[buffer_of[name] for name in u.parameters if name in buffer_of] for u in units],
            self._reduction,
            cache,
            lambda one: self.before_sum(one),
            early,
        )

    @property
    def owner_of(self) -> dict[str, str]:
        """The parameters of which there are further uses, by the names of these."""
        return {use.use.name: use.use.owner for use in self._uses}

    def pieces(self) -> Iterator[Piece]:
        """Everything that is held beside the chunks."""
        holders: list[Holder] = [self._reduction, *self._uses]
        for one in holders:
            yield from one.pieces()

    def before_backward(self, stage: int) -> None:
        """Before a backward of the stage on this rank, or its part that gives weight gradients."""
        if self._follower is not None:
            self._follower.before_backward(stage)

    def release(self) -> None:
        """After the update."""
        if self._follower is not None:
            assert isinstance(self._reduction, PieceReduction)
            self._reduction.release()

    def start(self) -> None:
        """Before the first backward of a step."""
        self._reduction.start()
        self._departures.start()
        if self._follower is not None:
            self._follower.start()

    def last_backward(
        self, stage: int, late: Collection[Tensor] | None = None
    ) -> AbstractContextManager:
        """Around what `reduce` comes behind: gradients may leave as soon as they are complete.
        `late`: the only leaves that are given one still (None: any may be)."""
        return self._departures.last_backward(stage, late)

    def reduce(self, stage: int) -> None:
        """Behind a backward of the stage: every one in deterministic mode, else a step's last."""
        self._departures.check(stage)
        if self._follower is not None:
            self._follower.reduce(stage)
        else:
            self._departures.rest(stage)

    def finish(self, far_ends: Mapping[str, Group] | None = None) -> None:
        """Complete all gradients before the update. `far_ends` names parameters of which other
        ranks of a group hold further uses: theirs are added too."""
        if self._follower is not None:
            self._follower.finish()
        self._reduction.finish()
        far_ends = far_ends or {}
        for name, group in far_ends.items():
            if group.size > 1 and name in self._by_name:
                self._add_far(name, group)
        for use in self._uses:
            if use.use.owner not in far_ends or far_ends[use.use.owner].size == 1:
                self._add_whole(use.use.owner, use.total)

    def _add_far(self, name: str, group: Group) -> None:
        """Both ends of a pipeline: each has one use's whole gradient, both get the sum."""
        own = [use.total for use in self._uses if use.use.owner == name]
        one, slot = self._by_name[name]
        held = own[0] if own else one.view(one.whole(one.grad), slot)
        whole = held.to(torch.float32, copy=True)
        all_reduce_sum(whole, group)
        here = one.piece_of(one.grad, slot)
        if here is not None:
            here[0].copy_(whole.flatten()[here[1]])

    def _add_whole(self, name: str, gradient: Tensor) -> None:
        one, slot = self._by_name[name]
        here = one.piece_of(one.grad, slot)
        if here is not None:
            here[0].add_(gradient.flatten()[here[1]])


def by_first_use(chunks: Sequence[ChunkStates], named: Mapping[str, Tensor]) -> list[ChunkStates]:
    """Chunks in the order in which a forward pass comes to them."""
    place = {name: number for number, name in enumerate(named)}
    return sorted(chunks, key=lambda one: place[one.chunk.slots[0].name])
