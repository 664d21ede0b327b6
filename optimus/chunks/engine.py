"""Model states in chunks: parameters and gradients are views of them, AdamW updates shards.

Serves any torch module: it is given parameters by name and told whose their gradients are.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from optimus.chunks.agree import check_alike, homes_of
from optimus.chunks.frozen import FrozenParameters
from optimus.chunks.layout import ChunkLayout, Parameter, Slot, lay_out
from optimus.chunks.memory import Piece, count_bytes
from optimus.chunks.optimizer import AdamW
from optimus.chunks.reduce import FastReduction, OrderedReduction
from optimus.chunks.states import ChunkStates, Home
from optimus.dist.collectives import ALONE, Group, all_gather, all_reduce_sum
from optimus.dist.exact import sum_of_squares

_WIDENS_NATIVELY = hasattr(torch.Tensor, "grad_dtype")  # torch 2.9 and later: fp32 .grad of bf16
_NORM_BLOCK = 1 << 16
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
        home_of: Callable[[str], Home | None],
        optimizer: AdamW,
        *,
        dtype: torch.dtype,
        chunk_length: int,
        deterministic: bool = False,
        reduce_dtype: torch.dtype = torch.float32,
        everyone: Group = ALONE,
        compiled: bool = False,
    ) -> None:
        """`named` parameters come in order of first use, with their values; they become views of
        chunks of about `chunk_length` elements in `dtype`. `compiled`: torch.compile will trace the
        model; it takes no parameter whose gradient is of another dtype, so that each is widened in
        a hook as on older torch.

        Raises ConfigError naming a parameter without a home, or, alike on `everyone`, the first
        that differs between ranks that add up gradients.
        """
        homes = homes_of(named, home_of)
        check_alike(named, homes, everyone)
        self._device = next(iter(named.values())).device
        frozen = {name: p for name, p in named.items() if homes[name].setting.frozen}
        named = {name: p for name, p in named.items() if name not in frozen}
        self.frozen = FrozenParameters(frozen, dtype, chunk_length)
        self._named, self._home_of, self._everyone = dict(named), home_of, everyone
        self._deterministic, self._optimizer = deterministic, optimizer
        self.layout: ChunkLayout = lay_out(
            [
                Parameter(name, tuple(p.shape), home, home.adders.size, home.shards.size)
                for name, p in named.items()
                for home in (homes[name],)
            ],
            chunk_length,
        )
        self.chunks = [
            ChunkStates(chunk, chunk.key, dtype, self._device) for chunk in self.layout.chunks
        ]
        self.slots = {slot.name: slot for slot in self.layout.slots}
        for name, parameter in named.items():
            self.put("master", name, parameter.data)
            view = self._view(name, "params")
            view.copy_(parameter.data)
            parameter.data = view
        self._uses: list[_UseStates] = []
        self._accumulates_natively = dtype is torch.float32 or (_WIDENS_NATIVELY and not compiled)
        for name, parameter in named.items():
            self._accumulate(name, parameter, self._view(name, "grads"))
        together = any(one.home.adders.size > 1 for one in self.chunks)
        self._reduction = (
            OrderedReduction(self.chunks)
            if deterministic and together
            else FastReduction(self.chunks, reduce_dtype)
        )

    # -- gradients -------------------------------------------------------------------------------

    def add_use(self, use: Use) -> None:
        """Give a further use of a parameter a gradient buffer of its own, if it is trained."""
        if use.owner in self.frozen:
            use.leaf.requires_grad_(False)
            return
        states = _UseStates(use, self._home_of(use.name), self._deterministic)
        self._uses.append(states)
        self._accumulate(use.name, use.leaf, states.grads)

    def _accumulate(self, name: str, leaf: Tensor, target: Tensor) -> None:
        """Let backward add into `target`, fp32."""
        if self._accumulates_natively:
            if leaf.dtype is not torch.float32:
                leaf.grad_dtype = torch.float32
            leaf.grad = target
            return

        def widen(leaf: Tensor) -> None:
            if leaf.grad is None:  # its backward has added to `gradient` itself
                return
            target.add_(leaf.grad)
            leaf.grad = None

        leaf.register_post_accumulate_grad_hook(widen)

    def start(self) -> None:
        """Before the first backward of a step."""
        self._reduction.start()
        for use in self._uses:
            use.start()

    def gradient(self, name: str) -> Tensor:
        """Where backward adds a parameter's gradient: for one that does so itself, past autograd.
        To be asked for each time."""
        return self._view(name, "grads")

    def gradients_of(self, stage: int) -> Iterator[tuple[str, Tensor]]:
        """What backward has added for a stage on this rank, by name, before any reduction."""
        for one in self.chunks:
            if one.home.stage == stage:
                for slot in one.chunk.slots:
                    yield slot.name, one.view(one.grads, slot)
        for use in self._uses:
            if use.home.stage == stage:
                yield use.use.name, use.grads

    def buffers_of(self, stage: int) -> Iterator[Tensor]:
        """The memory behind `gradients_of`, in large pieces."""
        yield from (one.grads for one in self.chunks if one.home.stage == stage)
        yield from (use.grads for use in self._uses if use.home.stage == stage)

    def reduce(self, stage: int) -> None:
        """Behind a backward of the stage: every one in deterministic mode, else a step's last."""
        self._check_gradients_in_place()
        for one in self.chunks:
            if one.home.stage == stage:
                self._reduction.after(one)
        for use in self._uses:
            if use.home.stage == stage:
                use.after()

    def finish(self, far_ends: Mapping[str, Group] | None = None) -> None:
        """Complete all gradients before the update. `far_ends` names parameters of which other
        ranks of a group hold further uses: theirs are added too."""
        self._reduction.finish()
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
        whole = torch.zeros(slot.shape, dtype=torch.float32, device=self._device)
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
            whole = torch.empty_like(one.grads)
            all_gather(whole, one.grad, one.home.shards)
        into.copy_(one.view(whole, slot))

    def _add_whole(self, name: str, gradient: Tensor) -> None:
        slot = self.slots[name]
        one = self.chunks[slot.chunk]
        here = one.piece_of(one.grad, slot)
        if here is not None:
            here[0].add_(gradient.flatten()[here[1]])

    def _check_gradients_in_place(self) -> None:
        """Assert that no `.grad` was replaced: a replaced one would be lost in silence."""
        if not self._accumulates_natively:
            return
        for name, leaf in self._named.items():
            target = self._view(name, "grads")
            in_place = leaf.grad is not None and leaf.grad.data_ptr() == target.data_ptr()
            assert in_place, f"the gradient of {name} was replaced; it must accumulate in place"

    # -- the update ------------------------------------------------------------------------------

    def grad_norm(self) -> float:
        """The global 2-norm: what several ranks hold counts once. In deterministic mode the same
        bits on every layout that keeps parameters whole."""
        counted = [one.grad for one in self.chunks if one.home.counts]
        if self._deterministic:
            return math.sqrt(sum_of_squares(counted, self._everyone))
        total = torch.zeros((), dtype=torch.float64, device=self._device)
        for flat in counted:
            total += _square_sum(flat)
        all_reduce_sum(total, self._everyone)
        return math.sqrt(float(total))

    def update(self, lr: float, grad_scale: float = 1.0) -> None:
        """One AdamW update of this rank's shards from the gradients times `grad_scale` (clipping),
        then of all parameters."""
        self._optimizer.step(self.chunks, lr, grad_scale)
        self._gather_parameters()

    def publish(self) -> None:
        """Make the parameters what the masters say, on all ranks."""
        for one in self.chunks:
            own = one.params[one.own]
            if own.data_ptr() != one.master.data_ptr():
                own.copy_(one.master)
        self._gather_parameters()

    def _gather_parameters(self) -> None:
        for one in self.chunks:
            all_gather(one.params, one.params[one.own], one.home.shards)

    # -- whole states, for checkpoints -----------------------------------------------------------

    def put(self, state: str, name: str, whole: Tensor) -> None:
        """Set this rank's part of a state (of STATES) of a parameter from all of its elements; a
        frozen one is its own master."""
        if name in self.frozen:
            assert state == "master", f"{name} is frozen and has no {state}"
            self.frozen.put(name, whole)
            return
        slot = self.slots[name]
        one = self.chunks[slot.chunk]
        here = one.piece_of(getattr(one, state), slot)
        if here is not None:
            here[0].copy_(whole.reshape(-1)[here[1]])

    def whole(self, state: str) -> dict[str, Tensor]:
        """A state of every parameter here, by name, put together over shards: a collective of their
        ranks. Views of this rank's memory where nothing is divided. Frozen ones have a master."""
        out = {}
        for one in self.chunks:
            flat = getattr(one, state)
            if one.home.shards.size > 1:
                flat = flat.new_empty(one.chunk.length)
                all_gather(flat, getattr(one, state), one.home.shards)
            out |= {slot.name: one.view(flat, slot) for slot in one.chunk.slots}
        frozen = self.frozen.masters() if state == "master" else {}
        return {name: out[name] for name in self._named} | frozen

    def first_shard(self, state: str, is_bad: Callable[[Tensor], bool]) -> str:
        """The first parameter whose part in this rank's shard is bad; "" if none is."""
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
        return {name: self._view(name, "params") for name in self._named} | self.frozen.parameters()

    def bytes_held(self) -> dict[str, int]:
        """Bytes of all model states here, as `optimus.chunks.memory.count_bytes` splits them."""
        holders = [*self.chunks, self._reduction, *self._uses, self.frozen]
        return count_bytes(piece for one in holders for piece in one.pieces())

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

    def __init__(self, use: Use, home: Home, ordered: bool) -> None:
        self.use, self.home, self._ordered = use, home, ordered and home.adders.size > 1
        self.grads = torch.zeros(use.leaf.shape, dtype=torch.float32, device=use.leaf.device)
        self.total = torch.zeros_like(self.grads) if self._ordered else self.grads

    def pieces(self) -> Iterator[Piece]:
        """Everything that this holds."""
        yield Piece("tied", self.grads)
        yield Piece("tied", self.total)

    def start(self) -> None:
        self.grads.zero_()
        self.total.zero_()

    def after(self) -> None:
        group = self.home.adders
        if not self._ordered:
            all_reduce_sum(self.grads, group)
            return
        every = self.grads.new_empty(group.size * len(self.grads), *self.grads.shape[1:])
        all_gather(every, self.grads, group)
        for contribution in every.chunk(group.size):
            self.total.add_(contribution)
        self.grads.zero_()


def _square_sum(flat: Tensor) -> Tensor:
    """fp64 scalar: norms of blocks in fp32 (fast), squared and added in fp64."""
    blocks = torch.stack([torch.linalg.vector_norm(part) for part in flat.split(_NORM_BLOCK)])
    total = blocks.double().square().sum()
    if math.isfinite(float(total)):
        return total
    return flat.double().square().sum()  # squares beyond fp32, although each value may be finite
