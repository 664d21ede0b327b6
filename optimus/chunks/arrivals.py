"""Updated parameters on their way to the ranks that compute with them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

from torch import nn

from optimus.chunks.states import ChunkStates
from optimus.distributed.collectives import Transfer, begin_all_gather


class Arrivals:
    """Gathers chunks' parameters from their shards, beside what is computed meanwhile if somebody
    is known to wait before they are used."""

    def __init__(self) -> None:
        self._under_way: dict[int, Transfer] = {}
        self._awaited = False

    def wait_in(
        self, readers: Iterable[tuple[nn.Module, Collection[str]]], chunk_of: Mapping[str, int]
    ) -> None:
        """From now on gathers go on until a module that reads the chunk is called, or `wait`.
        `readers` as in watch_first_uses, all that read a parameter among them."""
        watch_first_uses(readers, chunk_of.__getitem__, self._wait_for)
        self._awaited = True

    def gather(self, one: ChunkStates) -> None:
        """A collective of the chunk's shard group; all begin theirs in one order."""
        transfer = begin_all_gather(one.params, one.shard, one.home.shards)
        if self._awaited:
            self._under_way[one.chunk.number] = transfer
        else:
            transfer.wait()

    def wait(self) -> None:
        """Until all parameters are there. Waits for this rank's own part alone."""
        while self._under_way:
            self._under_way.pop(next(iter(self._under_way))).wait()

    def _wait_for(self, chunk: int) -> None:
        transfer = self._under_way.pop(chunk, None)
        if transfer is not None:
            transfer.wait()


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
