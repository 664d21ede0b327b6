#!/usr/bin/env python3
"""Train for long, with evaluations and checkpoints, and look for whatever grows, slows or stays.

    python scripts/drills/soak.py [--minutes 30] [--nproc 2] [--work DIR] [KEY=VALUE ...]

Runs the demo's configuration on the demo's data (made under --work the first time), stopped by
train.deadline_s, and samples every process of it once a second: resident memory of its own
(anonymous and shared, not pages of files), open files but for the data's shards, which stay open
once read, threads; and the time of every step, by the clock and in processor time of all ranks,
which other programs disturb less. Through the medians of twelve windows behind the first fifth goes
a straight line, told as the rise from the first to the last with its interval of 95 %. Memory rises
in some hundred updates until libraries have what they keep: a run should take thousands.
Exit status 0: memory, files, threads and the processor time of a step do not rise beyond noise and
a hundredth; the run ended with 3, as after any deadline, behind a checkpoint that verifies; no
process and no file is left.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "kernels")]
os.environ["PYTHONPATH"] = os.pathsep.join(sys.path[:2])

from optimus.io import files  # noqa: E402

OPTIMUS = (sys.executable, "-P", "-m", "optimus.cli")
CONFIG = ROOT / "configs" / "run" / "demo.toml"
WINDOWS = 12
GROWTH = 0.01
"""Of the mean within the run: what a line may rise by, where noise does not explain it."""
TICK_S = 1 / os.sysconf("SC_CLK_TCK")


class Sample(NamedTuple):
    """Of one process at one moment."""

    own_bytes: int
    open_files: int
    threads: int
    cpu_s: float


History = dict[float, Sample]
"""By seconds since the run began."""


class Progress(NamedTuple):
    at: float
    steps: int
    cpu_s: float
    """Of all processes."""


class Process(NamedTuple):
    pid: int
    started: int
    """In ticks since the machine was: numbers of processes come back."""


class Trend(NamedTuple):
    """A line through the windows of a run: how much a value changes in the time looked at."""

    mean: float
    rise: float
    error: float
    """Half of the interval of 95 % of `rise`."""

    @property
    def grows(self) -> bool:
        return self.rise - self.error > 0 and self.rise > GROWTH * self.mean

    def told(self, scale: float, unit: str) -> str:
        rise, error = self.rise / scale, self.error / scale
        return f"{self.mean / scale:.4g} {unit}, rise {rise:+.3g} +- {error:.2g}"


def main() -> int:
    args = _arguments()
    args.work.mkdir(parents=True, exist_ok=True)
    data = _demo_data(args.work)
    scratch = Path(tempfile.mkdtemp(dir=args.work, prefix="tmp-"))
    run_dir, shared = args.work / f"run-{scratch.name}", set(os.listdir("/dev/shm"))
    command = [*OPTIMUS, "train", str(CONFIG), f"data.path={data}"]
    command += [f"train.run_dir={run_dir}", f"train.deadline_s={args.minutes * 60:.0f}"]
    command += ["train.max_steps=1000000", *args.settings, "--nproc", str(args.nproc)]
    with open(args.work / "soak.log", "w") as log:
        run = subprocess.Popen(
            command,
            stdout=log,
            stderr=log,
            env=os.environ | {"TMPDIR": str(scratch)},
        )
        samples, steps = _watch(run, run_dir / "metrics.jsonl", data)
    print(f"{' '.join(command[3:])}\nended with {run.returncode}", flush=True)
    wrong = [] if run.returncode == 3 else [f"exit status {run.returncode} for 3"]
    wrong += [f"process {one.pid} is left" for one in samples if one in _processes()]
    wrong += [f"{path} is left" for path in scratch.rglob("*")]
    wrong += [f"/dev/shm/{name} is left" for name in set(os.listdir("/dev/shm")) - shared]
    wrong += _left_in(run_dir) + _unverified(run_dir)
    wrong += _memory(samples) + _steps(run_dir, steps)
    print("\n".join(wrong) or "nothing grows, slows or stays")
    return 1 if wrong else 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=30.0, help="of training")
    parser.add_argument("--nproc", type=int, default=2, help="ranks")
    parser.add_argument("--work", type=Path, default=Path("soak"), help="data and runs")
    parser.add_argument("settings", nargs="*", metavar="KEY=VALUE", help="of the run")
    return parser.parse_args()


def _demo_data(work: Path) -> Path:
    """The demo's data set, as scripts/demo.sh makes it."""
    data, tokenizer = work / "data", work / "tokenizer.json"
    text = ["--input", f"{os.path.dirname(os.__file__)}/**/*.py", "--exclude", "*/site-packages/*"]
    text += ["--on-error", "quarantine"]
    tool = [sys.executable, "-P", "-m", "data_prep.cli"]
    if not tokenizer.exists():
        train = ["train-tokenizer", *text, "--vocab-size", "4096", "--out", str(tokenizer)]
        subprocess.run([*tool, *train], check=True)
    if not data.exists():
        fixed = ["--tokenizer", str(tokenizer), "--context", "256", "--eval-fraction", "0.02"]
        subprocess.run([*tool, "run", *text, *fixed, "--out", str(data)], check=True)
    return data


def _watch(
    run: subprocess.Popen, metrics: Path, data: Path
) -> tuple[dict[Process, History], list[Progress]]:
    """Samples of each process, and how far the run was when, until it ends. Ranks have sessions of
    their own, so descent tells what belongs to the run; who was seen once belongs to it."""
    samples: dict[Process, History] = {}
    progress = [Progress(0.0, 0, 0.0)]
    start = time.monotonic()
    while run.poll() is None:
        now = time.monotonic() - start
        for process, parent in _processes().items():
            if process.pid == run.pid or any(parent == one.pid for one in samples):
                sample = _sample(process.pid, data)
                if sample is not None:
                    samples.setdefault(process, {})[now] = sample
        steps = metrics.read_bytes().count(b"\n") if metrics.exists() else 0
        if steps > progress[-1].steps:
            cpu_s = sum(list(of_one.values())[-1].cpu_s for of_one in samples.values())
            progress.append(Progress(now, steps, cpu_s))
        time.sleep(1)
    return samples, progress


def _processes() -> dict[Process, int]:
    """All of the machine that have not ended, parents first, each with its parent."""
    found = {}
    for pid in sorted(int(name) for name in os.listdir("/proc") if name.isdigit()):
        try:
            fields = _stat(pid)
        except OSError:
            continue
        if fields[0] != "Z":
            found[Process(pid, int(fields[19]))] = int(fields[1])
    return found


def _stat(pid: int) -> list[str]:
    """What stands in /proc/PID/stat behind the name: state, parent, group, session, ..."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()


def _sample(pid: int, data: Path) -> Sample | None:
    """None: it has ended."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
        status = {name: value.split() for name, _, value in (line.partition(":") for line in lines)}
        own = sum(int(status[key][0]) * 1024 for key in ("RssAnon", "RssShmem"))
        files, threads = _open_files(pid, data), int(status["Threads"][0])
        cpu = sum(int(ticks) for ticks in _stat(pid)[11:13]) * TICK_S
    except (OSError, KeyError):
        return None
    return Sample(own, files, threads, cpu)


def _open_files(pid: int, data: Path) -> int:
    """But for each shard of `data`, opened as it is first read and kept: once. Raises OSError."""
    paths = []
    for fd in os.listdir(f"/proc/{pid}/fd"):
        with contextlib.suppress(FileNotFoundError):  # closed by now
            paths.append(os.readlink(f"/proc/{pid}/fd/{fd}"))
    return len(paths) - len({path for path in paths if path.startswith(f"{data.resolve()}/")})


def _trend(times: Sequence[float], values: Sequence[float]) -> Trend:
    """The medians of windows behind the first fifth, as a line; its error from how they scatter."""
    begin = min(times) + (max(times) - min(times)) / 5
    width = (max(times) - begin) / WINDOWS
    windows: list[list[float]] = [[] for _ in range(WINDOWS)]
    for at, value in zip(times, values, strict=True):
        if at >= begin:
            windows[min(int((at - begin) / width), WINDOWS - 1)].append(value)
    x = numpy.arange(WINDOWS, dtype=float)
    y = numpy.array([statistics.median(window) for window in windows])
    (slope, _), covariance = numpy.polyfit(x, y, 1, cov=True)
    length = x[-1] - x[0]
    return Trend(float(y.mean()), slope * length, 1.96 * float(covariance[0, 0]) ** 0.5 * length)


def _memory(samples: dict[Process, History]) -> list[str]:
    """Print the lines of each process that lives as long as the run; which of them grow."""
    longest = max(len(of_pid) for of_pid in samples.values())
    wrong = []
    for number, of_pid in enumerate(samples.values()):
        if len(of_pid) < longest * 0.9:
            continue
        for what, scale, unit in (
            ("own_bytes", 1e6, "MB"),
            ("open_files", 1, "files"),
            ("threads", 1, "threads"),
        ):
            values = [getattr(sample, what) for sample in of_pid.values()]
            trend = _trend(list(of_pid), values)
            told = f"{trend.told(scale, unit)}, most {max(values) / scale:.4g}"
            print(f"process {number} {what:10} {told}")
            if trend.grows:
                wrong.append(f"process {number}: {what} grows")
    return wrong


def _steps(run_dir: Path, progress: list[Progress]) -> list[str]:
    """Print how the time of a step goes; whether its processor time grows."""
    lines = (run_dir / "metrics.jsonl").read_text().splitlines()
    seconds = [json.loads(line)["step_time_s"] for line in lines]
    clock = _trend(list(itertools.accumulate(seconds)), seconds)
    pairs = list(itertools.pairwise(progress[1:]))
    cpu_s = [(b.cpu_s - a.cpu_s) / (b.steps - a.steps) for a, b in pairs]
    worked = _trend([b.at for _, b in pairs], cpu_s)
    print(f"{len(seconds)} steps of {clock.told(1, 's')}; processor time {worked.told(1, 's')}")
    return ["the processor time of a step grows"] if worked.grows else []


def _left_in(run_dir: Path) -> list[str]:
    """Temporary files of the run directory."""
    return [f"{p} is left" for p in run_dir.rglob("*") if files.is_temporary(p)]


def _unverified(run_dir: Path) -> list[str]:
    verify = [*OPTIMUS, "checkpoint", "verify", str(run_dir)]
    told = subprocess.run(verify, capture_output=True, text=True)
    print(told.stdout.strip())
    return [] if told.returncode == 0 else [f"checkpoint verify: {told.stderr.strip()}"]


if __name__ == "__main__":
    sys.exit(main())
