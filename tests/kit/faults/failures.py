"""Faults of supervised runs: launches whose ranks, agents, nodes or supervisors fail, and checks of
the result.

Nodes are emulated on this machine: an agent and its ranks are a node.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import psutil

from optimus.checkpoint import store
from optimus.config import dump_toml
from tests.kit.runs.results import metrics_of
from tests.kit.runs.tiny import CONTEXT, tiny_config

ROOT = Path(__file__).resolve().parents[3]
NODES, BUFFER_NODES, RANKS = 2, 2, 2
STEPS, INTERVAL = 60, 5
INSTANCES = 24
"""Instances of an update, so that the 60 updates take some seconds."""
HEARTBEAT_S = 2.0
LIMIT_S = 240.0
"""Longest time of a run."""
KEYS = ("loss", "grad_norm", "tokens")


class Launch:
    """A running `optimus launch` and the processes of its emulated nodes."""

    def __init__(self, config: Path, run_dir: Path, out: Path) -> None:
        self.config, self.run_dir, self._out = config, run_dir, out
        self.nan_file = run_dir.with_suffix(".nan")
        """Nodes and steps at which a rank computes NaN (tests/kit/faults/site/sitecustomize.py)."""
        self.nan_file.unlink(missing_ok=True)
        self.process = self._start()
        self.seen: dict[int, psutil.Process] = {}
        """All processes of the launch that were seen, by their numbers."""

    def _start(self) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-P", "-m", "optimus.cli", "launch", str(self.config)]
        command += ["--launcher", "local", "--nodes", str(NODES)]
        command += ["--buffer-nodes", str(BUFFER_NODES), "--ranks-per-node", str(RANKS)]
        folders = (ROOT / "tests/kit/faults/site", ROOT, ROOT / "kernels")
        environ = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(map(str, folders)),
            "OPTIMUS_TEST_NAN": str(self.nan_file),
        }
        with open(self._out, "ab") as out:
            return subprocess.Popen(command, env=environ, stdout=out, stderr=out)

    def restart(self) -> None:
        """Start another supervisor."""
        self.process = self._start()

    def agents(self) -> dict[str, psutil.Process]:
        """Return the agents by the names of their nodes."""
        agents = {}
        for process in psutil.process_iter(["cmdline"]):
            words = process.info["cmdline"] or []
            if "optimus.resilience.supervision.agent" in words and str(self.run_dir) in words:
                agents[words[-1]] = process
                self.seen[process.pid] = process
        return agents

    def ranks(self, node: str) -> list[psutil.Process]:
        """Return the ranks of a node, in their order."""
        ranks: list[psutil.Process] = []
        with contextlib.suppress(psutil.NoSuchProcess, KeyError):
            for child in self.agents()[node].children():
                self.seen[child.pid] = child
                is_warm = "optimus.warm" in child.cmdline()
                ranks += child.children() if is_warm else [child]
        self.seen.update({rank.pid: rank for rank in ranks})
        return sorted(ranks, key=lambda rank: rank.pid)

    def step(self) -> int:
        """Return the last step in metrics.jsonl; 0 without one."""
        with contextlib.suppress(OSError, ValueError, IndexError, KeyError):
            lines = (self.run_dir / "metrics.jsonl").read_bytes().splitlines()
            return int(json.loads(lines[-1])["step"])
        return 0

    def wait_for_step(self, step: int) -> None:
        end = time.monotonic() + LIMIT_S
        while self.step() < step and self.process.poll() is None and time.monotonic() < end:
            time.sleep(0.01)

    def remaining(self) -> list[psutil.Process]:
        """Return the processes of the launch that still run."""
        self.agents()
        return [p for p in self.seen.values() if p.is_running() and p.status() != "zombie"]


Fault = Callable[[Launch, random.Random], tuple[str, str]]
"""A fault: changes a running launch. Returns the expected standing and the nodes that have it,
separated by spaces; ("", "") if no node has a mark."""


def _send(processes: Sequence[psutil.Process], number: int) -> None:
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.send_signal(number)


def _node(chance: random.Random) -> str:
    return f"node{chance.randrange(NODES)}"


def _kill_rank(number: int) -> Fault:
    def fault(launch: Launch, chance: random.Random) -> tuple[str, str]:
        node = _node(chance)
        _send([chance.choice(launch.ranks(node))], number)
        return "excluded", node

    return fault


def _kill_agent(launch: Launch, chance: random.Random) -> tuple[str, str]:
    node = _node(chance)
    launch.ranks(node)
    _send([launch.agents()[node]], signal.SIGKILL)
    return "excluded", node


def _kill_node(launch: Launch, chance: random.Random) -> tuple[str, str]:
    node = _node(chance)
    _send([launch.agents()[node], *launch.ranks(node)], signal.SIGKILL)
    return "excluded", node


def _freeze_node(launch: Launch, chance: random.Random) -> tuple[str, str]:
    """Suspend a node, and let it continue 4 s after the other nodes train again."""
    node = _node(chance)
    frozen = [launch.agents()[node], *launch.ranks(node)]
    step = launch.step()
    _send(frozen, signal.SIGSTOP)
    launch.wait_for_step(step + 4)
    time.sleep(4.0)
    _send(frozen, signal.SIGCONT)
    return "excluded", node


def _freeze_agent(seconds: float, standing: str) -> Fault:
    def fault(launch: Launch, chance: random.Random) -> tuple[str, str]:
        node = _node(chance)
        agent = launch.agents()[node]
        launch.ranks(node)
        _send([agent], signal.SIGSTOP)
        time.sleep(seconds)
        _send([agent], signal.SIGCONT)
        return standing, node if standing else ""

    return fault


def _freeze_rank(launch: Launch, chance: random.Random) -> tuple[str, str]:
    node = _node(chance)
    _send([chance.choice(launch.ranks(node))], signal.SIGSTOP)
    return "suspect", node


def _kill_supervisor(launch: Launch, chance: random.Random) -> tuple[str, str]:
    launch.agents()
    launch.process.kill()
    launch.process.wait()
    time.sleep(chance.random())
    launch.restart()
    return "", ""


def _freeze_supervisor(launch: Launch, chance: random.Random) -> tuple[str, str]:
    """Suspend the supervisor, start another one, and let the first one continue."""
    launch.agents()
    first = launch.process
    first.send_signal(signal.SIGSTOP)
    launch.restart()
    _wait_until(lambda: _count(launch.run_dir, "supervisor_started") == 2)
    first.send_signal(signal.SIGCONT)
    first.wait(30)
    return "", ""


def _kill_supervisor_and_node(launch: Launch, chance: random.Random) -> tuple[str, str]:
    node = _node(chance)
    processes = [launch.agents()[node], *launch.ranks(node)]
    launch.process.kill()
    launch.process.wait()
    _send(processes, signal.SIGKILL)
    launch.restart()
    return "excluded", node


def _nan_on_node(launch: Launch, chance: random.Random) -> tuple[str, str]:
    node = _node(chance)
    launch.agents()
    launch.nan_file.write_text(f"{node} 1\n")
    return "excluded", node


def _kill_in_start(launch: Launch, chance: random.Random) -> tuple[str, str]:
    """Kill a rank, and kill the agent of the other node while the ranks start again."""
    first, second = chance.sample([f"node{number}" for number in range(NODES)], 2)
    step = launch.step()
    _send([chance.choice(launch.ranks(first))], signal.SIGKILL)
    _wait_until(lambda: _count(launch.run_dir, "attempt_started") == 2)
    time.sleep(chance.random())
    launch.ranks(second)
    _send([launch.agents()[second]], signal.SIGKILL)
    launch.wait_for_step(step)
    return "excluded", f"{min(first, second)} {max(first, second)}"


def _count(run_dir: Path, kind: str) -> int:
    """Return the number of events of a kind in the ledger."""
    return (run_dir / "events.jsonl").read_text().count(f'"{kind}"')


def _wait_until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 60.0
    while not condition() and time.monotonic() < end:
        time.sleep(0.02)


def _kill_all(launch: Launch, chance: random.Random) -> tuple[str, str]:
    """Kill the supervisor and all agents, as the end of a job does, and launch again."""
    processes = [*launch.agents().values()]
    for node in list(launch.agents()):
        processes += launch.ranks(node)
    launch.process.kill()
    launch.process.wait()
    _send(processes, signal.SIGKILL)
    launch.restart()
    return "", ""


CASES: dict[str, Fault] = {
    "rank-kill": _kill_rank(signal.SIGKILL),
    "rank-segv": _kill_rank(signal.SIGSEGV),
    "agent-kill": _kill_agent,
    "node-kill": _kill_node,
    "node-freeze": _freeze_node,
    "agent-freeze": _freeze_agent(HEARTBEAT_S + 2.0, "excluded"),
    "agent-pause": _freeze_agent(HEARTBEAT_S / 2, ""),
    "rank-freeze": _freeze_rank,
    "nan": _nan_on_node,
    "two-nodes": _kill_in_start,
    "supervisor-kill": _kill_supervisor,
    "supervisor-freeze": _freeze_supervisor,
    "all-kill": _kill_all,
    "supervisor-and-node-kill": _kill_supervisor_and_node,
}


def write_config(work: Path, data: Path, name: str) -> Path:
    """Write the configuration of a run, and return its file."""
    config = tiny_config(
        data,
        work / name,
        train__max_steps=STEPS,
        train__global_batch_tokens=INSTANCES * CONTEXT,
        checkpoint__interval=INTERVAL,
        parallel__timeout_s=8.0,
        resilience__heartbeat_s=HEARTBEAT_S,
        resilience__supervisor_timeout_s=20.0,
    )
    path = work / f"{name}.toml"
    path.write_text(dump_toml(config))
    return path


def run_case(work: Path, data: Path, name: str, seed: int, expected: list[Any]) -> dict[str, Any]:
    """Do one run with a fault. Return the result; `problems` is empty if all is right."""
    chance = random.Random(f"{name} {seed}")
    run_name = f"{name}-{seed}"
    shutil.rmtree(work / run_name, ignore_errors=True)
    out = work / f"{run_name}.out"
    out.unlink(missing_ok=True)
    launch = Launch(write_config(work, data, run_name), work / run_name, out)
    step = chance.randrange(2, STEPS // 2)
    began = time.monotonic()
    problems: list[str] = []
    standing = node = ""
    try:
        launch.wait_for_step(step)
        standing, node = CASES[name](launch, chance)
        status = launch.process.wait(LIMIT_S)
        if status:
            problems.append(f"exit status {status}")
    except (subprocess.TimeoutExpired, KeyError, IndexError) as error:
        problems.append(f"{type(error).__name__}: {error}")
    remaining = launch.remaining()
    if remaining:
        time.sleep(3.0)
        remaining = launch.remaining()
    if remaining:
        problems.append(f"these processes remain: {', '.join(map(str, remaining))}")
    for process in [*remaining, launch.process] if problems else []:
        with contextlib.suppress(psutil.NoSuchProcess, ProcessLookupError):
            process.kill()
    problems += check(work / run_name, standing, node, expected)
    seconds = time.monotonic() - began
    return {
        "case": name,
        "seed": seed,
        "step": step,
        "seconds": round(seconds, 1),
        "problems": problems,
    }


def check(run_dir: Path, standing: str, node: str, expected: list[Any]) -> list[str]:
    """Return what is wrong in the directory of an ended run."""
    problems = []
    try:
        if curve(run_dir) != expected:
            steps = [line["step"] for line in metrics_of(run_dir)]
            problems.append(f"another curve; {len(steps)} lines, steps {steps[:1]} to {steps[-1:]}")
        nodes = json.loads((run_dir / "nodes.json").read_text())
        marks = {name: entry["standing"] for name, entry in nodes["nodes"].items()}
        if marks != dict.fromkeys(node.split(), standing):
            problems.append(f"standings {marks}, expected {standing or 'none'} {node}")
        if nodes["verdict"] != "done":
            problems.append(f"verdict {nodes['verdict']}: {nodes['reason']}")
        for path in store.find_all(run_dir):
            store.read_manifest(path).verify()
    except Exception as error:  # any error is a result of the drill
        problems.append(f"{type(error).__name__}: {error}")
    return problems


def train_unbroken(work: Path, data: Path) -> list[Any]:
    """Train without a fault. Return the curve."""
    name = "unbroken"
    shutil.rmtree(work / name, ignore_errors=True)
    launch = Launch(write_config(work, data, name), work / name, work / f"{name}.out")
    assert launch.process.wait(LIMIT_S) == 0, (work / f"{name}.out").read_text()
    return curve(work / name)


def curve(run_dir: Path) -> list[Any]:
    """Return step and exact figures of each line of metrics.jsonl."""
    return [[line["step"], *(line[key] for key in KEYS)] for line in metrics_of(run_dir)]
