"""The index of a full checkpoint: its shard files with their hashes, and where each parameter lies.

Lines of JSON: the first tells of files and shapes, every other where the pieces of one parameter
lie, so that a rank parses only those lines that it wants. The hash of the whole stands in the
manifest. Needs no torch.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy

from optimus.checkpoint.pieces import Box, Piece
from optimus.checkpoint.reshard import Stored
from optimus.checkpoint.shards import BLOCK_BYTES, Identity, ShardFile, ShardReader
from optimus.chunks.layout import STATES
from optimus.errors import CheckpointError, one_line

INDEX = "index.jsonl"
DTYPE = "float32"
ITEMSIZE = 4
_ROW = f"[{','.join(['%d'] * (4 + len(STATES)))}]"


class Written(NamedTuple):
    """What one writer put where."""

    shard: ShardFile
    pieces: list[tuple[Piece, tuple[int, ...]]]
    """Each with the byte where each of STATES begins, -1 where it has none."""


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
        raw = json.loads(self.lines[name])
        boxes = tuple(tuple(tuple((a, b) for a, b in dim) for dim in box) for box in raw["boxes"])
        rows = numpy.array(raw["rows"], dtype=numpy.int64).reshape(-1, 4 + len(STATES))
        return Stored(name, boxes, rows)

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
        for (name, box, start, stop), offsets in one.pieces:
            known = boxes.setdefault(name, {})
            at = known.setdefault(box, len(known))
            # As text, of which the collector of garbage has nothing to follow: there are 400,000.
            row = _ROW % (number, at, start, stop, *offsets)
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
        return Index(raw["generation"], raw["step"], raw["block_bytes"], shards, shapes, by_name)
    except (ValueError, KeyError, TypeError, IndexError) as error:
        raise CheckpointError(f"{INDEX}: not readable: {one_line(error)}") from None
