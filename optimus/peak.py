"""The peak that MFU refers to: of a data sheet, or measured once on a device and kept.

A measured peak is kept in a file of the user's cache directory, one for each kind of device, dtype,
library, torch and number of threads; a run keeps the one it began with in its own directory.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import math
import os
import stat
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from optimus.errors import counted, one_line
from optimus.io import files
from optimus.platform import device_name, synchronize

# Dense bf16 peaks in FLOP/s. NVIDIA: data sheets. Max 1550: one tile as measured on Aurora.
_BF16_PEAKS = {
    "H200": 989e12,
    "H100": 989e12,
    "A100": 312e12,
    "Max 1550": 256e12,
}
_FORMAT = "optimus-peak"
_KINDS = {"str": str, "int": int, "float": (int, float)}
"""By annotation, the types of values in a file."""
_BUDGET_S = 0.8
_FEWEST_RUNS = 3
_SPREAD_KEPT = 0.1
"""A measurement whose best runs differ by more is used by one run and not kept."""
_SHARE_GIVEN = 0.9
"""Of the processor time that all threads could have had: a run with less was interrupted."""


@dataclass(frozen=True)
class Setup:
    """What a measured peak depends on."""

    device: str
    name: str
    dtype: str
    library: str
    torch: str
    threads: int

    @property
    def key(self) -> str:
        text = json.dumps(dataclasses.asdict(self), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]


@dataclass(frozen=True)
class Peak:
    """A peak in FLOP/s of one rank, and where it comes from."""

    setup: Setup
    flops: float
    spread: float
    """Relative distance of the best run from the third best or the best tenth."""
    method: str
    measured_at: str
    """UTC; empty of a data sheet."""

    @property
    def is_reliable(self) -> bool:
        return self.spread <= _SPREAD_KEPT

    def __str__(self) -> str:
        setup = self.setup
        text = f"{self.flops / 1e12:.3g} TFLOP/s a device ({self.method}"
        if self.measured_at:
            threads = f", {counted(setup.threads, 'thread')}"
            text += f", {setup.dtype}, {setup.library}{threads if setup.device == 'cpu' else ''}"
            text += f"; spread {self.spread:.1%}, {self.measured_at}"
        return text + ")"


def find_peak(
    device: torch.device, dtype: torch.dtype, library: str, say: Callable[[str], None]
) -> Peak:
    """Return the peak of a device for products in `dtype`: the data sheet's, or that of the cache,
    or one measured now, which takes about a second and is kept if it is reliable.

    Args:
        device: of this rank; on a CPU the peak is that of its intra-op threads.
        dtype: of the products.
        library: that computes them; the caller has chosen it.
        say: takes a line for the log.
    """
    setup = setup_of(device, dtype, library)
    if device.type != "cpu" and dtype is torch.bfloat16:
        for part, flops in _BF16_PEAKS.items():
            if part in setup.name:
                return Peak(setup, flops, 0.0, f"{part} data sheet", "")
    if (kept := _read(setup, say)) is not None:
        return kept
    peak = measure(device, dtype, setup)
    if peak.is_reliable:
        _keep(peak, say)
    else:
        say(
            f"the peak of MFU was measured with a spread of {peak.spread:.0%}, for the machine is "
            "busy; it is not kept, and the next run measures again"
        )
    return peak


def setup_of(device: torch.device, dtype: torch.dtype, library: str) -> Setup:
    threads = torch.get_num_threads() if device.type == "cpu" else 1
    kind = str(dtype).removeprefix("torch.")
    return Setup(device.type, device_name(device), kind, library, torch.__version__, threads)


def measure(device: torch.device, dtype: torch.dtype, setup: Setup) -> Peak:
    """Time many short products of this rank's threads and take the best.

    On a CPU a product counts only if its threads had the processor: one thread is timed by its
    processor time; several by the clock, if they were given nine tenths of it. Where that never
    happened, the rate of one thread times their number stands in, with a spread of 1. Another
    clock would measure the other programs of a busy machine: at a load of 18 on two cores,
    products of 1024^3 took 20 times as long by the clock as by processor time.
    """
    size, threads = 8192, setup.threads
    if device.type == "cpu":
        # fp16 where a CPU has no instructions for it takes 2 s for 1024^3.
        size = 512 if min(_thread_times(256, dtype, 0.0)) < 0.004 else 256
    method = f"measured {size}^3 matmul"
    if device.type != "cpu":
        taken = _device_times(size, dtype, device)
    elif threads == 1:
        taken = _thread_times(size, dtype, _BUDGET_S)
    else:
        taken = _clean_times(size, dtype, threads)
        if len(taken) < _FEWEST_RUNS:
            torch.set_num_threads(1)
            try:
                alone = min(_thread_times(size, dtype, _BUDGET_S / 4))
            finally:
                torch.set_num_threads(threads)
            method += f" of one thread, times {threads}"
            return Peak(setup, threads * 2 * size**3 / alone, 1.0, method, _now())
    taken = sorted(taken)
    confirming = taken[min(len(taken) - 1, max(2, len(taken) // 10))]
    return Peak(setup, 2 * size**3 / taken[0], 1 - taken[0] / confirming, method, _now())


def _now() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())


def _product(size: int, dtype: torch.dtype, device: torch.device) -> Callable[[], Any]:
    a = torch.randn(size, size, dtype=torch.float32).to(device, dtype)
    out = torch.empty_like(a)
    torch.mm(a, a, out=out)  # what is made once for a shape does not count
    return lambda: torch.mm(a, a, out=out)


def _timed(run: Callable[[], Any], clock: Callable[[], float]) -> float:
    start = clock()
    run()
    return clock() - start


def _thread_times(size: int, dtype: torch.dtype, budget_s: float) -> list[float]:
    """Processor seconds of products by this thread alone."""
    run = _product(size, dtype, torch.device("cpu"))
    taken: list[float] = []
    end = time.perf_counter() + budget_s
    while len(taken) < _FEWEST_RUNS or time.perf_counter() < end:
        taken.append(max(_timed(run, time.thread_time), 1e-9))
    return taken


def _clean_times(size: int, dtype: torch.dtype, threads: int) -> list[float]:
    """Seconds of products during which all threads had the processor; there may be none."""
    run, taken = _product(size, dtype, torch.device("cpu")), []
    end = time.perf_counter() + 0.75 * _BUDGET_S
    while time.perf_counter() < end:
        given = time.process_time()
        wall = _timed(run, time.perf_counter)
        if time.process_time() - given >= _SHARE_GIVEN * threads * wall:
            taken.append(wall)
    return taken


def _device_times(size: int, dtype: torch.dtype, device: torch.device) -> list[float]:
    """Seconds of products on another device than a CPU."""
    run = _product(size, dtype, device)
    taken: list[float] = []

    def finished() -> None:
        run()
        synchronize(device)

    synchronize(device)
    end = time.perf_counter() + _BUDGET_S
    while len(taken) < _FEWEST_RUNS or time.perf_counter() < end:
        taken.append(_timed(finished, time.perf_counter))
    return taken


def cache_dir() -> Path | None:
    """OPTIMUS_PEAK_CACHE, or optimus/peaks in the user's cache directory; None without a home."""
    if named := os.environ.get("OPTIMUS_PEAK_CACHE"):
        return Path(named)
    try:
        base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    except RuntimeError:
        return None
    return Path(base) / "optimus" / "peaks"


