"""Sharding: rows of the permuted order, gathered into .npy files of equal length.

A shard is complete once its sidecar stands. Memory stays within the limit whatever the size of a
shard or of the corpus, because a shard is gathered block by block.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from data_prep import layout
from data_prep.gather import INDEX_BYTES, Gatherer
from data_prep.pool import run_jobs
from data_prep.progress import Progress
from data_prep.shuffle import Order
from optimus import files
from optimus.errors import ConfigError, DataError

FORM = "optimus-shard"
PROCESS_BYTES = 100 << 20
"""What a process needs before it holds any data: the interpreter, numpy and its indices."""
_LEAST_BLOCK_BYTES = 4 << 20


@dataclass(frozen=True)
class ShardWork:
    """What a worker needs to write any shard of one part."""

    dataset: Path
    order: Order
    order_xxh3: str
    block_bytes: int
    """Memory for one block: rows, indices and the window they are read through."""


def shard_path(dataset: Path, shard: int) -> Path:
    """Where a shard lies."""
    return dataset / layout.SHARDS_DIR / f"{layout.shard_name(shard)}.npy"


def sidecar_path(dataset: Path, shard: int) -> Path:
    """The completion mark of a shard."""
    return shard_path(dataset, shard).with_suffix(".json")


def divide_memory(memory_bytes: int, workers: int) -> tuple[int, int]:
    """Workers that may run at once within `memory_bytes`, and each one's block in bytes.

    The parent process counts too. Raises ConfigError when not even one worker fits.
    """
    for count in range(workers, 0, -1):
        processes = count + (count > 1)
        block = (memory_bytes - processes * PROCESS_BYTES) // count
        if block >= _LEAST_BLOCK_BYTES:
            return count, block
    least = (PROCESS_BYTES + _LEAST_BLOCK_BYTES) / 1e6
    raise ConfigError(
        f"--memory {memory_bytes / 1e6:.0f}MB is too little; give {least:.0f}MB or more"
    )


def shard_all(dataset: Path, order: Order, workers: int, memory_bytes: int) -> None:
    """Write every shard that is not complete. Raises ConfigError for too little memory."""
    workers, block_bytes = divide_memory(memory_bytes, workers)
    (dataset / layout.SHARDS_DIR).mkdir(exist_ok=True)
    work = ShardWork(dataset, order, files.xxh3_file(dataset / layout.ORDER), block_bytes)
    label = "shard" if order.part == "train" else f"shard {order.part}"
    with Progress(label, order.num_instances, " instances") as progress:
        run_jobs(_do_shard, work, range(order.num_shards), workers, progress)


def read_shard_record(dataset: Path, order: Order, order_xxh3: str, shard: int) -> dict[str, Any]:
    """A shard's sidecar, if it follows this order and its file has its size, else DataError."""
    record = layout.read_checked_json(sidecar_path(dataset, shard), FORM)
    path = shard_path(dataset, shard)
    first, stop = order.shard_rows(shard)
    if record["order"] != order_xxh3 or (record["first"], record["instances"]) != (
        first,
        stop - first,
    ):
        raise DataError(f"{sidecar_path(dataset, shard)}: belongs to another {layout.ORDER}")
    size = path.stat().st_size if path.exists() else None
    if size != record["size"]:
        raise DataError(f"{path}: has size {size}, not the {record['size']} of its sidecar")
    return record


def _do_shard(work: ShardWork, shard: int, advance: Callable[[int], None]) -> None:
    order = work.order
    first, stop = order.shard_rows(shard)
    try:
        read_shard_record(work.dataset, order, work.order_xxh3, shard)
    except DataError:
        pass  # not there yet, or not whole: write it
    else:
        advance(stop - first)
        return
    header = layout.npy_header((stop - first, order.context), order.dtype)
    digest = xxhash.xxh3_64(header)
    with (
        Gatherer(work.dataset, order, work.block_bytes // 8) as gatherer,
        files.atomic_writer(shard_path(work.dataset, shard)) as file,
    ):
        file.write(header)
        permutation = order.epoch_zero()
        step = _block_rows(work)
        for begin in range(first, stop, step):
            rows = gatherer.rows(permutation.apply(np.arange(begin, min(begin + step, stop))))
            file.write(rows)
            digest.update(rows)
            advance(len(rows))
        size = file.tell()
    record = {
        "format": FORM,
        "version": layout.VERSION,
        "order": work.order_xxh3,
        "first": first,
        "instances": stop - first,
        "size": size,
        "xxh3": digest.hexdigest(),
    }
    layout.write_checked_json(sidecar_path(work.dataset, shard), record)


def _block_rows(work: ShardWork) -> int:
    """Rows of a block: three quarters of its memory; window and selection take a quarter."""
    row_bytes = work.order.context * layout.little_endian(work.order.dtype).itemsize
    return max(1, work.block_bytes * 3 // 4 // (row_bytes + INDEX_BYTES))
