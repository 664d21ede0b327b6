"""Instances collected from token arrays in a given order, in bounded memory.

Legend: R rows asked for, C context, U units. There are two strategies, which give the same bytes.
`gather` reads random rows. `bucket` writes sorted runs first, so that all reads are long: a shard
needs one piece of each run (docs/formats/dataset.md, "Strategies").

OUT/spill/ORDER-ROWS-2/unit-00000.npy         run 0: [ROWS * C] tokens; there only when complete
OUT/spill/ORDER-ROWS-2/unit-00000.pieces.npy  its pieces: int64 [shards + 1, 2], the first row and
xxh3 of each, compared when a shard has read all of it
"""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import xxhash

from data_prep import layout
from data_prep.layout import HEADER_BYTES, little_endian
from data_prep.runtime.memory import usable_memory
from data_prep.runtime.pool import run_jobs
from data_prep.runtime.progress import Progress
from data_prep.runtime.ranks import Team
from data_prep.shuffle.blend import BlendOrder
from data_prep.shuffle.order import Order
from data_prep.tokenize.store import TokenArrayReader, array_path
from optimus.errors import DamageError
from optimus.io import files

INDEX_BYTES = 80
"""Memory of a row beside its tokens: ten 8-byte temporaries of `Gatherer.rows`."""

_DENSE = 4
"""Where wanted rows are at least a quarter of a stretch, the stretch is read whole: one sequential
read costs less than the random reads it replaces."""


