"""Which rank writes, and reads, which part of the model states: values, made from places alone.

Of a chunk's shard some ranks hold the same copy; they divide it among themselves, so that the
states are written once and by all. A stretch of a shard is a `Span`: one run of memory, in which
pieces of parameters lie one behind the other. A `Piece` says by itself what it is of the model.
Lengths and offsets are in elements.

From the pieces that were written to those that a rank wants: a plan of what to read where.

Pure: boxes and ranges in, arrays of runs out, all int64. Works between any two layouts, since a
piece says by itself what it is of the whole parameter. A rank plans only its own wants; of each
parameter it wants, it looks at the pieces of that parameter alone."""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, NamedTuple

import numpy
from numpy import ndarray

from optimus.chunks.layout import ALIGNMENT, Chunk
from optimus.config.axes import MODEL
from optimus.distributed.mesh import Coordinate, Mesh
from optimus.errors import CheckpointError

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


@dataclass(frozen=True)
class Stored:
    """Where a parameter lies on disk."""

    name: str
    boxes: tuple[Box, ...]
    rows: ndarray
    """[n, 4 + states]: shard file (its number in the index), box, elements [start, stop) of the
    flattened box, and the byte in the file where each state of them begins (-1: not kept). By box
    and start."""

    @cached_property
    def _of_box(self) -> list[slice]:
        limits = numpy.searchsorted(self.rows[:, 1], numpy.arange(len(self.boxes) + 1))
        return [slice(*pair) for pair in itertools.pairwise(limits)]

    def element_runs(self, want: Piece) -> ndarray:
        """[n, 4]: row, offset in that row's piece, offset in `want`, length; in elements.

        Raises CheckpointError if they do not cover `want`.
        """
        found = []
        for box, rows in zip(self.boxes, self._of_box, strict=True):
            runs = runs_between(box, want)
            if len(runs):
                found.append(_cut(runs, self.rows[rows, 2:4], rows.start))
        runs = numpy.concatenate(found) if found else numpy.empty((0, 4), dtype=numpy.int64)
        if runs[:, 3].sum() != want.stop - want.start:
            raise CheckpointError(f"the index holds only a part of parameter {self.name}")
        return runs

    def byte_runs(self, runs: ndarray, state: int, itemsize: int) -> ndarray:
        """The `element_runs` of a state (its number) as [n, 4]: shard, offset in its file, offset
        in what is wanted, length; in bytes."""
        start = self.rows[runs[:, 0], 4 + state]
        if (start < 0).any():
            raise CheckpointError(f"the index holds not every state of parameter {self.name}")
        shard = self.rows[runs[:, 0], 0]
        inside, wanted, length = (runs[:, column] * itemsize for column in (1, 2, 3))
        return numpy.stack([shard, start + inside, wanted, length], 1)


def runs_between(disk: Box, want: Piece) -> ndarray:
    """[n, 3]: offset in the flattened box `disk`, offset in `want`, length, ascending: what both
    have of a parameter."""
    if disk == want.box:
        return numpy.array([[want.start, 0, want.stop - want.start]], dtype=numpy.int64)
    overlaps = [_overlap(a, b) for a, b in zip(disk, want.box, strict=True)]
    if not all(len(one) for one in overlaps):
        return numpy.empty((0, 3), dtype=numpy.int64)
    divided = max(d for d in range(len(disk)) if disk[d] != want.box[d])
    sizes = [[sum(b - a for a, b in dim) for dim in box] for box in (disk, want.box)]
    places = []
    for column, shape in enumerate(sizes):
        flat = numpy.zeros(1, dtype=numpy.int64)
        for dim in range(divided):
            index = _indices(overlaps[dim])[:, column]
            if dim == 0:
                index = index[_rows_met(overlaps[0], sizes[1], want)]
            flat = (flat[:, None] * shape[dim] + index[None, :]).reshape(-1)
        flat = flat[:, None] * shape[divided] + overlaps[divided][None, :, column]
        places.append(flat.reshape(-1) * math.prod(shape[divided + 1 :]))
    inner = math.prod(sizes[0][divided + 1 :])
    length = numpy.tile(overlaps[divided][:, 2] * inner, len(places[0]) // len(overlaps[divided]))
    return _merge(_clip(numpy.stack([*places, length], 1), want))


def _overlap(disk: Sequence[tuple[int, int]], want: Sequence[tuple[int, int]]) -> ndarray:
    """[n, 3]: index in `disk`, index in `want`, size, of what both hold of one dim, ascending."""
    found, here = [], 0
    for start, stop in disk:
        there = 0
        for low, high in want:
            a, b = max(start, low), min(stop, high)
            if a < b:
                found.append((here + a - start, there + a - low, b - a))
            there += high - low
        here += stop - start
    return numpy.array(found, dtype=numpy.int64).reshape(-1, 3)


def _indices(overlap: ndarray) -> ndarray:
    """[n, 2]: both indices of every element of an overlap."""
    parts = [numpy.arange(size)[:, None] + (here, there) for here, there, size in overlap.tolist()]
    return numpy.concatenate(parts)


def _rows_met(overlap: ndarray, want_shape: Sequence[int], want: Piece) -> ndarray:
    """Which indices of the first dim lie in the wanted range: all others need no look."""
    row = math.prod(want_shape[1:])
    index = _indices(overlap)[:, 1]
    return (index >= want.start // row) & (index < -(-want.stop // row))


def _clip(runs: ndarray, want: Piece) -> ndarray:
    """Runs by offset in the wanted box -> those in [start, stop), by offset in the piece."""
    low = numpy.maximum(want.start - runs[:, 1], 0)
    high = numpy.minimum(want.stop - runs[:, 1], runs[:, 2])
    kept = high > low
    low, high, runs = low[kept], high[kept], runs[kept]
    return numpy.stack([runs[:, 0] + low, runs[:, 1] + low - want.start, high - low], 1)


def _merge(runs: ndarray) -> ndarray:
    """Join runs that follow each other on both sides."""
    if len(runs) < 2:
        return runs
    gap = (runs[1:, :2] != runs[:-1, :2] + runs[:-1, 2:]).any(1)
    starts = numpy.flatnonzero(numpy.concatenate([[True], gap]))
    length = numpy.add.reduceat(runs[:, 2], starts)
    return numpy.stack([runs[starts, 0], runs[starts, 1], length], 1)


def _cut(runs: ndarray, ranges: ndarray, first_row: int) -> ndarray:
    """Cut runs [n, 3] at the disjoint, ascending ranges [start, stop) of the rows of a box:
    [m, 4] with the row, and the offset in its piece."""
    if not len(ranges):
        return numpy.empty((0, 4), dtype=numpy.int64)
    start, stop = runs[:, 0], runs[:, 0] + runs[:, 2]
    low = numpy.maximum(numpy.searchsorted(ranges[:, 0], start, "right") - 1, 0)
    high = numpy.searchsorted(ranges[:, 0], stop, "left")
    count = numpy.maximum(high - low, 0)
    which = numpy.repeat(numpy.arange(len(runs)), count)
    nth = numpy.arange(len(which)) - numpy.repeat(numpy.cumsum(count) - count, count)
    row = low[which] + nth
    a = numpy.maximum(start[which], ranges[row, 0])
    b = numpy.minimum(stop[which], ranges[row, 1])
    out = numpy.stack([row + first_row, a - ranges[row, 0], runs[which, 1] + a - start[which]], 1)
    out = numpy.concatenate([out, (b - a)[:, None]], 1)
    return out[b > a]


PIECE = 1 << 22
"""Elements of a piece at most: 16 MiB of fp32."""
