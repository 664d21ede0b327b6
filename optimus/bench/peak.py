"""The most memory that a training step takes, against what its parts add up to."""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

from optimus.bench.ours import make_ours
from optimus.config import Config
from optimus.distributed.collectives import all_gather_objects
from optimus.distributed.world import World
from optimus.errors import OptimusError
from optimus.parallel.recompute import KeptBytes

_WARMUP = 2
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3


def measure_peak(config: Config, small: Config, world: World) -> dict[str, Any]:
    """Bytes of this process's resident memory at the peak of a step, above what it held before the
    model was built, the worst rank's; and the formula of the first rank's parts. A collective of
    all ranks.

    Before, a `small` model is trained, so that libraries and process groups have what they keep.
    Large pieces are given back to the system at once: the figure is of what lives.
    """
    libc = _returning_memory()
    _train(small, world)
    gc.collect()
    libc.malloc_trim(0)
    before = _status("VmRSS")
    peak, parts = _train(config, world)
    worst = max(all_gather_objects(peak - before, world.everyone, int))
    return {"measured": worst, "formula": sum(parts.values()), "parts": parts}


def _train(config: Config, world: World) -> tuple[int, dict[str, int]]:
    """Peak of resident memory in the last of a few updates, and the bytes of its parts."""
    ours = make_ours(config, world)
    states, own, updater = ours.states, ours.microbatches(), ours.updater()
    for step in range(1, 1 + _WARMUP):
        updater.run(step, own)
    states.wait()
    _begin_peak()
    updater.run(1 + _WARMUP, own)
    states.wait()
    peak = _status("VmHWM")
    with KeptBytes(ours.part.model) as kept:
        ours.part.model.losses(own[0].tokens)
    two = 2 * max(one.grads.nbytes for one in states.chunks)
    held = states.state_bytes()["total"]
    return peak, {"states": held, "activations": kept.total, "two_chunks": two}


def peak_above(run: Callable[[], object]) -> int:
    """Bytes that the process's resident memory rose by, at the most, while `run` ran."""
    libc = _returning_memory()
    gc.collect()
    libc.malloc_trim(0)
    before = _status("VmRSS")
    _begin_peak()
    run()
    return _status("VmHWM") - before


def _returning_memory() -> ctypes.CDLL:
    """The C library, told to give large pieces back to the system at once."""
    libc = ctypes.CDLL(None)
    libc.mallopt(_M_MMAP_THRESHOLD, 1 << 16)
    libc.mallopt(_M_TRIM_THRESHOLD, 1 << 16)
    return libc


def _begin_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")


def _status(key: str) -> int:
    """Bytes, from /proc/self/status. Raises OptimusError where there is none."""
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError as error:
        raise OptimusError(f"the peak of memory is read from /proc: {error}") from error
    return int(next(line.split()[1] for line in lines if line.startswith(f"{key}:"))) * 1024
