"""Parameters that are not trained: chunks of nothing but them, whole on every rank."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn

from optimus.chunks.layout import ChunkLayout, Parameter, lay_out
from optimus.chunks.memory import Piece
from optimus.chunks.states import Home, StateShard


class FrozenParameters:
    """Holds frozen parameters in flat chunks, in the training dtype; they are their own masters."""

    def __init__(
        self,
        named: Mapping[str, nn.Parameter],
        homes: Mapping[str, Home],
        dtype: torch.dtype,
        chunk_length: int,
    ) -> None:
        """`named` come in order of first use, with their values, and become views of chunks that
        take no gradient. `homes` say which ranks hold copies."""
        parameters = [Parameter(n, tuple(p.shape), homes[n]) for n, p in named.items()]
        self.layout: ChunkLayout = lay_out(parameters, chunk_length)
        self._flats: list[Tensor] = []
        self._wide: list[Tensor] = []
        self._views: dict[str, Tensor] = {}
        for chunk in self.layout.chunks:
            device = named[chunk.slots[0].name].device
            flat = torch.zeros(chunk.length, dtype=dtype, device=device)
            self._flats.append(flat)
            for slot in chunk.slots:
                parameter = named[slot.name]
                view = flat[slot.start : slot.stop].view(slot.shape)
                view.copy_(parameter.data)
                parameter.data = self._views[slot.name] = view
                parameter.requires_grad_(False)

    def __contains__(self, name: str) -> bool:
        return name in self._views

    def put(self, name: str, part: Tensor, start: int) -> None:
        """Set elements `start` and on of a flattened parameter."""
        self.settle()  # else what `shards` has told of it would count
        self._views[name].view(-1)[start : start + len(part)].copy_(part)

    def parameters(self) -> dict[str, Tensor]:
        """Views of them, by name."""
        return dict(self._views)

    def shards(self) -> Iterator[StateShard]:
        """What checkpoints keep of them: values in fp32, which are their own masters. What is put
        into narrower ones' copies counts from `settle` on, which lets the copies go."""
        self._wide = [flat.float() for flat in self._flats]
        for chunk, flat in zip(self.layout.chunks, self._wide, strict=True):
            assert isinstance(chunk.key, Home)
            yield StateShard(chunk, 0, chunk.key, {"master": flat})

    def settle(self) -> None:
        """Take over what was put into `shards`."""
        for flat, wide in zip(self._flats, self._wide, strict=False):
            if wide is not flat:
                flat.copy_(wide)
        self._wide = []

    def pieces(self) -> Iterator[Piece]:
        """Everything that this holds."""
        for chunk, flat in zip(self.layout.chunks, self._flats, strict=True):
            yield Piece("parameters", flat, chunk)
