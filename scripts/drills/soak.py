#!/usr/bin/env python3
"""Train for a long time, with evaluations and checkpoints, and detect leaks and slowdowns.

    python scripts/drills/soak.py [--minutes 30] [--nproc 2] [--work DIR] [KEY=VALUE ...]

The drill trains with the configuration and the data set of the demo until the deadline of the run
(train.deadline_s). The first run prepares the data set in --work. Once a second, the drill samples
all processes of the run: resident memory (anonymous and shared, without pages of files), open files
(without the shards of the data set, which remain open) and threads. The drill also records the
wall-clock time of each step and the processor time of all ranks in each step. Other programs on the
machine affect processor time less than wall-clock time. The time after the first fifth of the run
is divided into twelve windows. For each quantity, a line is fitted to the medians of the quantity
in the twelve windows, and the rise of the line is printed with a 95 % confidence interval. Memory
rises for some hundred updates until the caches of libraries are full. A run should therefore have
thousands of updates.

Exit status 0: all of these conditions are met.

- For memory, open files, threads, and processor time per step: the rise is at most 1 % of the mean,
  or the confidence interval of the rise includes 0.
- The run ended with a valid checkpoint, and with exit status 3, the status after a deadline.
- No process and no temporary file remains.
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
"""Maximum accepted rise, as a fraction of the mean. A larger rise is accepted only if its
confidence interval includes 0."""
TICK_S = 1 / os.sysconf("SC_CLK_TCK")


class Sample(NamedTuple):
    """Resources of a process at one moment: memory in bytes, open files, threads, and the processor
    time in seconds since the start of the process."""

    resident_bytes: int
    open_files: int
    threads: int
    cpu_s: float


History = dict[float, Sample]
"""Maps the seconds since the start of the run to a Sample of one process."""


class Progress(NamedTuple):
    """Number of training steps and processor time in the first `at_s` seconds of a run."""

    at_s: float
    steps: int
    cpu_s: float
    """Processor time of all processes of the run, in seconds."""


class Process(NamedTuple):
    """Identity of a process: its ID and its start time, because the system reuses process IDs."""

    pid: int
    start: int
    """Start time of the process, in clock ticks since the boot of the machine."""


class Trend(NamedTuple):
    """Straight line fitted to the values of a quantity, such as memory, in the time windows of a
    run."""

    mean: float
    rise: float
    """Rise of the line from the first to the last window."""
    error: float
    """Half the width of the 95 % confidence interval of `rise`."""

    @property
    def grows(self) -> bool:
        return self.rise - self.error > 0 and self.rise > GROWTH * self.mean

    def describe(self, scale: float, unit: str) -> str:
        """Return a text with the mean and the rise. The two numbers are divided by `scale`, which
        converts them to `unit`."""
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
    print(f"{' '.join(command[3:])}\nended with status {run.returncode}", flush=True)
    wrong = [] if run.returncode == 3 else [f"exit status {run.returncode} instead of 3"]
    running = _processes()
    wrong += [f"process {process.pid} still runs" for process in samples if process in running]
    wrong += [f"{path} remains" for path in scratch.rglob("*")]
    wrong += [f"/dev/shm/{name} remains" for name in set(os.listdir("/dev/shm")) - shared]
    wrong += [f"{path} remains" for path in run_dir.rglob("*") if files.is_temporary(path)]
    verify = [*OPTIMUS, "checkpoint", "verify", str(run_dir)]
    verified = subprocess.run(verify, capture_output=True, text=True)
    print(verified.stdout.strip())
    if verified.returncode:
        wrong.append(f"checkpoint verify: {verified.stderr.strip()}")
    wrong += _memory(samples) + _steps(run_dir, steps)
    print("\n".join(wrong) or "no leak and no slowdown")
    return 1 if wrong else 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=30.0, help="minutes of training")
    parser.add_argument("--nproc", type=int, default=2, help="number of ranks")
    parser.add_argument(
        "--work", type=Path, default=Path("soak"), help="directory of data and runs"
    )
    parser.add_argument("settings", nargs="*", metavar="KEY=VALUE", help="settings of the run")
    return parser.parse_args()


def _demo_data(work: Path) -> Path:
    """Return the path of the demo's data set in `work`. If the data set does not exist, prepare it
    as in scripts/demo.sh."""
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
    run: subprocess.Popen[bytes], metrics: Path, data: Path
) -> tuple[dict[Process, History], list[Progress]]:
    """Sample all processes of the run until the run ends. Return the samples of each process, and
    the progress of the run over time.

    A process belongs to the run if it is the command or a child of a process of the run. Session
    IDs do not identify the processes of the run, because each rank starts a new session.
    """
    samples: dict[Process, History] = {}
    progress = [Progress(0.0, 0, 0.0)]
    start = time.monotonic()
    while run.poll() is None:
        now = time.monotonic() - start
        for process, parent in _processes().items():
            if process.pid == run.pid or any(parent == other.pid for other in samples):
                sample = _sample(process.pid, data)
                if sample is not None:
                    samples.setdefault(process, {})[now] = sample
        steps = metrics.read_bytes().count(b"\n") if metrics.exists() else 0
        if steps > progress[-1].steps:
            cpu_s = sum(list(history.values())[-1].cpu_s for history in samples.values())
            progress.append(Progress(now, steps, cpu_s))
        time.sleep(1)
    return samples, progress


def _processes() -> dict[Process, int]:
    """Return all processes of the machine except zombies. The keys are the processes, and the
    values are the IDs of their parents."""
    processes = {}
    for pid in sorted(int(name) for name in os.listdir("/proc") if name.isdigit()):
        try:
            fields = _stat(pid)
        except OSError:
            continue
        if fields[0] != "Z":
            processes[Process(pid, int(fields[19]))] = int(fields[1])
    return processes


def _stat(pid: int) -> list[str]:
    """Return the fields of /proc/PID/stat that follow the process name: state, parent, group,
    session, ..."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()


def _sample(pid: int, data: Path) -> Sample | None:
    """Return the resources that a process uses, or None if the process has ended. One descriptor of
    each open shard of the data set `data` is not counted as an open file."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
        status = {name: value.split() for name, _, value in (line.partition(":") for line in lines)}
        resident = sum(int(status[key][0]) * 1024 for key in ("RssAnon", "RssShmem"))
        paths = []
        for fd in os.listdir(f"/proc/{pid}/fd"):
            with contextlib.suppress(FileNotFoundError):  # the file was closed
                paths.append(os.readlink(f"/proc/{pid}/fd/{fd}"))
        # Shards remain open after their first read. One descriptor of each shard is not counted.
        shards = {path for path in paths if path.startswith(f"{data.resolve()}/")}
        threads = int(status["Threads"][0])
        cpu_s = sum(int(ticks) for ticks in _stat(pid)[11:13]) * TICK_S
    except (OSError, KeyError):
        return None
    return Sample(resident, len(paths) - len(shards), threads, cpu_s)


def _trend(times: Sequence[float], values: Sequence[float]) -> Trend:
    """Leave out the first fifth of the time, and divide the rest into WINDOWS windows. Return the
    line that is fitted to the median values of the windows. `times[i]` is the time of `values[i]`
    in seconds."""
    start = min(times) + (max(times) - min(times)) / 5
    width = (max(times) - start) / WINDOWS
    windows: list[list[float]] = [[] for _ in range(WINDOWS)]
    for time_s, value in zip(times, values, strict=True):
        if time_s >= start:
            windows[min(int((time_s - start) / width), WINDOWS - 1)].append(value)
    x = numpy.arange(WINDOWS, dtype=float)
    y = numpy.array([statistics.median(window) for window in windows])
    (slope, _), covariance = numpy.polyfit(x, y, 1, cov=True)
    length = x[-1] - x[0]
    return Trend(float(y.mean()), slope * length, 1.96 * float(covariance[0, 0]) ** 0.5 * length)


def _memory(samples: dict[Process, History]) -> list[str]:
    """Print the trends of the memory, open files and threads of each process that was sampled
    during at least 90 % of the run. Return a message for each quantity that grows."""
    longest = max(len(history) for history in samples.values())
    wrong = []
    for number, history in enumerate(samples.values()):
        if len(history) < longest * 0.9:
            continue
        for field, scale, unit in (
            ("resident_bytes", 1e6, "MB"),
            ("open_files", 1, "files"),
            ("threads", 1, "threads"),
        ):
            values = [getattr(sample, field) for sample in history.values()]
            trend = _trend(list(history), values)
            description = f"{trend.describe(scale, unit)}, maximum {max(values) / scale:.4g}"
            print(f"process {number} {field:14} {description}")
            if trend.grows:
                wrong.append(f"process {number}: {field} grows")
    return wrong


def _steps(run_dir: Path, progress: list[Progress]) -> list[str]:
    """Print the trends of a training step's wall-clock time and processor time. Return a list with
    a message if the processor time grows."""
    lines = (run_dir / "metrics.jsonl").read_text().splitlines()
    seconds = [json.loads(line)["step_time_s"] for line in lines]
    clock = _trend(list(itertools.accumulate(seconds)), seconds)
    pairs = list(itertools.pairwise(progress[1:]))
    cpu_s = [(b.cpu_s - a.cpu_s) / (b.steps - a.steps) for a, b in pairs]
    work = _trend([b.at_s for _, b in pairs], cpu_s)
    print(
        f"{len(seconds)} steps of {clock.describe(1, 's')}; processor time {work.describe(1, 's')}"
    )
    return ["the processor time of a step grows"] if work.grows else []


if __name__ == "__main__":
    sys.exit(main())
