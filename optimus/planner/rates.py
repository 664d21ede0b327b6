"""Measured rates of this machine's device, host, links and disk, for the placement of model states.
The rates are measured once and cached."""

from __future__ import annotations

import contextlib
import hashlib
import json
import mmap
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError

from optimus import platform
from optimus.chunks.memory import update_threads
from optimus.chunks.state_file import BLOCK_BYTES, THREADS
from optimus.config.machine import Links
from optimus.errors import reason_of
from optimus.io import files
from optimus.peak import cache_dir, find_peak, setup_of
from optimus_kernels import adamw_, library_of

_COPIED_BYTES = 1 << 26
"""Bytes of a timed copy. A chunk of 32 Mi bf16 elements has this size."""
_UPDATED = 1 << 22
"""Number of elements in a timed update. The states, 18 bytes for each element, are larger than the
caches of a CPU."""
_RUNS = 15
_DISK_RUNS = 3
"""_RUNS: number of timed runs of a copy or an update. _DISK_RUNS: number of timed reads and of
timed writes of a disk."""
_HUGE_PAGE = 2 << 20


def find_links(
    device: torch.device,
    dtype: torch.dtype,
    log: Callable[[str], None],
    ranks_per_node: int = 1,
    disk: Path | None = None,
) -> Links:
    """Return the rates of this rank in the units of `Links`, from the cache or from a measurement
    that takes a few seconds.

    Args:
        device: Device of this rank.
        dtype: Dtype of matrix products. The rate of products is measured only in this dtype.
        log: Function that writes one line to the log.
        ranks_per_node: Number of ranks that share the cores and the disk of this machine. Cached
            rates are used only if they were measured with the same number. Each rank gets an equal
            share of the rates of the disk.
        disk: Directory on a disk that is also measured; None to measure no disk.
    """
    library = library_of(torch.empty(0, dtype=dtype, device=device))
    key = f"{setup_of(device, dtype, library).key}-{ranks_per_node}"
    flops = "flops_fp32" if dtype is torch.float32 else "flops"

    def measure() -> dict[str, float]:
        rates = _medians(measure_links(device, torch.get_num_threads()))
        return rates | {flops: find_peak(device, dtype, library, log).flops}

    rates = _cached(f"links-{flops}-{key}", measure)
    if disk is not None:
        of_path = hashlib.sha256(os.fsencode(disk.resolve())).hexdigest()[:16]
        try:
            measured = _cached(
                f"disk-{key}-{of_path}", lambda: _medians(disk_rates(disk, _DISK_RUNS))
            )
            rates |= {name: rate / ranks_per_node for name, rate in measured.items()}
        except OSError as error:  # for example, the file system has no O_DIRECT
            default = Links()
            log(
                f"offload.disk = '{disk}': its rates cannot be measured ({reason_of(error)}); the "
                f"placement assumes reads of {default.disk_read / 1e9:g} GB/s and writes of "
                f"{default.disk_write / 1e9:g} GB/s; set offload.links to a file with other rates"
            )
    return Links(**rates)


def _cached(name: str, measure: Callable[[], dict[str, float]]) -> dict[str, float]:
    """Return the rates in the file NAME.json of the cache. If the file cannot be read, call
    `measure` and write the file."""
    folder = cache_dir()
    path = None if folder is None else folder / f"{name}.json"
    if path is not None:
        with contextlib.suppress(OSError, ValueError, ValidationError):
            rates = json.loads(path.read_bytes())
            Links.model_validate(rates)
            return rates
    rates = measure()
    if path is not None and folder is not None:
        with contextlib.suppress(OSError):  # the next run measures again
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            files.write_bytes(path, json.dumps(rates).encode())
    return rates


def _medians(rates: dict[str, list[float]]) -> dict[str, float]:
    return {name: statistics.median(values) for name, values in rates.items()}


