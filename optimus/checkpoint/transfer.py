"""Between the memory of a rank and shard files: spans written as they lie, spans read by a plan.

Memory is given as bytes, whoever owns it. Needs no torch.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy

from optimus.checkpoint.index import ITEMSIZE, Index, Written
from optimus.checkpoint.pieces import Box, Piece, Span
from optimus.checkpoint.shards import HEADER_BYTES, Identity, ShardReader, ShardWriter, aligned
from optimus.checkpoint.threads import Stop
from optimus.chunks.layout import STATES
from optimus.errors import CheckpointError
from optimus.io import files


class Want(NamedTuple):
    """A state of some pieces of parameters, each with the place of its first element in memory."""

    state: str
    pieces: Sequence[tuple[Piece, int]]
    memory: memoryview


def shard_size(parts: Sequence[tuple[str, Span]]) -> int:
    """Bytes of the file that holds these states of spans."""
    sizes = [aligned((span.stop - span.start) * ITEMSIZE) for _, span in parts]
    return HEADER_BYTES + sum(sizes)


def write_shard(
    directory: Path,
    identity: Identity,
    parts: Sequence[tuple[str, Span]],
    bytes_of: Callable[[str, Span], memoryview],
    stop: Stop | None = None,
    direct: bool = True,
) -> Written:
    """Write the file of one writer, these states of spans, and make it durable; `stop` and `direct`
    as for ShardWriter. Raises OSError, and OptimusError soon after `stop` is set."""
    begins: dict[Span, dict[str, int]] = {}
    with ShardWriter(directory, identity, shard_size(parts), stop, direct) as file:
        for state, span in parts:
            begins.setdefault(span, {})[state] = file.write(bytes_of(state, span))
        shard = file.finish()
    boxes: dict[tuple[str, Box], int] = {}
    rows: list[tuple[int, ...]] = []
    for span, of_state in begins.items():
        for (name, box, start, end), at in span.pieces:
            offsets = (of_state[s] + at * ITEMSIZE if s in of_state else -1 for s in STATES)
            rows.append((boxes.setdefault((name, box), len(boxes)), start, end, *offsets))
    return Written(shard, list(boxes), rows)


class Readers(files.Closing):
    """The shard files of a checkpoint, of which the last `limit` stay open, with the block that
    was not read in whole: whoever wants one thing after the other reads it once."""

    def __init__(self, directory: Path, index: Index, limit: int) -> None:
        self._directory, self._index, self._limit = directory, index, limit
        self._open: dict[int, ShardReader] = {}
        """The last used last."""

    def read(self, wants: Sequence[Want]) -> None:
        """Fill the memory of every want; a file that holds some of them is opened once, and a block
        of it read once. Raises CheckpointError naming the file that is damaged or what is
        missing."""
        try:
            runs = plan_reads(self._index, wants)
        except CheckpointError as error:
            raise CheckpointError(f"{self._directory}: {error}") from None
        limits = [*numpy.flatnonzero(numpy.diff(runs[:, 0], prepend=-1)), len(runs)]
        targets = [want.memory for want in wants]
        for low, high in itertools.pairwise(limits):
            self._file(int(runs[low, 0])).read(runs[low:high, 1:], targets)

    def _file(self, number: int) -> ShardReader:
        file = self._open.pop(number, None)
        if file is None:
            while len(self._open) >= self._limit:
                self._open.pop(next(iter(self._open))).close()
            file = self._index.open(self._directory, number)
        self._open[number] = file
        return file

    def close(self) -> None:
        while self._open:
            self._open.popitem()[1].close()


def plan_reads(index: Index, wants: Sequence[Want]) -> numpy.ndarray:
    """int64 [n, 5]: shard, offset in its file, number of the want, offset in its memory, length; in
    bytes, by shard and offset. Raises CheckpointError if the index does not lead to everything."""
    stored = {name: index.stored(name) for name in {p.name for w in wants for p, _ in w.pieces}}
    known: dict[Piece, numpy.ndarray] = {}
    found = [numpy.empty((0, 5), dtype=numpy.int64)]
    for number, want in enumerate(wants):
        state = STATES.index(want.state)
        for piece, at in want.pieces:
            if piece not in known:
                known[piece] = stored[piece.name].element_runs(piece)
            runs = stored[piece.name].byte_runs(known[piece], state, ITEMSIZE)
            runs[:, 2] += at * ITEMSIZE
            found.append(numpy.insert(runs, 2, number, axis=1))
    every = numpy.concatenate(found)
    return every[numpy.lexsort((every[:, 1], every[:, 0]))]
