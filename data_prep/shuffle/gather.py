"""Readers of instances from token arrays, in the order of the shards and in bounded memory.

A row is an instance. Legend: R requested rows, C tokens of a row (context). Two strategies produce
the same bytes. `gather` reads rows at random positions. `bucket` first writes sorted runs, like an
external sort. A run contains consecutive instances of the token arrays, sorted by the row that each
instance has in the shards. The rows of a run that belong to the same shard are therefore adjacent.
These adjacent rows are called a piece of the run. A shard consists of one piece of each run, so
that all reads are long (docs/formats/dataset.md, "Strategies").

Files of run 0, where ORDER is the hash of order.json and ROWS is the number of rows of a run:

OUT/spill/ORDER-ROWS-2/unit-00000.npy         [ROWS * C] tokens; exists only if it is complete
OUT/spill/ORDER-ROWS-2/unit-00000.pieces.npy  int64 [shards + 1, 2]; row s is (first row, xxh3) of
the piece of shard s, and the last row has the number of rows of the run. The reader compares the
hash of a piece when it has read the whole piece.
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
from data_prep.runtime.pool import run_jobs
from data_prep.runtime.progress import Progress
from data_prep.runtime.ranks import WorkerGroup
from data_prep.shuffle.blend import BlendOrder
from data_prep.shuffle.order import Order
from data_prep.tokenize.store import TokenArrayReader, array_path, plain_arrays
from optimus.errors import DamageError
from optimus.io import files
from optimus.launch.environment import usable_memory

INDEX_BYTES = 80
"""Bytes of memory per row, in addition to the tokens of the row: ten temporary integers of 8 bytes
in `Gatherer.rows`."""

_DENSE = 4
"""A range of a token array is read as a whole if at least 1/_DENSE of the range is requested. A
sequential read then takes less time than random reads."""


class Gatherer:
    """Reader of the instances of an order, from token arrays. Threads must not share a reader."""

    def __init__(self, dataset: Path, order: Order | BlendOrder, window_bytes: int):
        """Open the token arrays of `order`. A sequential read has about `window_bytes` bytes."""
        self._order = order
        self._sources = [_SourceReader(dataset, source, window_bytes) for source in order.sources]

    def close(self) -> None:
        for source in self._sources:
            source.close()

    def rows(self, instances: np.ndarray, out: np.ndarray) -> np.ndarray:
        """Copy the tokens of instance instances[i] to out[i], for all i, and return `out`.

        A caller should pass the same `out` in each call. This saves a tenth of the time, because
        the operating system does not have to clear new pages.

        Args:
            instances: int64 [R], numbers of instances before the shuffle.
            out: [R, C].
        """
        for number, rows, of_source in self._order.split(instances):
            self._sources[number].fill(out, rows, of_source)
        return out


class _SourceReader:
    """Reader of the instances of one source: a set of token arrays."""

    def __init__(self, dataset: Path, order: Order, window_bytes: int):
        self._context = order.context
        self._dtype = little_endian(order.dtype)
        self._starts = order.starts()
        self._window_tokens = max(window_bytes // self._dtype.itemsize, order.context)
        self._reader = TokenArrayReader(dataset / order.tokens_dir, order.dtype)

    def close(self) -> None:
        self._reader.close()

    def fill(self, out: np.ndarray, at: np.ndarray, instances: np.ndarray) -> None:
        """Copy the tokens of instance instances[i] of the source to out[at[i]], for all i."""
        order = np.argsort(instances)
        rows = at[order]
        begins = instances[order] * self._context
        units = np.searchsorted(self._starts, begins, side="right") - 1
        crosses = begins + self._context > self._starts[units + 1]
        for row in np.flatnonzero(crosses):
            self._read_across(out[rows[row]], int(units[row]), int(begins[row]))
        inside = np.flatnonzero(~crosses)
        edges = np.flatnonzero(np.diff(units[inside])) + 1
        for group in np.split(inside, edges) if inside.size else ():
            unit = int(units[group[0]])
            self._read_within(out, unit, begins[group] - self._starts[unit], rows[group])

    def _read_across(self, row: np.ndarray, unit: int, begin: int) -> None:
        """Fill `row` with an instance that begins in `unit` and ends in a later unit."""
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
        self, out: np.ndarray, unit: int, offsets: np.ndarray, rows: np.ndarray
    ) -> None:
        """Fill out[rows[i]] with the instance at token offsets[i] of a unit. `offsets` ascend."""
        context, first = self._context, 0
        while first < len(offsets):
            begin = int(offsets[first])
            last = int(np.searchsorted(offsets, begin + self._window_tokens - context, "right"))
            last = max(last, first + 1)
            end = int(offsets[last - 1]) + context
            if (last - first) * context * _DENSE >= end - begin:
                window = self._reader.read(unit, begin, end).reshape(-1, context)
                out[rows[first:last]] = window[(offsets[first:last] - begin) // context]
            else:
                self._reader.read_rows(out, rows[first:last], unit, offsets[first:last])
            first = last


SPILL_DIR = "spill"
_VERSION = 2
"""Version of the layout of run files. Runs of another version are not read."""


@dataclass(frozen=True)
class Spill:
    """Task that writes the sorted runs of one order for the strategy `bucket`.

    Each work item is a run: a file of consecutive instances of the token arrays, sorted by the row
    that each instance has in the shards.
    """

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
        """Return the range [first, stop) of the instances in a run. Instances are numbered as
        before the shuffle."""
        first = run * self.run_rows
        return first, min(first + self.run_rows, self.order.num_instances)

    def pieces_path(self, run: int) -> Path:
        return array_path(self.folder, run).with_suffix(".pieces.npy")

    def plan(self) -> list[int]:
        """Return the number of rows of each run."""
        return [stop - first for first, stop in map(self.rows, range(self.num_runs))]

    def missing(self) -> list[int]:
        """Return the indices of the runs that are not complete."""
        names = set(os.listdir(self.folder))
        return [run for run in range(self.num_runs) if f"{layout.unit_name(run)}.npy" not in names]

    def do(self, runs: list[int]) -> None:
        """Write the runs with the indices `runs`. Complete runs are not written again."""
        total = sum(stop - first for first, stop in map(self.rows, runs))
        with Progress(self.label, total, " instances") as progress:
            run_jobs(_do_run, self, runs, self.workers, progress)

    def verify(self) -> list[int]:
        """Return []. Runs are verified later: `SpillReader` checks the hashes of the rows that it
        reads."""
        return []


def open_spill(
    dataset: Path,
    order: Order | BlendOrder,
    order_xxh3: str,
    block_bytes: int,
    workers: int,
    label: str,
) -> Spill:
    """Create the directory of the runs of an order, and return the task that writes the runs.

    Args:
        dataset: The directory of the data set.
        order: The order of the data set.
        order_xxh3: The hash of order.json.
        block_bytes: Memory of a worker for rows, in bytes. `rows_of_run` computes the length of
            runs from this memory.
        workers: Number of worker processes of this rank.
        label: Name of the step in progress messages.
    """
    run_rows = rows_of_run(order, block_bytes)
    folder = dataset / SPILL_DIR / f"{order_xxh3}-{run_rows}-{_VERSION}"
    folder.mkdir(parents=True, exist_ok=True)
    return Spill(dataset, order, folder, run_rows, block_bytes, workers, label)


def rows_of_run(order: Order | BlendOrder, block_bytes: int) -> int:
    """Return the number of rows of a sorted run that a worker can make in `block_bytes` bytes of
    memory.

    The result is a power of two, so that a small change of `block_bytes` does not change the
    result.
    """
    fit = max(1, block_bytes * 3 // 4 // (order.row_bytes + 2 * INDEX_BYTES))
    return 1 << (fit.bit_length() - 1)


def remove_spill(dataset: Path) -> None:
    """Remove the sorted runs of the strategy `bucket` from a data set."""
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
    with contextlib.closing(Gatherer(spill.dataset, order, spill.block_bytes // 8)) as gatherer:
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
    """Return the int64 that has the same bits as a 64-bit hash."""
    return value - (1 << 64) if value >> 63 else value


class SpillReader:
    """Reader of the rows of one shard from sorted runs. The rows are read in the order of the
    shard."""

    def __init__(self, spill: Spill, shard: int):
        self._context, self._run_rows = spill.order.context, spill.run_rows
        self._reader = TokenArrayReader(spill.folder, spill.order.dtype)
        self._window_rows = max(1, spill.block_bytes // 8 // spill.order.row_bytes)
        offset = layout.HEADER_BYTES + 16 * shard
        self._folder = spill.folder
        # For each run: the next row to read, and the end and the hash of this shard's piece.
        self._next = np.empty(spill.num_runs, np.int64)
        self._stop = np.empty(spill.num_runs, np.int64)
        self._xxh3 = np.empty(spill.num_runs, np.int64)
        # Maps a run to the hash of the rows that were read, if the piece is only partly read.
        self._digests: dict[int, xxhash.xxh3_64] = {}
        for run in range(spill.num_runs):
            with open(spill.pieces_path(run), "rb", buffering=0) as file:
                values = np.frombuffer(os.pread(file.fileno(), 24, offset), "<i8")
                self._next[run], self._xxh3[run], self._stop[run] = values

    def close(self) -> None:
        self._reader.close()

    def rows(self, instances: np.ndarray, out: np.ndarray) -> np.ndarray:
        """Copy the next R rows of the shard to `out` [R, C]. Return `out`.

        `instances`, int64 [R], contains the instances in these rows, numbered as before the
        shuffle.
        """
        runs = instances // self._run_rows
        rows = np.argsort(runs, kind="stable")
        edges = np.flatnonzero(np.diff(runs[rows])) + 1
        for group in np.split(rows, edges) if rows.size else ():
            run = int(runs[group[0]])
            for first in range(0, len(group), self._window_rows):
                window = group[first : first + self._window_rows]
                begin = int(self._next[run]) * self._context
                piece = self._reader.read(run, begin, begin + len(window) * self._context)
                out[window] = piece.reshape(-1, self._context)
                self._next[run] += len(window)
                self._check(run, piece)
        return out

    def _check(self, run: int, piece: np.ndarray) -> None:
        """Update the hash of this shard's rows in `run` with `piece`, the tokens that were read
        last.

        If all of this shard's rows in `run` have been read and the hash is wrong, raise
        DamageError.
        """
        digest = self._digests.setdefault(run, xxhash.xxh3_64())
        digest.update(piece.data)
        if self._next[run] < self._stop[run]:
            return
        if _signed(self._digests.pop(run).intdigest()) != self._xxh3[run]:
            raise DamageError(
                f"{array_path(self._folder, run)}: its content is damaged (hash differs); remove "
                f"{self._folder} and run the same command again"
            )


_PROBE_ROWS = 128
_LEAST_PIECE_ROWS = 8
"""`bucket` is faster than `gather` only if a shard has at least _LEAST_PIECE_ROWS adjacent rows in
each run. Reads of fewer rows are as slow as random reads, and `bucket` writes twice as many bytes
as `gather`."""
_WORTH_IT = 3.0
"""The strategy "auto" selects `bucket` if random reads take more than _WORTH_IT times as long as a
sequential read of the same number of bytes. For V bytes of tokens, `gather` reads V bytes in random
reads and writes V bytes. `bucket` reads 2 V bytes in long reads and writes 2 V bytes."""


def choose_strategy(
    dataset: Path, order: Order | BlendOrder, strategy: str, group: WorkerGroup, run_rows: int
) -> str:
    """Return the strategy for reading token arrays, "gather" or "bucket".

    With several ranks, "auto" selects "gather", because all ranks must use the same strategy, and
    parallel file systems serve many readers at once. With one rank, "auto" selects "gather" for
    small data sets and for short pieces of runs. For other data sets, "auto" measures the disk.

    Args:
        dataset: The directory of the data set.
        order: The order of the data set.
        strategy: "gather", "bucket" or "auto".
        group: The ranks that share the work.
        run_rows: Number of rows in a run, for the strategy `bucket`.
    """
    piece_rows = run_rows * order.instances_per_shard / max(1, order.num_instances)
    small = order.num_instances > run_rows and piece_rows < _LEAST_PIECE_ROWS
    if strategy == "bucket" and small:
        group.say(
            f"--strategy bucket can read only {piece_rows:.2g} adjacent rows at a time, so bucket "
            "is not faster than gather; use --strategy gather, or increase --memory or "
            f"--shard-size by a factor of {_LEAST_PIECE_ROWS / piece_rows:.0f}"
        )
    if strategy != "auto":
        return strategy
    if small:
        return "gather"
    if group.world > 1 or order.num_instances * order.row_bytes < usable_memory() // 2:
        return "gather"
    return "bucket" if random_read_cost(dataset, order) > _WORTH_IT else "gather"


def random_read_cost(dataset: Path, order: Order | BlendOrder) -> float:
    """Return the ratio of the time of random reads to the time of a sequential read.

    The sequential read has as many bytes as all random reads together. All reads are from the
    largest token array of the largest source. The ratio is 1 if this array is compressed or too
    small for a measurement.
    """
    row_bytes, source = order.row_bytes, max(order.sources, key=lambda source: source.num_instances)
    unit = max(range(len(source.units)), key=lambda unit: source.units[unit].tokens)
    size = _PROBE_ROWS * row_bytes
    path = plain_arrays(dataset / source.tokens_dir, [unit]).get(unit)
    if path is None:  # the array is compressed, and `bucket` would write its tokens uncompressed
        return 1.0
    fd = os.open(path, os.O_RDONLY)
    try:
        end = os.fstat(fd).st_size
        if end < 64 * size:
            return 1.0
        files.drop_cached(fd)
        start = time.perf_counter()
        os.pread(fd, size, HEADER_BYTES)
        middle = time.perf_counter()
        for row in random.Random(0).sample(range(2 * _PROBE_ROWS, end // row_bytes), _PROBE_ROWS):
            os.pread(fd, row_bytes, row * row_bytes)
        return (time.perf_counter() - middle) / max(middle - start, 1e-9)
    finally:
        os.close(fd)
