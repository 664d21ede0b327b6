"""Slices of model states: functions that select the elements which each rank writes or reads, and
that compute overlaps of slices.

Terms of this package (lengths and offsets are in elements):

- A box is the set of a parameter's elements that a rank has, given as index ranges for each dim.
- A `ParamSlice` is a range of a flattened box. It does not depend on ranks or layouts.
- A `ChunkShard` is a rank's shard of a chunk. A chunk is a flat buffer of several parameters
  (optimus/chunks/layout.py). Several ranks may have the same shard.
- A `StateSlice` is a contiguous range of a shard. The range may contain slices of several
  parameters. It has the same bounds for the master weights and the moments.
- A `Share` is an n-th of a shard that n ranks have. Each of these ranks reads or writes one share.
- A `StoredParam` lists the slices of a parameter in the files of a checkpoint.

The functions of this module use only coordinates of ranks and index ranges.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType
from typing import Literal, NamedTuple

import numpy
from numpy import ndarray

from optimus.chunks.layout import ALIGNMENT, Chunk
from optimus.config.axes import MODEL
from optimus.distributed.mesh import Coordinate, Mesh
from optimus.errors import CheckpointError

Scatter = Literal["balanced", "paper"]
"""Possible values of the setting `checkpoint.scatter`."""
Intervals = tuple[tuple[int, int], ...]
Box = tuple[Intervals, ...]
"""Elements of a parameter, as index ranges [start, stop) for each dim of the whole parameter."""

STRIPE = 1 << 20
"""Number of elements in a stripe of a parameter: 4 MiB of fp32. If several pipeline stages have the
same parameter, the stages take turns in writing the parameter's stripes."""
BATCH_ELEMENTS = 1 << 22
"""Maximum number of elements that are converted or copied at once: 16 MiB of fp32."""


class ParamSlice(NamedTuple):
    """A contiguous range of the elements of parameter `name` that a rank has.

    `box` contains, for each dim of the whole parameter, the index ranges of the rank's elements.
    The slice has the elements [start, stop) of the box, counted in row-major order.
    """

    name: str
    box: Box
    start: int
    stop: int


@dataclass(frozen=True)
class StateSlice:
    """Elements [start, stop) of a shard. A shard is a rank's range of a flat buffer of parameters.

    `shard` is the index of the shard in the list of the rank's shards.
    """

    shard: int
    start: int
    stop: int
    params: tuple[tuple[ParamSlice, int], ...]
    """The parameter slices in this StateSlice, each with the offset of its first element from
    `start`. Elements that are in none of the parameter slices are padding."""


def batches_of(state_slice: StateSlice) -> Iterator[StateSlice]:
    """Yield the elements of a StateSlice as slices of at most BATCH_ELEMENTS elements, in order."""
    for start in range(state_slice.start, state_slice.stop, BATCH_ELEMENTS):
        stop = min(start + BATCH_ELEMENTS, state_slice.stop)
        low, high = start - state_slice.start, stop - state_slice.start
        params = []
        for param, offset in state_slice.params:
            end = offset + param.stop - param.start
            first, last = max(offset, low), min(end, high)
            if first < last:
                begin = param.start + first - offset
                clipped = param._replace(start=begin, stop=begin + last - first)
                params.append((clipped, first - low))
        yield StateSlice(state_slice.shard, start, stop, tuple(params))


class ChunkShard(NamedTuple):
    """A rank's shard of a chunk. The chunk is a flat buffer of parameters."""

    chunk: Chunk
    first: int
    """Index in the chunk of the shard's first element."""
    copy_axes: tuple[str, ...]
    """Mesh axes along which ranks have copies of the same shard."""
    is_later_copy: bool
    """True if an earlier pipeline stage also has the parameters of this shard. The chunk layouts of
    the two stages may differ."""


class Share(NamedTuple):
    """Share with the index `index` of a shard that is divided into `count` shares of about equal
    size."""

    index: int  # type: ignore[assignment]  # hides a method of tuple that is not used
    count: int  # type: ignore[assignment]  # the same


WHOLE = Share(0, 1)


def whole_box(shape: Sequence[int]) -> Box:
    """Return the box that contains all elements of a parameter with this shape: the index range
    [0, size) for each dim."""
    return tuple(((0, size),) for size in shape)


