"""Supervised runs whose processes a test can break, and checks of the results of these runs.

Nodes are emulated on this machine, or are nodes of a Slurm on this machine: all processes of a
launch must be visible to this process.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import torch

from optimus.checkpoint import store
from optimus.config import dump_toml
from optimus.errors import ConfigError
from optimus.io.workspace import Workspace
from optimus.resilience.supervision.agents import Job
from optimus.resilience.supervision.attempt import Progress, read_page
from optimus.resilience.supervision.decide import Policy
from optimus.resilience.supervision.launchers import Local
from optimus.resilience.supervision.ledger import History, read_history
from tests.kit.runs.results import hash_files, metrics_of, read_whole
from tests.kit.runs.tiny import CONTEXT, tiny_config

ROOT = Path(__file__).resolve().parents[3]
NODES, RANKS = 2, 2
"""Number of nodes with ranks, and of ranks on each node."""
STEPS, INTERVAL = 60, 5
HEARTBEAT_S = 2.0
ORPHAN_S = 20.0
"""Seconds after which agents without a supervisor end."""
LIMIT_S = 240.0
"""Time limit in seconds for a run, and for each wait for an event of the run."""
END_S = 5.0
"""Seconds within which all processes of a launch must end after the launch has ended."""
KEYS = ("loss", "grad_norm", "tokens")
_RUN, _FAULTS = "OPTIMUS_TEST_RUN", "OPTIMUS_TEST_FAULTS"


class Allocation(NamedTuple):
    """Nodes for launches, and the launcher that starts processes on these nodes."""

    nodes: tuple[str, ...]
    """All nodes in the order of the allocation."""
    used: int = NODES
    """Number of nodes that get ranks. The other nodes are buffer nodes."""
    launcher: str = "local"


def local_nodes(buffer_nodes: int, used: int = NODES) -> Allocation:
    """Return an allocation of emulated nodes."""
    return Allocation(tuple(f"node{index}" for index in range(used + buffer_nodes)), used)


class Expected(NamedTuple):
    """Expected content of the ledger and the files of a run after a fault, and the expected exit
    status."""

    standings: Mapping[str, str] = {}
    """Expected standing of each node that the supervisor marks."""
    restarts: tuple[int, int] = (0, 0)
    """Smallest and largest permitted number of attempts that fail or are interrupted."""
    verdict: str = "done"
    status: int = 0
    """Exit status of `optimus launch`."""
    unusable: Mapping[str, int] = {}
    """Nodes that must not get ranks, although the ledger has no mark of these nodes. Maps each of
    them to the first attempt in which it must not get ranks."""
    unbroken: tuple[str, ...] = ()
    """Lines for the file of faults of the unbroken run. With these lines, the curve of the unbroken
    run equals the curve of the run with the fault, for example because both runs skip the same
    updates."""

    def joined(self, later: Expected) -> Expected:
        """Return the values that are expected after this fault and the fault of `later`."""
        least, most = (a + b for a, b in zip(self.restarts, later.restarts, strict=True))
        return Expected(
            {**self.standings, **later.standings},
            (least, most),
            later.verdict,
            later.status,
            {**self.unusable, **later.unusable},
            self.unbroken + later.unbroken,
        )


def write_config(work: Path, data: Path, name: str, steps: int = STEPS, **settings: Any) -> Path:
    """Write the configuration of a run, and return the path of the configuration file. The run
    directory is `work`/`name`.

    Args:
        work: Folder for runs.
        data: The data set.
        name: Name of the run.
        steps: Number of updates.
        settings: Other settings, as `section__key=value`.
    """
    values = {
        "train__max_steps": steps,
        "train__global_batch_tokens": 16 * CONTEXT,  # updates of about 0.1 s
        "checkpoint__interval": INTERVAL,
        "parallel__timeout_s": 15.0,  # ranks connect late on a busy machine
        "resilience__heartbeat_s": HEARTBEAT_S,
        "resilience__supervisor_timeout_s": ORPHAN_S,
        **settings,
    }
    path = work / f"{name}.toml"
    path.write_text(dump_toml(tiny_config(data, work / name, **values)))
    return path


def _environ(run_dir: Path, faults: Path) -> dict[str, str]:
    folders = (ROOT / "tests/kit/faults/site", ROOT, ROOT / "kernels")
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(map(str, folders)),
        "OMP_NUM_THREADS": "1",
        _RUN: str(run_dir),
        _FAULTS: str(faults),
    }


class Launch:
    """A running `optimus launch` and the processes of its nodes."""

    def __init__(self, config: Path, allocation: Allocation) -> None:
        """Start the launch of a configuration file that `write_config` has written."""
        self.config, self.allocation = config, allocation
        self.run_dir, self.out = config.with_suffix(""), config.with_suffix(".out")
        self.faults = config.with_suffix(".faults")
        """File with faults inside of ranks (tests/kit/faults/site/sitecustomize.py)."""
        for path in (self.faults, self.out):
            path.unlink(missing_ok=True)
        shutil.rmtree(self.run_dir, ignore_errors=True)
        self.frozen: list[psutil.Process] = []
        """Suspended processes."""
        self.process = self._start()

    def _start(self, *options: str, **variables: str) -> subprocess.Popen[bytes]:
        nodes, used, launcher = self.allocation
        command = [sys.executable, "-P", "-m", "optimus.cli", "launch", str(self.config), *options]
        command += ["--launcher", launcher, "--nodes", str(used)]
        command += ["--buffer-nodes", str(len(nodes) - used), "--ranks-per-node", str(RANKS)]
        environ = self.environ() | variables
        with open(self.out, "ab") as out:
            return subprocess.Popen(command, env=environ, stdout=out, stderr=out)

    def environ(self) -> dict[str, str]:
        """Return the environment of all processes of the launch."""
        return _environ(self.run_dir, self.faults)

    def restart(self, *options: str, **variables: str) -> None:
        """Start another supervisor, with additional options of `optimus launch` and environment
        variables."""
        self.process = self._start(*options, **variables)

    def break_rank(self, kind: str, node: str, rank: int | str, step: int = 1) -> None:
        """Let a rank fail from the inside, in update `step` or a later update.

        Args:
            kind: The fault, as in tests/kit/faults/site/sitecustomize.py.
            node: Name of the rank's node; "*": any node.
            rank: Number of the rank on the node; "*": any rank; "g2": rank 2 of the run.
            step: First update with the fault.
        """
        with open(self.faults, "a") as file:
            print(kind, node, rank, step, file=file)

    def remove_faults(self) -> None:
        """Delete the file of faults, so that no further rank fails from the inside."""
        self.faults.unlink(missing_ok=True)

    # -- Processes --------------------------------------------------------------------------------

    def processes(self) -> list[psutil.Process]:
        """Return all processes that the launch has started and that still run."""
        processes = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                is_mine = process.environ().get(_RUN) == str(self.run_dir)
                if is_mine and process.status() != psutil.STATUS_ZOMBIE:
                    processes.append(process)
        return processes

    def agents(self) -> dict[str, psutil.Process]:
        """Return the agents by the names of their nodes."""
        agents = {}
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                words = process.cmdline()
                if words[2:4] != ["-m", "optimus.resilience.supervision.agent"]:
                    continue  # for example srun, whose arguments contain the command of an agent
                run_dir, *name = words[4:]
                if run_dir == str(self.run_dir):
                    agents[name[0] if name else process.environ()["SLURMD_NODENAME"]] = process
        return agents

    def ranks(self, node: str) -> list[psutil.Process]:
        """Return the processes of a node's ranks, in ascending order of process ids."""
        ranks: list[psutil.Process] = []
        with contextlib.suppress(psutil.NoSuchProcess, KeyError):
            for child in self.agents()[node].children():
                is_warm = "optimus.warm" in child.cmdline()
                ranks += child.children() if is_warm else [child]
        return sorted(ranks, key=lambda rank: rank.pid)

    def node(self, node: str) -> list[psutil.Process]:
        """Return the agent, the ranks and all other processes of a node; [] if the node has no
        agent."""
        with contextlib.suppress(psutil.NoSuchProcess, KeyError):
            agent = self.agents()[node]
            return [agent, *agent.children(recursive=True)]
        return []

    def freeze(self, processes: Sequence[psutil.Process]) -> None:
        """Suspend processes."""
        self.frozen += processes
        send(processes, signal.SIGSTOP)

    def thaw(self) -> None:
        """Let all suspended processes continue."""
        send(self.frozen, signal.SIGCONT)
        self.frozen = []

    # -- State of the run -------------------------------------------------------------------------

    def step(self) -> int:
        """Return the last step in metrics.jsonl; 0 if there is none."""
        with contextlib.suppress(OSError, ValueError, IndexError, KeyError):
            with open(self.run_dir / "metrics.jsonl", "rb") as file:
                file.seek(max(0, file.seek(0, os.SEEK_END) - 8192))
                *_, line, _ = file.read().split(b"\n")
            return int(json.loads(line)["step"])
        return 0

    def history(self) -> History:
        """Return the content of the ledger; an empty History if the ledger cannot be read."""
        with contextlib.suppress(ConfigError):
            return read_history(self.run_dir)
        return History()

    def active(self) -> tuple[str, ...]:
        """Return the nodes of the last attempt."""
        attempts = self.history().attempts
        return attempts[-1].nodes if attempts else ()

    def count(self, kind: type) -> int:
        """Return the number of events of a kind in the ledger."""
        return sum(isinstance(event, kind) for event in self.history().events)

    def wait_until(self, condition: Callable[[], bool], limit_s: float = LIMIT_S) -> None:
        """Wait until a condition is true or the launch has ended. Raises TimeoutError."""
        end = time.monotonic() + limit_s
        while not condition() and self.process.poll() is None:
            if time.monotonic() > end:
                raise TimeoutError(f"no {condition.__qualname__} within {limit_s:.0f} s")
            time.sleep(0.02)

    def require(self, status: int, verdict: str) -> None:
        """Wait for the end of the launch, and assert its exit status and verdict."""
        result = self.end(60.0), json.loads((self.run_dir / "nodes.json").read_text())["verdict"]
        assert result == (status, verdict), (
            f"status and verdict {result}, expected {status, verdict}"
        )

    def wait_for_step(self, step: int) -> None:
        """Wait until update `step` is complete or the launch has ended."""

        def step_is_complete() -> bool:
            return self.step() >= step

        self.wait_until(step_is_complete)

    def wait_for_recovery(self, expected: Expected, ended: int) -> None:
        """Wait until the supervisor has reacted to a fault and the run has done another update.

        Args:
            expected: Effects that the fault must have.
            ended: Number of attempts that had ended before the fault.
        """

        def recovery() -> bool:
            history = self.history()
            if any(history.standing(node) != s for node, s in expected.standings.items()):
                return False
            if len(history.ends) < ended + expected.restarts[0] or history.running is None:
                return False
            return history.has_updated(history.running)

        self.wait_until(recovery)

    def end(self, limit_s: float = LIMIT_S) -> int | None:
        """Wait for the end of the launch. Return the exit status of the launch; None if the launch
        still runs after `limit_s` seconds."""
        try:
            return self.process.wait(limit_s)
        except subprocess.TimeoutExpired:
            return None

    def wait_for_processes(self, limit_s: float) -> list[psutil.Process]:
        """Wait for the end of all processes. Return the processes that still run after `limit_s`
        seconds."""
        end = time.monotonic() + limit_s
        while (remaining := self.processes()) and time.monotonic() < end:
            time.sleep(0.1)
        return remaining

    def kill(self) -> None:
        """Kill all processes of the launch."""
        self.process.kill()
        self.process.wait()
        send(self.processes(), signal.SIGKILL)


