"""Faults of supervised runs in jobs of the Slurm that `scripts/drills/slurm.sh --networks` starts.

Each node has a separate network and separate processes, so that the power, the link and the slurmd
of a node can fail. Node n1 runs the job script and the supervisor.
"""

from __future__ import annotations

import contextlib
import os
import random
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import psutil

from optimus.resilience.supervision.ledger import SupervisorStarted, VerdictReached
from tests.kit.faults import failures
from tests.kit.faults.failures import Case
from tests.kit.faults.supervised import (
    HEARTBEAT_S,
    LIMIT_S,
    NODES,
    RANKS,
    ROOT,
    Allocation,
    Expected,
    Launch,
    send,
)

NAMES = ("n1", "n2", "n3", "n4", "n5")
_FLAP_S = 0.9 * HEARTBEAT_S
"""Maximum length in seconds of a network cut that must not count as a failure."""
_DOWN_S = 14.0
"""Seconds without slurmd after which Slurm has declared a node down (SlurmdTimeout is 10 s)."""


class Node:
    """A node of the Slurm installation that scripts/drills/slurm.sh --networks starts."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._state = Path(os.environ["SLURM_DRILL"])

    def processes(self) -> list[psutil.Process]:
        """Return all processes of the node. The first element is the first process of the node."""
        with contextlib.suppress(OSError, ValueError):
            network = os.readlink(
                f"/proc/{(self._state / f'{self.name}.pid').read_text()[:-1]}/ns/net"
            )
            processes = []
            for process in psutil.process_iter():
                with contextlib.suppress(OSError, psutil.Error):
                    if os.readlink(f"/proc/{process.pid}/ns/net") == network:
                        processes.append(process)
            return sorted(processes, key=lambda process: process.pid)
        return []

    def _first_process(self) -> int:
        return int((self._state / f"{self.name}.pid").read_text())

    def cut(self, has_carrier: bool = False) -> None:
        """Disconnect the node from the network. With `has_carrier`, the network interface of the
        node stays up, as with a switch that drops all packets."""
        change = "nomaster" if has_carrier else "down"
        subprocess.run(["ip", "link", "set", self.name, change], check=True)

    def connect(self) -> None:
        """Connect the node to the network again, if the node runs."""
        command = ["ip", "link", "set", self.name, "master", "bridge", "up"]
        subprocess.run(command, check=False, stderr=subprocess.DEVNULL)

    def power_off(self) -> None:
        """Disconnect the node from the network and end all of its processes. Other nodes still see
        the connections of the node as open."""
        (self._state / f"{self.name}.off").touch()
        self.cut()
        os.kill(self._first_process(), signal.SIGKILL)

    def power_on(self) -> None:
        """Start the node after `power_off`, or its slurmd after `end_slurmd`."""
        for suffix in ("off", "no-slurmd"):
            (self._state / f"{self.name}.{suffix}").unlink(missing_ok=True)

    def end_slurmd(self) -> None:
        """Kill the slurmd of the node. slurmd does not start again before `power_on`."""
        (self._state / f"{self.name}.no-slurmd").touch()
        send([p for p in self.processes() if p.name() == "slurmd"], signal.SIGKILL)


class _Job:
    """A job of Slurm, with the methods `poll`, `wait` and `kill` of a process, which a `Launch`
    needs. The exit status of the job is the exit status of `optimus launch`, or 5 if the job ended
    without this status."""

    def __init__(self, script: str, out: Path, environ: Mapping[str, str], options: list[str]):
        self._status = out.with_suffix(f".status{time.monotonic_ns()}")
        script = f"#!/bin/bash\n{script}\necho $status >{shlex.quote(str(self._status))}\n"
        command = ["sbatch", "--parsable", f"--output={out}", "--open-mode=append", *options]
        done = subprocess.run(
            command, input=script, env=environ, capture_output=True, text=True, check=True
        )
        self.number = done.stdout.strip()
        self.returncode: int | None = None
        self._asked_at = 0.0

    def poll(self) -> int | None:
        """Return the exit status; None while the job is queued or runs."""
        if self.returncode is None and time.monotonic() - self._asked_at > 0.5:
            self._asked_at = time.monotonic()
            command = ["squeue", "--noheader", f"--jobs={self.number}", "--format=%T"]
            state = subprocess.run(command, capture_output=True, text=True).stdout
            if not state.strip() or "COMPLETING" in state:
                with contextlib.suppress(OSError, ValueError):
                    self.returncode = int(self._status.read_text())
                    return self.returncode
                if not state.strip():
                    self.returncode = 5
        return self.returncode

    def wait(self, timeout: float = LIMIT_S) -> int:
        """Wait for the end of the job. Raises TimeoutExpired."""
        end = time.monotonic() + timeout
        while (status := self.poll()) is None:
            if time.monotonic() > end:
                raise subprocess.TimeoutExpired("sbatch", timeout)
            time.sleep(0.1)
        return status

    def kill(self) -> None:
        """Cancel the job."""
        subprocess.run(["scancel", "--quiet", self.number], check=False)


class SlurmLaunch(Launch):
    """A launch in a job of Slurm. If a signal ends the supervisor, the job script starts another
    supervisor."""

    minutes = 0
    """Time limit of the jobs; 0: none."""

    def __init__(self, config: Path, allocation: Allocation) -> None:
        self.nodes = {name: Node(name) for name in allocation.nodes}
        self.restore_nodes()
        super().__init__(config, allocation)

    def _start(self, *options: str) -> _Job:  # type: ignore[override]
        command = [sys.executable, "-P", "-m", "optimus.cli", "launch", str(self.config), *options]
        buffer_nodes = len(self.allocation.nodes) - NODES
        command += ["--nodes", str(NODES), "--buffer-nodes", str(buffer_nodes)]
        command += ["--launcher", "srun", "--ranks-per-node", str(RANKS)]
        script = f"cd {ROOT}\nstatus=137\n"
        script += f"while ((status > 128)); do {shlex.join(command)}; status=$?; done"
        slurm = [f"--nodes={len(self.allocation.nodes)}", "--no-kill", "--no-requeue"]
        slurm += ["--exclusive", f"--job-name={self.config.stem}"]
        slurm += [f"--time={self.minutes}"] if self.minutes else []
        return _Job(script, self.out, self.environ(), slurm)

    @property
    def job(self) -> str:
        """ID of the present Slurm job."""
        return str(self.process.number)  # type: ignore[attr-defined]

    def supervisor(self) -> psutil.Process:
        """Return the process of the supervisor."""
        for process in self.processes():
            with contextlib.suppress(psutil.Error):
                if process.cmdline()[2:6] == ["-m", "optimus.cli", "launch", str(self.config)]:
                    return process
        raise ProcessLookupError("no supervisor runs")

    def restore_nodes(self) -> None:
        """Repair all nodes after earlier faults, and wait until they are idle."""
        restarted_at = time.monotonic()
        end = restarted_at + 120.0
        while time.monotonic() < end:
            for node in self.nodes.values():
                node.power_on()
                node.connect()
            command = ["sinfo", "--noheader", "--Node", "--states=idle", "--format=%N"]
            idle = subprocess.run(command, capture_output=True, text=True).stdout.split()
            if {*idle} >= {*self.nodes}:
                return
            if time.monotonic() - restarted_at > 20.0:
                restarted_at = time.monotonic()
                for node in self.nodes.values():
                    if node.name not in idle:
                        send(node.processes()[:1], signal.SIGKILL)
            time.sleep(0.3)
        raise TimeoutError("the nodes are not idle after 120 s")

    def kill(self) -> None:
        self.thaw()
        self.process.kill()
        self.process.wait()
        for node in self.nodes.values():
            node.power_on()
            node.connect()
        send(self.processes(), signal.SIGKILL)

    def wait_for_new_supervisor(self, supervisors: int) -> None:
        """Wait until the ledger has more than `supervisors` starts of a supervisor."""

        def new_supervisor() -> bool:
            return self.count(SupervisorStarted) > supervisors

        self.wait_until(new_supervisor)


def _other(launch: SlurmLaunch, chance: random.Random) -> Node:
    """Return a random node that has ranks but does not run the supervisor."""
    return launch.nodes[chance.choice([name for name in launch.active() if name != NAMES[0]])]


def _excluded(node: Node) -> Expected:
    return Expected({node.name: "excluded"}, (1, 1))


def _lose_power(launch: SlurmLaunch, chance: random.Random) -> Expected:
    node = _other(launch, chance)
    node.power_off()
    return _excluded(node)


def _lose_power_shortly(launch: SlurmLaunch, chance: random.Random) -> Expected:
    """Switch a node off and start it again at once. The agent of the node does not start again."""
    node = _other(launch, chance)
    node.power_off()
    node.power_on()
    return _excluded(node)


def _cut(launch: SlurmLaunch, chance: random.Random) -> Expected:
    """Disconnect a node from the network, and connect it again some time after the other nodes have
    continued to train."""
    node, ended, step = _other(launch, chance), len(launch.history().ends), launch.step()
    node.cut(has_carrier=chance.random() < 0.5)
    launch.wait_for_recovery(_excluded(node), ended)
    launch.wait_for_step(step + 4)
    time.sleep(4 * chance.random())
    node.connect()
    return _excluded(node)


def _cut_first(launch: SlurmLaunch, chance: random.Random) -> Expected:
    """Disconnect the node of the supervisor for longer than the heartbeat limit. The supervisor
    must not mark any node. Attempts can fail, because ranks can lose their peers."""
    node, step, ended = launch.nodes[NAMES[0]], launch.step(), len(launch.history().ends)
    node.cut(has_carrier=chance.random() < 0.5)
    time.sleep(HEARTBEAT_S + 2.0 + 2.0 * chance.random())
    node.connect()
    launch.wait_for_step(step + 8)
    restarts = len(launch.history().ends) - ended
    return Expected(restarts=(restarts, restarts))


def _flap(launch: SlurmLaunch, chance: random.Random) -> Expected:
    """Disconnect a node three times, each time for less than the heartbeat limit."""
    node = chance.choice([node for node in launch.nodes.values() if node.processes()])
    for _ in range(3):
        node.cut(has_carrier=chance.random() < 0.8)
        time.sleep(chance.uniform(0.1, _FLAP_S))
        node.connect()
        time.sleep(chance.uniform(1.0, 2.0))
    return Expected()


def _freeze_node(launch: SlurmLaunch, chance: random.Random) -> Expected:
    """Suspend all processes of a node, and let them continue after the other nodes have continued
    to train."""
    node, ended, step = _other(launch, chance), len(launch.history().ends), launch.step()
    launch.freeze(node.processes())
    launch.wait_for_recovery(_excluded(node), ended)
    launch.wait_for_step(step + 4)
    time.sleep(4 * chance.random())
    launch.thaw()
    return _excluded(node)


def _restart_slurmd(launch: SlurmLaunch, chance: random.Random) -> Expected:
    """Kill the slurmd of a node, and start slurmd again after a second, as systemd does."""
    node = launch.nodes[chance.choice(NAMES)]
    node.end_slurmd()
    time.sleep(1.0)
    node.power_on()
    return Expected()


def _kill_supervisor(launch: SlurmLaunch, chance: random.Random) -> Expected:
    supervisors = launch.count(SupervisorStarted)
    launch.supervisor().kill()
    launch.wait_for_new_supervisor(supervisors)
    return Expected()


def _kill_supervisor_and_node(launch: SlurmLaunch, chance: random.Random) -> Expected:
    supervisors, node = launch.count(SupervisorStarted), _other(launch, chance)
    supervisor = launch.supervisor()
    node.power_off()
    supervisor.kill()
    launch.wait_for_new_supervisor(supervisors)
    return _excluded(node)


def _cancel_steps(launch: SlurmLaunch, chance: random.Random) -> Expected:
    """Cancel the steps of all agents. The supervisor starts other agents and an attempt."""
    command = ["squeue", "--noheader", "--steps", f"--jobs={launch.job}", "--format=%i %j"]
    lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    steps = [line.split()[0] for line in lines if "python" in line]
    subprocess.run(["scancel", *steps], check=True)
    return Expected(restarts=(1, 1))


def _cancel_job(launch: SlurmLaunch, chance: random.Random) -> Expected:
    """Cancel the job. The ranks save a checkpoint, and the next job continues the run."""
    subprocess.run(["scancel", launch.job], check=True)
    expected = _next_job(launch, None)
    ends = [*launch.history().ends.values()]
    if ends[-1].outcome != "stopped":
        raise ValueError(f"the attempt ended as {ends[-1].outcome}")
    return expected


def _lose_power_of_first(launch: SlurmLaunch, chance: random.Random) -> Expected:
    """Switch the node of the supervisor off. Slurm ends the job, and the next job continues the
    run."""
    launch.nodes[NAMES[0]].power_off()
    time.sleep(1.0)
    launch.nodes[NAMES[0]].power_on()
    return _next_job(launch, None)


def _reach_time_limit(launch: SlurmLaunch, chance: random.Random) -> Expected:
    """Continue the run in a job with a time limit of one minute, and then in another job. The first
    job must save a checkpoint before the limit."""
    subprocess.run(["scancel", launch.job], check=True)
    launch.minutes = 1
    expected = _next_job(launch, None)
    launch.minutes = 0
    later = _next_job(launch, 3)
    verdicts = [event for event in launch.history().events if isinstance(event, VerdictReached)]
    if verdicts[-1].verdict != "continue":
        raise ValueError(f"the verdict of the job was {verdicts[-1].verdict}")
    return expected.joined(later)


def _lose_buffer_node_before_start(launch: SlurmLaunch, chance: random.Random) -> Expected:
    """Start a job while a buffer node does not answer and Slurm has not yet noticed this."""
    subprocess.run(["scancel", launch.job], check=True)
    node = launch.nodes[NAMES[-1]]

    def break_node() -> None:
        node.end_slurmd()
        node.cut()

    return _next_job(launch, None, break_node)


def _next_job(
    launch: SlurmLaunch, status: int | None, before: Callable[[], None] = lambda: None
) -> Expected:
    """Wait for the end of a job, check its exit status, and start the next job of the run.
    `before` is called directly before the next job starts."""
    if (ended := launch.end()) is None or status not in (None, ended):
        raise ValueError(f"the job ended with {ended}, expected {status}")
    interrupted = launch.history().running is not None
    launch.restore_nodes()
    supervisors = launch.count(SupervisorStarted)
    before()
    launch.restart()
    launch.wait_for_new_supervisor(supervisors)
    return Expected(restarts=(int(interrupted), int(interrupted)))


_COMMON = ("rank-kill", "rank-segv", "rank-freeze", "nan", "agent-kill", "agent-freeze")
CASES: dict[str, Case] = {
    **{name: failures.CASES[name] for name in (*_COMMON, "agent-pause", "kill-in-start")},
    "power-loss": Case(_lose_power, 1),
    "power-cycle": Case(_lose_power_shortly, 1),
    "cut": Case(_cut, 1),
    "first-cut": Case(_cut_first, in_sequences=False),  # needs two other nodes
    "flap": Case(_flap),
    "node-freeze": Case(_freeze_node, 1),
    "slurmd-kill": Case(_restart_slurmd),
    "supervisor-kill": Case(_kill_supervisor),
    "supervisor-and-node-kill": Case(_kill_supervisor_and_node, 1),
    "cancel-steps": Case(_cancel_steps),
    "cancel-job": Case(_cancel_job),
    "first-power-loss": Case(_lose_power_of_first),
    "dead-buffer": Case(_lose_buffer_node_before_start, in_sequences=False),
    "time-limit": Case(
        _reach_time_limit,
        settings={"train__max_steps": 600, "resilience__end_margin_s": 20.0},
        in_sequences=False,
    ),
}
