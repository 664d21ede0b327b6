"""Rates of raw reads and writes of a disk, and rates of updates of optimizer states on the disk,
for `optimus bench disk`."""

from __future__ import annotations

import contextlib
import itertools
import os
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

from optimus.chunks.engine import ChunkEngine
from optimus.chunks.groups import ParamProcessGroups
from optimus.chunks.memory import update_threads
from optimus.chunks.optimizer import AdamW
from optimus.chunks.residency import Residency
from optimus.config import OptimConfig
from optimus.distributed.collectives import ALONE
from optimus.planner.rates import RawFile

_CHUNKS = 12
_ELEMENTS = 1 << 22
"""Number of elements of a chunk. The states of a chunk have 48 MiB."""
_STATE_BYTES = 12
"""Bytes of the optimizer states of an element: fp32 master weight, exp_avg and exp_avg_sq."""


def bench_disk(directory: Path, rounds: int, threads: int) -> dict[str, Any]:
    """Compare updates of states on disk with raw reads and writes of the same bytes.

    A round updates all chunks of an engine whose states are on disk. Before and after the round,
    threads read and write the file of the engine without computing. The updates and the raw reads
    and writes therefore use the same blocks of the disk under the same load of the machine.

    Args:
        directory: Directory on the disk.
        rounds: Number of rounds.
        threads: Number of threads of the run.

    Returns:
        A dict for JSON: `bytes`, the number of bytes that a round reads, which is also the number
        that it writes; `raw`, for each round the bytes per second of raw reads and writes; `tier`,
        for each round the bytes per second that the updates read and write; `ratio`, for each round
        `tier` divided by `raw`; `threads`, the number of threads of an update; and `load`, the load
        average of the machine.
    """
    torch.set_num_threads(threads)
    size = _CHUNKS * _ELEMENTS * _STATE_BYTES
    engine = _make_engine(directory)
    assert engine.disk is not None
    try:
        with contextlib.closing(RawFile(engine.disk.path, size)) as raw:
            raw.write()  # the first write of an allocated block can be slower
            _update(engine)
            raw_s, tier_s = [raw.read_and_write()], []
            for _ in range(rounds):
                tier_s.append(_update(engine))
                raw_s.append(raw.read_and_write())
    finally:
        engine.close()
    around = [(before + after) / 2 for before, after in itertools.pairwise(raw_s)]
    return {
        "bytes": size,
        "threads": update_threads(threads, engine.device),
        "raw": [2 * size / seconds for seconds in around],
        "tier": [2 * size / seconds for seconds in tier_s],
        "ratio": [reference / s for reference, s in zip(around, tier_s, strict=True)],
        "load": os.getloadavg()[0],
    }


def _make_engine(directory: Path) -> ChunkEngine:
    named = {
        str(number): nn.Parameter(torch.randn(_ELEMENTS, dtype=torch.bfloat16))
        for number in range(_CHUNKS)
    }
    groups = ParamProcessGroups(reduce_group=ALONE, shard_group=ALONE)
    return ChunkEngine(
        named,
        lambda name: groups,
        AdamW(OptimConfig(lr=1e-3, min_lr=0.0)),
        dtype=torch.bfloat16,
        chunk_length=_ELEMENTS,
        residency=Residency(
            divides_gradients=True, host_share=1.0, disk_share=1.0, disk=str(directory)
        ),
    )


def _update(engine: ChunkEngine) -> float:
    """Update all chunks, and wait until their states are on disk. Return the duration in
    seconds."""
    engine.start_step()
    engine.gradients.finish()
    for state in engine.chunks:  # a disk can transfer zeros faster than other values
        state.grad.normal_()
    start = time.perf_counter()
    engine.update(1e-3)
    engine.wait()
    return time.perf_counter() - start


def format_disk(result: dict[str, Any]) -> str:
    """Return the result of `bench_disk` as text, with one line per figure."""
    lines = [
        f"{result['bytes']:,} bytes read and written in each of {len(result['raw'])} rounds, load "
        f"of the machine {result['load']:.1f}"
    ]
    for name, unit in (("raw", "GB/s"), ("tier", "GB/s"), ("ratio", "")):
        values = [value / 1e9 if unit else value for value in result[name]]
        low, middle, high = statistics.quantiles(values, n=4)
        lines.append(
            f"{name:<6} {middle:.2f} {unit}".rstrip() + f", quartiles {low:.2f} to {high:.2f}"
        )
    return "\n".join(lines)