def measure_links(device: torch.device, threads: int) -> dict[str, list[float]]:
    """Measure the rates of `Links` several times, except the rates of matrix products and of the
    disk.

    Args:
        device: The device. On a CPU, a copy between host and device is a copy within the memory of
            the CPU.
        threads: Number of threads of a rank. The number of threads of an update on the host is
            `update_threads(threads, device)`.

    Returns:
        A dict from keys of the table `links` of a machine file to the rates of all timed runs.
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
        for flat in (host, *states, param):  # 142 MB
            platform.free_host(flat)


def _times(run: Callable[[], Any], device: torch.device) -> list[float]:
    """Return the seconds of _RUNS calls of `run`. Two earlier calls are not timed."""
    times = []
    for _ in range(_RUNS + 2):
        platform.synchronize(device)
        start = time.perf_counter()
        run()
        platform.synchronize(device)
        times.append(time.perf_counter() - start)
    return times[2:]


class RawFile:
    """A file for measurements of a disk. A pool of threads reads and writes its blocks with
    O_DIRECT.

    Args:
        path: The file.
        size: Bytes of the file, a multiple of BLOCK_BYTES.

    Raises:
        OSError: The file cannot be opened with O_DIRECT.
    """

    def __init__(self, path: Path, size: int) -> None:
        self._fd, self._size = os.open(path, os.O_RDWR | os.O_DIRECT), size
        self._threads = ThreadPoolExecutor(2 * THREADS)
        # With huge pages, the system divides a block into fewer requests.
        memory = mmap.mmap(-1, 2 * THREADS * BLOCK_BYTES + _HUGE_PAGE)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            with contextlib.suppress(OSError):  # a kernel without huge pages
                memory.madvise(mmap.MADV_HUGEPAGE)
        flat = torch.frombuffer(memory, dtype=torch.uint8)
        flat = flat[-flat.data_ptr() % _HUGE_PAGE :][: 2 * THREADS * BLOCK_BYTES]
        flat.view(torch.float32).uniform_(0.1, 1.0)  # some disks transfer zeros faster
        self._blocks = flat.split(BLOCK_BYTES)

    def close(self) -> None:
        self._threads.shutdown()
        os.close(self._fd)

    def read(self) -> float:
        """Read the whole file. Return the duration in seconds."""
        return self._time(os.preadv)

    def write(self) -> float:
        """Write the whole file. Return the duration in seconds."""
        return self._time(os.pwritev)

    def read_and_write(self) -> float:
        """Read and write the whole file, first at the same time and then one after the other.
        Return the duration of the faster method in seconds."""
        return min(self._time(os.preadv, os.pwritev), self.read() + self.write())

    def _time(self, *calls: Callable[..., int]) -> float:
        def move(call: Callable[..., int], thread: int, block: torch.Tensor) -> None:
            content = block.numpy().data
            for at in range(thread * BLOCK_BYTES, self._size, THREADS * BLOCK_BYTES):
                assert call(self._fd, [content], at) == BLOCK_BYTES, "a short read or write"

        start = time.perf_counter()
        blocks = iter(self._blocks)
        jobs = [
            self._threads.submit(move, call, thread, next(blocks))
            for call in calls
            for thread in range(THREADS)
        ]
        for job in jobs:
            job.result()
        return time.perf_counter() - start


def disk_rates(directory: Path, runs: int = 7) -> dict[str, list[float]]:
    """Measure a disk. Return a dict from `disk_read` and `disk_write`, keys of the table `links` in
    a machine file, to the bytes per second of each run. Raises OSError if the directory cannot be
    written, or if its file system has no O_DIRECT."""
    size = 32 * BLOCK_BYTES
    with tempfile.NamedTemporaryFile(dir=directory, prefix="optimus-bench-") as file:
        os.posix_fallocate(file.fileno(), 0, size)
        with contextlib.closing(RawFile(Path(file.name), size)) as raw:
            raw.write()  # the first write of an allocated block can be slower
            seconds = [(raw.read(), raw.write()) for _ in range(runs)]
    return {
        "disk_read": [size / read for read, _ in seconds],
        "disk_write": [size / write for _, write in seconds],
    }
