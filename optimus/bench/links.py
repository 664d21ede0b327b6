"""Rates between the tiers of memory and of updates on the host, for `optimus bench links`."""

from __future__ import annotations

import socket
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from optimus import platform
from optimus.chunks.memory import update_threads
from optimus.errors import ConfigError, counted, reason_of
from optimus.io import files
from optimus_kernels import adamw_

_COPIED_BYTES = 1 << 26
"""Bytes of a timed copy, as of a chunk of 32 Mi bf16 elements."""
_UPDATED = 1 << 22
"""Elements of a timed update. The states, 18 bytes for each element, exceed the caches of a CPU."""
_RUNS = 15


def bench_links(device: torch.device, threads: int) -> dict[str, Any]:
    """Measure the rates of a device and its host.

    Args:
        device: The device. On a CPU, a copy between the tiers is a copy within its memory.
        threads: Number of threads of the run. An update on the host uses `update_threads` of it.

    Returns:
        A dict for JSON: `links`, the median rates, with the keys of the table `links` of a machine;
        `spread`, for each of them the difference between the quartiles of all runs, as a share of
        the median; and `device`, `host` and `threads`, the number of threads of an update.
    """
    host = platform.host_zeros(_COPIED_BYTES, torch.uint8, device)
    on_device = torch.zeros(_COPIED_BYTES, dtype=torch.uint8, device=device)
    states = [platform.host_zeros(_UPDATED, torch.float32, device).fill_(0.01) for _ in range(4)]
    param = platform.host_zeros(_UPDATED, torch.bfloat16, device)

    def update() -> None:
        master, exp_avg, exp_avg_sq, grad = states
        lr, betas, eps, decay = 1e-3, (0.9, 0.95), 1e-8, 0.1
        adamw_(master, exp_avg, exp_avg_sq, grad, param, lr, *betas, eps, decay, step=1)

    threads = update_threads(threads)
    torch.set_num_threads(threads)
    runs = {
        "to_device": (lambda: on_device.copy_(host, non_blocking=True), _COPIED_BYTES, device),
        "to_host": (lambda: host.copy_(on_device, non_blocking=True), _COPIED_BYTES, device),
        "host_adam": (update, _UPDATED, torch.device("cpu")),
    }
    rates = {name: [size / s for s in _times(run, on)] for name, (run, size, on) in runs.items()}
    spread = {}
    for name, values in rates.items():
        low, middle, high = statistics.quantiles(values, n=4)
        spread[name] = (high - low) / middle
    return {
        "links": {name: statistics.median(values) for name, values in rates.items()},
        "spread": spread,
        "device": platform.device_name(device),
        "host": socket.gethostname(),
        "threads": threads,
    }


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


def write_links(result: dict[str, Any], path: Path) -> None:
    """Write the rates to a TOML file with a table `links`. Raises ConfigError if the file cannot be
    written."""
    day = time.strftime("%Y-%m-%d", time.gmtime())
    lines = [
        f"# optimus bench links, {day}: {result['device']} of {result['host']}, "
        f"{counted(result['threads'], 'thread')}",
        "[links]",
        *(f"{name} = {rate:.4g}" for name, rate in result["links"].items()),
    ]
    try:
        files.write_bytes(path, "\n".join([*lines, ""]).encode())
    except OSError as error:
        raise ConfigError(f"--out {path}: {reason_of(error)}; use another file") from error


def format_links(result: dict[str, Any]) -> str:
    """Return the result of `bench_links` as text, with one line per rate."""
    units = {name: "elements/s" if name == "host_adam" else "bytes/s" for name in result["links"]}
    lines = [f"{result['device']} of {result['host']}, {counted(result['threads'], 'thread')}"]
    lines += [
        f"{name:<10} {rate:>9.3g} {units[name]}, quartiles differ by {result['spread'][name]:.1%}"
        for name, rate in result["links"].items()
    ]
    return "\n".join(lines)
