"""Model states in chunks: parameters and gradients are views of them, AdamW updates shards.

Serves any torch module: it is given parameters by name and told whose their gradients are.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

import torch
from torch import Tensor, nn

from optimus.chunks.agree import check_alike, homes_of
from optimus.chunks.arrivals import Arrivals
from optimus.chunks.frozen import FrozenParameters
from optimus.chunks.gradients import Gradients, by_first_use
from optimus.chunks.layout import STATES, ChunkLayout, Parameter, Slot, lay_out
from optimus.chunks.memory import Holder, count_bytes
from optimus.chunks.norm import exact_norm, fast_norm
from optimus.chunks.optimizer import AdamW
from optimus.chunks.rcache import ChunkCache
from optimus.chunks.residency import ALL_RESIDENT, Pass, Residency, visit_order
from optimus.chunks.states import ChunkStates, Home, ShardPart, StateShard
from optimus.chunks.storage import Memory
from optimus.chunks.tied import Use
from optimus.chunks.units import Unit
from optimus.distributed.collectives import ALONE, Group


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
        self.layout = _lay_out(named, homes, chunk_length)
        self.slots = {slot.name: slot for slot in self.layout.slots}
        self.residency, self._memory = residency, Memory(residency.poison)
        self.cache: ChunkCache | None = None
        self.chunks: list[ChunkStates] = []
        kind = (dtype, grad_dtype, device, residency.divides_parameters)
        for chunk in self.layout.chunks:
            assert isinstance(chunk.key, Home)
            self.chunks.append(ChunkStates(chunk, chunk.key, *kind))
            self._take_values(self.chunks[-1])
        self._arrivals = Arrivals()
        self._by_first_use = by_first_use(self.chunks, named)
        self.gradients = Gradients(
            named,
            self.chunks,
            self._memory,
            deterministic=deterministic,
            reduce_dtype=reduce_dtype,
            grad_dtype=grad_dtype,
            compiled=compiled,
            overlap=overlap,
            in_pieces=residency.divides_gradients,
        )

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
        together. The cache has the slots that each of `needs` takes.
        """
        if not self.residency.divides_gradients:
            return
        divided = [one for one in self.chunks if one.divided]
        if divided:
            needs, chunk_of = self.needs(units), self._chunk_of()
            trains = [any(name in chunk_of for name in unit.parameters) for unit in units]
            visits = visit_order(
                passes,
                [unit.stage for unit in units],
                needs,
                [unit.stage > 0 or any(trains[: n + 1]) for n, unit in enumerate(units)],
                regions,
            )
            slots = self.residency.slots or len(divided)
            self.cache = ChunkCache(divided, needs, visits, slots, self._memory)
        self.gradients.follow(units, self.cache, early)

    def needs(self, units: Sequence[Unit]) -> list[frozenset[int]]:
        """The chunks that must be whole while each unit computes, by number: of those divided."""
        chunk_of = self._chunk_of()
        needed = ({chunk_of[n] for n in unit.parameters if n in chunk_of} for unit in units)
        return [frozenset(n for n in own if self.chunks[n].divided) for own in needed]

    def _chunk_of(self) -> dict[str, int]:
        """The chunk of each trained parameter and of each further use of one."""
        chunk_of = {name: slot.chunk for name, slot in self.slots.items()}
        return chunk_of | {use: chunk_of[own] for use, own in self.gradients.owner_of.items()}

    def gather(self, names: Collection[str]) -> None:
        """Make parameters whole for a use that is no visit of a unit, until the next visit. A
        collective of the ranks that divide them."""
        if self.cache is not None:
            numbers = {self.slots[name].chunk for name in names if name in self.slots}
            self.cache.hold({n for n in numbers if self.chunks[n].divided})

    # -- gradients -------------------------------------------------------------------------------

    def add_use(self, use: Use) -> None:
        """Give a further use of a parameter a gradient buffer of its own, if it is trained."""
        if use.owner in self.frozen:
            use.leaf.requires_grad_(False)
            return
        home = self._home_of(use.name)
        assert home is not None, use.name
        self.gradients.add_use(use, home)

    def gradient(self, name: str) -> Tensor:
        """Where backward adds a parameter's gradient: for one that does so itself, past autograd.
        To be asked for each time."""
        return self._view(name, "grads")

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
        self.gradients.release()
        self._drop_old()

    def _give_out(self, one: ChunkStates) -> None:
        if not one.divided:
            self._arrivals.gather(one)

    def _drop_old(self) -> None:
        if self.cache is not None:
            self.cache.drop()  # whole chunks are out of date; their next visit gathers them

    def wait_in(self, readers: Iterable[tuple[nn.Module, Collection[str]]]) -> None:
        """Let updated parameters arrive while other things are computed: these modules wait for
        what their call reads (watch_first_uses), as do this class's methods; others call `wait`."""
        trained = ((module, [n for n in names if n in self.slots]) for module, names in readers)
        self._arrivals.wait_in(trained, {name: slot.chunk for name, slot in self.slots.items()})

    def wait(self) -> None:
        """Until all parameters are updated."""
        self._arrivals.wait()

    def publish(self) -> None:
        """Make the parameters what the masters say, on all ranks."""
        self.frozen.settle()
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

    def put(self, state: str, name: str, part: Tensor, start: int = 0) -> None:
        """Set what this rank's shard has of elements `start` and on of a flattened parameter, for a
        state of STATES; a frozen one is its own master."""
        part = part.reshape(-1)
        if name in self.frozen:
            assert state == "master", f"{name} is frozen and has no {state}"
            self.frozen.put(name, part, start)
            return
        slot = self.slots[name]
        one = self.chunks[slot.chunk]
        if (here := one.piece_of(getattr(one, state), slot)) is None:
            return
        own, where = here
        low, high = max(where.start, start), min(where.stop, start + len(part))
        if low < high:
            own[low - where.start : high - where.start].copy_(part[low - start : high - start])

    def first_shard(self, state: str, is_bad: Callable[[Tensor], bool]) -> ShardPart | None:
        """The first part of a parameter in this rank's shard that is bad; None if none is. Frozen
        parameters are their own masters."""
        self.wait()
        for one in self.chunks:
            flat = getattr(one, state)
            if is_bad(flat):
                for slot in one.chunk.slots:
                    here = one.piece_of(flat, slot)
                    if here is not None and is_bad(here[0]):
                        return ShardPart(slot.name, slot.shape, here[1].start, here[0])
        if state == "master":
            for name, held in self.frozen.parameters().items():
                if is_bad(held):
                    return ShardPart(name, tuple(held.shape), 0, held.view(-1))
        return None

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
        holders: list[Holder] = [*self.chunks, self.gradients, self.frozen]
        return count_bytes(piece for one in holders for piece in one.pieces())

    @property
    def cache_bytes(self) -> int:
        """Bytes that the cache of divided parameters takes, if the largest chunks are in it."""
        sizes = sorted(one.params.nbytes for one in self.chunks if one.divided)
        return sum(sizes[-self.residency.slots :])

    @property
    def device(self) -> torch.device:
        """Where the states are."""
        return self._device

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


def _lay_out(
    named: Mapping[str, nn.Parameter], homes: Mapping[str, Home], chunk_length: int
) -> ChunkLayout:
    parameters = [
        Parameter(name, tuple(p.shape), home, home.adders.size, home.shards.size)
        for name, p in named.items()
        for home in (homes[name],)
    ]
    return lay_out(parameters, chunk_length)
