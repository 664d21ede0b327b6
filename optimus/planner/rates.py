"""Rates of this machine's device, host and links for the placement of model states, measured once
and cached."""

from __future__ import annotations

import contextlib
import json
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from pydantic import ValidationError

from optimus import platform
from optimus.chunks.memory import update_threads
from optimus.config.machine import Links
from optimus.io import files
from optimus.peak import cache_dir, find_peak, setup_of
from optimus_kernels import adamw_, library_of

_COPIED_BYTES = 1 << 26
"""Bytes of a timed copy, as of a chunk of 32 Mi bf16 elements."""
_UPDATED = 1 << 22
"""Elements of a timed update. The states, 18 bytes for each element, exceed the caches of a CPU."""
_RUNS = 15


def find_links(
    device: torch.device, dtype: torch.dtype, log: Callable[[str], None], ranks_per_node: int = 1
) -> Links:
    """Return the rates of this rank, from the cache or from a measurement of about two seconds.

    Args:
        device: Device of this rank.
        dtype: Dtype of matrix products.
        log: Function that writes one line to the log.
        ranks_per_node: Number of ranks that share the cores of this machine. Cached rates are used
            only for this number.
    """
    library = library_of(torch.empty(0, dtype=dtype, device=device))
    setup, folder = setup_of(device, dtype, library), cache_dir()
    path = None if folder is None else folder / f"links-{setup.key}-{ranks_per_node}.json"
    if path is not None:
        with contextlib.suppress(OSError, ValueError, ValidationError):
            return Links.model_validate(json.loads(path.read_bytes()))
    rates = measure_links(device, torch.get_num_threads())
    links = Links(
        **{name: statistics.median(values) for name, values in rates.items()},
        flops=find_peak(device, dtype, library, log).flops,
    )
    if path is not None and folder is not None:
        with contextlib.suppress(OSError):  # the next run measures again
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            files.write_bytes(path, json.dumps(links.model_dump()).encode())
    return links


def measure_links(device: torch.device, threads: int) -> dict[str, list[float]]:
    """Measure the rates of `Links` except that of matrix products, several times.

    Args:
        device: The device. On a CPU, a copy between the tiers is a copy within its memory.
        threads: Number of threads of the run. An update on the host uses `update_threads` of it.

    Returns:
        The rates of all runs, by their key in the table `links` of a machine.
    """
    host = platform.host_zeros(_COPIED_BYTES, torch.uint8, device)
    on_device = torch.zeros(_COPIED_BYTES, dtype=torch.uint8, device=device)
    states = [platform.host_zeros(_UPDATED, torch.float32, device).fill_(0.01) for _ in range(4)]
    param = platform.host_zeros(_UPDATED, torch.bfloat16, device)
    left, right = torch.zeros(2, _COPIED_BYTES // 4, device=device)
    total = torch.empty_like(left)

    def update() -> None:
        master, exp_avg, exp_avg_sq, grad = states
        lr, betas, eps, decay = 1e-3, (0.9, 0.95), 1e-8, 0.1
        adamw_(master, exp_avg, exp_avg_sq, grad, param, lr, *betas, eps, decay, step=1)

    runs = {
        "to_device": (lambda: on_device.copy_(host, non_blocking=True), _COPIED_BYTES, device),
        "to_host": (lambda: host.copy_(on_device, non_blocking=True), _COPIED_BYTES, device),
        "memory": (lambda: torch.add(left, right, out=total), 3 * _COPIED_BYTES, device),
        "host_adam": (update, _UPDATED, torch.device("cpu")),
    }
    before = torch.get_num_threads()
    torch.set_num_threads(update_threads(threads, device))
    try:
        return {name: [size / s for s in _times(run, on)] for name, (run, size, on) in runs.items()}
    finally:
        torch.set_num_threads(before)


def _times(run: Callable[[], Any], device: torch.device) -> list[float]:
    """Return the seconds of _RUNS runs."""
    times = []
    for _ in range(_RUNS + 2):
        platform.synchronize(device)
        start = time.perf_counter()
        run()
        platform.synchronize(device)
        times.append(time.perf_counter() - start)
    return times[2:]
