"""Model states in chunks: parameters and gradients are views of them, AdamW updates shards.

Serves any torch module: it is given parameters by name and told whose their gradients are.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from optimus.chunks.arrivals import Arrivals
from optimus.chunks.departures import Departures, Look, Parcel
from optimus.chunks.layout import ChunkLayout, Parameter, Slot, lay_out
from optimus.chunks.norm import exact_norm, fast_norm
from optimus.chunks.optimizer import AdamW
from optimus.chunks.reduce import FastReduction, OrderedReduction
from optimus.chunks.states import ChunkStates, Home
from optimus.dist.collectives import (
    ALONE,
    Group,
    Transfer,
    all_gather,
    all_reduce_sum,
    begin_all_reduce_sum,
)

_WIDENS_NATIVELY = hasattr(torch.Tensor, "grad_dtype")  # torch 2.9 and later: fp32 .grad of bf16
STATES = ("master", "exp_avg", "exp_avg_sq")
"""What AdamW keeps of a parameter, each an attribute of ChunkStates."""


@dataclass(frozen=True)
class Use:
    """A further use of a parameter, with a leaf of its own over the same storage, such as the
    output head's of tied embeddings: one accumulator for each use (CONTRACT.md)."""

    name: str
    leaf: Tensor
    owner: str


