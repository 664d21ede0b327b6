"""Tests of ranks that mpiexec starts: the process between mpiexec and the rank, and whole runs."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from optimus.resilience.supervision import launched_rank
from optimus.resilience.supervision.channel import create_secret
from optimus.resilience.supervision.launched_rank import LaunchedProcess, receive_rank
from tests.kit.faults import supervised

MPIEXEC = Path(sys.executable).with_name("mpiexec")


@pytest.fixture
def secret_file(tmp_path) -> Path:
    create_secret(tmp_path / "secret")
    return tmp_path / "secret"


def start(secret_file: Path, rank: int, workspace: str = "w") -> subprocess.Popen[bytes]:
    """Start the process that mpiexec would start for `rank` (of two ranks), and return it."""
    command = [sys.executable, "-P", "-m", launched_rank.MODULE, str(secret_file), workspace]
    return subprocess.Popen(command, env={**os.environ, "PMI_RANK": str(rank), "PMI_SIZE": "2"})


async def receive(secret_file: Path, *arguments: str, **options: Any) -> LaunchedProcess:
    values = {"limit_s": 30.0, "environ": {"LOCAL_RANK": "0"}} | options
    secret = secret_file.read_bytes()
    return await receive_rank(secret, "w", 1, arguments=arguments, **values)


def test_agent_gets_output_and_status_before_mpiexec_notices_the_end(secret_file):
    async def observe() -> None:
        process = start(secret_file, 1)
        rank = await receive(secret_file, "status", "no-such-run")
        output = await rank.stdout.read()
        assert await rank.wait() == 2 and b"no-such-run" in output
        assert not rank.was_lost
        await asyncio.sleep(0.3)
        assert process.poll() is None  # mpiexec would end the other ranks
        rank.close()
        assert await asyncio.to_thread(process.wait, 10) == 0

    asyncio.run(observe())


@pytest.mark.parametrize("fault", ["rank", "parent", "close"])
def test_rank_ends_with_its_parent_and_its_agent(secret_file, monkeypatch, tmp_path, fault):
    """A rank ends if its parent process, which mpiexec started, is killed, or if the agent closes
    the connection. Only a killed rank is evidence against its node, because mpiexec can end the
    parent process of a rank for other reasons."""
    (tmp_path / "sitecustomize.py").write_text("import time; time.sleep(60)\n")

    async def observe() -> None:
        process = start(secret_file, 1)
        rank = await receive(secret_file, "status", environ={"PYTHONPATH": str(tmp_path)})
        running = psutil.Process(rank.pid)
        if fault == "close":
            rank.close()
        else:
            os.kill(rank.pid if fault == "rank" else process.pid, signal.SIGKILL)
        assert await rank.wait() == -signal.SIGKILL
        assert rank.was_lost == (fault == "parent")
        rank.close()
        assert await asyncio.to_thread(process.wait, 10) in (0, -signal.SIGKILL)
        running.wait(10)

    asyncio.run(observe())


def test_process_of_another_attempt_or_secret_never_becomes_a_rank(
    secret_file, tmp_path, monkeypatch
):
    other = tmp_path / "other"
    create_secret(other)

    async def observe() -> None:
        processes = [start(secret_file, 1, "older"), start(other, 1), start(secret_file, 0)]
        with pytest.raises(OSError, match="mpiexec has not started rank 1 in 3 s"):
            await receive(secret_file, "status", limit_s=3.0)
        for process in processes:
            assert process.poll() is None
            process.terminate()  # these processes ignore signals that mpiexec passes on
            process.kill()
            process.wait()

    asyncio.run(observe())


def observers(run_dir: Path) -> list[psutil.Process]:
    """Return the process of mpiexec, and the processes that mpiexec has started for the ranks of a
    run."""
    secret = str(run_dir / ".supervisor" / "secret")
    return [
        process
        for process in psutil.process_iter(["cmdline", "environ"])
        if {launched_rank.MODULE, secret} <= {*(process.info["cmdline"] or [])}
    ]


HAS_MPIEXEC = pytest.mark.skipif(
    not MPIEXEC.exists(), reason=f"{MPIEXEC} is missing: install optimus[test]"
)


def launch_command(tmp_path, tiny_data, monkeypatch, folder: Path) -> list[str]:
    """Return the command of a launch with two nodes and a buffer node. The launch uses the program
    mpiexec in `folder`."""
    monkeypatch.setenv("HYDRA_LAUNCHER", "fork")  # nodes are loopback addresses
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    (tmp_path / "hosts").write_text("127.0.0.1\n127.0.0.2\n127.0.0.3\n")
    config = supervised.write_config(tmp_path, tiny_data, "run")
    command = [sys.executable, "-P", "-m", "optimus.cli", "launch", str(config)]
    command += ["--launcher", "mpiexec", "--mpi-ranks", "--hosts", str(tmp_path / "hosts")]
    return [*command, "--nodes", "2", "--buffer-nodes", "1", "train.max_steps=16"]


@HAS_MPIEXEC
@pytest.mark.parametrize("fault", ["exit 3", "kill -9 $PPID"])
def test_mpiexec_that_starts_no_rank_is_attributed_to_no_node(
    tiny_data, tmp_path, monkeypatch, fault
):
    """The first mpiexec that should start ranks ends at once, or the supervisor is killed before
    this mpiexec starts ranks. No node is excluded, and attempt 2 completes the run. The test takes
    some seconds, because a real mpiexec starts agents and ranks."""
    script = tmp_path / "bin" / "mpiexec"
    script.parent.mkdir()
    script.write_text(
        f'#!/bin/sh\ncase "$*" in\n*{launched_rank.MODULE}*) '
        f"mkdir '{tmp_path}/first' 2>/dev/null && {{ {fault}; exit 3; }};;\nesac\n"
        f'exec {MPIEXEC} "$@"\n'
    )
    script.chmod(0o755)
    command, run_dir = (
        launch_command(tmp_path, tiny_data, monkeypatch, script.parent),
        tmp_path / "run",
    )
    began, statuses = time.monotonic(), []
    with open(tmp_path / "out", "wb") as out:
        while not statuses or (statuses[-1] < 0 and len(statuses) < 3):
            statuses.append(subprocess.run(command, stdout=out, stderr=out, timeout=110).returncode)
    assert statuses == ([0] if fault == "exit 3" else [-9, 0]), (tmp_path / "out").read_text()
    assert time.monotonic() - began < 100  # not the limit of 120 s to wait for mpiexec
    nodes = json.loads((run_dir / "nodes.json").read_text())
    assert nodes["attempt"] == 2 and nodes["nodes"] == {}
    text = "mpiexec ended with status 3 before it had started all ranks"
    assert (text in (run_dir / "events.jsonl").read_text()) == (fault == "exit 3")
    assert [row[0] for row in supervised.curve(run_dir)] == [*range(1, 17)]


@HAS_MPIEXEC
def test_mpiexec_starts_the_ranks_of_each_attempt(tiny_data, tmp_path, monkeypatch):
    """In the first attempt, a rank is killed, which is attributed to its node. In the second
    attempt, mpiexec is killed, which is attributed to no node. The test takes some seconds, because
    a real mpiexec starts agents and the ranks of three attempts."""
    command = launch_command(tmp_path, tiny_data, monkeypatch, MPIEXEC.parent)
    run_dir = tmp_path / "run"
    with open(tmp_path / "out", "wb") as out:
        launch = subprocess.Popen(command, stdout=out, stderr=out)

    def wait_for_step(step: int) -> None:
        metrics, end = run_dir / "metrics.jsonl", time.monotonic() + 100.0
        while not (metrics.exists() and metrics.read_bytes().count(b"\n") >= step):
            is_running = launch.poll() is None and time.monotonic() < end
            assert is_running, (tmp_path / "out").read_text()
            time.sleep(0.02)

    try:
        wait_for_step(3)
        by_rank = {(p.info["environ"] or {}).get("PMI_RANK"): p for p in observers(run_dir)}
        (rank,) = by_rank["1"].children()
        rank.kill()
        wait_for_step(8)
        (mpiexec,) = (p for p in observers(run_dir) if "-ppn" in p.info["cmdline"])
        mpiexec.kill()
        assert launch.wait(100) == 0, (tmp_path / "out").read_text()
    finally:
        launch.kill()  # the agents end after resilience.supervisor_timeout_s
    nodes = json.loads((run_dir / "nodes.json").read_text())
    assert nodes["attempt"] == 3 and [*nodes["nodes"]] == ["127.0.0.2"]
    assert [row[0] for row in supervised.curve(run_dir)] == [*range(1, 17)]