class Gatherer:
    """Gives rows of source instances, until closed; not for two threads."""

    def __init__(self, dataset: Path, order: Order, window_bytes: int):
        self._context = order.context
        self._dtype = little_endian(order.dtype)
        self._starts = order.starts()
        self._window_tokens = max(window_bytes // self._dtype.itemsize, order.context)
        self._reader = TokenArrayReader(dataset / order.tokens_dir, order.dtype)

    def close(self) -> None:
        self._reader.close()

    def rows(self, instances: np.ndarray, out: np.ndarray) -> np.ndarray:
        """`out` [R, C] with the tokens of source instances int64 [R], in the order asked for.

        A buffer used again saves the kernel from clearing new pages, a tenth of the time.
        """
        self.fill(out, np.arange(len(instances)), instances)
        return out

    def fill(self, out: np.ndarray, at: np.ndarray, instances: np.ndarray) -> None:
        """out[at[i]] = the tokens of source instance instances[i], for all i."""
        order = np.argsort(instances)
        places = at[order]
        begins = instances[order] * self._context
        units = np.searchsorted(self._starts, begins, side="right") - 1
        crosses = begins + self._context > self._starts[units + 1]
        for row in np.flatnonzero(crosses):
            self._read_across(out[places[row]], int(units[row]), int(begins[row]))
        inside = np.flatnonzero(~crosses)
        edges = np.flatnonzero(np.diff(units[inside])) + 1
        for group in np.split(inside, edges) if inside.size else ():
            unit = int(units[group[0]])
            self._read_within(out, unit, begins[group] - self._starts[unit], places[group])

    def _read_across(self, row: np.ndarray, unit: int, begin: int) -> None:
        """Fill `row` with an instance that begins in `unit` and ends in a later one."""
        filled = 0
        while filled < len(row):
            offset = begin + filled - int(self._starts[unit])
            count = min(
                len(row) - filled, int(self._starts[unit + 1] - self._starts[unit]) - offset
            )
            if count:  # an array may be empty
                self._reader.read_into(row[filled : filled + count], unit, offset)
            filled += count
            unit += 1

    def _read_within(
        self, out: np.ndarray, unit: int, offsets: np.ndarray, places: np.ndarray
    ) -> None:
        """Fill out[places] with the instances at ascending `offsets` of one unit."""
        context, first = self._context, 0
        while first < len(offsets):
            begin = int(offsets[first])
            last = int(np.searchsorted(offsets, begin + self._window_tokens - context, "right"))
            last = max(last, first + 1)
            end = int(offsets[last - 1]) + context
            if (last - first) * context * _DENSE >= end - begin:
                window = self._reader.read(unit, begin, end).reshape(-1, context)
                out[places[first:last]] = window[(offsets[first:last] - begin) // context]
            else:
                self._read_rows(out, unit, offsets[first:last], places[first:last])
            first = last

    def _read_rows(
        self, out: np.ndarray, unit: int, offsets: np.ndarray, places: np.ndarray
    ) -> None:
        """Fill out[places] one by one. The loop is lean: a row costs little more than its read."""
        fd, size = self._reader.descriptor(unit), self._context * self._dtype.itemsize
        if fd is None:  # packed: neighbours come out of one block
            for offset, place in zip(offsets.tolist(), places.tolist(), strict=True):
                self._reader.read_into(out[place], unit, offset)
            return
        begins = HEADER_BYTES + offsets * self._dtype.itemsize
        for begin, offset, place in zip(
            begins.tolist(), offsets.tolist(), places.tolist(), strict=True
        ):
            if os.preadv(fd, (out[place],), begin) != size:
                self._reader.read_into(out[place], unit, offset)


class BlendGatherer:
    """Gives rows of a blend's instances, until closed; not for two threads."""

    def __init__(self, dataset: Path, order: BlendOrder, window_bytes: int):
        self._order = order
        self._sources = [Gatherer(dataset, source, window_bytes) for source in order.sources]

    def close(self) -> None:
        for source in self._sources:
            source.close()

    def rows(self, instances: np.ndarray, out: np.ndarray) -> np.ndarray:
        """`out` [R, C] with the tokens of blend instances int64 [R], in the order asked for."""
        for number, places, own in self._order.split(instances):
            self._sources[number].fill(out, places, own)
        return out


def open_gatherer(
    dataset: Path, order: Order | BlendOrder, window_bytes: int
) -> Gatherer | BlendGatherer:
    """What gives the rows of an order, read through windows of `window_bytes`."""
    if isinstance(order, BlendOrder):
        return BlendGatherer(dataset, order, window_bytes)
    return Gatherer(dataset, order, window_bytes)


SPILL_DIR = "spill"
_VERSION = 2
"""Of the layout of runs: those of another are not read."""


@dataclass(frozen=True)
class Spill:
    """The runs of one order."""

    dataset: Path
    order: Order | BlendOrder
    folder: Path
    run_rows: int
    block_bytes: int
    workers: int
    label: str

    @property
    def num_runs(self) -> int:
        return -(-self.order.num_instances // self.run_rows)

    def rows(self, run: int) -> tuple[int, int]:
        """Source instances [first, stop) of a run."""
        first = run * self.run_rows
        return first, min(first + self.run_rows, self.order.num_instances)

    def pieces_path(self, run: int) -> Path:
        return array_path(self.folder, run).with_suffix(".pieces.npy")

    def plan(self) -> list[int]:
        """Return the rows of each run."""
        return [stop - first for first, stop in map(self.rows, range(self.num_runs))]

    def missing(self) -> list[int]:
        """Return the runs that are not complete."""
        there = set(os.listdir(self.folder))
        return [run for run in range(self.num_runs) if f"{layout.unit_name(run)}.npy" not in there]

    def do(self, runs: list[int]) -> None:
        """Write these runs, unless they are complete."""
        total = sum(stop - first for first, stop in map(self.rows, runs))
        with Progress(self.label, total, " instances") as progress:
            run_jobs(_do_run, self, runs, self.workers, progress)

    def verify(self) -> list[int]:
        """Return no run: the reader compares the hash of each piece."""
        return []


def open_spill(
    dataset: Path,
    order: Order | BlendOrder,
    order_xxh3: str,
    block_bytes: int,
    workers: int,
    label: str,
) -> Spill:
    """Return the runs for blocks of `block_bytes` of memory, in a directory that exists."""
    run_rows = rows_of_run(order, block_bytes)
    folder = dataset / SPILL_DIR / f"{order_xxh3}-{run_rows}-{_VERSION}"
    folder.mkdir(parents=True, exist_ok=True)
    return Spill(dataset, order, folder, run_rows, block_bytes, workers, label)


def rows_of_run(order: Order | BlendOrder, block_bytes: int) -> int:
    """Rows of a run for blocks of `block_bytes`: the same where memory differs a little."""
    fit = max(1, block_bytes * 3 // 4 // (order.row_bytes + 2 * INDEX_BYTES))
    return 1 << (fit.bit_length() - 1)


def remove_spill(dataset: Path) -> None:
    """Remove all runs: the shards are complete."""
    shutil.rmtree(dataset / SPILL_DIR, ignore_errors=True)


def _do_run(spill: Spill, run: int, advance: Callable[[int], None]) -> None:
    order, (first, stop) = spill.order, spill.rows(run)
    path = array_path(spill.folder, run)
    if path.exists():
        advance(stop - first)
        return
    becomes = order.epoch_zero().inverse(np.arange(first, stop))
    instances = np.argsort(becomes)
    becomes = becomes[instances]
    edges = np.arange(order.num_shards + 1) * order.instances_per_shard
    starts = np.searchsorted(becomes, edges)
    instances += first
    with contextlib.closing(
        open_gatherer(spill.dataset, order, spill.block_bytes // 8)
    ) as gatherer:
        out = np.empty((len(instances), order.context), layout.little_endian(order.dtype))
        rows = gatherer.rows(instances, out)
    pieces = np.zeros((len(starts), 2), layout.little_endian("int64"))
    pieces[:, 0] = starts
    for shard in range(order.num_shards):
        piece = rows[starts[shard] : starts[shard + 1]]
        pieces[shard, 1] = _signed(xxhash.xxh3_64_intdigest(piece.data))
    header = layout.npy_header(pieces.shape, "int64")
    files.write_bytes(spill.pieces_path(run), header + pieces.tobytes())
    with files.atomic_writer(path) as file:
        file.write(layout.npy_header((rows.size,), order.dtype))
        file.write(rows.data)
    advance(stop - first)


def _signed(value: int) -> int:
    """A hash of 64 bits as an int64."""
    return value - (1 << 64) if value >> 63 else value


class SpillReader:
    """Gives the rows of one shard out of the runs, first to last, until closed."""

    def __init__(self, spill: Spill, shard: int):
        self._context, self._run_rows = spill.order.context, spill.run_rows
        self._reader = TokenArrayReader(spill.folder, spill.order.dtype)
        self._window_rows = max(1, spill.block_bytes // 8 // spill.order.row_bytes)
        offset = layout.HEADER_BYTES + 16 * shard
        self._folder = spill.folder
        self._next = np.empty(spill.num_runs, np.int64)  # the next row to be read of each run
        self._stop = np.empty(spill.num_runs, np.int64)  # the end of this shard's piece of it
        self._xxh3 = np.empty(spill.num_runs, np.int64)
        self._digests: dict[int, xxhash.xxh3_64] = {}  # of pieces begun
        for run in range(spill.num_runs):
            with open(spill.pieces_path(run), "rb", buffering=0) as file:
                found = np.frombuffer(os.pread(file.fileno(), 24, offset), "<i8")
                self._next[run], self._xxh3[run], self._stop[run] = found

    def close(self) -> None:
        self._reader.close()

    def rows(self, instances: np.ndarray, out: np.ndarray) -> np.ndarray:
        """`out` [R, C] with the shard's next instances, which have to be asked for in its order."""
        runs = instances // self._run_rows
        places = np.argsort(runs, kind="stable")
        edges = np.flatnonzero(np.diff(runs[places])) + 1
        for group in np.split(places, edges) if places.size else ():
            run = int(runs[group[0]])
            for first in range(0, len(group), self._window_rows):
                part = group[first : first + self._window_rows]
                begin = int(self._next[run]) * self._context
                piece = self._reader.read(run, begin, begin + len(part) * self._context)
                out[part] = piece.reshape(-1, self._context)
                self._next[run] += len(part)
                self._check(run, piece)
        return out

    def _check(self, run: int, piece: np.ndarray) -> None:
        """Raises DamageError where a piece has been read to its end and is not what was written."""
        digest = self._digests.setdefault(run, xxhash.xxh3_64())
        digest.update(piece.data)
        if self._next[run] < self._stop[run]:
            return
        if _signed(self._digests.pop(run).intdigest()) != self._xxh3[run]:
            raise DamageError(
                f"{array_path(self._folder, run)}: its content is damaged (hash differs); remove "
                f"{self._folder} and give the command again"
            )


_PROBE_ROWS = 128
_LEAST_PIECE_ROWS = 8
"""Of a run that a shard reads at once: fewer are random reads again, after twice the writing."""
_WORTH_IT = 3.0
"""Gathering moves 2 V bytes and buckets 4 V, three of these in long reads and writes: random reads
may cost up to three times as much a byte (facts: a third of sequential bandwidth)."""


def choose_strategy(
    dataset: Path, order: Order | BlendOrder, strategy: str, team: Team, run_rows: int
) -> str:
    """`gather` or `bucket`, whose runs would have `run_rows`. `auto` measures where that pays.

    On several machines it gathers: ranks must agree, and parallel file systems serve many readers.
    """
    piece_rows = run_rows * order.instances_per_shard / max(1, order.num_instances)
    small = order.num_instances > run_rows and piece_rows < _LEAST_PIECE_ROWS
    if strategy == "bucket" and small:
        team.say(
            f"--strategy bucket reads pieces of {piece_rows:.2g} rows here, no faster than gather; "
            f"{_LEAST_PIECE_ROWS / piece_rows:.0f} times the --memory or --shard-size helps"
        )
    if strategy != "auto":
        return strategy
    if small:
        return "gather"
    if team.world > 1 or order.num_instances * order.row_bytes < usable_memory() // 2:
        return "gather"
    return "bucket" if random_read_cost(dataset, order) > _WORTH_IT else "gather"


def random_read_cost(dataset: Path, order: Order | BlendOrder) -> float:
    """How much longer rows at random places take to read than a stretch of as many bytes."""
    row_bytes, source = order.row_bytes, max(order.sources, key=lambda source: source.num_instances)
    unit = max(range(len(source.units)), key=lambda unit: source.units[unit].tokens)
    size = _PROBE_ROWS * row_bytes
    path = array_path(dataset / source.tokens_dir, unit)
    if not path.exists():
        return 1.0  # packed: buckets would write it out whole, which packing avoids
    fd = os.open(path, os.O_RDONLY)
    try:
        end = os.fstat(fd).st_size
        if end < 64 * size:
            return 1.0
        files.drop_cached(fd)
        start = time.perf_counter()
        os.pread(fd, size, HEADER_BYTES)
        middle = time.perf_counter()
        for place in random.Random(0).sample(range(2 * _PROBE_ROWS, end // row_bytes), _PROBE_ROWS):
            os.pread(fd, row_bytes, place * row_bytes)
        return (time.perf_counter() - middle) / max(middle - start, 1e-9)
    finally:
        os.close(fd)