class ChunkEngine:
    """Owns a rank's model states."""

    def __init__(
        self,
        named: Mapping[str, nn.Parameter],
        home_of: Callable[[str], Home],
        optimizer: AdamW,
        *,
        dtype: torch.dtype,
        chunk_length: int,
        deterministic: bool = False,
        reduce_dtype: torch.dtype = torch.float32,
        grad_dtype: torch.dtype = torch.float32,
        everyone: Group = ALONE,
        compiled: bool = False,
        overlap: bool = False,
    ) -> None:
        """`named` parameters come in order of first use, with their values; they become views of
        chunks of about `chunk_length` elements in `dtype`. Gradients add up in `grad_dtype`, fp32
        or (but for deterministic) the parameters'. `compiled`: torch.compile will trace the model;
        it takes no parameter whose gradient is of another dtype, so that each is widened in a hook
        as on older torch. `overlap`: reductions go on beside the backward that `last_backward`
        tells of, unless they are ordered."""
        assert grad_dtype in (torch.float32, dtype) and not (
            deterministic and grad_dtype is not torch.float32
        ), (grad_dtype, dtype, deterministic)
        self._named, self._home_of, self._everyone = dict(named), home_of, everyone
        self._deterministic, self._optimizer = deterministic, optimizer
        self._grad_dtype = grad_dtype
        homes = {name: home_of(name) for name in named}
        self.layout: ChunkLayout = lay_out(
            [
                Parameter(name, tuple(p.shape), home, home.adders.size, home.shards.size)
                for name, p in named.items()
                for home in (homes[name],)
            ],
            chunk_length,
        )
        device = next(iter(named.values())).device
        self.chunks = [
            ChunkStates(chunk, chunk.key, dtype, grad_dtype, device) for chunk in self.layout.chunks
        ]
        self.slots = {slot.name: slot for slot in self.layout.slots}
        for name, parameter in named.items():
            self.put("master", name, parameter.data)
            view = self._view(name, "params")
            view.copy_(parameter.data)
            parameter.data = view
        self._uses: list[_UseStates] = []
        self._accumulates_natively = dtype is grad_dtype or (_WIDENS_NATIVELY and not compiled)
        together = any(one.home.adders.size > 1 for one in self.chunks)
        self._reduction = (
            OrderedReduction(self.chunks)
            if deterministic and together
            else FastReduction(self.chunks, reduce_dtype, overlap)
        )
        self._arrivals = Arrivals()
        early = overlap and together and not deterministic
        self._departures = Departures(self._accumulates_natively, early)
        place = {name: number for number, name in enumerate(named)}
        self._by_first_use = sorted(self.chunks, key=lambda one: place[one.chunk.slots[0].name])
        for one in self._by_first_use:
            slots = one.chunk.slots
            parts = {slot.name: (named[slot.name], one.view(one.grads, slot)) for slot in slots}
            self._depart(one.home.stage, one.grads, parts, partial(self._reduction.after, one))

    # -- gradients -------------------------------------------------------------------------------

    def add_use(self, use: Use) -> None:
        """Give a further use of a parameter a gradient buffer of its own."""
        states = _UseStates(use, self._home_of(use.name), self._deterministic, self._grad_dtype)
        self._uses.append(states)
        parts = {use.name: (use.leaf, states.grads)}
        self._depart(states.home.stage, states.grads, parts, states.after)

    def _depart(
        self,
        stage: int,
        flat: Tensor,
        parts: dict[str, tuple[Tensor, Tensor]],
        send: Callable[[], None],
    ) -> None:
        """Let backward add into these parts of `flat`, which leaves by `send`."""
        for leaf, part in parts.values():
            self._accumulate(leaf, part)
        self._departures.add(Parcel(stage, flat, parts, send))

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

    def start(self) -> None:
        """Before the first backward of a step."""
        self._reduction.start()
        self._departures.start()
        for use in self._uses:
            use.start()

    def look_with(self, look: Look) -> None:
        """Let `look` see all that backward has added, before it leaves this rank."""
        self._departures.look = look

    def gradients_of(self, stage: int) -> Iterator[tuple[str, Tensor]]:
        """What backward has added for a stage on this rank, by name, before any reduction."""
        return self._departures.gradients_of(stage)

    def last_backward(
        self, stage: int, late: Collection[Tensor] | None = None
    ) -> AbstractContextManager:
        """Around what `reduce` comes behind: gradients may leave as soon as they are complete.
        `late`: the only leaves that are given one still (None: any may be)."""
        return self._departures.last_backward(stage, late)

    def reduce(self, stage: int) -> None:
        """Behind a backward of the stage: every one in deterministic mode, else a step's last."""
        self._departures.rest(stage)

    def finish(self, far_ends: Mapping[str, Group] | None = None) -> None:
        """Complete all gradients before the update. `far_ends` names parameters of which other
        ranks of a group hold further uses: theirs are added too."""
        self._reduction.finish()
        for use in self._uses:
            use.finish()
        far_ends = far_ends or {}
        for name, group in far_ends.items():
            if group.size > 1 and name in self.slots:
                self._add_far(name, group)
        for use in self._uses:
            if use.use.owner not in far_ends or far_ends[use.use.owner].size == 1:
                self._add_whole(use.use.owner, use.total)

    def _add_far(self, name: str, group: Group) -> None:
        """Both ends of a pipeline: each has one use's whole gradient, both get the sum."""
        own = [use.total for use in self._uses if use.use.owner == name]
        slot = self.slots[name]
        whole = torch.zeros(slot.shape, dtype=torch.float32, device=self.chunks[0].grad.device)
        if own:
            whole.add_(own[0])
        else:
            self._gather_grad(name, whole)
        all_reduce_sum(whole, group)
        here = self.chunks[slot.chunk].piece_of(self.chunks[slot.chunk].grad, slot)
        if here is not None:
            here[0].copy_(whole.flatten()[here[1]])

    def _gather_grad(self, name: str, into: Tensor) -> None:
        slot = self.slots[name]
        one = self.chunks[slot.chunk]
        whole = one.grad
        if one.home.shards.size > 1:
            whole = one.grad.new_empty(one.chunk.length)
            all_gather(whole, one.grad, one.home.shards)
        into.copy_(one.view(whole, slot))

    def _add_whole(self, name: str, gradient: Tensor) -> None:
        slot = self.slots[name]
        one = self.chunks[slot.chunk]
        here = one.piece_of(one.grad, slot)
        if here is not None:
            here[0].add_(gradient.flatten()[here[1]])

    # -- the update ------------------------------------------------------------------------------

    def grad_norm(self) -> float:
        """The global 2-norm: what several ranks hold counts once. In deterministic mode the same
        bits on every layout that keeps parameters whole."""
        counted = [one.grad for one in self.chunks if one.home.counts]
        norm = exact_norm if self._deterministic else fast_norm
        return norm(counted, self.chunks[0].grad.device, self._everyone)

    def update(self, lr: float, grad_scale: float = 1.0) -> None:
        """One AdamW update of this rank's shards from the gradients times `grad_scale` (clipping),
        then of all parameters: begun, where `wait_in` was told who waits for them."""
        self.wait()  # for what no forward pass has read since the update before
        self._optimizer.step(self._by_first_use, lr, grad_scale, self._arrivals.gather)

    def wait_in(self, readers: Iterable[tuple[nn.Module, Collection[str]]]) -> None:
        """Let updated parameters arrive while other things are computed: these modules wait for
        what their call reads (FirstUses), as do this class's methods; others call `wait`."""
        self._arrivals.wait_in(readers, {name: slot.chunk for name, slot in self.slots.items()})

    def wait(self) -> None:
        """Until all parameters are updated."""
        self._arrivals.wait()

    def publish(self) -> None:
        """Make the parameters what the masters say, on all ranks."""
        self.wait()
        for one in self._by_first_use:
            own = one.params[one.own]
            if own.data_ptr() != one.master.data_ptr():
                own.copy_(one.master)
            self._arrivals.gather(one)
        self.wait()

    # -- whole states, for checkpoints -----------------------------------------------------------

    def put(self, state: str, name: str, whole: Tensor) -> None:
        """Set this rank's part of a state (of STATES) of a parameter from all of its elements."""
        slot = self.slots[name]
        one = self.chunks[slot.chunk]
        here = one.piece_of(getattr(one, state), slot)
        if here is not None:
            here[0].copy_(whole.reshape(-1)[here[1]])

    def whole(self, state: str) -> dict[str, Tensor]:
        """A state of every parameter here, by name, put together over shards: a collective of their
        ranks. Views of this rank's memory where nothing is divided."""
        self.wait()
        out = {}
        for one in self.chunks:
            flat = getattr(one, state)
            if one.home.shards.size > 1:
                flat = flat.new_empty(one.chunk.length)
                all_gather(flat, getattr(one, state), one.home.shards)
            out |= {slot.name: one.view(flat, slot) for slot in one.chunk.slots}
        return {name: out[name] for name in self._named}

    def first_shard(self, state: str, is_bad: Callable[[Tensor], bool]) -> str:
        """The first parameter whose part in this rank's shard is bad; "" if none is."""
        self.wait()
        for one in self.chunks:
            flat = getattr(one, state)
            if is_bad(flat):
                for slot in one.chunk.slots:
                    here = one.piece_of(flat, slot)
                    if here is not None and is_bad(here[0]):
                        return slot.name
        return ""

    def parameters(self) -> dict[str, Tensor]:
        """Views of the parameters, by name."""
        self.wait()
        return {name: self._view(name, "params") for name in self._named}

    @property
    def num_updates(self) -> int:
        """Updates that AdamW has made; its bias correction depends on it."""
        return self._optimizer.num_updates

    @num_updates.setter
    def num_updates(self, number: int) -> None:
        self._optimizer.num_updates = number

    def _view(self, name: str, buffer: str) -> Tensor:
        slot: Slot = self.slots[name]
        one = self.chunks[slot.chunk]
        return one.view(getattr(one, buffer), slot)


class _UseStates:
    """The gradient of a further use, kept whole on every rank that adds it."""

    def __init__(self, use: Use, home: Home, ordered: bool, dtype: torch.dtype) -> None:
        self.use, self.home, self._ordered = use, home, ordered and home.adders.size > 1
        self.grads = torch.zeros(use.leaf.shape, dtype=dtype, device=use.leaf.device)
        self.total = torch.zeros_like(self.grads) if self._ordered else self.grads
        self._under_way: Transfer | None = None

    def start(self) -> None:
        self.finish()
        self.grads.zero_()
        self.total.zero_()

    def after(self) -> None:
        group = self.home.adders
        if not self._ordered:
            self._under_way = begin_all_reduce_sum(self.grads, group)
            return
        every = self.grads.new_empty(group.size * len(self.grads), *self.grads.shape[1:])
        all_gather(every, self.grads, group)
        for contribution in every.chunk(group.size):
            self.total.add_(contribution)
        self.grads.zero_()

    def finish(self) -> None:
        if self._under_way is not None:
            self._under_way.wait()
            self._under_way = None
