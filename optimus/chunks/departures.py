"""Gradients leaving for their reduction: looked at, in one order, as soon as they are complete."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass

from torch import Tensor

from optimus.chunks.pieces import Buffer


@dataclass(frozen=True)
class Parcel:
    """Gradients that are reduced as one: a chunk's, or those of a further use of a parameter."""

    buffer: Buffer
    parts: dict[str, tuple[Tensor, Tensor]]
    """The leaves and their parts of the buffer, by name, in order of first use."""
    send: Callable[[], None]


class Departures:
    """The parcels of one rank. Those of a stage leave with what is used last first, since backward
    completes it first."""

    def __init__(self, in_place: bool, early: bool, look: Callable[[Buffer], None]) -> None:
        """`in_place`: `.grad` is the parcel's own memory, else hooks add to it. `early`: parcels
        leave while `last_backward` lasts; else all of a stage leave in `rest`. `look` is called
        before a parcel leaves: a sum over ranks hides whose a NaN is."""
        self._in_place, self._completion = in_place, Completion() if early else None
        self._look = look
        self._parcels: list[Parcel] = []
        self._stages: dict[int, Procession] = {}

    def add(self, parcel: Parcel) -> None:
        """In order of first use, and once its leaves' gradients are caught."""
        number = len(self._parcels)
        self._parcels.append(parcel)
        stage = parcel.buffer.home.stage
        before = self._stages.get(stage)
        order = (number, *(before.order if before else ()))
        self._stages[stage] = Procession(order, self._go)
        if self._completion is not None:
            for name, (leaf, _) in parcel.parts.items():
                self._completion.add(number, name, leaf)

    def start(self) -> None:
        """Before the first backward of a step."""
        if self._completion is not None:
            self._completion.start()

    def last_backward(self, stage: int, late: Collection[Tensor] | None) -> AbstractContextManager:
        """Around a stage's last backward of a step: its parcels may leave. `late` as in
        Completion."""
        if self._completion is None or stage not in self._stages:
            return nullcontext()
        procession = self._stages[stage]
        return self._completion.listening(procession.order, procession.ready, late)

    def rest(self, stage: int) -> None:
        """Behind a backward of the stage: all its parcels that are here still leave."""
        if stage in self._stages:
            self._stages[stage].rest()

    def check(self, stage: int) -> None:
        """Assert that no `.grad` of the stage was replaced: it would be lost in silence."""
        if stage in self._stages:
            for number in self._stages[stage].order:
                self._check(self._parcels[number])

    def _go(self, number: int) -> None:
        parcel = self._parcels[number]
        self._check(parcel)
        self._look(parcel.buffer)
        if self._completion is not None:
            self._completion.gone(number)
        parcel.send()

    def _check(self, parcel: Parcel) -> None:
        if not self._in_place:
            return
        for name, (leaf, part) in parcel.parts.items():
            in_place = leaf.grad is not None and _same_memory(leaf.grad, part)
            assert in_place, f"the gradient of {name} was replaced; it must accumulate in place"


def _same_memory(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors begin at the same place of the same storage, which may be freed."""
    same = one.untyped_storage()._cdata == other.untyped_storage()._cdata
    return same and one.storage_offset() == other.storage_offset()


class Completion:
    """Counts the gradients that chunks still wait for in a pass."""

    def __init__(self) -> None:
        self._leaves: dict[int, dict[str, Tensor]] = {}
        self._owed: dict[int, set[str]] = {}
        self._complete: Callable[[int], None] | None = None
        self._gone: set[int] = set()

    def add(self, chunk: int, name: str, leaf: Tensor) -> None:
        """Wait for the gradient of a leaf too, unless it is frozen. Hooks that widen it are
        registered before."""
        leaves = self._leaves.setdefault(chunk, {})
        if not leaf.requires_grad:
            return
        leaves[name] = leaf
        leaf.register_post_accumulate_grad_hook(lambda leaf: self.came(chunk, name))

    @contextmanager
    def listening(
        self,
        chunks: Iterable[int],
        complete: Callable[[int], None],
        late: Collection[Tensor] | None = None,
    ) -> Iterator[None]:
        """Within, each leaf of `chunks` that is given a gradient is given its last one of the step:
        `complete(chunk)` is called behind the last of a chunk. A chunk of which some leaf has none
        is never told of. `late`: only these leaves are given one still, so that chunks without any
        are told of at once; the hooks of others may have run for gradients that were put off."""
        wanted = None if late is None else set(map(id, late))
        self._owed = {
            chunk: {
                name
                for name, leaf in self._leaves[chunk].items()
                if wanted is None or id(leaf) in wanted
            }
            for chunk in chunks
        }
        self._complete = complete
        try:
            for chunk in [chunk for chunk, owed in self._owed.items() if not owed]:
                complete(chunk)
            yield
        finally:
            self._owed, self._complete = {}, None

    def gone(self, chunk: int) -> None:
        """A chunk's gradients are taken as they are: one that came still would be lost."""
        self._gone.add(chunk)

    def start(self) -> None:
        """A step begins: nothing has gone."""
        self._gone.clear()

    def came(self, chunk: int, name: str) -> None:
        """A pass has added the gradient of a leaf; whoever adds it past autograd says so too."""
        assert chunk not in self._gone, f"the gradient of {name} came after its chunk had been sent"
        owed = self._owed.get(chunk)
        if owed and name in owed:
            owed.discard(name)
            if not owed:
                assert self._complete is not None
                self._complete(chunk)


class Procession:
    """Lets chunks go in one order, the same on all ranks, each as soon as it is ready and those
    before it have gone: collectives of a group must be begun in one order."""

    def __init__(self, order: Sequence[int], go: Callable[[int], None]) -> None:
        self.order, self._go = tuple(order), go
        self._next = 0
        self._ready: set[int] = set()

    def ready(self, chunk: int) -> None:
        """It may go."""
        self._ready.add(chunk)
        while self._next < len(self.order) and self.order[self._next] in self._ready:
            self._advance()

    def rest(self) -> None:
        """All may go; then the order begins again."""
        while self._next < len(self.order):
            self._advance()
        self._next = 0
        self._ready.clear()

    def _advance(self) -> None:
        chunk = self.order[self._next]
        self._next += 1  # first: should going fail, nothing goes twice
        self._go(chunk)