def find_nonfinite(flat: ndarray, state_slice: StateSlice) -> str:
    """Return a text with the first non-finite element: the name of the parameter, the value, and
    the index of the element in the flattened box. Return "" if all elements are finite.

    Args:
        flat: The values of the elements of `state_slice`, fp32. Padding may have any value.
        state_slice: Parameter slices with their positions in `flat`.
    """
    with numpy.errstate(all="ignore"):
        if numpy.isfinite(flat.sum()):  # fast check of the usual case
            return ""
    for param, offset in state_slice.params:
        values = flat[offset : offset + param.stop - param.start]
        bad = numpy.flatnonzero(~numpy.isfinite(values))
        if len(bad):
            return f"{param.name} is {values[bad[0]]} at element {param.start + bad[0]}"
    return ""


def share_of(mesh: Mesh, coordinate: Coordinate, axes: Collection[str]) -> Share:
    """Return the share of the rank at `coordinate` in a shard. All ranks along the mesh `axes` have
    this shard, and each of these ranks gets a share of about equal size."""
    return Share(mesh.number_of(coordinate, axes), mesh.size_of(axes))


def share_bounds(shard: ChunkShard, share: Share) -> tuple[int, int]:
    """Return the bounds (start, stop) of a share, in elements from the start of the shard.

    If a shard has several shares, the padding at the end of the shard is in none of the shares.
    """
    if share.count == 1:
        return 0, shard.chunk.shard_length
    # A shard starts with an aligned element of a parameter, or contains only padding.
    last = shard.first + shard.chunk.shard_length
    slots = shard.chunk.slots_in(shard.first, last)
    used = min(slots[-1].stop, last) - shard.first if slots else 0
    units, (index, count) = used // ALIGNMENT, share
    start, stop = (units * number // count * ALIGNMENT for number in (index, index + 1))
    return start, used if index + 1 == count else stop


def slices_to_write(
    shards: Sequence[ChunkShard],
    boxes: Mapping[str, Box],
    mesh: Mesh,
    coordinate: Coordinate,
    scatter: Scatter = "balanced",
    turns: Mapping[str, Share] = MappingProxyType({}),
) -> list[StateSlice]:
    """Return the slices that a rank writes. All ranks together write each element once.

    Args:
        shards: The rank's shards.
        boxes: The boxes of the rank's parameters, by name.
        mesh: The mesh of all ranks.
        coordinate: The rank's coordinate.
        scatter: With `balanced`, all ranks that have a copy of a shard write equal shares,
            and pipeline stages that have the same parameter write stripes of the parameter in turn.
            With `paper`, the rank with data-parallel index m mod dp writes the whole model-parallel
            shard m. If several stages have the same parameter, only the first of them writes it.
        turns: Maps each parameter that several pipeline stages have to `Share(index, count)`: the
            index of the rank's stage among these stages, and the number of these stages.
    """
    slices: list[StateSlice] = []
    shares = {axes: share_of(mesh, coordinate, axes) for axes in {s.copy_axes for s in shards}}
    for number, shard in enumerate(shards):
        axes = shard.copy_axes
        stripes, share = turns, shares[axes]
        if scatter == "paper":
            is_writer = not any(getattr(coordinate, axis) for axis in axes if axis != "dp") and (
                "dp" not in axes or coordinate.dp == writer_in_paper(mesh, coordinate)
            )
            if shard.is_later_copy or not is_writer:
                continue
            stripes, share = {}, WHOLE
        slices += _slice_shard(number, shard, boxes, *share_bounds(shard, share), stripes)
    return slices


def slices_to_read(
    shards: Sequence[ChunkShard], boxes: Mapping[str, Box], mesh: Mesh, coordinate: Coordinate
) -> list[StateSlice]:
    """Return the slices that a rank reads from the files of a checkpoint: one share of each shard.

    The rank receives the other shares from the ranks that have the same shard. A shard with
    `is_later_copy` is not read. Instead, the rank receives all elements of this shard from the
    first pipeline stage that has the parameters. The arguments are as for `slices_to_write`.
    """
    slices: list[StateSlice] = []
    for number, shard in enumerate(shards):
        if not shard.is_later_copy:
            bounds = share_bounds(shard, share_of(mesh, coordinate, shard.copy_axes))
            slices += _slice_shard(number, shard, boxes, *bounds, {})
    return slices


def writer_in_paper(mesh: Mesh, coordinate: Coordinate) -> int:
    """Return the data-parallel index of the rank that writes the model-parallel shard of the rank
    at `coordinate`, for `checkpoint.scatter = "paper"`. For shard m, the index is m mod dp."""
    return mesh.number_of(coordinate, MODEL) % mesh.dp


def _slice_shard(
    number: int,
    shard: ChunkShard,
    boxes: Mapping[str, Box],
    start: int,
    stop: int,
    turns: Mapping[str, Share],
) -> Iterator[StateSlice]:
    """Yield slices that together contain elements [start, stop) of a shard, except stripes that
    other pipeline stages write. A new slice begins after each omitted stripe."""
    params: list[tuple[ParamSlice, int]] = []
    first = end = start
    for slot in shard.chunk.slots_in(shard.first + start, shard.first + stop):
        begin = slot.start - shard.first
        low, high = max(start - begin, 0), min(stop, slot.stop - shard.first) - begin
        for a, b in _stripes(low, high, turns.get(slot.name, WHOLE)):
            if params and begin + a - end >= ALIGNMENT:
                yield StateSlice(number, first, end, tuple(params))
                params = []
            if not params:
                first = begin + a
            params.append((ParamSlice(slot.name, boxes[slot.name], a, b), begin + a - first))
            end = begin + b
    if params:
        yield StateSlice(number, first, end, tuple(params))


def _stripes(low: int, high: int, turn: Share) -> Iterator[tuple[int, int]]:
    """Yield the intersections of the element range [low, high) with the stripes `turn.index`,
    `turn.index + turn.count`, and so on."""
    if turn.count == 1:
        if low < high:
            yield low, high
        return
    for stripe in range(low // STRIPE, math.ceil(high / STRIPE)):
        if stripe % turn.count == turn.index:
            a, b = max(low, stripe * STRIPE), min(high, (stripe + 1) * STRIPE)
            if a < b:
                yield a, b


# -- Resharding: find the elements of a requested slice in the stored slices ----------------------


@dataclass(frozen=True)
class StoredParam:
    """Table of the slices of a parameter in the shard files of a checkpoint."""

    name: str
    boxes: tuple[Box, ...]
    rows: ndarray
    """int64 [n, 4 + states], sorted by box and start. Columns: number of the shard file in the
    index, number of the box, start and stop of the elements in the flattened box, and for each
    state the byte offset of the slice in the file (-1: not stored)."""

    @cached_property
    def _rows_of_boxes(self) -> list[slice]:
        limits = numpy.searchsorted(self.rows[:, 1], numpy.arange(len(self.boxes) + 1))
        return [slice(*pair) for pair in itertools.pairwise(limits)]

    def element_ranges(self, param: ParamSlice) -> ndarray:
        """Return the ranges of stored slices that together contain the elements of `param`.

        Returns:
            int64 [n, 4]. Columns: index of a row in `rows`, offset in the slice of this row, offset
            in `param`, length. Offsets and lengths are in elements.

        Raises:
            CheckpointError: The rows do not contain all elements of `param`.
        """
        cuts = [numpy.empty((0, 4), dtype=numpy.int64)]
        for box, rows in zip(self.boxes, self._rows_of_boxes, strict=True):
            ranges = intersect(box, param)
            if len(ranges):
                cuts.append(_cut(ranges, self.rows[rows, 2:4], rows.start))
        ranges = numpy.concatenate(cuts)
        if ranges[:, 3].sum() != param.stop - param.start:
            raise CheckpointError(f"the index lacks elements of parameter {self.name}")
        return ranges

    def byte_ranges(self, ranges: ndarray, state: int, itemsize: int) -> ndarray:
        """Convert ranges of elements to ranges of bytes in shard files.

        Args:
            ranges: Result of `element_ranges`.
            state: Index of the state in `Index.states`.
            itemsize: Bytes of an element.

        Returns:
            int64 [n, 4]. Columns: number of the shard file, offset in the file, offset in the
            requested slice, length. Offsets and lengths are in bytes.

        Raises:
            CheckpointError: The state is not stored for one of the rows.
        """
        start = self.rows[ranges[:, 0], 4 + state]
        if (start < 0).any():
            raise CheckpointError(f"the checkpoint lacks moments of parameter {self.name}")
        shard = self.rows[ranges[:, 0], 0]
        offset, target, length = (ranges[:, column] * itemsize for column in (1, 2, 3))
        return numpy.stack([shard, start + offset, target, length], 1)


def intersect(box: Box, param: ParamSlice) -> ndarray:
    """Return the contiguous ranges of elements that `box` and `param` have in common.

    Returns:
        int64 [n, 3], ascending. Columns: offset in the flattened box, offset in `param`, length.
    """
    if box == param.box:
        return numpy.array([[param.start, 0, param.stop - param.start]], dtype=numpy.int64)
    overlaps = [_overlap(a, b) for a, b in zip(box, param.box, strict=True)]
    if not all(map(len, overlaps)):
        return numpy.empty((0, 3), dtype=numpy.int64)
    # The last dim in which the index ranges of the two boxes differ.
    divided = max(dim for dim in range(len(box)) if box[dim] != param.box[dim])
    shapes = [[sum(b - a for a, b in dim) for dim in each] for each in (box, param.box)]
    offsets = []
    for column, shape in enumerate(shapes):
        flat = numpy.zeros(1, dtype=numpy.int64)
        for dim in range(divided):
            indices = numpy.concatenate(
                [numpy.arange(size)[:, None] + (a, b) for a, b, size in overlaps[dim].tolist()]
            )
            if dim == 0:  # skip the rows outside the range of `param`
                row = math.prod(shapes[1][1:])
                index = indices[:, 1]
                indices = indices[(index >= param.start // row) & (index < -(-param.stop // row))]
            flat = (flat[:, None] * shape[dim] + indices[None, :, column]).reshape(-1)
        flat = flat[:, None] * shape[divided] + overlaps[divided][None, :, column]
        offsets.append(flat.reshape(-1) * math.prod(shape[divided + 1 :]))
    inner = math.prod(shapes[0][divided + 1 :])
    length = numpy.tile(overlaps[divided][:, 2] * inner, len(offsets[0]) // len(overlaps[divided]))
    ranges = numpy.stack([*offsets, length], 1)
    # Limit the ranges to [param.start, param.stop) and count from param.start.
    low = numpy.maximum(param.start - ranges[:, 1], 0)
    high = numpy.minimum(param.stop - ranges[:, 1], ranges[:, 2])
    kept = high > low
    low, high, ranges = low[kept], high[kept], ranges[kept]
    ranges = numpy.stack([ranges[:, 0] + low, ranges[:, 1] + low - param.start, high - low], 1)
    if len(ranges) < 2:
        return ranges
    # Join ranges that are adjacent in both slices.
    gap = (ranges[1:, :2] != ranges[:-1, :2] + ranges[:-1, 2:]).any(1)
    starts = numpy.flatnonzero(numpy.concatenate([[True], gap]))
    length = numpy.add.reduceat(ranges[:, 2], starts)
    return numpy.stack([ranges[starts, 0], ranges[starts, 1], length], 1)


def _overlap(first: Intervals, second: Intervals) -> ndarray:
    """Return the intersections of the index ranges `first` and `second` of a dim, ascending.

    The result is int64 [n, 3]. Columns: offset in `first`, offset in `second`, length. An offset is
    the number of indices of the preceding ranges.
    """
    ranges, first_offset = [], 0
    for start, stop in first:
        second_offset = 0
        for low, high in second:
            a, b = max(start, low), min(stop, high)
            if a < b:
                ranges.append((first_offset + a - start, second_offset + a - low, b - a))
            second_offset += high - low
        first_offset += stop - start
    return numpy.array(ranges, dtype=numpy.int64).reshape(-1, 3)


def _cut(ranges: ndarray, bounds: ndarray, first_row: int) -> ndarray:
    """Divide ranges of elements so that each range is inside one row. A row is a stored slice.

    Args:
        ranges: int64 [n, 3]: ranges of a box, as `intersect` returns them.
        bounds: int64 [rows, 2]: start and stop of each row of this box, disjoint and ascending.
        first_row: Index, among the rows of all boxes, of the first row in `bounds`.

    Returns:
        int64 [m, 4]. Columns: index of the row, offset in the slice of this row, offset in the
        requested slice, length.
    """
    if not len(bounds):
        return numpy.empty((0, 4), dtype=numpy.int64)
    start, stop = ranges[:, 0], ranges[:, 0] + ranges[:, 2]
    low = numpy.maximum(numpy.searchsorted(bounds[:, 0], start, "right") - 1, 0)
    high = numpy.searchsorted(bounds[:, 0], stop, "left")
    count = numpy.maximum(high - low, 0)
    source = numpy.repeat(numpy.arange(len(ranges)), count)
    nth = numpy.arange(len(source)) - numpy.repeat(numpy.cumsum(count) - count, count)
    row = low[source] + nth
    a = numpy.maximum(start[source], bounds[row, 0])
    b = numpy.minimum(stop[source], bounds[row, 1])
    target = ranges[source, 1] + a - start[source]
    out = numpy.stack([row + first_row, a - bounds[row, 0], target, b - a], 1)
    return out[b > a]