def send(processes: Sequence[psutil.Process], number: int) -> None:
    """Send a signal to those of `processes` that still exist."""
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.send_signal(number)


def progress_of(rank: psutil.Process) -> Progress:
    """Return the progress of the process of a rank, from the memory page that this process has
    mapped."""
    (page,) = (m.path for m in rank.memory_maps() if Path(m.path).match("attempt-*/rank-*"))
    return read_page(Path(page))


class Sleepers(Local):
    """Launcher that starts sleeping processes in place of agents.

    If `folder` is set, the launcher first opens a workspace in this folder, as another supervisor
    would do.
    """

    folder: Path | None = None

    def agent_commands(self, nodes: Sequence[str], run_dir: Path) -> list[list[str]]:
        if self.folder is not None:
            Workspace.open(self.folder)
        return [[sys.executable, "-c", "import time; time.sleep(60)", str(run_dir)] for _ in nodes]


def make_job(run_dir: Path, **more: Any) -> Job:
    """Return a job of two nodes whose agents do not answer. `more` replaces attributes."""
    values: dict[str, Any] = {
        "run_dir": run_dir,
        "config": "",
        "nodes": ("a", "b"),
        "ranks_per_node": 1,
        "policy": Policy(sizes=(2,)),
        "heartbeat_s": 1.0,
        "timeout_s": 600.0,
        "supervisor_timeout_s": 1.0,
        "launcher": Sleepers(),
        "settings": "",
        "start_limit_s": 0.2,
    }
    return Job(**values | more)


