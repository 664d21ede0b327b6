"""Tests of the job script under a real Slurm with two nodes (skipped if Slurm is not installed),
and without Slurm."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.data_prep.corpus import run_arguments, tree
from tests.kit.ranks.processes import ROOT, install, started

SLURM = ROOT / "scripts" / "drills" / "slurm.sh"
PATH = os.environ["PATH"] + ":/usr/sbin:/sbin"  # where Debian has the daemons
PROGRAMS = ("slurmctld", "slurmd", "munged", "srun")

needs_slurm = pytest.mark.skipif(
    any(shutil.which(name, path=PATH) is None for name in PROGRAMS),
    reason="no Slurm (scripts/drills/install_slurm.sh installs it)",
)


def under_slurm(
    tmp_path: Path, *command: str, options: Sequence[str] = ("--nodes", "2")
) -> subprocess.CompletedProcess:
    """Start Slurm, run a command under Slurm, and end Slurm when the command ends.

    Args:
        tmp_path: Working directory of the command. Its folder `slurm` gets the state of Slurm.
        command: The command.
        options: Options of scripts/drills/slurm.sh.
    """
    environ = os.environ | {"PATH": PATH}
    if "--networks" in options:  # an earlier test can have set the interface
        environ.pop("GLOO_SOCKET_IFNAME", None)
    return subprocess.run(
        [str(SLURM), *options, "--keep", str(tmp_path / "slurm"), "--", *command],
        cwd=tmp_path,
        env=environ,
        capture_output=True,
        text=True,
        timeout=300,
    )


def processes_of(state: Path) -> list[str]:
    """Return the command lines of all processes whose command line contains the path of the
    directory `state`."""
    commands = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            words = (process / "cmdline").read_bytes()
        except (FileNotFoundError, ProcessLookupError):
            continue
        if str(state).encode() in words:
            commands.append(words.replace(b"\0", b" ").decode(errors="replace"))
    return commands


@needs_slurm
def test_nodes_have_different_names_and_no_process_is_left(tmp_path):
    script = "echo $SLURM_PROCID of $SLURM_STEP_NUM_TASKS on $SLURMD_NODENAME; exit 7"
    done = under_slurm(tmp_path, "srun", "--nodes=2", "--ntasks-per-node=2", "bash", "-c", script)
    lines = [f"{rank} of 4 on n{1 + rank // 2}" for rank in range(4)]
    assert (done.returncode, sorted(done.stdout.split("\n")[:-1])) == (7, lines), done.stderr
    assert processes_of(tmp_path / "slurm") == []


@needs_slurm
def test_signal_ends_all_processes_of_slurm(tmp_path):
    state = tmp_path / "slurm"
    command = [str(SLURM), "--keep", str(state), "--", "bash", "-c", "echo up; sleep 100"]
    environ = os.environ | {"PATH": PATH}
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=environ) as drill:
        assert drill.stdout.readline() == b"up\n"
        assert len(processes_of(state)) >= 4  # munged, slurmctld, two slurmd
        drill.terminate()
        assert drill.wait(timeout=60) == 143
    assert processes_of(state) == []


@needs_slurm
def test_cancelled_and_killed_jobs_write_the_same_bytes(tmp_path):
    """Run three cases of scripts/drills/data_slurm.py on two nodes. In the case `cancel`, an array
    of two jobs completes the output of a cancelled job."""
    drill = [sys.executable, str(ROOT / "scripts" / "drills" / "data_slurm.py")]
    done = under_slurm(tmp_path, *drill, "--files", "120", "--cases", "tasks,nodes,cancel")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("byte-identical, verified") == 3
    assert "units done, completed by an array of 2" in done.stdout


def test_machine_without_slurm_exits_with_69(tmp_path):
    (tmp_path / "bash").symlink_to(shutil.which("bash"))
    environ = os.environ | {"PATH": str(tmp_path)}
    done = subprocess.run([str(SLURM), "--", "true"], env=environ, capture_output=True, text=True)
    assert done.returncode == 69
    assert done.stderr.startswith("slurm.sh: no slurmctld on PATH") and done.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--nodes", "0", "--", "true"], "--nodes 0 and --cpus 2 must be whole numbers above 0"),
        (["--speed", "9", "--", "true"], "unknown option --speed; the command comes after --"),
        (["--nodes", "2"], "no command; give it after --"),
    ],
)
def test_wrong_options_are_refused(words, message):
    done = subprocess.run([str(SLURM), *words], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (2, f"slurm.sh: {message}\n")


SRUN = """#!/bin/bash
n=${1#--nodes=}
for ((rank = 0; rank < n; rank++)); do
    SLURM_STEP_ID=0 SLURM_PROCID=$rank SLURM_NTASKS=$n "${@:6}" &
done
for job in $(jobs -p); do wait "$job" || exit 1; done
"""


def test_job_script_with_a_replacement_of_srun_writes_the_same_bytes(made, tmp_path):
    """The replacement sets the variables of Slurm's srun. Dry runs print the commands."""
    out, program = tmp_path / "data", install(tmp_path / "optimus data", "data_prep.cli")
    (tmp_path / "srun").write_text(SRUN)
    (tmp_path / "srun").chmod(0o755)
    environ = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "OPTIMUS_DATA": str(program)}
    command = [str(ROOT / "scripts" / "slurm" / "data.sh")]
    words = run_arguments(made.text, made.tokenizer, out)

    def script(*how: str) -> subprocess.CompletedProcess:
        return started([*command, *how, "--", *words], **environ)

    dry = script("--dry-run", "--nodes", "2")
    assert dry.returncode == 0 and "srun" in dry.stdout and "optimus\\ data run" in dry.stdout
    assert "sbatch" in dry.stdout
    array = script("--dry-run", "--array", "5")
    assert "0-4" in array.stdout and "srun" not in array.stdout.splitlines()[-1]
    done = script("--inside", "--nodes", "2")
    assert done.returncode == 0, done.stderr
    assert "[rank 1 of 2]" in done.stderr
    assert tree(out) == tree(made.data)
    assert script("--nope").returncode == 2
