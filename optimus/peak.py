"""Peak FLOP/s of a device, the denominator of MFU (model FLOPs utilization).

The peak comes from a data sheet or from a measurement, which is cached. A resumed run uses the same
peak as before if the conditions in `Setup`, such as device and dtype, are the same.
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

from optimus.errors import counted, one_line, reason_of
from optimus.io import files
from optimus.io.workspace import Workspace
from optimus.launch.environment import available_cores
from optimus.platform import device_name, synchronize

# Dense bf16 peaks in FLOP/s. NVIDIA: data sheets. Intel Max 1550: one tile, measured on Aurora.
_BF16_PEAKS = {
    "H200": 989e12,
    "H100": 989e12,
    "A100": 312e12,
    "Max 1550": 256e12,
}
_FORMAT = "optimus-peak"
_KINDS = {
    "str": str,
    "int": int,
    "float": (int, float),
    "float | None": (int, float, type(None)),
}
"""Maps the type annotation of a field of `Peak` or `Setup` to the types that the field's value may
have in a cache file."""
_BUDGET_S = 0.8
"""Approximate time of a measurement in seconds."""
_MIN_RUNS = 3
"""Minimum number of matrix products in a measurement."""
_MAX_SPREAD = 0.1
"""A measured peak is cached only if its `Peak.spread` is at most this value."""
_MIN_CPU_SHARE = 0.9
"""Minimum of processor time / (wall-clock time * threads) of a matrix product. If the quotient is
lower, other programs interrupted the product, and its time is not used."""


@dataclass(frozen=True)
class Setup:
    """Conditions under which a peak was measured: device, dtype, software and number of threads. A
    cached peak is used only under the same conditions."""

    device: str
    """Device type, such as `cuda`."""
    name: str
    """Name of the processor or accelerator."""
    dtype: str
    library: str
    """Library that computes the matrix products."""
    torch: str
    """Version of torch."""
    threads: int

    @property
    def key(self) -> str:
        text = json.dumps(dataclasses.asdict(self), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]


@dataclass(frozen=True)
class Peak:
    """Peak FLOP/s of one rank, and the method by which it was found."""

    setup: Setup
    flops: float
    spread: float | None
    """Relative difference between the rates of the fastest measured matrix product and of a slower
    product. If at least 30 products are measured, the slower product is the product at the 10th
    percentile of times; otherwise it is the third fastest product. A large spread means that the
    measurement is unreliable. If other programs interrupted too many products, `flops` is only an
    estimate, and the spread is None."""
    method: str
    """Phrase for log lines that says how `flops` was found, such as "measured 512^3 matmul"."""
    measured_at: str
    """Time of the measurement in UTC; empty for a peak from a data sheet."""

    @property
    def is_reliable(self) -> bool:
        return self.spread is not None and self.spread <= _MAX_SPREAD

    def __str__(self) -> str:
        setup = self.setup
        text = f"{self.flops / 1e12:.3g} TFLOP/s per device ({self.method}"
        if self.measured_at:
            threads = f", {counted(setup.threads, 'thread')}"
            text += f", {setup.dtype}, {setup.library}{threads if setup.device == 'cpu' else ''}"
            spread = "unknown" if self.spread is None else f"{self.spread:.1%}"
            text += f"; spread {spread}, {self.measured_at}"
        return text + ")"


def find_peak(
    device: torch.device, dtype: torch.dtype, library: str, log: Callable[[str], None]
) -> Peak:
    """Return the peak FLOP/s of a device for matrix products.

    The peak comes from a data sheet, from the cache or from a measurement that takes about a
    second.

    Args:
        device: Device of this rank. On a CPU, the peak covers this rank's intra-op threads.
        dtype: Dtype of the matrix products.
        library: Name of the library that computes the matrix products.
        log: Function that writes one line to the log.

    Returns:
        The peak of this rank.
    """
    setup = setup_of(device, dtype, library)
    if device.type != "cpu" and dtype is torch.bfloat16:
        for model, flops in _BF16_PEAKS.items():
            if model in setup.name:
                return Peak(setup, flops, 0.0, f"{model} data sheet", "")
    directory = cache_dir()
    cached = None if directory is None else read_peak(directory / f"{setup.key}.json")
    if isinstance(cached, str):
        log(f"{cached}; the file is ignored, and the peak FLOP/s for MFU is measured again")
    elif cached is not None and cached.setup == setup:
        return cached
    peak = measure(device, dtype, setup)
    if peak.is_reliable:
        _cache(peak, log)
    else:
        quality, reason = "is only an estimate", "the machine is busy"
        if peak.spread is not None:
            quality = f"was measured with a spread of {peak.spread:.0%}"
        if device.type == "cpu" and setup.threads > available_cores():
            cores = counted(available_cores(), "core")
            reason = f"{counted(setup.threads, 'thread')} share {cores}"
        log(
            f"the peak FLOP/s for MFU {quality} because {reason}; it is not cached, and the next "
            "run measures again"
        )
    return peak


def setup_of(device: torch.device, dtype: torch.dtype, library: str) -> Setup:
    """Return the conditions under which this rank would measure its peak."""
    threads = torch.get_num_threads() if device.type == "cpu" else 1
    dtype_name = str(dtype).removeprefix("torch.")
    return Setup(device.type, device_name(device), dtype_name, library, torch.__version__, threads)


def measure(device: torch.device, dtype: torch.dtype, setup: Setup) -> Peak:
    """Measure and return the peak: the rate of the fastest of many short matrix products.

    On a CPU with several threads, products that other programs interrupted are ignored. If fewer
    than _MIN_RUNS products remain, the peak is the rate of one thread times the number of threads
    or cores, whichever is smaller. The spread is then None, and `find_peak` does not cache the
    peak.
    """
    size, threads = 8192, setup.threads
    if device.type == "cpu":
        # Small products if arithmetic is slow: without fp16 instructions, 1024^3 takes 2 s in fp16.
        size = 512 if min(_thread_times(256, dtype, 0.0)) < 0.004 else 256
    method = f"measured {size}^3 matmul"
    if device.type != "cpu":
        times_s = _device_times(size, dtype, device)
    elif threads == 1:
        times_s = _thread_times(size, dtype, _BUDGET_S)
    else:
        times_s = _uninterrupted_times(size, dtype, threads)
        if len(times_s) < _MIN_RUNS:
            torch.set_num_threads(1)
            try:
                one_thread_s = min(_thread_times(size, dtype, _BUDGET_S / 4))
            finally:
                torch.set_num_threads(threads)
            cores = min(threads, available_cores())
            method += f" of one thread, times {cores}"
            return Peak(setup, cores * 2 * size**3 / one_thread_s, None, method, _now())
    times_s = sorted(times_s)
    # The third fastest product or, of 30 or more products, the one at the 10th percentile.
    confirming_s = times_s[min(len(times_s) - 1, max(2, len(times_s) // 10))]
    return Peak(setup, 2 * size**3 / times_s[0], 1 - times_s[0] / confirming_s, method, _now())


def _now() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())


def _product(size: int, dtype: torch.dtype, device: torch.device) -> Callable[[], Any]:
    a = torch.randn(size, size, dtype=torch.float32).to(device, dtype)
    out = torch.empty_like(a)
    torch.mm(a, a, out=out)  # the first product of a shape may compile a kernel
    return lambda: torch.mm(a, a, out=out)


def _timed(run: Callable[[], Any], clock: Callable[[], float]) -> float:
    start = clock()
    run()
    return clock() - start


def _thread_times(size: int, dtype: torch.dtype, budget_s: float) -> list[float]:
    """Multiply two [size, size] matrices on a CPU for `budget_s` seconds, at least _MIN_RUNS times.
    Return the processor seconds that this thread used for each product."""
    run = _product(size, dtype, torch.device("cpu"))
    times_s: list[float] = []
    end = time.perf_counter() + budget_s
    while len(times_s) < _MIN_RUNS or time.perf_counter() < end:
        times_s.append(max(_timed(run, time.thread_time), 1e-9))
    return times_s


def _uninterrupted_times(size: int, dtype: torch.dtype, threads: int) -> list[float]:
    """Multiply two [size, size] matrices repeatedly on all intra-op threads of a CPU.

    Return the wall-clock seconds of those products that no other program interrupted.
    """
    run, times_s = _product(size, dtype, torch.device("cpu")), []
    end = time.perf_counter() + 0.75 * _BUDGET_S
    while time.perf_counter() < end:
        cpu_start_s = time.process_time()
        wall_s = _timed(run, time.perf_counter)
        if time.process_time() - cpu_start_s >= _MIN_CPU_SHARE * threads * wall_s:
            times_s.append(wall_s)
    return times_s


def _device_times(size: int, dtype: torch.dtype, device: torch.device) -> list[float]:
    """Multiply two [size, size] matrices repeatedly on an accelerator. Return the wall-clock
    seconds of each product."""
    run = _product(size, dtype, device)
    times_s: list[float] = []

    def run_to_end() -> None:
        run()
        synchronize(device)

    synchronize(device)
    end = time.perf_counter() + _BUDGET_S
    while len(times_s) < _MIN_RUNS or time.perf_counter() < end:
        times_s.append(_timed(run_to_end, time.perf_counter))
    return times_s


def cache_dir() -> Path | None:
    """Return the directory of cached peaks; None if there is no such directory.

    The directory is the value of OPTIMUS_PEAK_CACHE or, without this variable, `optimus/peaks` in
    the user's cache directory (XDG_CACHE_HOME or `~/.cache`). A user without a home directory may
    have no cache directory.
    """
    if setting := os.environ.get("OPTIMUS_PEAK_CACHE"):
        return Path(setting)
    try:
        base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    except RuntimeError:
        return None
    return Path(base) / "optimus" / "peaks"


def kept_peaks() -> list[tuple[Path, Peak]]:
    """Return a pair (path of the file, peak) for each cached peak that can be used."""
    directory = cache_dir()
    paths = sorted(directory.glob("*.json")) if directory is not None else []
    peaks = ((path, read_peak(path)) for path in paths)
    return [(path, peak) for path, peak in peaks if isinstance(peak, Peak)]


def read_peak(path: Path, private: bool = True) -> Peak | str | None:
    """Read the peak in a file that `write_peak` has written.

    Args:
        path: Path of the file.
        private: If True, refuse the file if another user owns or can change the file or its
            directory.

    Returns:
        The peak; None if the file does not exist; a str with the reason if the file cannot be used.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    except FileNotFoundError:
        return None
    except OSError as error:
        return f"{path}: {reason_of(error)}"
    status = os.fstat(fd)
    if not stat.S_ISREG(status.st_mode):
        os.close(fd)
        return f"{path}: is not a file"
    with os.fdopen(fd, "rb") as file:
        checked = ((path, status), (path.parent, path.parent.stat())) if private else ()
        for name, owner_and_mode in checked:
            if owner_and_mode.st_uid != os.geteuid():
                return f"{name}: belongs to another user"
            if owner_and_mode.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
                return f"{name}: can be written by others; to use it, run chmod go-w on it"
        try:
            return _parse(file.read(1 << 16))
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            return f"{path}: damaged: {one_line(error).removeprefix('damaged: ')}"


