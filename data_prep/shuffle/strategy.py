"""Random gathering or sorted runs? Same bytes, another speed; decided here."""

from __future__ import annotations

import os
import random
import time
from pathlib import Path

from data_prep.layout import HEADER_BYTES
from data_prep.runtime.machine import usable_memory
from data_prep.runtime.ranks import Team
from data_prep.shuffle.blend import BlendOrder
from data_prep.shuffle.shuffle import Order
from data_prep.tokenize.token_arrays import array_path
from optimus.io import files

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
