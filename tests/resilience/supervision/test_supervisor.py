"""Tests of supervised runs: processes fail, and the run ends with the curve of an unbroken run.

The tests take some seconds each, because they start the supervisor, agents and ranks of a launch.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import os
import stat
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from optimus.cli import main
from optimus.errors import OptimusError
from optimus.io.workspace import Workspace
from optimus.resilience.supervision import supervisor
from optimus.resilience.supervision.decide import Policy
from optimus.resilience.supervision.launchers import Local
from optimus.resilience.supervision.ledger import read_history
from tests.kit.faults import failures


@pytest.fixture(scope="module")
def expected(tiny_data, tmp_path_factory) -> list[Any]:
    """The curve of a run without a fault."""
    return failures.train_unbroken(tmp_path_factory.mktemp("unbroken"), tiny_data)


@pytest.mark.parametrize("case", ["rank-kill", "node-freeze", "agent-pause", "supervisor-kill"])
def test_run_with_a_fault_has_the_curve_of_an_unbroken_run(tiny_data, tmp_path, expected, case):
    result = failures.run_case(tmp_path, tiny_data, case, 0, expected)
    assert not result["problems"], (tmp_path / f"{case}-0.out").read_text()


def launch(tmp_path: Path, tiny_data: Path, *options: str) -> int:
    config = failures.write_config(tmp_path, tiny_data, "run")
    return main(["launch", str(config), "--launcher", "local", *options])


def test_launch_without_a_valid_allocation_starts_nothing(tiny_data, tmp_path, capsys, monkeypatch):
    for name in ("SLURM_JOB_ID", "SLURM_JOB_NODELIST", "PBS_NODEFILE"):
        monkeypatch.delenv(name, raising=False)
    config = str(failures.write_config(tmp_path, tiny_data, "run"))
    hosts = tmp_path / "hosts"
    hosts.write_text("a\nb\n")
    for options, message in (
        (["--nodes", "0", "--launcher", "local"], "--nodes 0 must be at least 1"),
        ([], "there is no Slurm or PBS job here"),
        (["--launcher", "ssh"], "there is no allocation"),
        (["--launcher", "ssh", "--hosts", str(hosts), "--nodes", "3"], "has 2; lower them"),
        (["--nodes", "5", "--launcher", "local"], "train.global_batch_tokens"),
    ):
        assert main(["launch", config, *options]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert message in line
    assert not (tmp_path / "run").exists()


def test_dry_run_prints_ranks_and_commands(tiny_data, tmp_path, capsys):
    options = ["--nodes", "2", "--buffer-nodes", "1", "--ranks-per-node", "2", "--dry-run"]
    assert launch(tmp_path, tiny_data, *options) == 0
    text = capsys.readouterr().out
    assert "node1: ranks 2-3\nnode2: buffer node\n" in text
    assert not (tmp_path / "run").exists()


def test_ledger_secret_and_status_of_a_run(tiny_data, tmp_path, capsys):
    assert launch(tmp_path, tiny_data, "--nodes", "2") == 0
    run_dir = tmp_path / "run"
    assert stat.S_IMODE(os.stat(run_dir / ".supervisor" / "secret").st_mode) == 0o600
    history = read_history(run_dir)
    assert history.verdict.verdict == "done" and len(history.attempts) == 1
    assert json.loads((run_dir / "nodes.json").read_text())["verdict"] == "done"
    capsys.readouterr()
    assert main(["status", str(run_dir), "--json"]) == 0
    status = json.loads(capsys.readouterr().out)
    assert status["state"] == "done" and status["checkpoint"] == "step-00000060"
    total = history.events[-1].time - history.events[0].time
    assert sum(status["seconds"].values()) == pytest.approx(total, abs=0.01)
    assert main(["status", str(run_dir)]) == 0
    assert "done (the run has reached its last step)" in capsys.readouterr().out
    assert main(["status", str(tmp_path)]) == 2


class Sleepers(Local):
    """Starts processes that sleep in place of agents, and then another supervisor if `folder` is
    set."""

    folder: Path | None = None

    def agent_commands(self, nodes, run_dir):
        if self.folder is not None:
            Workspace.open(self.folder)
        return [[sys.executable, "-c", "import time; time.sleep(60)", str(run_dir)] for _ in nodes]


@pytest.mark.parametrize("is_replaced", [True, False])
def test_replaced_supervisor_does_not_end_the_agents_of_its_successor(
    tmp_path, monkeypatch, is_replaced
):
    monkeypatch.setattr(supervisor, "_KILLED_S", 0.2)
    launcher = Sleepers()
    launcher.folder = tmp_path / supervisor.SUPERVISOR if is_replaced else None
    job = supervisor.Job(
        run_dir=tmp_path,
        config="",
        nodes=("a", "b"),
        ranks_per_node=1,
        policy=Policy(sizes=(2,)),
        heartbeat_s=1.0,
        supervisor_timeout_s=1.0,
        launcher=launcher,
        settings="",
        start_limit_s=0.2,
    )
    with contextlib.suppress(OptimusError):  # no agent answers
        asyncio.run(supervisor.Supervisor(job).run())
    gc.collect()
    time.sleep(0.1)
    remaining = [p for p in psutil.Process().children() if str(tmp_path) in p.cmdline()]
    for process in remaining:
        process.kill()
        process.wait()
    assert len(remaining) == 2 * is_replaced