def _parse(data: bytes) -> Peak:
    """Return the peak in `data`, the content of a file that `write_peak` has written."""
    tree = files.parse_checked_json(data)
    is_peak = tree.pop("format") == _FORMAT
    del tree["self_xxh3"]
    peak = Peak(**tree | {"setup": Setup(**tree["setup"])})
    for section in (peak, peak.setup):
        fields = dataclasses.fields(section)
        kinds: dict[str, Any] = {field.name: _KINDS.get(str(field.type), Setup) for field in fields}
        values = {key: getattr(section, key) for key in kinds}
        is_peak = is_peak and all(isinstance(values[key], kinds[key]) for key in kinds)
        is_peak = is_peak and not any(isinstance(value, bool) for value in values.values())
        texts = (text for text in values.values() if isinstance(text, str))
        is_peak = is_peak and all(map(str.isprintable, texts))  # the texts are printed
    spread = 0.0 if peak.spread is None else peak.spread
    is_peak = is_peak and peak.setup.threads > 0
    if not is_peak or not 0 < peak.flops < 1e18 or not 0 <= spread < math.inf:
        raise ValueError("a field has an invalid value")
    return peak


def _cache(peak: Peak, log: Callable[[str], None]) -> None:
    """Write a peak to the cache, if there is a cache directory. If the write fails, log a line."""
    if (directory := cache_dir()) is None:
        return
    try:
        for folder in reversed([directory, *directory.parents]):  # parents=True would use the umask
            folder.mkdir(mode=0o700, exist_ok=True)
        path = directory / f"{peak.setup.key}.json"
        write_peak(path, peak)
        path.chmod(0o600)  # umask 002 lets the group write, which read_peak refuses
    except OSError as error:
        log(
            f"the peak FLOP/s for MFU is not cached: {error.filename or directory}: "
            f"{error.strerror}; set OPTIMUS_PEAK_CACHE to a writable directory"
        )


