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


def test_a_dry_run_prints_both_commands_and_runs_neither(tmp_path):
    command = [str(JOB_SCRIPT), "--dry-run", "--nodes", "2", "--queue", "debug"]
    environ = os.environ | {"OPTIMUS_DATA": "/opt/optimus data"}

    def told(*how: str) -> str:
        given = [*command, *how, "--", "verify", "a b"]
        return subprocess.run(
            given, env=environ, cwd=tmp_path, capture_output=True, text=True, check=True
        ).stdout

    together, array = told().splitlines(), told("--array", "5").splitlines()
    assert together[0].startswith("qsub -V") and "select=2" in together[0]
    assert "-q debug" in together[0] and "-J" not in together[0]
    assert "mpiexec --envall" in together[-1] and "WORLD_SIZE=2" in together[-1]
    assert together[-1].rstrip().endswith("/opt/optimus\\ data verify a\\ b")
    assert "select=1" in array[0] and "-J 0-4" in array[0]
    assert "OPTIMUS_ARRAY_SIZE=5" in array[-1] and "mpiexec" not in array[-1]
    mistake = subprocess.run([*command, "--nope"], capture_output=True, text=True)
    assert mistake.returncode == 2 and "unknown option --nope" in mistake.stderr
