"""Tests of the PBS job script with real processes. Test programs replace qsub and the mpiexec of
PALS."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from tests.data_prep.corpus import run_arguments, tree
from tests.kit.ranks import pbs
from tests.kit.ranks.processes import ROOT, install

JOB_SCRIPT = ROOT / "scripts" / "pbs" / "data.sh"


@pytest.mark.parametrize(
    ("how", "world"), [(["--nodes", "3"], 3), (["--array", "3"], 3), (["--array", "1"], 1)]
)
def test_jobs_write_the_bytes_of_a_run(made, tmp_path, how, world):
    """The path of the output is relative to the directory in which the job is submitted, although
    PBS starts a job in the home directory."""
    pbs.install(tmp_path / "bin")
    program = install(tmp_path / "bin" / "optimus-data", "data_prep.cli")
    options = ["--account", "A", "--queue", "debug", "--filesystems", "home", *how]
    done = subprocess.run(
        [str(JOB_SCRIPT), *options, "--", *run_arguments(made.text, made.tokenizer, Path("data"))],
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
    command = [str(JOB_SCRIPT), "--dry-run", "--queue", "debug"]
    environ = os.environ | {"OPTIMUS_DATA": "/opt/optimus data"}

    def dry_run(*how: str) -> str:
        words = [*command, *how, "--", "verify", "a b"]
        return subprocess.run(
            words, env=environ, cwd=tmp_path, capture_output=True, text=True, check=True
        ).stdout

    together, array = dry_run("--nodes", "2").splitlines(), dry_run("--array", "5").splitlines()
    assert together[0].startswith("qsub -v ") and "select=2" in together[0]
    assert "-q debug" in together[0] and "-J" not in together[0]
    assert "mpiexec --envall" in together[-1] and "WORLD_SIZE=2" in together[-1]
    assert together[-1].rstrip().endswith("/opt/optimus\\ data verify a\\ b")
    assert "select=1" in array[0] and "-J 0-4" in array[0]
    assert "OPTIMUS_ARRAY_SIZE=5" in array[-1] and "mpiexec" not in array[-1]
    single = dry_run("--array", "1").splitlines()
    assert (
        "-J" not in single[0] and "mpiexec" in single[-1] and "OPTIMUS_ARRAY_SIZE" not in single[-1]
    )
    mistake = subprocess.run([*command, "--nope"], capture_output=True, text=True)
    assert mistake.returncode == 2 and "unknown option --nope" in mistake.stderr


def test_pbs_job_gets_only_named_variables(tmp_path):
    """PBS shows the variables of a job to other users, so the script passes only named variables.
    The values of these variables can contain commas and quotes."""
    pbs.install(tmp_path / "bin")
    program = tmp_path / "optimus-data"
    program.write_text("#!/bin/sh\nenv > variables\n")
    program.chmod(0o755)
    value = "a,b='c\"\\ $(d)"
    environ = os.environ | {
        "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}",
        "OPTIMUS_DATA": str(program),
        "OPTIMUS_KERNELS": value,
        "HF_TOKEN": "secret",
        "AWS_SECRET_ACCESS_KEY": "secret",
        **dict.fromkeys(
            ("OPTIMUS_SECRET", "OPTIMUS_APIKEY", "CONDA_PAT", "PYTHONPASSWD"), "secret"
        ),
        "WANTED": value,
    }

    def job(*export: str) -> list[str]:
        command = [str(JOB_SCRIPT), *export, "--", "x"]
        subprocess.run(command, env=environ, cwd=tmp_path, check=True, capture_output=True)
        return (tmp_path / "variables").read_text().splitlines()

    assert f"OPTIMUS_KERNELS={value}" in (lines := job())
    assert not any("secret" in line or line.startswith("WANTED") for line in lines)
    assert {f"WANTED={value}", "HF_TOKEN=secret"} <= set(job("--export", "WANTED,HF_TOKEN"))


@pytest.mark.parametrize("system", ["pbs", "slurm"])
def test_names_of_exported_variables_are_checked(tmp_path, system):
    command = [str(ROOT / "scripts" / system / "data.sh"), "--dry-run"]
    environ = os.environ | {"OPTIMUS_DATA": "/bin/true", "WANTED": "x"}

    def done(names: str) -> subprocess.CompletedProcess:
        words = [*command, "--export", names, "--", "x"]
        return subprocess.run(words, env=environ, capture_output=True, text=True)

    for names, problem in (
        ("A=b", "not 'A=b'"),
        ("WANTED,$(touch x)", "not '$(touch x)'"),
        ("WANTED,,PATH", "not ''"),
        ("NOT_SET_AT_ALL", "the variable NOT_SET_AT_ALL is not set"),
    ):
        refused = done(names)
        assert refused.returncode == 2 and refused.stdout == "" and problem in refused.stderr
    submit = done("WANTED").stdout.splitlines()[0]
    assert ",PATH," in submit.replace("\\", "") and ",WANTED" in submit.replace("\\", "")


@pytest.mark.parametrize("system", ["pbs", "slurm"])
def test_job_scripts_ignore_cdpath(tmp_path, system):
    """With CDPATH, cd prints the directory, so the name of the script would have two lines."""
    environ = os.environ | {"CDPATH": f"{ROOT}:/", "OPTIMUS_DATA": "/bin/true"}
    command = [f"scripts/{system}/data.sh", "--dry-run", "--", "x"]
    done = subprocess.run(command, env=environ, cwd=ROOT, capture_output=True, text=True)
    assert f"exec {ROOT}/scripts/{system}/data.sh --inside" in done.stdout, done.stderr


@pytest.mark.parametrize("link", ["data.sh", "scripts"])
@pytest.mark.parametrize("system", ["pbs", "slurm"])
def test_job_scripts_can_be_called_through_a_link(tmp_path, system, link):
    environ = {name: value for name, value in os.environ.items() if name != "OPTIMUS_DATA"}
    target = ROOT / "scripts" if link == "scripts" else ROOT / "scripts" / system / link
    (tmp_path / link).symlink_to(target)
    script = f"scripts/{system}/data.sh" if link == "scripts" else link
    command = [f"./{script}", "--dry-run", "--", "x"]
    done = subprocess.run(command, env=environ, cwd=tmp_path, capture_output=True, text=True)
    assert f"OPTIMUS_DATA={ROOT}/.venv/bin/optimus-data" in done.stdout, done.stderr
    assert f"exec {tmp_path / script} --inside" in done.stdout


@pytest.mark.parametrize("system", ["pbs", "slurm"])
def test_job_that_cannot_run_is_not_submitted(tmp_path, system):
    script = ROOT / "scripts" / system / "data.sh"
    for options, problem in (
        (["--nodes", "7", "--array", "3"], "give --nodes or --array, not both"),
        (["--nodes", "2"], "gone is no program; run scripts/setup.sh, or set OPTIMUS_DATA"),
    ):
        done = subprocess.run(
            [str(script), *options, "--", "verify", "x"],
            env=os.environ | {"OPTIMUS_DATA": str(tmp_path / "gone")},
            capture_output=True,
            text=True,
        )
        assert done.returncode == 2 and problem in done.stderr and done.stdout == ""
