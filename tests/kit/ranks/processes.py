"""Other processes: commands as a shell or a launcher starts them, waiting for them, memory."""

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
    """Run a command, in `folder` if given, that finds this checkout's packages."""
    found = os.environ.get("PYTHONPATH")
    path = f"{PYTHONPATH}:{found}" if found else PYTHONPATH
    environ = os.environ | {"PYTHONPATH": path} | environ
    return subprocess.run(
        words, cwd=folder, env=environ, capture_output=True, text=True, timeout=300
    )


def write_hostile_modules(folder: Path) -> Path:
    """Fill a folder with modules that raise when they are imported; return it."""
    for name in ("xxhash", "numpy", "multiprocessing", "optimus", "data_prep", "optimus_kernels"):
        (folder / name).mkdir(parents=True)
        words = f"code of the working directory runs: {name}"
        (folder / name / "__init__.py").write_text(f"raise SystemExit({words!r})\n")
    return folder


def python(*words: str, **environ: str) -> subprocess.CompletedProcess[str]:
    return started([sys.executable, *words], **environ)


def mpiexec(kind: str, ranks: int) -> list[str]:
    """Skips where there is none of this kind."""
    if shutil.which(_MPIEXEC[kind][0]) is None:
        pytest.skip(f"no {_MPIEXEC[kind][0]} (Debian: apt-get install {_PACKAGES[kind]})")
    return [*_MPIEXEC[kind], "-n", str(ranks)]


def install(program: Path, module: str) -> Path:
    """A program that runs a module of this checkout, from wherever it is called."""
    python = shlex.join([sys.executable, "-m", module])
    program.write_text(f'#!/bin/bash\nPYTHONPATH={shlex.quote(PYTHONPATH)} exec {python} "$@"\n')
    program.chmod(0o755)
    return program


def children_of(pid: int) -> list[int]:
    listed = Path(f"/proc/{pid}/task/{pid}/children").read_text()
    return [int(child) for child in listed.split()]


def is_running(pid: int) -> bool:
    """Whether a process runs under this number (a zombie does not)."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def wait_until(condition: Callable[[], object], within_s: float) -> None:
    end = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.05)


def assert_gone(pids: Iterable[int]) -> None:
    """Soon, if they are not yet."""
    pids = list(pids)
    wait_until(lambda: not any(map(is_running, pids)), within_s=10)


def peak_of(work: Callable[[], object]) -> int:
    """Bytes by which resident memory was at most greater than before, the second time: the first
    brings the pages of code into a forked process."""
    work()
    Path("/proc/self/clear_refs").write_text("5")  # the highest from here on
    before = _kilobytes("VmRSS")
    work()
    return 1024 * (_kilobytes("VmHWM") - before)


def _kilobytes(key: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(key)).split()[1])