def kept_peaks() -> list[tuple[Path, Peak]]:
    """The usable peaks of the cache with their files."""
    directory = cache_dir()
    paths = sorted(directory.glob("*.json")) if directory is not None else []
    found = ((path, read_peak(path)) for path in paths)
    return [(path, peak) for path, peak in found if isinstance(peak, Peak)]


def _read(setup: Setup, say: Callable[[str], None]) -> Peak | None:
    if (directory := cache_dir()) is None:
        return None
    found = read_peak(directory / f"{setup.key}.json")
    if isinstance(found, str):
        say(f"{found}; it is ignored, and the peak of MFU is measured again")
        return None
    return found if found is not None and found.setup == setup else None


def read_peak(path: Path, private: bool = True) -> Peak | str | None:
    """The peak in a file; None where there is none, and why a file is not to be used. `private`: a
    file or a folder that others own or may write is not."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    except FileNotFoundError:
        return None
    except OSError as error:
        return f"{path}: {error.strerror}"
    about = os.fstat(fd)
    if not stat.S_ISREG(about.st_mode):
        os.close(fd)
        return f"{path}: is not a file"
    with os.fdopen(fd, "rb") as file:
        for what, where in ((about, path), (path.parent.stat(), path.parent)) if private else ():
            if what.st_uid != os.geteuid():
                return f"{where}: belongs to another user"
            if what.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
                return f"{where}: can be written by others; chmod go-w makes it usable"
        try:
            return _parse(file.read(1 << 16))
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            return f"{path}: damaged: {one_line(error)}"


def _parse(data: bytes) -> Peak:
    """Return the peak that `write_peak` wrote. Raises one of several exceptions for other bytes."""
    tree = files.parse_checked_json(data)
    is_peak = tree.pop("format") == _FORMAT
    del tree["self_xxh3"]
    peak = Peak(**tree | {"setup": Setup(**tree["setup"])})
    for part in (peak, peak.setup):
        fields = dataclasses.fields(part)
        kinds: dict[str, Any] = {one.name: _KINDS.get(str(one.type), Setup) for one in fields}
        values = {key: getattr(part, key) for key in kinds}
        is_peak = is_peak and all(isinstance(values[key], kinds[key]) for key in kinds)
        texts = (text for text in values.values() if isinstance(text, str))
        is_peak = is_peak and all(map(str.isprintable, texts))  # they are printed
    if not is_peak or not 0 < peak.flops < 1e18 or not 0 <= peak.spread < math.inf:
        raise ValueError("holds no peak")
    return peak


def _keep(peak: Peak, say: Callable[[str], None]) -> None:
    """Put a peak into the cache, if that can be written."""
    if (directory := cache_dir()) is None:
        return
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        path = directory / f"{peak.setup.key}.json"
        write_peak(path, peak)
        path.chmod(0o600)  # under umask 002 it would not be used again
    except OSError as error:
        say(
            f"the peak of MFU is not kept: {error.filename or directory}: {error.strerror}; set "
            "OPTIMUS_PEAK_CACHE to a writable directory"
        )


def write_peak(path: Path, peak: Peak) -> None:
    """Atomically write a peak, as `read_peak` reads it. Raises OSError."""
    files.write_bytes(path, files.checked_json({"format": _FORMAT, **dataclasses.asdict(peak)}))


class RunPeak:
    """The peak of one run: what it began with, also where it is resumed.

    Of several ranks the first has it, for its own threads, measured while the others wait or
    prepare: a figure that is kept must not depend on how many ranks shared the machine. So what
    ranks lose to each other shows in MFU.
    """

    def __init__(
        self,
        run_dir: Path,
        resumed: bool,
        device: torch.device,
        dtype: torch.dtype,
        library: str,
        say: Callable[[str], None],
    ) -> None:
        """Other arguments as for `find_peak`; `say` is told which peak it is."""
        self._path, self._say, self._was_wrong = run_dir / "peak.json", say, False
        setup = setup_of(device, dtype, library)
        recorded = read_peak(self._path, private=False) if resumed else None
        if isinstance(recorded, Peak) and recorded.setup == setup:
            self.peak = recorded
            say(f"MFU refers to {recorded}, as before in this run")
            return
        self.peak = find_peak(device, dtype, library, say)
        before = f"; until now it was {recorded}" if isinstance(recorded, Peak) else ""
        say(f"MFU refers to {self.peak}{before}")
        self._record()

    def mfu(self, flops: float) -> float | None:
        """Return the share of the peak that `flops` a second are. A greater rate shows that the
        peak was too low: it becomes the peak, and None is returned."""
        if flops <= self.peak.flops:
            return flops / self.peak.flops
        if not self._was_wrong:
            self._say(
                f"the peak of MFU was too low: a step reached {flops / 1e12:.3g} TFLOP/s, which is "
                "the peak from now on; the step's mfu is null"
            )
            if (directory := cache_dir()) is not None:
                with contextlib.suppress(OSError):
                    (directory / f"{self.peak.setup.key}.json").unlink()
        self._was_wrong = True
        self.peak = dataclasses.replace(self.peak, flops=flops, method="reached by a step")
        self._record()
        return None

    def _record(self) -> None:
        with contextlib.suppress(OSError):  # metrics, which share the disk, tell of it
            write_peak(self._path, self.peak)
