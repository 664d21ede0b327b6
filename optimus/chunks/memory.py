"""Bytes of model states, counted at the tensors that hold them, whether on a device or on meta."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple, Protocol

from torch import Tensor

from optimus.chunks.layout import Chunk

KINDS = ("parameters", "gradients", "masters", "moments", "deterministic", "tied")
"""What states are for: parameters in the training dtype; gradients, whole and of the shard;
masters and both moments of AdamW; sums in microbatch order (deterministic mode); gradients of
further uses of tied parameters."""


class Piece(NamedTuple):
    """A tensor that holds states."""

    kind: str
    """Of KINDS."""
    tensor: Tensor
    chunk: Chunk | None = None
    """Of which it is a part, padding included in proportion."""


class Holder(Protocol):
    """An object that holds states."""

    def pieces(self) -> Iterable[Piece]:
        """Return all tensors that it holds."""


def count_bytes(pieces: Iterable[Piece]) -> dict[str, int]:
    """Bytes by kind, their "total", and how many of these are "padding", rounded up chunk by chunk.

    Memory behind several tensors counts once, for the first.
    """
    sizes = dict.fromkeys(KINDS, 0)
    in_chunk: dict[int, int] = {}
    chunks: dict[int, Chunk] = {}
    seen = set()
    for kind, tensor, chunk in pieces:
        storage = tensor.untyped_storage()
        if storage._cdata in seen:
            continue
        seen.add(storage._cdata)
        sizes[kind] += storage.nbytes()
        if chunk is not None:
            chunks[chunk.number] = chunk
            in_chunk[chunk.number] = in_chunk.get(chunk.number, 0) + storage.nbytes()
    padding = sum(
        -(-in_chunk[number] * (chunk.length - chunk.used) // chunk.length)
        for number, chunk in chunks.items()
    )
    return {**sizes, "total": sum(sizes.values()), "padding": padding}
