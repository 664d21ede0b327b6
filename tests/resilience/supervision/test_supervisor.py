"""Tests of supervised runs: processes fail, and the run ends with the curve of an unbroken run.

The tests take some seconds each, because they start the supervisor, agents and ranks of a launch.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import io
import json
import os
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from optimus.cli import main
from optimus.errors import ConfigError, OptimusError
from optimus.io.workspace import lock_run_dir
from optimus.resilience.supervision import agents, supervisor
from optimus.resilience.supervision.launchers import LAUNCHERS, Local
from optimus.resilience.supervision.ledger import (
    AttemptEnded,
    AttemptStarted,
    SupervisorStarted,
    read_history,
)
from optimus.resilience.supervision.messages import (
    Kill,
    Message,
    RankReport,
    Report,
)
from tests.kit.faults import failure_runs
from tests.kit.faults.supervised import References, Sleepers, make_job, write_config


def test_run_with_faults_has_the_curve_of_an_unbroken_run(tiny_data, tmp_path):
    names = ("rank-data-error", "supervisor-kill", "node-freeze")
    result = failure_runs.run_sequence(
        References(tmp_path, tiny_data), 7, names=names, steps=120, most_faults=3
    )
    assert not result["problems"], (tmp_path / "sequence-7.out").read_text()
    # The seed determines this order. On a busy machine, the run can end before the last fault.
    assert result["faults"][:2] == [*names[:2]]


def launch(tmp_path: Path, tiny_data: Path, *options: str) -> int:
    config = write_config(tmp_path, tiny_data, "run")
    return main(["launch", str(config), "--launcher", "local", *options])


def test_launch_without_a_valid_allocation_starts_nothing(tiny_data, tmp_path, capsys, monkeypatch):
    for name in ("SLURM_JOB_ID", "SLURM_JOB_NODELIST", "PBS_NODEFILE"):
        monkeypatch.delenv(name, raising=False)
    config = str(write_config(tmp_path, tiny_data, "run"))
    hosts = tmp_path / "hosts"
    hosts.write_text("a\nb\n")
    for options, message in (
        (["--nodes", "0", "--launcher", "local"], "--nodes 0 must be at least 1"),
        ([], "there is no Slurm or PBS job here"),
        (["--launcher", "ssh"], "there is no allocation"),
        (["--launcher", "ssh", "--hosts", str(hosts), "--nodes", "3"], "has 2; lower these"),
        (["--nodes", "5", "--launcher", "local"], "train.global_batch_tokens"),
        (["--launcher", "local", "--pardon", "x9"], "--pardon x9: not a node of this run"),
    ):
        assert main(["launch", config, *options]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert message in line
    assert not (tmp_path / "run").exists()


def test_launcher_that_is_not_installed_starts_nothing(tiny_data, tmp_path, capsys, monkeypatch):
    hosts = tmp_path / "hosts"
    hosts.write_text("a\n")
    monkeypatch.setenv("PATH", str(tmp_path))
    config = str(write_config(tmp_path, tiny_data, "run"))
    assert main(["launch", config, "--launcher", "ssh", "--hosts", str(hosts)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "--launcher ssh needs the program 'ssh', which is not on PATH" in line
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("is_hard", [True, False])
def test_low_limit_of_open_files_is_raised_or_refused(tiny_data, tmp_path, is_hard):
    """The supervisor raises a soft limit of 64 open files, and the run completes. A hard limit of
    64 is refused with status 2, before a file is created."""
    config = write_config(tmp_path, tiny_data, "run")
    command = f'ulimit {"-n" if is_hard else "-Sn"} 64; exec "$@"'
    arguments = ["launch", str(config), "--launcher", "local", "train.stop_at_step=2"]
    done = subprocess.run(
        ["bash", "-c", command, "bash", sys.executable, "-P", "-m", "optimus.cli", *arguments],
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    if is_hard:
        (line,) = done.stderr.splitlines()
        assert "ulimit -n 64: the supervisor needs" in line and done.returncode == 2
    else:
        assert done.returncode == 0, done.stderr
    assert (tmp_path / "run").exists() is not is_hard


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


class WithoutNode(Local):
    """Launcher of emulated nodes. The agent of node1 ends at once, without an answer."""

    def agent_commands(self, nodes, run_dir):
        commands = zip(nodes, super().agent_commands(nodes, run_dir), strict=True)
        return [["false"] if node == "node1" else command for node, command in commands]


class WithFewFiles(Local):
    """Launcher of emulated nodes. On node1, an agent can open only 512 files, which are too few."""

    def agent_commands(self, nodes, run_dir):
        limit = ["bash", "-c", 'ulimit -n 512 && exec "$@"', "bash"]
        commands = zip(nodes, super().agent_commands(nodes, run_dir), strict=True)
        return [[*limit, *command] if node == "node1" else command for node, command in commands]


@pytest.mark.parametrize(
    ("launcher", "reason"),
    [
        (WithoutNode, "node1: local ended with status 1 before an agent answered"),
        (WithFewFiles, "node1: node1 can open only 512 files; raise ulimit -n"),
    ],
)
def test_final_line_has_the_reason_why_a_node_is_missing(
    tiny_data, tmp_path, monkeypatch, capsys, launcher, reason
):
    monkeypatch.setitem(LAUNCHERS, "local", launcher)
    assert launch(tmp_path, tiny_data, "--nodes", "2") == 2
    *_, line = capsys.readouterr().err.splitlines()
    assert "only 1 node can be used (node0; " in line and reason in line
    assert not (tmp_path / "run").exists()


def test_dead_node_does_not_delay_the_start(tiny_data, tmp_path, monkeypatch):
    monkeypatch.setitem(LAUNCHERS, "local", WithoutNode)
    assert launch(tmp_path, tiny_data, "--nodes", "2", "--buffer-nodes", "2") == 0
    history = read_history(tmp_path / "run")
    (attempt,) = history.attempts
    assert attempt.nodes == ("node0", "node2")
    # The agent of node1 ends at once. For a running agent, the supervisor would wait for 120 s.
    assert attempt.time - history.events[0].time < 60.0


@pytest.mark.parametrize("is_replaced", [True, False])
def test_replaced_supervisor_does_not_end_the_agents_of_its_successor(
    tmp_path, monkeypatch, is_replaced
):
    monkeypatch.setattr(agents, "KILLED_S", 0.2)
    launcher = Sleepers()
    launcher.folder = tmp_path / supervisor.SUPERVISOR if is_replaced else None
    job = make_job(tmp_path, launcher=launcher)
    with contextlib.suppress(OptimusError):  # no agent answers
        asyncio.run(supervisor.Supervisor(job).run())
    gc.collect()
    time.sleep(0.1)
    remaining = [p for p in psutil.Process().children() if str(tmp_path) in p.cmdline()]
    for process in remaining:
        process.kill()
        process.wait()
    assert len(remaining) == 2 * is_replaced


def test_run_without_a_supervisor_keeps_its_directory(tmp_path):
    """The run directory contains files of an earlier launch. If a run without a supervisor has the
    lock, these files must not let a new supervisor take over the lock."""
    earlier = supervisor.Supervisor(make_job(tmp_path))
    earlier._workspace.write_bytes(tmp_path / ".supervisor" / "address.json", b"{}")
    earlier._lock.close()
    with lock_run_dir(tmp_path), pytest.raises(ConfigError, match="in use by another run"):
        supervisor.Supervisor(make_job(tmp_path))
    supervisor.Supervisor(make_job(tmp_path))._lock.close()


def test_supervisor_that_does_not_answer_is_replaced(tmp_path):
    earlier = supervisor.Supervisor(make_job(tmp_path))
    address = tmp_path / ".supervisor" / "address.json"
    for host in ("x" * 70, "a..b", "a\0b"):
        address.write_text(json.dumps({"hosts": [host], "port": 1}))
        assert not asyncio.run(supervisor._answers(tmp_path))
    address.write_bytes(b"[" * 60_000)
    later = supervisor.Supervisor(make_job(tmp_path))
    assert not earlier._workspace.is_open() and later._workspace.is_open()


@pytest.mark.parametrize("kind", ["link", "fifo", "open to others"])
def test_folder_in_which_others_can_write_is_refused(tmp_path, kind):
    folder, foreign = tmp_path / "run" / ".supervisor", tmp_path / "foreign"
    folder.parent.mkdir()
    foreign.mkdir()
    if kind == "link":
        folder.symlink_to(foreign)
    elif kind == "fifo":
        os.mkfifo(folder)
    else:
        folder.mkdir()
        folder.chmod(0o777)
    with pytest.raises(ConfigError, match="a folder in which only you can write"):
        supervisor.Supervisor(make_job(folder.parent))
    assert not list(foreign.iterdir())


@pytest.mark.parametrize("kind", ["link", "fifo"])
def test_output_goes_only_to_a_regular_file(tmp_path, kind, capsys):
    watcher = supervisor.Supervisor(make_job(tmp_path))
    path = tmp_path / "log" / "attempt-0001.log"
    if kind == "link":
        path.symlink_to(tmp_path / "notes")
    else:
        os.mkfifo(path)
    with pytest.raises(OSError):
        watcher._agents._write_log(1, ["text"], 0)
    assert capsys.readouterr().err == "text\n" and not (tmp_path / "notes").exists()


def test_attempt_on_other_nodes_is_not_continued(tmp_path):
    """The supervisor of a run was killed, and the run is launched again on fewer nodes. The new
    supervisor must not continue the old attempt."""
    job = make_job(tmp_path)
    killed = supervisor.Supervisor(job)
    killed._ledger.add(
        SupervisorStarted(time=1, host="", pid=1, job="", nodes=job.nodes, settings="")
    )
    started = AttemptStarted(time=2, attempt=1, nodes=job.nodes, ranks_per_node=1, port=1)
    killed._ledger.add(started)
    killed._lock.close()
    again = supervisor.Supervisor(make_job(tmp_path))
    assert again._is_takeover()
    again._lock.close()
    assert not supervisor.Supervisor(make_job(tmp_path, nodes=("a",)))._is_takeover()


def test_changed_frozen_settings_are_refused_by_name(tmp_path):
    config = "[model]\nnum_layers = {}\n[train]\nseed = {}\nmax_steps = {}\n"
    job = {"frozen": ("model", "train.seed"), "config": config.format(2, 1, 10), "settings": "0"}
    first = supervisor.Supervisor(make_job(tmp_path, **job))
    event = SupervisorStarted(time=1, host="", pid=1, job="", nodes=("a", "b"), settings="0")
    first._ledger.add(event)
    first._lock.close()
    job |= {"config": config.format(3, 2, 20), "settings": "1"}
    with pytest.raises(ConfigError, match=r"frozen settings \(model.num_layers, train.seed\); use"):
        supervisor.Supervisor(make_job(tmp_path, **job))
    for content in ("[", "model = 5", "[[model]]", "model = [1]", "train = 3", 'data = "x"'):
        (tmp_path / ".supervisor" / "run.toml").write_text(content)
        with pytest.raises(ConfigError, match=r"run was launched with other frozen settings \("):
            supervisor.Supervisor(make_job(tmp_path, **job))


def test_refused_configuration_leaves_only_files_that_existed(tiny_data, tmp_path):
    """A rank refuses the configuration. For a new run, no file remains except those that existed
    before the launch. If the run already has a ledger, the refused attempt is added to it."""
    setting = "checkpoint.load=/nowhere"
    assert launch(tmp_path, tiny_data, setting) == 2
    run = tmp_path / "run"
    assert not run.exists()
    (run / "checkpoints").mkdir(parents=True)
    (run / "notes").touch()
    assert launch(tmp_path, tiny_data, setting) == 2
    assert sorted(run.rglob("*")) == [run / "checkpoints", run / "notes"]
    assert launch(tmp_path, tiny_data, "train.stop_at_step=2") == 0
    assert launch(tmp_path, tiny_data, setting) == 2
    assert len(read_history(run).attempts) == 2


@pytest.mark.parametrize("cause", ["secret", "listen", "replaced"])
def test_supervisor_that_cannot_start_leaves_no_file(tmp_path, monkeypatch, cause):
    """A supervisor that cannot start removes its files. If another supervisor takes over before the
    failure, the files of this other supervisor remain."""

    def fail(*args: Any) -> None:
        raise OSError("no space")

    if cause == "secret":
        monkeypatch.setattr(supervisor, "create_secret", fail)
    else:
        monkeypatch.setattr(agents.Agents, "listen", fail)
    with pytest.raises(OSError, match="no space"):
        first = supervisor.Supervisor(make_job(tmp_path / "run"))
        if cause == "replaced":
            later = supervisor.Supervisor(make_job(tmp_path / "run"))
        asyncio.run(first.run())
    if cause == "replaced":
        assert later._workspace.is_open() and (tmp_path / "run" / "events.jsonl").exists()
        later._lock.close()
    else:
        assert not list(tmp_path.iterdir())


def test_node_that_cannot_listen_ends_the_start_with_the_reason(tiny_data, tmp_path, monkeypatch):
    monkeypatch.setattr(Local, "meeting_host", lambda self, host: "192.0.2.1")
    config = write_config(tmp_path, tiny_data, "run")
    with contextlib.redirect_stderr(io.StringIO()) as printed:
        status = main(["launch", str(config), "--launcher", "local", "--nodes", "2"])
    assert status == 2
    *_, line = printed.getvalue().splitlines()
    assert "node node0: it cannot listen at 192.0.2.1: " in line and "address_suffix" in line
    assert not (tmp_path / "run").exists()


def test_launch_with_too_few_nodes_is_refused_again(tiny_data, tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(LAUNCHERS, "local", WithoutNode)
    for _ in range(2):
        assert launch(tmp_path, tiny_data, "--nodes", "2") == 2
        assert "only 1 node can be used" in capsys.readouterr().err.splitlines()[-1]


@pytest.mark.parametrize("is_ignored", [True, False])
def test_nohup_keeps_a_supervised_run(tiny_data, tmp_path, is_ignored):
    """The terminal of a user is closed, so SIGHUP arrives while the run trains. With `nohup`, the
    run completes. Otherwise, the run stops with status 3."""
    config = write_config(tmp_path, tiny_data, "run")
    arguments = ["launch", str(config), "--launcher", "local", "--nodes", "2"]
    prefix = ["nohup"] if is_ignored else []
    command = [*prefix, sys.executable, "-P", "-m", "optimus.cli", *arguments]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if b"step 3/" in line:
                process.send_signal(signal.SIGHUP)
                break
        process.stdout.read()
        assert process.wait(120) == (0 if is_ignored else 3)


def test_second_agent_of_a_node_ends(tiny_data, tmp_path):
    """While a run trains, a second agent of a node is started. The supervisor refuses the second
    agent, which ends with status 0, and the run completes."""
    config = write_config(tmp_path, tiny_data, "run")
    arguments = ["launch", str(config), "--launcher", "local", "--nodes", "2"]
    command = [sys.executable, "-P", "-m", "optimus.cli", *arguments]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as process:
        assert process.stdout is not None
        output = b""
        for line in process.stdout:
            output += line
            if b"step 3/" in line:
                agent = [sys.executable, "-P", "-m", "optimus.resilience.supervision.agent"]
                second = subprocess.run([*agent, str(tmp_path / "run"), "node0"], timeout=60)
                assert second.returncode == 0
                break
        output += process.stdout.read()
        assert process.wait(120) == 0
    assert output.count(b"an agent is refused: node0 has an agent already") == 1


def test_decision_waits_for_an_agent_that_connects_again(tmp_path):
    """Node a has failed while the agent of the buffer node c has no connection. The decision about
    the next attempt waits until the agent of node c connects again, and then uses node c."""
    job = make_job(tmp_path, nodes=("a", "b", "c"), heartbeat_s=3.0)
    watcher = supervisor.Supervisor(job)
    attempt = AttemptStarted(time=1, attempt=1, nodes=("a", "b"), ranks_per_node=1, port=1)
    end = {"outcome": "failed", "failure": "hard", "nodes": ("a",), "signature": "signal 9"}
    watcher._history.add(attempt)
    watcher._history.add(AttemptEnded(time=2, attempt=1, step=5, **end))
    connected: Any = object()
    for node in watcher._agents.nodes.values():
        node.heard_at, node.channel = 0.0, connected
    last = watcher._agents.nodes["c"]
    last.channel = None

    async def run() -> Any:
        deciding = asyncio.create_task(watcher._decide())
        await asyncio.sleep(0.3)
        assert not deciding.done()
        last.channel = connected
        return await deciding

    decision = asyncio.run(run())
    assert (decision.action, decision.nodes) == ("start", ("c", "b"))
    last.channel = None
    watcher._agents.clock_s = 4.0  # all nodes are silent
    assert asyncio.run(watcher._decide()).action != "start"
    watcher._lock.close()


def test_ranks_of_a_node_that_answers_again_are_killed(tmp_path):
    """Node b was suspended, and the attempt ended without an answer of node b. When the agent of
    node b reports a rank of this attempt, the supervisor asks the agent to kill the rank, and
    repeats the request if it may be lost."""
    watcher = supervisor.Supervisor(make_job(tmp_path))
    attempt = AttemptStarted(time=1, attempt=1, nodes=("a", "b"), ranks_per_node=1, port=1)
    watcher._history.add(attempt)
    watcher._history.add(AttemptEnded(time=2, attempt=1, outcome="failed", step=5))
    sent: list[tuple[str, Message]] = []

    async def say(node: Any, message: Message) -> None:
        sent.append((node.name, message))

    watcher._agents.say = say
    node = watcher._agents.nodes["b"]
    report = Report(attempt=1, ranks=(RankReport(rank=1, pid=3),), lines=())

    async def run() -> None:
        await watcher._kill(attempt)  # no agent answers
        for clock_s in (0.0, 1.0, 20.0):  # the request may be lost
            watcher._agents.clock_s = clock_s
            watcher._agents._receive(node, report)
            await asyncio.sleep(0)

    asyncio.run(run())
    watcher._lock.close()
    assert sent == [("b", Kill(attempt=1))] * 2


FLOOD = """
import socket, sys, time
end, kept = time.monotonic() + 2.0, []
while time.monotonic() < end:
    try:
        kept.append(socket.create_connection(("127.0.0.1", int(sys.argv[1])), timeout=1.0))
    except OSError:
        pass
    if len(kept) > 900:
        for connection in kept[:300]:
            connection.close()
        del kept[:300]
"""


def test_flood_of_connections_takes_few_open_files(tmp_path):
    """A process that knows only the port, not the secret, opens many connections. The supervisor
    keeps only a limited number of connections without authentication open."""
    watcher = supervisor.Supervisor(make_job(tmp_path))
    most = 0

    async def run() -> None:
        nonlocal most
        _, port = await watcher._agents.listen()
        flood = await asyncio.create_subprocess_exec(sys.executable, "-c", FLOOD, str(port))
        while flood.returncode is None:
            most = max(most, len(os.listdir("/proc/self/fd")))
            await asyncio.sleep(0.005)
        await flood.wait()
        await watcher._agents.close()

    before = len(os.listdir("/proc/self/fd"))
    asyncio.run(run())
    watcher._lock.close()
    assert agents._MOST_UNAUTHENTICATED <= most - before < 4 * agents._MOST_UNAUTHENTICATED
