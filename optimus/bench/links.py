"""Rates of copies between device, host and disk, and rates of updates on the host, for `optimus
bench links`."""

from __future__ import annotations

import socket
import statistics
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch

from optimus import platform
from optimus.chunks.memory import update_threads
from optimus.errors import ConfigError, counted, reason_of
from optimus.io import files
from optimus.peak import find_peak
from optimus.planner.rates import disk_rates, measure_links
from optimus_kernels import library_of


def bench_links(device: torch.device, threads: int, disk: Path | None = None) -> dict[str, Any]:
    """Measure the rates of copies and updates of a device and its host.

    Args:
        device: The device. On a CPU, a copy between device and host is a copy within host memory.
        threads: Number of threads of the run. An update on the host uses `update_threads(threads)`
            threads.
        disk: A directory on a disk that is also measured; None if no disk is measured.

    Returns:
        A dict for JSON: `links`, the median rates, with the keys of the table `links` in a machine
        file; `spread`, for each rate the difference between the upper and the lower quartile of all
        runs, divided by the median; and `device`, `host` and `threads` (the number of threads of an
        update).

    Raises:
        ConfigError: The directory cannot be used.
    """
    rates = measure_links(device, threads)
    if disk is not None:
        try:
            rates |= disk_rates(disk)
        except OSError as error:
            raise ConfigError(
                f"--disk {disk}: {reason_of(error)}; use a directory on a local disk that supports "
                "O_DIRECT"
            ) from error
    quartiles = {name: statistics.quantiles(values, n=4) for name, values in rates.items()}
    library = library_of(torch.empty(0, device=device))
    log = partial(print, file=sys.stderr)  # standard output is for the result, such as JSON
    peaks = {
        name: find_peak(device, dtype, library, log)
        for name, dtype in (("flops", torch.bfloat16), ("flops_fp32", torch.float32))
    }
    links = {name: middle for name, (_, middle, _) in quartiles.items()}
    spread = {name: (high - low) / middle for name, (low, middle, high) in quartiles.items()}
    return {
        "links": links | {name: peak.flops for name, peak in peaks.items()},
        "spread": spread | {name: peak.spread or 0.0 for name, peak in peaks.items()},
        "device": platform.device_name(device),
        "host": socket.gethostname(),
        "threads": update_threads(threads, device),
    }


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
    other = {"host_adam": "elements/s", "flops": "FLOP/s", "flops_fp32": "FLOP/s"}
    units = {name: other.get(name, "bytes/s") for name in result["links"]}
    lines = [f"{result['device']} of {result['host']}, {counted(result['threads'], 'thread')}"]
    lines += [
        f"{name:<10} {rate:>9.3g} {units[name]}, quartiles differ by {result['spread'][name]:.1%}"
        for name, rate in result["links"].items()
    ]
    return "\n".join(lines)
