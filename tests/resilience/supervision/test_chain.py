"""Tests of the next job of a chain, which continues a run: how the supervisor submits the job,
removes it from the queue, and records it in the ledger."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from optimus.io.workspace import Workspace
from optimus.resilience.supervision.chain import Chain
from optimus.resilience.supervision.ledger import (
    Ledger,
    NextJob,
    SupervisorStarted,
    VerdictReached,
    read_history,
)
from optimus.train.launch import ended_status


def test_name_of_the_next_job_is_the_last_word():
    for command, name in (
        ("echo 12.pbs", "12.pbs"),
        ("echo '7;cluster'", "7"),
        ("echo Submitted batch job 8", "8"),
    ):
        assert asyncio.run(Chain(command).submit()) == name


def test_refused_job_gives_the_message_of_the_scheduler():
    chain = Chain("echo 'qsub: would exceed the limit' >&2; exit 38")
    with pytest.raises(OSError, match="exit status 38: qsub: would exceed the limit"):
        asyncio.run(chain.submit())
    with pytest.raises(OSError, match="does not print a job name"):
        asyncio.run(Chain("true").submit())


def test_variables_of_the_present_slurm_job_do_not_reach_the_next_job(tmp_path):
    environ = {"PATH": "/usr/bin:/bin", "SLURM_JOB_ID": "7", "SLURM_CONF": "conf", "HOME": "/x"}
    out = tmp_path / "out"
    asyncio.run(Chain(f"env > {out}; echo 8", environ).submit())
    names = {line.partition("=")[0] for line in out.read_text().splitlines()}
    assert "SLURM_JOB_ID" not in names and {"SLURM_CONF", "HOME"} <= names


@pytest.mark.parametrize(("variable", "program"), [("SLURM_JOB_ID", "scancel"), ("X", "qdel")])
def test_next_job_is_removed_by_the_scheduler(tmp_path, variable, program):
    path = tmp_path / program
    path.write_text(f'#!/bin/sh\necho "$@" > {path}.args\n')
    path.chmod(0o755)
    environ = {"PATH": f"{tmp_path}:/usr/bin:/bin", variable: "7"}
    asyncio.run(Chain("", environ).remove("8"))
    assert Path(f"{path}.args").read_text() == "8\n"


def test_ledger_keeps_the_next_job_until_another_job_begins(tmp_path):
    (tmp_path / "work").mkdir()
    ledger = Ledger(tmp_path, Workspace.open(tmp_path / "work"))
    start = {"host": "a", "pid": 1, "nodes": ("a",), "settings": ""}
    ledger.add(SupervisorStarted(time=1.0, job="1", **start))
    ledger.add(NextJob(time=2.0, job="", problem="refused"))
    ledger.add(NextJob(time=3.0, job="2"))
    assert read_history(tmp_path).next_job.job == "2" and ended_status(tmp_path) is None
    assert '"next_job": "2"' in (tmp_path / "nodes.json").read_text()
    ledger.add(SupervisorStarted(time=4.0, job="1", **start))  # takes over the same job
    assert read_history(tmp_path).next_job.job == "2"
    for verdict, status, ended in (("continue", 3, None), ("stop", 6, 6), ("done", 0, 0)):
        event = VerdictReached(time=5.0, verdict=verdict, reason="x", status=status)
        ledger.add(event)
        assert ended_status(tmp_path) == ended
    ledger.add(SupervisorStarted(time=6.0, job="2", **start))
    assert read_history(tmp_path).next_job is None and ended_status(tmp_path) is None
    ledger.close()
