"""Commands in processes of their own, as a shell or a launcher starts them."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
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
