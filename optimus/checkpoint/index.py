"""The file `index.jsonl` of a full checkpoint.

The file contains the hashes of the shard files' blocks and, for each parameter, the positions of
its elements in the shard files (optimus/checkpoint/shard_file.py). The first line lists the shard
files, the hashes of their blocks and the shapes of the parameters. Each other line describes one
parameter, so that a rank parses only the lines of the parameters that it loads. This module does
not import torch.
"""

from __future__ import annotations

import fnmatch
import functools
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import numpy

from optimus.checkpoint.shard_file import (
    ALIGNED_BYTES,
    BLOCK_BYTES,
    HASH_CHARS,
    HEADER_BYTES,
    Identity,
    ShardFile,
    ShardReader,
)
from optimus.checkpoint.slices import Box, StoredParam
from optimus.chunks.layout import ALIGNMENT
from optimus.errors import CheckpointError, one_line

INDEX = "index.jsonl"
DTYPE = "float32"
ITEMSIZE = 4
ADAMW_STATES = ("master", "exp_avg", "exp_avg_sq")
KNOWN_STATES: tuple[tuple[str, ...], ...] = (ADAMW_STATES,)
"""Names of the states that are saved for each parameter. There is one tuple for each supported
optimizer: the master weight first, then the moments. The columns of the index have the order of the
tuple."""
_MOST = 1 << 56
"""Exclusive upper limit of each number of elements or bytes in an index. An int64 can still
represent eight times this limit."""
_MOST_BLOCK_BYTES = 64 << 20
"""Maximum size, in bytes, of the blocks of a shard file. This limit bounds the memory that a reader
allocates. Saves write blocks of 4 MiB."""
_INTEGERS = re.compile("[-0-9,]+")
_MOST_DIMS, _MOST_CELLS, _MOST_NAME_CHARS = 8, 1 << 24, 500
_UNREADABLE = (ValueError, KeyError, TypeError, IndexError, RecursionError, OverflowError)


class ShardReport(NamedTuple):
    """Description of a shard file for the index. The rank that wrote the file sends this
    description to rank 0."""

    shard: ShardFile
    boxes: list[tuple[str, Box]]
    """(name, box) pairs of the parameters in the file, without duplicates. A box is the set of a
    parameter's elements that a rank has, as index ranges for each dim."""
    rows: list[tuple[int, ...]]
    """A row for each slice of a parameter: index of its (name, box) pair in `boxes`, start and stop
    in the flattened box, and for each state the byte offset in the file (-1: not stored)."""


@dataclass(frozen=True)
class Index:
    """The content of the index of a full checkpoint.

    The lines of the parameters are kept as text. `stored(name)` parses the line of the
    parameter `name`.
    """

    generation: str
    step: int
    block_bytes: int
    states: tuple[str, ...]
    """Names of the saved states; one of the tuples in KNOWN_STATES."""
    shards: tuple[ShardFile, ...]
    shapes: Mapping[str, tuple[int, ...]]
    """Shapes of the whole parameters, by name."""
    lines: Mapping[str, str]
    """The unparsed line of each parameter, by name of the parameter."""

    def stored(self, name: str) -> StoredParam:
        """Return the positions at which the elements of parameter `name` are stored.

        Raises:
            CheckpointError: The checkpoint does not have the parameter, or its line is invalid.
        """
        if name not in self.lines:
            raise CheckpointError(f"the checkpoint has no parameter {name}")
        try:
            table, _, text = self.lines[name].rpartition('"rows":')
            raw = json.loads(table.rstrip(", ") + "}", parse_float=_refuse_float)
            boxes = tuple(
                tuple(tuple((a, b) for a, b in dim) for dim in box) for box in raw["boxes"]
            )
            sizes = _box_sizes(boxes, self.shapes[name])
            rows = _parse_rows(text, 4 + len(self.states))
            self._check_rows(rows, sizes)
        except _UNREADABLE as error:
            raise CheckpointError(f"{INDEX}: parameter {name}: {one_line(error)}") from None
        # The rows, sorted by box and start, must contain every element of every box once.
        stops = numpy.cumsum(sizes)
        offsets = (stops - sizes)[rows[:, 1]]
        start, stop = offsets + rows[:, 2], offsets + rows[:, 3]
        if start[0] != 0 or (start[1:] != stop[:-1]).any() or stop[-1] != stops[-1]:
            raise CheckpointError(
                f"the index does not locate every element of parameter {name} exactly once"
            )
        return StoredParam(name, boxes, rows)

    def _check_rows(self, rows: numpy.ndarray, box_sizes: numpy.ndarray) -> None:
        """Raise ValueError if the index rows of a parameter contain a value that `encode` never
        writes. `box_sizes` are the numbers of elements of the parameter's boxes."""
        shard, box, start, stop = rows[:, :4].T
        for kind, number, count in (("shard file", shard, len(self.shards)),
                                    ("box", box, len(box_sizes))):  # fmt: skip
            if number.min() < 0 or number.max() >= count:
                raise ValueError(f"a row has a {kind} number outside 0 to {count - 1}")
        if start.min() < 0 or (start >= stop).any() or (stop > box_sizes[box]).any():
            raise ValueError("a row is not a range of elements inside its box")
        offsets = rows[:, 4:]
        last = self._shard_sizes[shard] - (stop - start) * ITEMSIZE
        right = (offsets >= HEADER_BYTES) & (offsets <= last[:, None])
        if not (right | (offsets == -1)).all():
            raise ValueError("a row refers to bytes outside its shard file")
        if (offsets[offsets >= 0] % ALIGNED_BYTES).any():
            raise ValueError(f"a row begins at a byte that is not a multiple of {ALIGNED_BYTES}")
        # A frozen parameter has master weights, but no moments.
        if (offsets[:, 0] < 0).any() or (
            (offsets[:, 1:] < 0).any(1) & (offsets[:, 1:] >= 0).any(1)
        ).any():
            raise ValueError(
                f"a row needs the offset of {self.states[0]}, and all or none of the offsets of "
                f"{', '.join(self.states[1:])}"
            )
        full = offsets[(offsets >= 0).all(1)]
        if (full[:, 1:] <= full[:, :-1]).any():  # a writer writes state by state
            raise ValueError(f"the states of a row are not in the order {', '.join(self.states)}")

    @functools.cached_property
    def _shard_sizes(self) -> numpy.ndarray:
        return numpy.array([shard.size for shard in self.shards], dtype=numpy.int64)

    def check_rows(self, frozen: Sequence[str] = ()) -> None:
        """Check three conditions on the index rows of all parameters.

        A row contains the positions of the states of one parameter slice in a shard file.

        - The rows of a parameter cover all its elements and states. Only parameters that match a
          pattern of `frozen` can lack moments.
        - Each byte of the shard files, except headers and padding, belongs to exactly one row.
        - The distances in bytes between the states of a row are the same for neighboring rows of a
          shard file.

        Args:
            frozen: `optim.frozen` of the run.

        Raises:
            CheckpointError: A row is invalid, or one of the conditions is not met.
        """
        matchers = [re.compile(fnmatch.translate(pattern)).match for pattern in frozen]
        rows_of_params = [numpy.empty((0, 4 + len(self.states)), dtype=numpy.int64)]
        for name in self.lines:
            rows = self.stored(name).rows
            is_partial = (rows[:, 4:] < 0).any()
            if is_partial and not any(match(name) for match in matchers):
                raise CheckpointError(f"{INDEX}: parameter {name} lacks some of its states")
            rows_of_params.append(rows)
        rows = numpy.concatenate(rows_of_params)
        length = (rows[:, 3] - rows[:, 2]) * ITEMSIZE
        # Shard, start and stop of the headers, of all states, and of the ends of the files.
        numbers = numpy.arange(len(self.shards))
        ranges = [
            numpy.stack([numbers, 0 * numbers, 0 * numbers + HEADER_BYTES], 1),
            numpy.stack([numbers, self._shard_sizes, self._shard_sizes], 1),
        ]
        for offset in rows[:, 4:].T:
            ranges.append(numpy.stack([rows[:, 0], offset, offset + length], 1)[offset >= 0])
        all_ranges = numpy.concatenate(ranges)
        shard, start, stop = all_ranges[numpy.lexsort((all_ranges[:, 1], all_ranges[:, 0]))].T
        gap = (start[1:] - stop[:-1])[shard[1:] == shard[:-1]]
        if (gap < 0).any():
            raise CheckpointError(f"{INDEX}: two rows refer to the same bytes of a shard file")
        if (gap >= ALIGNMENT * ITEMSIZE).any():
            raise CheckpointError(f"{INDEX}: a shard file has bytes to which no row refers")
        # The row of a frozen parameter has only the master weights. Because of such a row,
        # neighboring rows may differ in the distance from master weights to first moments, but not
        # in the distances between moments.
        rows = rows[numpy.lexsort((rows[:, 4], rows[:, 0]))]
        is_full = rows[:, -1] >= 0
        compared = (rows[1:, 0] == rows[:-1, 0]) & is_full[1:] & is_full[:-1]
        differs = (numpy.diff(rows[1:, 4:6]) != numpy.diff(rows[:-1, 4:6])).any(1)
        full = rows[is_full]
        distances, same_shard = numpy.diff(full[:, 5:]), full[1:, 0] == full[:-1, 0]
        wrong = numpy.concatenate(
            [distances[1:] != distances[:-1], full[1:, 5:] <= full[:-1, 5:]], axis=1
        )
        if differs[compared].any() or wrong[same_shard].any():
            raise CheckpointError(
                f"{INDEX}: two consecutive rows have different distances between their states"
            )

    def open(self, directory: Path, number: int) -> ShardReader:
        """Open the shard file `shards[number]` in `directory`. Raises CheckpointError if the file
        does not exist or does not have the size and header in the index."""
        shard = self.shards[number]
        identity = Identity(self.generation, self.step, shard.writer)
        return ShardReader(directory, identity, shard, self.block_bytes)


def encode(
    generation: str,
    step: int,
    states: Sequence[str],
    reports: Sequence[ShardReport],
    shapes: Mapping[str, Sequence[int]],
) -> bytes:
    """Return the content of a checkpoint's index file.

    Args:
        generation: Random name of the save.
        step: Number of completed updates.
        states: Names of the saved states: one of the tuples in KNOWN_STATES.
        reports: Reports of all ranks that wrote a shard file.
        shapes: Maps the name of each parameter to the shape of the whole parameter.
    """
    head = {
        "generation": generation,
        "step": step,
        "block_bytes": BLOCK_BYTES,
        "states": states,
        "dtype": DTYPE,
        "shards": [list(report.shard) for report in reports],
    }
    row_format = f"[{','.join(['%d'] * (4 + len(states)))}]"
    rows: dict[str, list[tuple[int, int, str]]] = {}
    boxes: dict[str, dict[Box, int]] = {}
    for number, report in enumerate(reports):
        numbered = []
        for name, box in report.boxes:
            known = boxes.setdefault(name, {})
            numbered.append((name, known.setdefault(box, len(known))))
        for in_boxes, start, *rest in report.rows:
            name, box_number = numbered[in_boxes]
            # Rows are stored as text, because the garbage collector skips strings but would
            # traverse 400,000 tuples.
            row = row_format % (number, box_number, start, *rest)
            rows.setdefault(name, []).append((box_number, start, row))
    lines = [json.dumps(head | {"shapes": {name: list(shapes[name]) for name in rows}})]
    for name, of_param in rows.items():
        table = json.dumps({"name": name, "boxes": list(boxes[name])}, separators=(",", ":"))
        lines.append(f'{table[:-1]},"rows":[{",".join(row for *_, row in sorted(of_param))}]}}')
    return "\n".join([*lines, ""]).encode()


def decode(data: bytes) -> Index:
    """Parse the content of an index file, whose hash the caller has checked.

    Raises:
        CheckpointError: The content is invalid.
    """
    try:
        head, *lines = data.decode().splitlines()
        raw = json.loads(head)
        if raw["states"] not in map(list, KNOWN_STATES) or raw["dtype"] != DTYPE:
            raise CheckpointError(
                f"this version cannot read the states {raw['states']} of dtype {raw['dtype']}"
            )
        by_name = {line.split('"', 4)[3]: line for line in lines}
        shards = tuple(ShardFile(*fields) for fields in raw["shards"])
        shapes = {name: tuple(shape) for name, shape in raw["shapes"].items()}
        _check_head(raw, shards, shapes)
        if by_name.keys() != shapes.keys() or len(lines) != len(shapes):
            raise ValueError('the file must have exactly one line for each parameter in "shapes"')
        sizes = raw["step"], raw["block_bytes"]
        return Index(raw["generation"], *sizes, tuple(raw["states"]), shards, shapes, by_name)
    except (*_UNREADABLE, AttributeError) as error:
        raise CheckpointError(f"{INDEX}: not readable: {one_line(error)}") from None


def _check_head(
    raw: Mapping[str, Any], shards: Sequence[ShardFile], shapes: Mapping[str, tuple[int, ...]]
) -> None:
    """Check the types and ranges of the values in the first line of an index. Raises ValueError or
    TypeError."""
    block_bytes, generation = raw["block_bytes"], raw["generation"]
    if not _is_count(block_bytes, 1, _MOST_BLOCK_BYTES) or not _is_count(raw["step"]):
        raise ValueError(f"invalid block_bytes = {block_bytes!r:.40} or step = {raw['step']!r:.40}")
    if type(generation) is not str or len(generation) > 100:
        raise ValueError(f"invalid generation = {generation!r:.40}")
    for writer, size, hashes in shards:
        if not (_is_count(writer) and _is_count(size, HEADER_BYTES) and type(hashes) is str):
            raise ValueError(f"invalid writer = {writer!r:.40}, size = {size!r:.40} or hashes")
        if len(hashes) != -(-size // block_bytes) * HASH_CHARS:
            raise ValueError(f"wrong number of hashes of shard file {writer} with {size} bytes")
    if len({shard.writer for shard in shards}) != len(shards):
        raise ValueError("a shard file is listed twice")
    for name, shape in shapes.items():
        sizes = 0 < len(shape) <= _MOST_DIMS and all(_is_count(size, 1) for size in shape)
        if not sizes or math.prod(shape) >= _MOST or len(name) > _MOST_NAME_CHARS:
            raise ValueError(f"invalid shape of {name:.200} = {list(shape)!r:.80}")


def _parse_rows(text: str, columns: int) -> numpy.ndarray:
    """Parse `text`, the JSON list of rows at the end of an index line. Return int64 [n, columns].
    Raises ValueError.

    The json module would be slower, because it creates an object for every number: parsing and
    checking a whole index with this function takes 0.8 times as long as with the json module.
    """
    text = text.replace(" ", "")
    numbers = text[2:-3].replace("],[", ",")
    if text[:2] == "[[" and text[-3:] == "]]}" and _INTEGERS.fullmatch(numbers):
        # fromstring stops at anything except an integer, and clamps larger integers to int64.
        parsed = numpy.fromstring(numbers, dtype=numpy.int64, sep=",")
        if len(parsed) == (text.count("],[") + 1) * columns:
            return parsed.reshape(-1, columns)
    raise ValueError(f"rows are not lists of {columns} integers")


def _refuse_float(text: str) -> NoReturn:
    raise ValueError(f"{text} is not an integer")


def _is_count(value: object, least: int = 0, most: int = _MOST - 1) -> bool:
    return type(value) is int and least <= value <= most


@functools.lru_cache(256)
def _box_sizes(boxes: tuple[Box, ...], shape: tuple[int, ...]) -> numpy.ndarray:
    """Return the number of elements of each box, int64 [boxes]. Raises ValueError if an element of
    a parameter with the given `shape` is in no box or in several boxes."""
    for box in boxes:
        if len(box) != len(shape):
            raise ValueError(f"a box has {len(box)} dims, but the parameter has {len(shape)}")
        for dim, size in zip(box, shape, strict=True):
            ends = [end for interval in dim for end in interval]
            if not ends or not all(type(end) is int for end in ends):
                raise ValueError("a box is not made of ranges of integers")
            steps = zip([0, *ends], [*ends, size], strict=True)
            if not all(low < high if n % 2 else low <= high for n, (low, high) in enumerate(steps)):
                raise ValueError("a box is not inside the shape of the parameter")
    sizes = [math.prod(sum(b - a for a, b in dim) for dim in box) for box in boxes]
    if sum(sizes) != math.prod(shape) or (len(boxes) > 1 and _overlap(boxes, shape)):
        raise ValueError("the boxes do not contain every element exactly once")
    return numpy.array(sizes, dtype=numpy.int64)


def _overlap(boxes: Sequence[Box], shape: Sequence[int]) -> bool:
    """Return True if two of the boxes have an element in common. Raises ValueError if the boxes
    have more boundaries than any layout of a run produces."""
    cuts = [
        sorted({0, size, *(end for box in boxes for interval in box[dim] for end in interval)})
        for dim, size in enumerate(shape)
    ]
    if math.prod(map(len, cuts)) > _MOST_CELLS:
        raise ValueError("the boxes have more boundaries than any layout produces")
    number = [{cut: n for n, cut in enumerate(dim)} for dim in cuts]
    covered = numpy.zeros([len(dim) - 1 for dim in cuts], dtype=bool)
    for box in boxes:
        cells = numpy.ix_(
            *(
                numpy.concatenate([numpy.arange(at[a], at[b]) for a, b in dim])
                for at, dim in zip(number, box, strict=True)
            )
        )
        if covered[cells].any():
            return True
        covered[cells] = True
    return False
