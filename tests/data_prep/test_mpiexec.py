"""Ranks that a real mpiexec starts, on machines that have one installed."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.data_prep.corpus import run_arguments, tree

ROOT = Path(__file__).resolve().parents[2]
LAUNCHERS = {
    "openmpi": ["mpiexec.openmpi", "--allow-run-as-root", "--oversubscribe", "--bind-to", "none"],
    "mpich": ["mpiexec.mpich"],
}


@pytest.mark.parametrize("kind", LAUNCHERS)
def test_three_ranks_write_the_same(made, tmp_path, kind):
    launcher, *options = LAUNCHERS[kind]
    if shutil.which(launcher) is None:
        package = {"openmpi": "openmpi-bin", "mpich": "mpich"}[kind]
        pytest.skip(f"no {launcher} (Debian: apt-get install {package})")
    out = tmp_path / "data"
    done = subprocess.run(
        [
            *(launcher, *options, "-n", "3", sys.executable, "-m", "data_prep.cli"),
            *run_arguments(made.text, made.tokenizer, out),
        ],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert {f"[rank {rank} of 3]" for rank in range(3)} <= {
        line.partition("]")[0] + "]" for line in done.stderr.split("\n")
    }
    assert tree(out) == tree(made.data)
