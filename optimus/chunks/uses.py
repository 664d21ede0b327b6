"""When a chunk is first used by a forward pass, and when backward has completed its gradients.

Both are told by hooks that know nothing of what is done then, so that whatever moves chunks (a
reduction, a gather, a cache) can be driven by them. A chunk is known by a number.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence

from torch import Tensor, nn


def watch_first_uses(
    readers: Iterable[tuple[nn.Module, Collection[str]]],
    chunk_of: Callable[[str], int],
    before: Callable[[int], None],
) -> None:
    """Have `before(chunk)` called ahead of every module that reads a chunk. `readers`: modules with
    the names of all parameters that their call reads, in the order of forward. The hooks run
    outside of what torch.compile makes of a module's `forward`."""
    for module, names in readers:
        chunks = tuple(dict.fromkeys(map(chunk_of, names)))
        if chunks:
            module.register_forward_pre_hook(functools.partial(_ahead, chunks, before))


def _ahead(
    chunks: Sequence[int], before: Callable[[int], None], module: nn.Module, args: object
) -> None:
    for chunk in chunks:
        before(chunk)


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

    @contextlib.contextmanager
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
