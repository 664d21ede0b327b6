"""The layout of parameters in flat chunks: a pure function of names, shapes and groups.

Parameters with the same process groups and options form a class. The parameters of a class are
placed, in order of first use, in chunks of equal length. Each chunk is reduced, updated, gathered
and freed as a whole. The optimizer states of a chunk are divided evenly over its shard group.

Lengths and offsets are in elements. Every parameter and every shard starts at a multiple of
ALIGNMENT elements: 64 bytes in bf16, the narrowest dtype. Without this alignment, the layout would
change the results: matrix products of unaligned views round differently, and a fused optimizer
update can compute the last, unaligned elements with another formula.
"""

from __future__ import annotations

import itertools
import math
from bisect import bisect_left, bisect_right
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

ALIGNMENT = 32
"""Number of elements of a two-byte dtype in 64 bytes."""
KINDS = ("parameters", "gradients", "masters", "moments", "deterministic", "tied")
"""Kinds of states, whose bytes are counted separately. "parameters" have the training dtype.
"gradients" are the gradients of whole chunks, and this rank's shards of the summed gradients.
"deterministic" are the sums of deterministic mode, to which microbatches are added in order. "tied"
are the gradients of further uses of parameters (`optimus.chunks.buffers.FurtherUse`)."""
MAX_WASTE = 0.01
"""Padding that is small, as a fraction of the elements of a class. `best_length` rounds the padding
of each chunk length down to a multiple of a quarter of this fraction, and compares the rounded
values."""


@dataclass(frozen=True)
class Parameter:
    """A parameter of a rank."""

    name: str
    shape: tuple[int, ...]
    key: Hashable = None
    """Parameters with equal keys form a class, whose parameters share chunks. `ChunkEngine` uses
    `ParamProcessGroups` as keys."""
    reduce_size: int = 1
    """Size of the reduce group. The length of the parameter's chunk is a multiple of this size."""
    shard_size: int = 1
    """Size of the shard group, a divisor of `reduce_size`."""

    @property
    def size(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True)
class Slot:
    """The position of a parameter in its chunk."""

    name: str
    shape: tuple[int, ...]
    chunk: int
    """Index of the chunk in `ChunkLayout.chunks`."""
    start: int
    """Index of the parameter's first element in the chunk."""

    @property
    def stop(self) -> int:
        return self.start + math.prod(self.shape)


@dataclass(frozen=True)
class Chunk:
    """Layout of a chunk: a flat buffer that contains several parameters."""

    number: int
    """Index of the chunk in `ChunkLayout.chunks`."""
    key: Hashable
    """`Parameter.key` of all parameters in the chunk."""
    length: int
    """Number of elements, a multiple of `reduce_size` * ALIGNMENT. All chunks with the same key
    have the same length, except the last of them, which is only as long as its parameters need."""
    reduce_size: int
    shard_size: int
    slots: tuple[Slot, ...]

    @property
    def shard_length(self) -> int:
        return self.length // self.shard_size

    @property
    def used(self) -> int:
        """Number of elements that belong to parameters."""
        return sum(slot.stop - slot.start for slot in self.slots)

    def slots_in(self, start: int, stop: int) -> tuple[Slot, ...]:
        """Return the parameters that have elements in [start, stop)."""
        starts, stops = self._limits
        return self.slots[bisect_right(stops, start) : bisect_left(starts, stop)]

    @cached_property
    def _limits(self) -> tuple[list[int], list[int]]:
        """The start and stop indices of the parameters in the chunk, as two lists. The lists are
        cached, because a plan of thousands of ranks reads them often."""
        return [slot.start for slot in self.slots], [slot.stop for slot in self.slots]


@dataclass(frozen=True)
class ChunkLayout:
    """All chunks of a rank. Chunks with the same key are adjacent, in order of first use."""

    chunks: tuple[Chunk, ...]

    @property
    def slots(self) -> list[Slot]:
        """All parameters, in the order of their chunks."""
        return [slot for chunk in self.chunks for slot in chunk.slots]

    @property
    def length(self) -> int:
        """Number of elements of all chunks, with padding."""
        return sum(chunk.length for chunk in self.chunks)

    @property
    def shard_length(self) -> int:
        """Number of elements of each optimizer state on this rank, with padding."""
        return sum(chunk.shard_length for chunk in self.chunks)


def lay_out(parameters: Iterable[Parameter], target_length: int) -> ChunkLayout:
    """Divide parameters into chunks, and return the layout.

    All chunks of a class have the same length, except the last, which is only as long as its
    parameters need. This length is near `target_length`, is at least the size of the largest
    parameter of the class, and is chosen so that there is little padding.

    Args:
        parameters: The parameters in order of first use. Each name occurs once.
        target_length: Desired number of elements of a chunk.
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
        sizes = {(p.reduce_size, p.shard_size) for p in members}
        assert len(sizes) == 1 and first.reduce_size % first.shard_size == 0, f"{key}: {sizes}"
        length = best_length([p.size for p in members], target_length, first.reduce_size)
        packs = _pack(members, length)
        for packed in packs[:-1]:
            chunks.append(_make_chunk(len(chunks), packed, length))
        chunks.append(_make_chunk(len(chunks), packs[-1], 0))
    return ChunkLayout(tuple(chunks))


def best_length(sizes: Sequence[int], target: int, reduce_size: int) -> int:
    """Return the chunk length near `target` that gives a class the least padding.

    The length is a multiple of `reduce_size` * ALIGNMENT. The function tries `target`, and the
    total lengths of sequences of consecutive parameters. Only sequences that begin with one of the
    first `_FIRSTS` parameters of the class are tried. Models repeat their layers, so a length that
    fits the parameters of some layers also fits the parameters of later layers.

    Args:
        sizes: Number of elements of each parameter of the class, in order of first use.
        target: Desired number of elements of a chunk.
        reduce_size: Number of ranks in the reduce group of the class.
    """
    step = reduce_size * ALIGNMENT
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
"""Number of parameters at the start of a class. `best_length` tries sequences that begin with one
of these parameters. This number of parameters covers several layers."""


def _wasted(ends: Sequence[int], length: int, step: int) -> int:
    """Return the padding of a class with chunks of `length`, as a number of coarse units.

    A unit is MAX_WASTE / 4 of the elements of the class, and the number is rounded down. Lengths
    with about the same padding therefore have the same result, and `best_length` selects the length
    nearest to the target. `ends` contains, for each parameter, the sum of the padded sizes of all
    parameters up to and including it. A binary search in `ends` finds the last parameter of a
    chunk. This is fast even for models of a thousand layers.
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
    """Return a chunk of at least `length` elements."""
    first = members[0]
    slots, offset = [], 0
    for parameter in members:
        slots.append(Slot(parameter.name, parameter.shape, number, offset))
        offset += _round_up(parameter.size, ALIGNMENT)
    length = max(length, _round_up(offset, first.reduce_size * ALIGNMENT))
    return Chunk(number, first.key, length, first.reduce_size, first.shard_size, tuple(slots))


def _round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple
