"""The PBS job script with real processes, through stand-ins for qsub and the mpiexec of PALS."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.data_prep.corpus import run_arguments, tree
from tests.helpers.pbs import install

ROOT = Path(__file__).resolve().parents[2]
JOB_SCRIPT = ROOT / "scripts" / "pbs" / "data.sh"


@pytest.mark.parametrize(
    ("how", "world"), [(["--nodes", "3"], 3), (["--array", "3"], 3), (["--array", "1"], 1)]
)
def test_jobs_write_the_same(made, tmp_path, how, world):
    """With relative names too: PBS starts a job in the home, not where it was submitted."""
    install(tmp_path / "bin")
    program = tmp_path / "bin" / "optimus-data"
    python = shlex.join([sys.executable, "-m", "data_prep.cli"])
    program.write_text(f'#!/bin/bash\nPYTHONPATH={shlex.quote(str(ROOT))} exec {python} "$@"\n')
    program.chmod(0o755)
    given = ["--account", "A", "--queue", "debug", "--filesystems", "home", *how]
    done = subprocess.run(
        [str(JOB_SCRIPT), *given, "--", *run_arguments(made.text, made.tokenizer, Path("data"))],
        cwd=tmp_path,
        env=os.environ
        | {"PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}", "OPTIMUS_DATA": str(program)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    labels = {f"[rank {rank} of {world}]" for rank in range(world)} if world > 1 else {"tokenize:"}
    assert all(any(line.startswith(label) for line in done.stderr.split("\n")) for label in labels)
    assert tree(tmp_path / "data") == tree(made.data)