# -- Checks of an ended run -----------------------------------------------------------------------


class References:
    """Curves (metrics by step) of unbroken runs. Each of these runs is trained only once."""

    def __init__(self, work: Path, data: Path) -> None:
        self.work, self.data = work, data
        self._curves: dict[str, list[Any]] = {}

    def curve(
        self, steps: int = STEPS, faults: Sequence[str] = (), **settings: Any
    ) -> list[list[Any]]:
        """Return the curve of an unbroken run without a supervisor.

        Args:
            steps: Number of updates.
            faults: Lines for the file of faults, such as `Expected.unbroken`.
            settings: As for `write_config`.
        """
        key = json.dumps([steps, *faults, sorted(settings.items())])
        name = f"unbroken-{hashlib.sha256(key.encode()).hexdigest()[:8]}"
        if key not in self._curves:
            config = write_config(self.work, self.data, name, steps, **settings)
            if not (self.work / f"{name}.done").exists():
                self._train(config, faults)
            self._curves[key] = curve(self.work / name)
        return self._curves[key]

    def _train(self, config: Path, faults: Sequence[str]) -> None:
        run_dir, file = config.with_suffix(""), config.with_suffix(".faults")
        shutil.rmtree(run_dir, ignore_errors=True)
        file.write_text("".join(f"{line}\n" for line in faults))
        command = [sys.executable, "-P", "-m", "optimus.cli", "train", str(config)]
        command += ["--nproc", str(NODES * RANKS)]
        done = subprocess.run(command, env=_environ(run_dir, file), capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        config.with_suffix(".done").touch()


def curve(run_dir: Path) -> list[list[Any]]:
    """Return, for each line of metrics.jsonl, a list with the step and the values that are exactly
    reproducible."""
    return [[line["step"], *(line[key] for key in KEYS)] for line in metrics_of(run_dir)]


def check(launch: Launch, status: int | None, expected: Expected, reference: Any) -> list[str]:
    """Check a launch that has ended. Return a list of messages about problems.

    Args:
        launch: The launch.
        status: Exit status of the launch; None if the launch did not end.
        expected: Effects that all faults together must have.
        reference: The curve of an unbroken run. If the verdict on the launched run is not "done",
            the curve of the launched run must be equal to the beginning of `reference`.
    """
    problems = []
    if status != expected.status:
        problems.append(f"exit status {status}, expected {expected.status}")
    if launch.frozen:  # suspended processes must not change a file
        before = hash_files(launch.run_dir)
        launch.thaw()
        launch.wait_for_processes(ORPHAN_S + 10.0)
        after = hash_files(launch.run_dir)
        if changed := {name for name, _ in before.items() ^ after.items()}:
            problems.append(f"processes that were suspended changed {sorted(changed)}")
    if remaining := launch.wait_for_processes(END_S):
        problems.append(f"these processes remain: {', '.join(map(str, remaining))}")
    try:
        joined = curve(launch.run_dir)
        if joined != (reference if expected.verdict == "done" else reference[: len(joined)]):
            different = [a for a, b in zip(joined, reference, strict=False) if a != b]
            problems.append(f"another curve of {len(joined)} lines, first {different[:1]}")
        problems += _check_ledger(launch, expected)
        problems += check_checkpoints(launch.run_dir)
    except Exception as error:  # any error is a result of the drill
        problems.append(f"{type(error).__name__}: {error}")
    return problems


def _check_ledger(launch: Launch, expected: Expected) -> list[str]:
    problems, history = [], launch.history()
    summary = json.loads((launch.run_dir / "nodes.json").read_text())
    if summary != summary | json.loads(json.dumps(history.summary())):
        problems.append("nodes.json differs from the ledger")
    marks = {node: mark.standing for node, mark in history.standings.items()}
    if marks != expected.standings:
        problems.append(f"standings {marks}, expected {expected.standings}")
    if summary["verdict"] != expected.verdict:
        problems.append(f"verdict {summary['verdict']}: {summary['reason']}")
    outcomes = [end.outcome for end in history.ends.values()]
    restarts = sum(outcome in ("failed", "interrupted") for outcome in outcomes)
    if not expected.restarts[0] <= restarts <= expected.restarts[1]:
        problems.append(f"{restarts} attempts failed, expected {expected.restarts}")
    return problems + _check_assignments(launch.allocation, history, expected.unusable)


def _check_assignments(
    allocation: Allocation, history: History, unusable: Mapping[str, int]
) -> list[str]:
    """Return a message for each violation of the following rule, which assigns nodes to attempts.

    A node that can be used keeps its ranks. Each other node is replaced by the first free node of
    the allocation. A suspect node is used only if no other node is free. After a verdict, or in a
    job with another number, all nodes are assigned again.
    """
    problems: list[str] = []
    standings: dict[str, str] = {}
    job = ""
    before = allocation.nodes[: allocation.used]
    for event in history.events:
        if event.kind == "node_marked":
            standings[event.node] = event.standing
        elif event.kind == "verdict":
            before = ("",) * allocation.used
        elif event.kind == "supervisor_started":
            if job not in ("", event.job):
                before = ("",) * allocation.used
            job = event.job
        elif event.kind == "attempt_started":
            usable = [
                node
                for node in allocation.nodes
                if standings.get(node) != "excluded"
                and event.attempt < unusable.get(node, event.attempt + 1)
            ]
            free = [node for node in usable if node not in before]
            free.sort(key=lambda node: standings.get(node) == "suspect")
            nodes = [node if node in usable else (free or [""]).pop(0) for node in before]
            if len(usable) >= allocation.used and event.nodes != (*nodes,):
                problems.append(f"attempt {event.attempt} on {event.nodes}, expected {nodes}")
            if not {*event.nodes} <= {*usable}:
                problems.append(f"attempt {event.attempt} on {event.nodes}, usable {usable}")
            before = event.nodes + ("",) * (allocation.used - len(event.nodes))
    return problems


def check_checkpoints(run_dir: Path) -> list[str]:
    """Return a message for each checkpoint that is damaged or contains values that are not finite.
    Checkpoints that the run removes during the check are ignored."""
    problems = []
    for path in store.find_all(run_dir):
        try:
            manifest = store.read_manifest(path)
            manifest.verify()
            index = manifest.index()
            for state in index.states:
                tensors = {name: torch.empty(shape) for name, shape in index.shapes.items()}
                read_whole(manifest, tensors, state)
                if not all(bool(tensor.isfinite().all()) for tensor in tensors.values()):
                    problems.append(f"{path.name}: {state} is not finite")
        except Exception as error:
            if path.exists():
                problems.append(f"{path.name}: {type(error).__name__}: {error}")
    return problems
