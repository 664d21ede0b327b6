"""Tests of the nodes of an allocation, the end of a job, and the commands that start agents."""

from __future__ import annotations

import json
import math
import subprocess
from datetime import datetime
from pathlib import Path

import pytest

from optimus.errors import ConfigError
from optimus.resilience.supervision.launchers import LAUNCHERS, Mpiexec, read_job_end, read_nodes


def write_program(folder: Path, name: str, output: str) -> None:
    """Write the executable file `name` to `folder`. The program writes its arguments to the file
    NAME.args in this folder, and prints `output`."""
    path = folder / name
    (folder / f"{name}.out").write_text(output)
    path.write_text(f'#!/bin/sh\necho "$@" > {path}.args\ncat {path}.out\n')
    path.chmod(0o755)


@pytest.fixture
def programs(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    return tmp_path


def test_nodes_of_a_slurm_job(programs):
    write_program(programs, "scontrol", "n1\nn2\nn3\n")
    environ = {"SLURM_JOB_NODELIST": "n[1-3]"}
    assert read_nodes("srun", 2, None, environ) == ("n1", "n2", "n3")
    assert (programs / "scontrol.args").read_text() == "show hostnames n[1-3]\n"
    with pytest.raises(ConfigError, match="ask for 4 nodes, but the Slurm job has 3"):
        read_nodes("srun", 4, None, environ)


def test_nodes_of_a_pbs_job_have_no_duplicates(tmp_path):
    (tmp_path / "nodefile").write_text("a\na\nb\nb\n")
    environ = {"PBS_NODEFILE": str(tmp_path / "nodefile")}
    assert read_nodes("mpiexec", 2, None, environ) == ("a", "b")
    with pytest.raises(ConfigError, match="PBS_NODEFILE has 2; lower these options"):
        read_nodes("mpiexec", 3, None, environ)


def test_missing_allocation_and_hosts_file_are_refused(tmp_path):
    with pytest.raises(ConfigError, match="there is no allocation"):
        read_nodes("srun", 1, None, {})
    with pytest.raises(ConfigError, match="not a readable text file"):
        read_nodes("ssh", 1, tmp_path / "absent", {})
    with pytest.raises(ConfigError, match="scontrol show hostnames n1 failed"):
        read_nodes("srun", 1, None, {"SLURM_JOB_NODELIST": "n1"})


def test_end_of_a_job(programs):
    assert read_job_end({}) == math.inf
    assert read_job_end({"SLURM_JOB_ID": "7", "SLURM_JOB_END_TIME": "1795000000"}) == 1795000000
    write_program(programs, "squeue", "2026-11-24T10:00:00\n")
    assert read_job_end({"SLURM_JOB_ID": "7"}) == datetime(2026, 11, 24, 10).timestamp()
    environ = {"SLURM_JOB_ID": "7", "SLURM_JOB_END_TIME": "Unknown"}
    assert read_job_end(environ) == datetime(2026, 11, 24, 10).timestamp()
    write_program(programs, "squeue", "NONE\n")
    assert read_job_end({"SLURM_JOB_ID": "7"}) == math.inf
    job = {"Resource_List": {"walltime": "01:30:00"}, "stime": "Tue Nov 24 08:30:00 2026"}
    write_program(programs, "qstat", json.dumps({"Jobs": {"9.pbs": job}}))
    assert read_job_end({"PBS_JOBID": "9.pbs"}) == datetime(2026, 11, 24, 10).timestamp()


def test_unknown_end_of_a_job_gives_a_warning(programs, capsys):
    job = '{"Jobs": {"1": {"Resource_List": {"walltime": 5}, "stime": null}}}'
    for answer in ("5", "[]", '{"Jobs": 5}', job, "[" * 100_000):
        write_program(programs, "qstat", answer)
        assert read_job_end({"PBS_JOBID": "9.pbs"}) == math.inf
    write_program(programs, "qstat", "{}")
    assert read_job_end({"PBS_JOBID": "9.pbs"}) == math.inf
    (programs / "qstat").unlink()
    assert read_job_end({"PBS_JOBID": "9.pbs"}) == math.inf
    assert "the end of the job is unknown" in capsys.readouterr().err


@pytest.mark.parametrize("name", sorted(LAUNCHERS))
def test_each_node_gets_an_agent(tmp_path, name):
    launcher = LAUNCHERS[name]()
    commands = launcher.agent_commands(["a", "b"], tmp_path)
    text = " ".join(word for command in commands for word in command)
    assert text.count("optimus.resilience.supervision.agent") == len(commands)
    assert str(tmp_path) in text and " -P " in text
    assert len(commands) == 2
    if name == "srun":
        assert {"--overlap", "--nodes=1", "--nodelist=a"} <= {*commands[0]}
    assert launcher.agent_commands([], tmp_path) == []


def test_ssh_quotes_the_run_directory_for_the_remote_shell(tmp_path):
    run_dir = tmp_path / "a 'b $c"
    (command,) = LAUNCHERS["ssh"]().agent_commands(["n1"], run_dir)
    *options, remote = command
    assert options == ["ssh", "-o", "BatchMode=yes", "-n", "n1"]
    # A shell prints the words instead of running the program.
    shown = remote.replace(" exec ", " printf '%s\\n' ")
    words = subprocess.run(["sh", "-c", shown], capture_output=True, text=True, check=True).stdout
    assert words.splitlines()[-2:] == [str(run_dir), "n1"]


@pytest.mark.parametrize("starts_ranks", [False, True])
def test_mpiexec_starts_ranks_on_request_only(tmp_path, starts_ranks):
    launcher = Mpiexec(starts_ranks=starts_ranks)
    values = (["b", "a"], 3, tmp_path / "secret", "attempt-0001-abc", "/stage/python")
    command = launcher.rank_command(*values)
    if not starts_ranks:
        assert command is None
        return
    assert command[:8] == ["mpiexec", "-n", "6", "-ppn", "3", "--envall", "--hosts", "b,a"]
    assert command[8:10] == ["/stage/python", "-P"]
    assert command[-2:] == [str(tmp_path / "secret"), "attempt-0001-abc"]
