"""Where every parameter lies in flat chunks: a pure function of names, shapes and groups.

Parameters that the same ranks copy, shard and add up form a class; a class is laid out in order of
first use into chunks of one length, which are reduced, updated, gathered and moved whole. A chunk's
optimizer state is divided evenly over its shard group.

Lengths and offsets are in elements. Every parameter and every shard starts on a multiple of
ALIGNMENT elements, which is 64 bytes in bf16, the narrowest type, and more in others: unaligned
views change the rounding of matrix products, and a fused update may treat a ragged end another way.
"""

from __future__ import annotations

import itertools
import math
from bisect import bisect_left, bisect_right
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

ALIGNMENT = 32
"""Elements: 64 bytes of two-byte numbers."""
STATES = ("master", "exp_avg", "exp_avg_sq")
"""What AdamW keeps of every element, in the order that a checkpoint's index has, too."""
MAX_WASTE = 0.01
"""The search for a length is content with this share of padding."""


@dataclass(frozen=True)
class Parameter:
    """One parameter as a rank holds it. `key` stands for its groups and pipeline stage: parameters
    of equal keys share chunks."""

    name: str
    shape: tuple[int, ...]
    key: Hashable = None
    adders: int = 1
    """Ranks that add up its gradient: a chunk divides evenly over them."""
    shards: int = 1
    """Ranks over which its optimizer state is divided, a divisor of `adders`."""

    @property
    def size(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True)
class Slot:
    """A parameter's place."""

    name: str
    shape: tuple[int, ...]
    chunk: int
    """Number of the chunk in the layout."""
    start: int
    """Within the chunk."""

    @property
    def stop(self) -> int:
        return self.start + math.prod(self.shape)


@dataclass(frozen=True)
class Chunk:
    """A run of memory that is treated as one."""

    number: int
    key: Hashable
    length: int
    """A multiple of `adders` * ALIGNMENT; equal for all chunks of a key but the last, which ends
    where its parameters do."""
    adders: int
    shards: int
    slots: tuple[Slot, ...]

    @property
    def shard_length(self) -> int:
        return self.length // self.shards

    @property
    def used(self) -> int:
        """Elements of parameters."""
        return sum(slot.stop - slot.start for slot in self.slots)

    def slots_in(self, start: int, stop: int) -> tuple[Slot, ...]:
        """The parameters that have elements in [start, stop)."""
        starts, stops = self._limits
        return self.slots[bisect_right(stops, start) : bisect_left(starts, stop)]

    @cached_property
    def _limits(self) -> tuple[list[int], list[int]]:
        """Where each parameter starts and stops: plans for thousands of ranks ask often."""
        return [slot.start for slot in self.slots], [slot.stop for slot in self.slots]


@dataclass(frozen=True)
class ChunkLayout:
    """All chunks of a rank, by key in order of first use."""

    chunks: tuple[Chunk, ...]

    @property
    def slots(self) -> list[Slot]:
        """All parameters, in the order of their memory."""
        return [slot for chunk in self.chunks for slot in chunk.slots]

    @property
    def length(self) -> int:
        """Elements of all chunks, padding included."""
        return sum(chunk.length for chunk in self.chunks)

    @property
    def shard_length(self) -> int:
        """Elements of optimizer state that this rank holds, padding included."""
        return sum(chunk.shard_length for chunk in self.chunks)


def lay_out(parameters: Iterable[Parameter], target_length: int) -> ChunkLayout:
    """Chunks of about `target_length` elements, at least as long as the largest parameter.

    `parameters` come in order of first use, each name once: a tied parameter is one parameter.
    Lengths are chosen class by class to waste little. What is left over, and classes shorter than
    the target, end in a chunk of just their length.
    """
    assert target_length >= 1, target_length
    classes: dict[Hashable, list[Parameter]] = {}
    for parameter in parameters:
        classes.setdefault(parameter.key, []).append(parameter)
    names = [p.name for members in classes.values() for p in members]
    assert len(set(names)) == len(names), "a parameter is given twice"
    chunks: list[Chunk] = []
    for key, members in classes.items():
        first = members[0]
        alike = all((p.adders, p.shards) == (first.adders, first.shards) for p in members)
        assert alike and first.adders % first.shards == 0, f"{key}: one class, several groups"
        length = best_length([p.size for p in members], target_length, first.adders)
        packs = _pack(members, length)
        for packed in packs[:-1]:
            chunks.append(_make_chunk(len(chunks), packed, length))
        chunks.append(_make_chunk(len(chunks), packs[-1], 0))
    return ChunkLayout(tuple(chunks))


def best_length(sizes: Sequence[int], target: int, adders: int) -> int:
    """The length of a class's chunks: a multiple of adders * ALIGNMENT near `target` that wastes
    least.

    Tried are the lengths at which some run of consecutive parameters, beginning with one of the
    first, fits exactly: models repeat their layers, so what fits once fits again.
    """
    step = adders * ALIGNMENT
    padded = [_round_up(size, ALIGNMENT) for size in sizes]
    least = _round_up(max(padded), step)
    target = max(target, least)
    tried = {_round_up(target, step)}
    for first in range(min(len(padded), _FIRSTS)):
        for total in itertools.accumulate(padded[first:]):
            if least <= total <= 2 * target:
                tried.add(_round_up(total, step))
            if total > 2 * target:
                break
    ends = list(itertools.accumulate(padded))
    return min(tried, key=lambda length: (_wasted(ends, length, step), abs(length - target)))


_FIRSTS = 64
"""Parameters from which runs are tried: several layers' worth."""


def _wasted(ends: Sequence[int], length: int, step: int) -> int:
    """Return the padding of a class in chunks of `length`, coarsely: differences below a percent of
    the whole count as none, so that of equally good lengths the nearest to the target is taken.

    `ends` has the sum of the padded sizes up to each parameter. A search in it for the last
    parameter that fits into a chunk takes time for the chunks instead of the parameters, which
    matters for models of a thousand layers.
    """
    total = start = 0
    while ends[-1] - start > length:
        start = ends[bisect_right(ends, start + length) - 1]
        total += length
    waste = total + _round_up(ends[-1] - start, step) - ends[-1]
    coarse = max(1, int(ends[-1] * MAX_WASTE / 4))
    return waste // coarse


def _pack(members: Sequence[Parameter], length: int) -> list[list[Parameter]]:
    packs: list[list[Parameter]] = [[]]
    filled = 0
    for parameter in members:
        size = _round_up(parameter.size, ALIGNMENT)
        if packs[-1] and filled + size > length:
            packs.append([])
            filled = 0
        packs[-1].append(parameter)
        filled += size
    return packs


def _make_chunk(number: int, members: Sequence[Parameter], length: int) -> Chunk:
    """A chunk of at least `length`."""
    first = members[0]
    slots, offset = [], 0
    for parameter in members:
        slots.append(Slot(parameter.name, parameter.shape, number, offset))
        offset += _round_up(parameter.size, ALIGNMENT)
    length = max(length, _round_up(offset, first.adders * ALIGNMENT))
    return Chunk(number, first.key, length, first.adders, first.shards, tuple(slots))


def _round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple
