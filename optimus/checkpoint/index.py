"""The index of a full checkpoint: its shard files with their hashes, and where each parameter lies.

Lines of JSON: the first tells of files and shapes, every other where the pieces of one parameter
lie, so that a rank parses only those lines that it wants. The hash of the whole stands in the
manifest. Needs no torch.
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

from optimus.checkpoint.pieces import Box
from optimus.checkpoint.reshard import Stored
from optimus.checkpoint.shards import (
    ALIGNED_BYTES,
    BLOCK_BYTES,
    HASH_CHARS,
    HEADER_BYTES,
    Identity,
    ShardFile,
    ShardReader,
)
from optimus.chunks.layout import ALIGNMENT, STATES
from optimus.errors import CheckpointError, one_line

INDEX = "index.jsonl"
DTYPE = "float32"
ITEMSIZE = 4
_COLUMNS = 4 + len(STATES)
_ROW = f"[{','.join(['%d'] * _COLUMNS)}]"
_MOST = 1 << 56
"""Elements or bytes, of which int64 can count the bits."""
_MOST_BLOCK_BYTES = 64 << 20
"""Memory that a reader takes for a block; those written now have 4 MiB."""
_INTEGERS = re.compile("[-0-9,]+")
_MOST_DIMS, _MOST_CELLS, _MOST_NAME_CHARS = 8, 1 << 24, 500
_UNREADABLE = (ValueError, KeyError, TypeError, IndexError, RecursionError, OverflowError)


class Written(NamedTuple):
    """What one writer put where, in a form that is short as JSON."""

    shard: ShardFile
    boxes: list[tuple[str, Box]]
    """Parameters and their boxes, each once."""
    rows: list[tuple[int, ...]]
    """A row for each piece: its index in `boxes`, its start and stop, and the byte where each of
    STATES begins, -1 where it has none."""


@dataclass(frozen=True)
class Index:
    """A checkpoint's index. `lines` are parsed when their parameter is asked for."""

    generation: str
    step: int
    block_bytes: int
    shards: tuple[ShardFile, ...]
    shapes: Mapping[str, tuple[int, ...]]
    """Of the whole parameters, by name."""
    lines: Mapping[str, str]

    def stored(self, name: str) -> Stored:
        """Where a parameter lies; CheckpointError if the checkpoint has none of that name."""
        if name not in self.lines:
            raise CheckpointError(f"the checkpoint has no parameter {name}")
        try:
            table, _, text = self.lines[name].rpartition('"rows":')
            raw = json.loads(table.rstrip(", ") + "}", parse_float=_refuse_float)
            boxes = tuple(
                tuple(tuple((a, b) for a, b in dim) for dim in box) for box in raw["boxes"]
            )
            sizes, rows = _box_sizes(boxes, self.shapes[name]), _parse_rows(text)
            self._check_rows(rows, sizes)
        except _UNREADABLE as error:
            raise CheckpointError(f"{INDEX}: parameter {name}: {one_line(error)}") from None
        if not _covers(rows, sizes):
            raise CheckpointError(
                f"the index holds only a part of parameter {name}, or a part of it twice"
            )
        return Stored(name, boxes, rows)

    def _check_rows(self, rows: numpy.ndarray, box_sizes: numpy.ndarray) -> None:
        """Check that the rows of a parameter have the ranges that `encode` gives them. Raises
        ValueError."""
        shard, box, start, stop = rows[:, :4].T
        for what, number, count in (("shard file", shard, len(self.shards)),
                                    ("box", box, len(box_sizes))):  # fmt: skip
            if number.min() < 0 or number.max() >= count:
                raise ValueError(f"a row names another {what} than 0 to {count - 1}")
        if start.min() < 0 or (start >= stop).any() or (stop > box_sizes[box]).any():
            raise ValueError("a row leads out of its box")
        offsets = rows[:, 4:]
        last = self._shard_sizes[shard] - (stop - start) * ITEMSIZE
        right = (offsets >= HEADER_BYTES) & (offsets <= last[:, None])
        if not (right | (offsets == -1)).all():
            raise ValueError("a row leads out of its shard file")
        if (offsets[offsets >= 0] % ALIGNED_BYTES).any():
            raise ValueError(f"a row begins at a byte that is no multiple of {ALIGNED_BYTES}")
        # A frozen parameter has a master alone.
        if (offsets[:, 0] < 0).any() or (
            (offsets[:, 1:] < 0).any(1) & (offsets[:, 1:] >= 0).any(1)
        ).any():
            raise ValueError(f"a row without some of {', '.join(STATES)}")
        full = offsets[offsets[:, 1] >= 0]
        if (full[:, 1:] <= full[:, :-1]).any():  # a writer writes state by state
            raise ValueError(f"a row whose states are not in the order {', '.join(STATES)}")

    @functools.cached_property
    def _shard_sizes(self) -> numpy.ndarray:
        return numpy.array([shard.size for shard in self.shards], dtype=numpy.int64)

    def check_rows(self, frozen: Sequence[str] = ()) -> None:
        """Check the rows of all parameters against each other.

        Every parameter is stored completely, with all states unless a pattern of `frozen` matches
        its name. The rows are where `write_shard` places them: they do not overlap, they leave out
        only the padding of the shard files, and the states of neighboring rows are equally far
        apart. Raises CheckpointError.
        """
        matchers = [re.compile(fnmatch.translate(pattern)).match for pattern in frozen]
        found = [numpy.empty((0, _COLUMNS), dtype=numpy.int64)]
        for name in self.lines:
            rows = self.stored(name).rows
            is_partial = (rows[:, 4:] < 0).any()
            if is_partial and not any(match(name) for match in matchers):
                raise CheckpointError(f"{INDEX}: parameter {name} has not all of its states")
            found.append(rows)
        rows = numpy.concatenate(found)
        length = (rows[:, 3] - rows[:, 2]) * ITEMSIZE
        # Shard, start and stop of the headers, of all states, and of the ends of the files.
        files = numpy.arange(len(self.shards))
        ranges = [
            numpy.stack([files, 0 * files, 0 * files + HEADER_BYTES], 1),
            numpy.stack([files, self._shard_sizes, self._shard_sizes], 1),
        ]
        for offset in rows[:, 4:].T:
            ranges.append(numpy.stack([rows[:, 0], offset, offset + length], 1)[offset >= 0])
        every = numpy.concatenate(ranges)
        shard, start, stop = every[numpy.lexsort((every[:, 1], every[:, 0]))].T
        gap = (start[1:] - stop[:-1])[shard[1:] == shard[:-1]]
        if (gap < 0).any():
            raise CheckpointError(f"{INDEX}: two rows lead to the same bytes of a shard file")
        if (gap >= ALIGNMENT * ITEMSIZE).any():
            raise CheckpointError(f"{INDEX}: a shard file has bytes to which no row leads")
        # Frozen rows have a master alone. They change the distance from the masters to exp_avg,
        # but not that from exp_avg to exp_avg_sq.
        rows = rows[numpy.lexsort((rows[:, 4], rows[:, 0]))]
        is_frozen = rows[:, 5] < 0
        compared = (rows[1:, 0] == rows[:-1, 0]) & ~is_frozen[1:] & ~is_frozen[:-1]
        differs = rows[1:, 5] - rows[1:, 4] != rows[:-1, 5] - rows[:-1, 4]
        full = rows[~is_frozen]
        distance, same_shard = full[:, 6] - full[:, 5], full[1:, 0] == full[:-1, 0]
        wrong = (distance[1:] != distance[:-1]) | (full[1:, 5] <= full[:-1, 5])
        if (differs & compared).any() or (wrong & same_shard).any():
            raise CheckpointError(
                f"{INDEX}: the states of two neighboring rows are not equally far apart"
            )

    def open(self, directory: Path, number: int) -> ShardReader:
        """Shard file `number` of `shards`; CheckpointError if it is not as this index says."""
        shard = self.shards[number]
        identity = Identity(self.generation, self.step, shard.writer)
        return ShardReader(directory, identity, shard, self.block_bytes)

    def verify(self, directory: Path, number: int, blocks: range) -> None:
        """Compare blocks of shard file `number` with their hashes; raises CheckpointError."""
        with self.open(directory, number) as file:
            file.verify(blocks)


def encode(
    generation: str, step: int, writers: Sequence[Written], shapes: Mapping[str, Sequence[int]]
) -> bytes:
    """The index of what `writers` wrote of parameters of these whole `shapes`."""
    head = {
        "generation": generation,
        "step": step,
        "block_bytes": BLOCK_BYTES,
        "states": STATES,
        "dtype": DTYPE,
        "shards": [list(one.shard) for one in writers],
    }
    rows: dict[str, list[tuple[int, int, str]]] = {}
    boxes: dict[str, dict[Box, int]] = {}
    for number, one in enumerate(writers):
        numbered = []
        for name, box in one.boxes:
            known = boxes.setdefault(name, {})
            numbered.append((name, known.setdefault(box, len(known))))
        for in_boxes, start, *rest in one.rows:
            name, at = numbered[in_boxes]
            # As text, of which the collector of garbage has nothing to follow: there are 400,000.
            row = _ROW % (number, at, start, *rest)
            rows.setdefault(name, []).append((at, start, row))
    lines = [json.dumps(head | {"shapes": {name: list(shapes[name]) for name in rows}})]
    for name, found in rows.items():
        table = json.dumps({"name": name, "boxes": list(boxes[name])}, separators=(",", ":"))
        lines.append(f'{table[:-1]},"rows":[{",".join(row for *_, row in sorted(found))}]}}')
    return "\n".join([*lines, ""]).encode()


def decode(data: bytes) -> Index:
    """What `encode` made, from bytes whose hash has been compared. Raises CheckpointError."""
    try:
        head, *lines = data.decode().splitlines()
        raw = json.loads(head)
        if (raw["states"], raw["dtype"]) != (list(STATES), DTYPE):
            raise CheckpointError(f"states {raw['states']} of {raw['dtype']} are unknown here")
        by_name = {line.split('"', 4)[3]: line for line in lines}
        shards = tuple(ShardFile(*one) for one in raw["shards"])
        shapes = {name: tuple(shape) for name, shape in raw["shapes"].items()}
        _check_head(raw, shards, shapes)
        if by_name.keys() != shapes.keys() or len(lines) != len(shapes):
            raise ValueError("its lines are not one for each shape")
        return Index(raw["generation"], raw["step"], raw["block_bytes"], shards, shapes, by_name)
    except (*_UNREADABLE, AttributeError) as error:
        raise CheckpointError(f"{INDEX}: not readable: {one_line(error)}") from None


def _check_head(
    raw: Mapping[str, Any], shards: Sequence[ShardFile], shapes: Mapping[str, tuple[int, ...]]
) -> None:
    """Check the types and ranges of an index's first line. Raises ValueError and TypeError."""
    block_bytes, generation = raw["block_bytes"], raw["generation"]
    if not _is_count(block_bytes, 1, _MOST_BLOCK_BYTES) or not _is_count(raw["step"]):
        raise ValueError(f"block_bytes = {block_bytes!r:.40}, step = {raw['step']!r:.40}")
    if type(generation) is not str or len(generation) > 100:
        raise ValueError(f"generation = {generation!r:.40}")
    for writer, size, hashes in shards:
        if not (_is_count(writer) and _is_count(size, HEADER_BYTES) and type(hashes) is str):
            raise ValueError(f"shard file of writer {writer!r:.40} and size {size!r:.40}")
        if len(hashes) != -(-size // block_bytes) * HASH_CHARS:
            raise ValueError(f"hashes of shard file {writer} are not those of {size} bytes")
    if len({shard.writer for shard in shards}) != len(shards):
        raise ValueError("a shard file is listed twice")
    for name, shape in shapes.items():
        sizes = 0 < len(shape) <= _MOST_DIMS and all(_is_count(size, 1) for size in shape)
        if not sizes or math.prod(shape) >= _MOST or len(name) > _MOST_NAME_CHARS:
            raise ValueError(f"shape of {name:.200} = {list(shape)!r:.80}")


def _parse_rows(text: str) -> numpy.ndarray:
    """Return the rows in the rest of a line, int64 [n, _COLUMNS]. Raises ValueError.

    The json module would make an object of every number: with all checks this takes 0.8 of its
    time for a whole index.
    """
    text = text.replace(" ", "")
    numbers = text[2:-3].replace("],[", ",")
    if text[:2] == "[[" and text[-3:] == "]]}" and _INTEGERS.fullmatch(numbers):
        # It ends at what is no integer, and gives the largest for one that int64 cannot hold.
        found = numpy.fromstring(numbers, dtype=numpy.int64, sep=",")
        if len(found) == (text.count("],[") + 1) * _COLUMNS:
            return found.reshape(-1, _COLUMNS)
    raise ValueError(f"rows are not lists of {_COLUMNS} integers")


def _refuse_float(text: str) -> NoReturn:
    raise ValueError(f"{text} is no integer")


def _is_count(value: object, least: int = 0, most: int = _MOST - 1) -> bool:
    return type(value) is int and least <= value <= most


@functools.lru_cache(256)
def _box_sizes(boxes: tuple[Box, ...], shape: tuple[int, ...]) -> numpy.ndarray:
    """Return the elements of each box, int64 [boxes]. Raises ValueError unless the boxes are all of
    a parameter of this shape, each element in one."""
    for box in boxes:
        if len(box) != len(shape):
            raise ValueError(f"a box of {len(box)} dims, where the shape has {len(shape)}")
        for dim, size in zip(box, shape, strict=True):
            ends = [end for interval in dim for end in interval]
            if not ends or not all(type(end) is int for end in ends):
                raise ValueError("a box is not made of ranges of integers")
            steps = zip([0, *ends], [*ends, size], strict=True)
            if not all(low < high if n % 2 else low <= high for n, (low, high) in enumerate(steps)):
                raise ValueError("a box leads out of the parameter")
    sizes = [math.prod(sum(b - a for a, b in dim) for dim in box) for box in boxes]
    if sum(sizes) != math.prod(shape) or (len(boxes) > 1 and _overlap(boxes, shape)):
        raise ValueError("its boxes leave out elements or hold some twice")
    return numpy.array(sizes, dtype=numpy.int64)


def _overlap(boxes: Sequence[Box], shape: Sequence[int]) -> bool:
    """Return whether two boxes have an element in common. Raises ValueError for boxes that are cut
    at more places than any layout does."""
    cuts = [
        sorted({0, size, *(end for box in boxes for interval in box[dim] for end in interval)})
        for dim, size in enumerate(shape)
    ]
    if math.prod(map(len, cuts)) > _MOST_CELLS:
        raise ValueError("its boxes are cut at too many places")
    number = [{cut: n for n, cut in enumerate(dim)} for dim in cuts]
    taken = numpy.zeros([len(dim) - 1 for dim in cuts], dtype=bool)
    for box in boxes:
        cells = numpy.ix_(
            *(
                numpy.concatenate([numpy.arange(at[a], at[b]) for a, b in dim])
                for at, dim in zip(number, box, strict=True)
            )
        )
        if taken[cells].any():
            return True
        taken[cells] = True
    return False


def _covers(rows: numpy.ndarray, box_sizes: numpy.ndarray) -> bool:
    """Return whether rows, by box and start, hold every element of every box once."""
    stops = numpy.cumsum(box_sizes)
    begins = (stops - box_sizes)[rows[:, 1]]
    start, stop = begins + rows[:, 2], begins + rows[:, 3]
    return bool(start[0] == 0 and (start[1:] == stop[:-1]).all() and stop[-1] == stops[-1])
