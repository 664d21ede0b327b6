"""From the pieces that were written to those that a rank wants: a plan of what to read where.

Pure: boxes and ranges in, arrays of runs out, all int64. Works between any two layouts, since a
piece says by itself what it is of the whole parameter. A rank plans only its own wants; of each
parameter it wants, it looks at the pieces of that parameter alone.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy
from numpy import ndarray

from optimus.checkpoint.pieces import Box, Piece
from optimus.errors import CheckpointError


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
