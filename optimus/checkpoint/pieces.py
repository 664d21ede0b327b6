"""Which rank writes, and reads, which part of the model states: values, made from places alone.

Of a chunk's shard some ranks hold the same copy; they divide it among themselves, so that the
states are written once and by all. A stretch of a shard is a `Span`: one run of memory, in which
pieces of parameters lie one behind the other. A `Piece` says by itself what it is of the model.
Lengths and offsets are in elements.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy

from optimus.chunks.layout import ALIGNMENT, Chunk
from optimus.config.axes import MODEL
from optimus.distributed.mesh import Coordinate, Mesh

Scatter = Literal["balanced", "paper"]
Intervals = tuple[tuple[int, int], ...]
Box = tuple[Intervals, ...]
"""What a rank holds of a whole parameter: ranges [start, stop) of every dim."""

STRIPE = 1 << 20
"""In which turns the two end stages write what they both hold: 4 MiB of fp32."""


class Piece(NamedTuple):
    """Elements [start, stop) of the flattened part of parameter `name` that lies in `box`."""

    name: str
    box: Box
    start: int
    stop: int


def whole_box(shape: Sequence[int]) -> Box:
    """All of a parameter."""
    return tuple(((0, size),) for size in shape)


@dataclass(frozen=True)
class Span:
    """Elements [start, stop) of this rank's shard of a chunk (its number among those held)."""

    held: int
    start: int
    stop: int
    pieces: tuple[tuple[Piece, int], ...]
    """Each with the place of its first element in the span; between them lies padding."""


def first_nonfinite(flat: numpy.ndarray, span: Span) -> str:
    """The first non-finite value of a parameter in fp32 `flat`, the memory of a span; "" if none.

    Padding does not count. One sum decides the common case.
    """
    with numpy.errstate(all="ignore"):
        if numpy.isfinite(flat.sum()):
            return ""
    for piece, at in span.pieces:
        values = flat[at : at + piece.stop - piece.start]
        bad = numpy.flatnonzero(~numpy.isfinite(values))
        if len(bad):
            return f"{piece.name} is {values[bad[0]]} at element {piece.start + bad[0]}"
    return ""


class Held(NamedTuple):
    """A rank's shard of a chunk: it begins at element `first`."""

    chunk: Chunk
    first: int
    copies: tuple[str, ...]
    """Axes along which ranks hold the same shard."""
    far: bool
    """Whether it is a copy of what the first stage holds, cut into other shards perhaps."""


class Part(NamedTuple):
    """One of `count` about equal parts."""

    index: int  # type: ignore[assignment]  # hides a method of tuple that is not used
    count: int  # type: ignore[assignment]  # the same


WHOLE = Part(0, 1)


def part_of(mesh: Mesh, place: Coordinate, copies: Collection[str]) -> Part:
    """Which part of a shard falls to the rank at `place`, of those that hold the same."""
    return Part(mesh.number_of(place, copies), mesh.size_of(copies))


def bounds(held: Held, part: Part) -> tuple[int, int]:
    """Where a part of a shard begins and ends: what holds parameters is divided; padding behind
    them is not, nor ever written."""
    if part.count == 1:
        return 0, held.chunk.shard_length
    used = _used(held)
    units, (index, count) = used // ALIGNMENT, part
    start, stop = (units * number // count * ALIGNMENT for number in (index, index + 1))
    return start, used if index + 1 == count else stop


def spans_to_write(
    held: Sequence[Held],
    boxes: Mapping[str, Box],
    mesh: Mesh,
    place: Coordinate,
    scatter: Scatter = "balanced",
    on_both_ends: Collection[str] = (),
) -> list[Span]:
    """What the rank at `place` writes; over all ranks every element once.

    `balanced`: all that hold a copy of a shard write equal parts of it; what is `on_both_ends` of
    the pipeline (tied embeddings) goes to them in turns of STRIPE. `paper`: of the copies of
    model-parallel shard m, data-parallel index m mod dp writes it whole, the first stage alone.
    """
    spans: list[Span] = []
    parts = {copies: part_of(mesh, place, copies) for copies in {one.copies for one in held}}
    for number, one in enumerate(held):
        turns = {name: Part(int(one.far), 2) for name in on_both_ends}
        part = parts[one.copies]
        if scatter == "paper":
            if one.far or not _writes_in_paper(mesh, place, one.copies):
                continue
            turns, part = {}, WHOLE
        spans += _spans(number, one, boxes, *bounds(one, part), turns)
    return spans


def spans_to_read(
    held: Sequence[Held], boxes: Mapping[str, Box], mesh: Mesh, place: Coordinate
) -> list[Span]:
    """What the rank at `place` reads: an equal part of each shard, the other parts of which come
    from the ranks that hold the same. A far copy comes whole from the first stage."""
    spans: list[Span] = []
    for number, one in enumerate(held):
        if not one.far:
            part = part_of(mesh, place, one.copies)
            spans += _spans(number, one, boxes, *bounds(one, part), {})
    return spans


def writer_in_paper(mesh: Mesh, place: Coordinate) -> int:
    """The data-parallel index that writes the model-parallel shard at `place`: m mod dp."""
    return mesh.number_of(place, MODEL) % mesh.dp


def _writes_in_paper(mesh: Mesh, place: Coordinate, copies: Collection[str]) -> bool:
    if any(getattr(place, axis) for axis in copies if axis != "dp"):
        return False
    return "dp" not in copies or place.dp == writer_in_paper(mesh, place)


def _used(held: Held) -> int:
    """Where padding begins in a shard: it begins with a parameter, aligned as these are, or holds
    none."""
    first, last = held.first, held.first + held.chunk.shard_length
    met = held.chunk.slots_in(first, last)
    return min(met[-1].stop, last) - first if met else 0


def _spans(
    number: int,
    held: Held,
    boxes: Mapping[str, Box],
    start: int,
    stop: int,
    turns: Mapping[str, Part],
) -> Iterator[Span]:
    """[start, stop) of the shard but for others' turns; a gap of a turn begins a new span."""
    pieces: list[tuple[Piece, int]] = []
    begun = end = start
    for piece, at in _pieces(held, boxes, start, stop, turns):
        if pieces and at - end >= ALIGNMENT:
            yield Span(number, begun, end, tuple(pieces))
            pieces = []
        if not pieces:
            begun = at
        pieces.append((piece, at - begun))
        end = at + piece.stop - piece.start
    if pieces:
        yield Span(number, begun, end, tuple(pieces))


def _pieces(
    held: Held, boxes: Mapping[str, Box], start: int, stop: int, turns: Mapping[str, Part]
) -> Iterator[tuple[Piece, int]]:
    """Each piece and its place in the shard."""
    for slot in held.chunk.slots_in(held.first + start, held.first + stop):
        begun = slot.start - held.first
        low, high = max(start - begun, 0), min(stop, slot.stop - held.first) - begun
        turn = turns.get(slot.name, WHOLE)
        for a, b in _in_turn(low, high, turn):
            yield Piece(slot.name, boxes[slot.name], a, b), begun + a


def _in_turn(low: int, high: int, turn: Part) -> Iterator[tuple[int, int]]:
    """The parts of [low, high) that lie in every `count`-th stripe from the `index`-th on."""
    if turn.count == 1:
        if low < high:
            yield low, high
        return
    for stripe in range(low // STRIPE, math.ceil(high / STRIPE)):
        if stripe % turn.count == turn.index:
            a, b = max(low, stripe * STRIPE), min(high, (stripe + 1) * STRIPE)
            if a < b:
                yield a, b
