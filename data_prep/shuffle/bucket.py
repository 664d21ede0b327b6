"""The bucket strategy: sorted runs, so that the disk sees long reads instead of random rows.

What a shard needs of a run is one piece, and a shard is put together from a piece of every run
(docs/formats/dataset.md, "Strategies"). The bytes of the shards are the same.

OUT/spill/ORDER-ROWS-2/unit-00000.npy         run 0: [ROWS * C] tokens; there only when complete
OUT/spill/ORDER-ROWS-2/unit-00000.pieces.npy  its pieces: int64 [shards + 1, 2], the first row and
xxh3 of each, compared when a shard has read all of it
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import xxhash

from data_prep import layout
from data_prep.runtime.pool import run_jobs
from data_prep.runtime.progress import Progress
from data_prep.runtime.ranks import Team, do_together
from data_prep.shuffle.blend import BlendOrder
from data_prep.shuffle.gather import INDEX_BYTES, open_gatherer
from data_prep.shuffle.shuffle import Order
from data_prep.tokenize.token_arrays import TokenArrayReader, array_path
from optimus.errors import DamageError
from optimus.io import files

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

    @property
    def num_runs(self) -> int:
        return -(-self.order.num_instances // self.run_rows)

    def rows(self, run: int) -> tuple[int, int]:
        """Source instances [first, stop) of a run."""
        first = run * self.run_rows
        return first, min(first + self.run_rows, self.order.num_instances)

    def pieces_path(self, run: int) -> Path:
        return array_path(self.folder, run).with_suffix(".pieces.npy")

    def missing(self) -> list[int]:
        """Runs that are not complete."""
        there = set(os.listdir(self.folder))
        return [run for run in range(self.num_runs) if f"{layout.unit_name(run)}.npy" not in there]


def open_spill(
    dataset: Path, order: Order | BlendOrder, order_xxh3: str, block_bytes: int
) -> Spill:
    """The place of the runs for blocks of `block_bytes` of memory, made if need be."""
    run_rows = rows_of_run(order, block_bytes)
    folder = dataset / SPILL_DIR / f"{order_xxh3}-{run_rows}-{_VERSION}"
    folder.mkdir(parents=True, exist_ok=True)
    return Spill(dataset, order, folder, run_rows, block_bytes)


def rows_of_run(order: Order | BlendOrder, block_bytes: int) -> int:
    """Rows of a run for blocks of `block_bytes`: the same where memory differs a little."""
    fit = max(1, block_bytes * 3 // 4 // (order.row_bytes + 2 * INDEX_BYTES))
    return 1 << (fit.bit_length() - 1)


def spill_all(spill: Spill, workers: int, team: Team) -> None:
    """Write every run that is not complete, together with the other ranks."""
    sizes = [stop - first for first, stop in map(spill.rows, range(spill.num_runs))]

    def do(runs: list[int]) -> None:
        with Progress(team.label("sort"), sum(sizes[run] for run in runs), " instances") as bar:
            run_jobs(_do_run, spill, runs, workers, bar)

    do_together(team, sizes, do, spill.missing, spill.folder, workers)


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