def write_peak(path: Path, peak: Peak, workspace: Workspace | None = None) -> None:
    """Write a peak atomically to the file `path`. `workspace`, if given, determines the path of the
    temporary file. Raises OSError."""
    with files.atomic_writer(path, workspace.temporary(path) if workspace else None) as file:
        file.write(files.checked_json({"format": _FORMAT, **dataclasses.asdict(peak)}))


class RunPeak:
    """Peak FLOP/s from which one run computes its MFU.

    Only the first rank has a RunPeak. The peak is that of the first rank's device or, on a CPU, of
    the first rank's intra-op threads.
    """

    def __init__(
        self,
        run_dir: Path,
        workspace: Workspace,
        resumed: bool,
        device: torch.device,
        dtype: torch.dtype,
        library: str,
        log: Callable[[str], None],
    ) -> None:
        """Read the peak from the run directory, or find a new peak and write it there.

        The peak in the run directory is used only if the run is resumed, the Setup of that peak
        equals the Setup of this rank, and the peak is reliable.

        Args:
            run_dir: Run directory.
            workspace: The workspace of the run.
            resumed: True if the run starts at a step after 0.
            device, dtype, library, log: As for `find_peak`. `log` also receives a line that names
                the peak in use.
        """
        self._path, self._workspace = run_dir / "peak.json", workspace
        self._log, self._was_too_low = log, False
        setup = setup_of(device, dtype, library)
        recorded = read_peak(self._path, private=False) if resumed else None
        if isinstance(recorded, Peak) and recorded.setup == setup and recorded.is_reliable:
            self.peak = recorded
            log(f"MFU refers to {recorded}, as before in this run")
            return
        self.peak = find_peak(device, dtype, library, log)
        change = f"; before, MFU referred to {recorded}" if isinstance(recorded, Peak) else ""
        log(f"MFU refers to {self.peak}{change}")
        self._record()

    def mfu(self, flops: float) -> float | None:
        """Return the MFU of a step, `flops` / peak. If `flops` is above the peak, return None, and
        use `flops` as the peak of later steps.

        Args:
            flops: Model FLOP/s of the step.
        """
        if flops <= self.peak.flops:
            return flops / self.peak.flops
        if not self._was_too_low:
            self._log(
                f"the peak FLOP/s for MFU was too low: a step reached {flops / 1e12:.3g} TFLOP/s, "
                "which is the peak from now on; the step's mfu is null"
            )
            if (directory := cache_dir()) is not None:
                with contextlib.suppress(OSError):
                    (directory / f"{self.peak.setup.key}.json").unlink()
        self._was_too_low = True
        self.peak = dataclasses.replace(self.peak, flops=flops, method="reached by a step")
        self._record()
        return None

    def _record(self) -> None:
        with contextlib.suppress(OSError):  # metrics are on the same disk and report its errors
            write_peak(self._path, self.peak, self._workspace)
