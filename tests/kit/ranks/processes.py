"""Functions for tests that start commands, wait until processes end, and measure memory."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
PYTHONPATH = f"{ROOT}:{ROOT}/kernels"
_MPIEXEC = {
    "openmpi": ["mpiexec.openmpi", "--allow-run-as-root", "--oversubscribe", "--bind-to", "none"],
    "mpich": ["mpiexec.mpich"],
}
_PACKAGES = {"openmpi": "openmpi-bin", "mpich": "mpich"}


def started(
    words: list[str], folder: Path | None = None, **environ: str
) -> subprocess.CompletedProcess[str]:
    """Run a command that imports the packages of this checkout.

    Args:
        words: The command.
        folder: Working directory of the command; None: the working directory of this process.
        environ: Additional environment variables.
    """
    before = os.environ.get("PYTHONPATH")
    path = f"{PYTHONPATH}:{before}" if before else PYTHONPATH
    environ = os.environ | {"PYTHONPATH": path} | environ
    return subprocess.run(
        words, cwd=folder, env=environ, capture_output=True, text=True, timeout=300
    )


def write_hostile_modules(folder: Path) -> Path:
    """Write modules to a folder, and return the folder. If a process imports any of these modules,
    the process ends."""
    for name in ("xxhash", "numpy", "multiprocessing", "optimus", "data_prep", "optimus_kernels"):
        (folder / name).mkdir(parents=True)
        message = f"code of the working directory runs: {name}"
        (folder / name / "__init__.py").write_text(f"raise SystemExit({message!r})\n")
    return folder


def python(*words: str, **environ: str) -> subprocess.CompletedProcess[str]:
    """Run Python with these arguments; `environ` as for `started`."""
    return started([sys.executable, *words], None, **environ)


def mpiexec(kind: str, ranks: int) -> list[str]:
    """Return the words that start a command on several ranks. Skip the test if `kind`, "openmpi" or
    "mpich", is not installed."""
    if shutil.which(_MPIEXEC[kind][0]) is None:
        pytest.skip(f"no {_MPIEXEC[kind][0]} (Debian: apt-get install {_PACKAGES[kind]})")
    return [*_MPIEXEC[kind], "-n", str(ranks)]


def install(program: Path, module: str) -> Path:
    """Write a program that runs a module of this checkout in any working directory. Return its
    path."""
    python = shlex.join([sys.executable, "-m", module])
    program.write_text(f'#!/bin/bash\nPYTHONPATH={shlex.quote(PYTHONPATH)} exec {python} "$@"\n')
    program.chmod(0o755)
    return program


def children_of(pid: int) -> list[int]:
    """Return the process IDs of the children of the process `pid`, which must have only one
    thread."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text()
    return [int(child) for child in children.split()]


def is_running(pid: int) -> bool:
    """Return True if the process exists and is not a zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def wait_until(condition: Callable[[], object], within_s: float) -> None:
    """Wait until the condition is true; fail after `within_s` seconds."""
    end = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < end, f"the condition is still false after {within_s:g} s"
        time.sleep(0.05)


def assert_gone(pids: Iterable[int]) -> None:
    """Wait until the processes have ended; fail after 10 s."""
    pids = list(pids)
    wait_until(lambda: not any(map(is_running, pids)), within_s=10)


def peak_of(work: Callable[[], object]) -> int:
    """Return the peak growth of resident memory during the second call of `work`, in bytes. The
    first call loads the pages of code into a forked process."""
    work()
    Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM, the peak
    before = status_bytes("VmRSS")
    work()
    return status_bytes("VmHWM") - before


def status_bytes(key: str) -> int:
    """Return a size in /proc/self/status, such as "VmRSS", in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line for line in lines if line.startswith(f"{key}:")).split()[1])
