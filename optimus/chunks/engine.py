"""Model states in chunks: parameters and gradients are views of them, AdamW updates shards.

Serves any torch module: it is given parameters by name and told whose their gradients are.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial

import torch
from torch import Tensor, nn

from optimus.chunks.agree import check_alike, homes_of
from optimus.chunks.arrivals import Arrivals
from optimus.chunks.departures import Departures, Parcel
from optimus.chunks.follow import Follower, check_slots
from optimus.chunks.frozen import FrozenParameters
from optimus.chunks.layout import ChunkLayout, Parameter, Slot, lay_out
from optimus.chunks.memory import count_bytes
from optimus.chunks.norm import exact_norm, fast_norm
from optimus.chunks.optimizer import AdamW
from optimus.chunks.pieces import Buffer, PieceReduction
from optimus.chunks.rcache import ChunkCache
from optimus.chunks.reduce import FastReduction, OrderedReduction
from optimus.chunks.residency import ALL_RESIDENT, Pass, Residency, visit_order
from optimus.chunks.states import ChunkStates, Home, StateShard
from optimus.chunks.storage import Memory
from optimus.chunks.tied import Use, UseInPieces, WholeUse
from optimus.chunks.units import Unit
from optimus.dist.collectives import ALONE, Group, all_gather, all_reduce_sum

_WIDENS_NATIVELY = hasattr(torch.Tensor, "grad_dtype")  # torch 2.9 and later: fp32 .grad of bf16
STATES = ("master", "exp_avg", "exp_avg_sq")
"""What AdamW keeps of a parameter, each an attribute of ChunkStates."""


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
        grad_dtype: torch.dtype = torch.float32,
        everyone: Group = ALONE,
        compiled: bool = False,
        overlap: bool = False,
        residency: Residency = ALL_RESIDENT,
    ) -> None:
        """`named` parameters come in order of first use, with their values; they become views of
        chunks of about `chunk_length` elements in `dtype`. Gradients add up in `grad_dtype`, fp32
        or (but for deterministic, or in pieces) the parameters'. `compiled`: torch.compile will
        trace the model; it takes no parameter whose gradient is of another dtype, so that each is
        widened in a hook as on older torch. `overlap`: reductions go on beside the backward that
        `last_backward` tells of, unless they are ordered. What is not always whole under
        `residency` waits for `follow`; frozen ones always are.

        Raises ConfigError naming a parameter without a home, or, alike on `everyone`, the first
        that differs between ranks that add up gradients.
        """
        wide = deterministic or residency.divides_gradients
        assert grad_dtype is torch.float32 or (grad_dtype is dtype and not wide), grad_dtype
        homes = homes_of(named, home_of)
        check_alike(named, homes, everyone)
        self._device = device = next(iter(named.values())).device
        frozen = {name: p for name, p in named.items() if homes[name].setting.frozen}
        named = {name: p for name, p in named.items() if name not in frozen}
        self.frozen = FrozenParameters(frozen, homes, dtype, chunk_length)
        self._named, self._home_of, self._everyone = dict(named), home_of, everyone
        self._deterministic, self._optimizer = deterministic, optimizer
        self._grad_dtype = grad_dtype
        self.layout: ChunkLayout = lay_out(
            [
                Parameter(name, tuple(p.shape), home, home.adders.size, home.shards.size)
                for name, p in named.items()
                for home in (homes[name],)
            ],
            chunk_length,
        )
        self.slots = {slot.name: slot for slot in self.layout.slots}
        self.residency, self._memory = residency, Memory(residency.poison)
        self._follower: Follower | None = None
        self.cache: ChunkCache | None = None
        self.chunks: list[ChunkStates] = []
        for chunk in self.layout.chunks:
            one = ChunkStates(
                chunk, chunk.key, dtype, grad_dtype, device, residency.divides_parameters
            )
            self.chunks.append(one)
            self._take_values(one)
        self._uses: list[WholeUse | UseInPieces] = []
        self.before_sum: Callable[[Buffer], None] = lambda one: None
        """Told of what this rank adds to a sum over ranks, which hides whose a NaN is."""
        self._accumulates_natively = dtype is grad_dtype or (_WIDENS_NATIVELY and not compiled)
        # Freed storage takes no new views.
        targets = {name: self._view(name, "grads") for name in named}
        together = any(one.home.adders.size > 1 for one in self.chunks)
        if residency.divides_gradients:
            self._reduction = PieceReduction(self.chunks, deterministic, reduce_dtype, self._memory)
        elif deterministic and together:
            self._reduction = OrderedReduction(self.chunks)
        else:
            self._reduction = FastReduction(self.chunks, reduce_dtype, overlap)
        self._arrivals = Arrivals()
        early = overlap and together and not (deterministic or residency.divides_gradients)
        self._departures = Departures(
            self._accumulates_natively, early, lambda one: self.before_sum(one)
        )
        place = {name: number for number, name in enumerate(named)}
        self._by_first_use = sorted(self.chunks, key=lambda one: place[one.chunk.slots[0].name])
        for one in self._by_first_use:
            names = [slot.name for slot in one.chunk.slots]
            parts = {name: (named[name], targets[name]) for name in names}
            self._depart(one, parts, partial(self._reduction.after, one))

    def _take_values(self, one: ChunkStates) -> None:
        """From the parameters, which become views of the chunk."""
        for slot in one.chunk.slots:
            parameter = self._named[slot.name]
            self.put("master", slot.name, parameter.data)
            view = one.view(one.params, slot)
            view.copy_(parameter.data)
            parameter.data = view
        if one.divided:
            one.shard.copy_(one.params[one.own])
            self._memory.free(one.params)

    # -- residency -------------------------------------------------------------------------------

    def follow(
        self,
        units: Sequence[Unit],
        passes: Sequence[Pass],
        early: bool = True,
        regions: Sequence[range] = (),
    ) -> None:
        """Give units what they need whenever they compute, where states are not always whole.

        `units` in order of first use, with every parameter and use in one of them; `passes`: this
        rank's in a training step; `early`: as for Follower; `regions`: units that are recomputed
        together. A collective of `everyone`; raises the same ConfigError on all where some rank's
        unit needs more slots than there are.
        """
        if not self.residency.divides_gradients:
            return
        chunk_of = {name: self.chunks[slot.chunk] for name, slot in self.slots.items()}
        buffer_of: dict[str, Buffer] = chunk_of | {use.use.name: use for use in self._uses}
        chunk_of |= {use.use.name: chunk_of[use.use.owner] for use in self._uses}
        needed = [[chunk_of[name] for name in u.parameters if name in chunk_of] for u in units]
        needs = [frozenset(c.chunk.number for c in chunks if c.divided) for chunks in needed]
        divided = [one for one in self.chunks if one.divided]
        slots = self.residency.slots or len(divided)
        check_slots(needs, slots, self._everyone, self._device)
        if divided:
            visits = visit_order(
                passes,
                [unit.stage for unit in units],
                needs,
                [unit.stage > 0 or any(needed[: n + 1]) for n, unit in enumerate(units)],
                regions,
            )
            self.cache = ChunkCache(divided, needs, visits, slots, self._memory)
        self._follower = Follower(
            units,
            [[buffer_of[name] for name in u.parameters if name in buffer_of] for u in units],
            self._reduction,
            self.cache,
            lambda one: self.before_sum(one),
            early,
        )

    def before_backward(self, stage: int) -> None:
        """Before a backward of the stage on this rank, or its part that gives weight gradients."""
        if self._follower is not None:
            self._follower.before_backward(stage)

    def gather(self, names: Collection[str]) -> None:
        """Make parameters whole for a use that is no visit of a unit, until the next visit. A
        collective of the ranks that divide them."""
        if self.cache is not None:
            numbers = {self.slots[name].chunk for name in names if name in self.slots}
            self.cache.hold({n for n in numbers if self.chunks[n].divided})

    @property
    def resident_bytes(self) -> dict[str, int]:
        """Memory of whole chunks at the moment: of `params` and of `grads`, those of uses too."""
        flats = {
            "params": [one.params for one in self.chunks],
            "grads": [one.grads for one in (*self.chunks, *self._uses)],
        }
        return {
            kind: sum(flat.untyped_storage().nbytes() for flat in every)
            for kind, every in flats.items()
        }

    # -- gradients -------------------------------------------------------------------------------

    def add_use(self, use: Use) -> None:
        """Give a further use of a parameter a gradient buffer of its own, if it is trained."""
        if use.owner in self.frozen:
            use.leaf.requires_grad_(False)
            return
        home = self._home_of(use.name)
        states: WholeUse | UseInPieces = WholeUse(use, home, self._deterministic, self._grad_dtype)
        if isinstance(self._reduction, PieceReduction):
            states = UseInPieces(use, home)
            self._reduction.add(states)
        self._uses.append(states)
        self._depart(states, {use.name: (use.leaf, states.target)}, states.after)

    def _depart(
        self, buffer: Buffer, parts: dict[str, tuple[Tensor, Tensor]], send: Callable[[], None]
    ) -> None:
        """Let backward add into these parts of the buffer, which leaves by `send`."""
        for leaf, part in parts.values():
            self._accumulate(leaf, part)
        self._departures.add(Parcel(buffer, parts, send))

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
        if self._follower is not None:
            self._follower.start()

    def gradient(self, name: str) -> Tensor:
        """Where backward adds a parameter's gradient: for one that does so itself, past autograd.
        To be asked for each time."""
        return self._view(name, "grads")

    def gradients_of(self, stage: int) -> Iterator[tuple[str, Tensor]]:
        """What backward has added for a stage on this rank, by name, before any reduction."""
        for one in self._held(stage):
            yield from one.named_grads()

    def _held(self, stage: int) -> list[Buffer]:
        """Gradients of a stage that have memory."""
        every: list[Buffer] = [*self.chunks, *self._uses]
        return [one for one in every if one.home.stage == stage and self._memory.holds(one.grads)]

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
        return norm(counted, self._device, self._everyone)

    def update(self, lr: float, grad_scale: float = 1.0) -> None:
        """One AdamW update of this rank's shards from the gradients times `grad_scale` (clipping),
        then of all parameters: begun, where `wait_in` was told who waits for them."""
        self.wait()  # for what no forward pass has read since the update before
        self._optimizer.step(self._by_first_use, lr, grad_scale, self._give_out)
        if self._follower is not None:
            self._reduction.release()
        self._drop_old()

    def _give_out(self, one: ChunkStates) -> None:
        if not one.divided:
            self._arrivals.gather(one)

    def _drop_old(self) -> None:
        if self.cache is not None:
            self.cache.drop()  # whole chunks are out of date; their next visit gathers them

    def wait_in(self, readers: Iterable[tuple[nn.Module, Collection[str]]]) -> None:
        """Let updated parameters arrive while other things are computed: these modules wait for
        what their call reads (FirstUses), as do this class's methods; others call `wait`."""
        trained = ((module, [n for n in names if n in self.slots]) for module, names in readers)
        self._arrivals.wait_in(trained, {name: slot.chunk for name, slot in self.slots.items()})

    def wait(self) -> None:
        """Until all parameters are updated."""
        self._arrivals.wait()

    def publish(self) -> None:
        """Make the parameters what the masters say, on all ranks."""
        self.wait()
        for one in self._by_first_use:
            own = one.shard
            if own.data_ptr() != one.master.data_ptr():
                own.copy_(one.master)
            self._give_out(one)
        self._drop_old()
        self.wait()

    # -- states, for checkpoints -----------------------------------------------------------------

    def shards(self) -> list[StateShard]:
        """What this rank holds of the states, chunk by chunk, as it lies in memory."""
        return [
            StateShard(one.chunk, one.own.start, one.home, {s: getattr(one, s) for s in STATES})
            for one in self.chunks
        ] + list(self.frozen.shards())

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
        self.wait()
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
        self.wait()
        for one in self.chunks:
            flat = getattr(one, state)
            if is_bad(flat):
                for slot in one.chunk.slots:
                    here = one.piece_of(flat, slot)
                    if here is not None and is_bad(here[0]):
                        return slot.name
        return ""

    def first_parameter(self, is_bad: Callable[[Tensor], bool]) -> str:
        """The first parameter that is bad as this rank holds it, be it but its shard; "" if none
        is."""
        self.wait()
        for name, slot in self.slots.items():
            one = self.chunks[slot.chunk]
            if one.divided:
                here = one.piece_of(one.shard, slot)
                held = here[0] if here is not None else None
            else:
                held = one.view(one.params, slot)
            if held is not None and is_bad(held):
                return name
        frozen = self.frozen.parameters().items()
        return next((name for name, held in frozen if is_bad(held)), "")

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
