"""Launchers, which start an agent on each node of an allocation. This module does not import
torch."""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import re
import shlex
import socket
import subprocess
import sys
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path

import psutil

from optimus.config.machine import Machine
from optimus.errors import ConfigError
from optimus.io import files
from optimus.launch.environment import available_cores
from optimus.resilience.supervision.launched_rank import MODULE

logger = logging.getLogger(__name__)

_LIMIT_S = 60.0
"""Time limit in seconds for a command of the scheduler."""
_AGENT = ("-P", "-m", "optimus.resilience.supervision.agent")


class Launcher(ABC):
    """Base class of launchers, which start an agent on each node. An agent starts and observes
    ranks.

    Args:
        machine: Definition of the machine; None if there is none.
        nodes: Number of nodes with ranks.
    """

    name: str

    def __init__(self, machine: Machine | None = None, nodes: int = 1) -> None:
        self._machine = machine or Machine()
        self._variables = self._machine.variables(nodes)

    @abstractmethod
    def agent_commands(self, nodes: Sequence[str], run_dir: Path) -> list[list[str]]:
        """Return the commands that start agents, one command for each node in `nodes`. Each command
        runs until its agent ends."""

    def addresses(self) -> list[str]:
        """Return the addresses of this machine at which the supervisor listens.

        These are the IPv4 addresses of the machine's network interfaces, except loopback addresses.
        If the interfaces have only loopback addresses, the host name is returned. In other cases,
        the host name is not used, because some systems map it to a loopback address.
        """
        addresses = [
            entry.address
            for entries in psutil.net_if_addrs().values()
            for entry in entries
            if entry.family == socket.AF_INET and not entry.address.startswith("127.")
        ]
        return addresses or [socket.gethostname()]

    def meeting_host(self, host: str) -> str:
        """Return MASTER_ADDR for an attempt whose first node has the host name `host`."""
        return self._machine.address(host)

    def variables(self, ranks: int) -> dict[str, str]:
        """Return environment variables for the ranks.

        Args:
            ranks: Number of ranks that would run if all nodes, including buffer nodes, had ranks.
        """
        return self._variables

    def rank_command(
        self, nodes: Sequence[str], ranks_per_node: int, secret: Path, workspace: str, python: str
    ) -> list[str] | None:
        """Return the command that starts the ranks of an attempt; None if agents start the ranks.

        Args:
            nodes: The nodes of the attempt, in the order of their ranks.
            ranks_per_node: Number of ranks on each node.
            secret: File with the launch secret.
            workspace: Name of the attempt's workspace.
            python: Path of the Python interpreter for the ranks.
        """
        return None


class Local(Launcher):
    """Launcher that emulates all nodes on this machine."""

    name = "local"

    def agent_commands(self, nodes: Sequence[str], run_dir: Path) -> list[list[str]]:
        return [[sys.executable, *_AGENT, str(run_dir), node] for node in nodes]

    def addresses(self) -> list[str]:
        return ["127.0.0.1"]

    def meeting_host(self, host: str) -> str:
        return "127.0.0.1"

    def variables(self, ranks: int) -> dict[str, str]:
        threads = os.environ.get("OMP_NUM_THREADS", str(max(1, available_cores() // ranks)))
        return self._variables | {"OMP_NUM_THREADS": threads, "GLOO_SOCKET_IFNAME": "lo"}


class Srun(Launcher):
    """Launcher for Slurm. It starts the agent of each node in a separate job step.

    Slurm cancels a job step if a node of the step does not answer at the start, or if a node of the
    step resets its connections later. With a single job step for all nodes, the failure of one node
    would therefore end the agents of all nodes.
    """

    name = "srun"

    def agent_commands(self, nodes: Sequence[str], run_dir: Path) -> list[list[str]]:
        # The ranks of a node are child processes of its agent, so the agent is not bound to a core.
        command = ["srun", "--overlap", "--no-kill", "--nodes=1", "--ntasks=1", "--cpu-bind=none"]
        agent = ["--export=ALL", sys.executable, *_AGENT, str(run_dir)]
        return [[*command, f"--nodelist={node}", *agent, node] for node in nodes]


class Ssh(Launcher):
    """Launcher that starts the agent of each node with ssh."""

    name = "ssh"

    def agent_commands(self, nodes: Sequence[str], run_dir: Path) -> list[list[str]]:
        exported = {k: v for k, v in os.environ.items() if k.startswith(("OPTIMUS_", "PYTHONPATH"))}
        variables = [f"{name}={value}" for name, value in exported.items()]
        commands = []
        for node in nodes:
            words = ["env", *variables, sys.executable, *_AGENT, str(run_dir.absolute()), node]
            remote = f"cd {shlex.quote(os.getcwd())} && exec {shlex.join(words)}"
            commands.append(["ssh", "-o", "BatchMode=yes", "-n", node, remote])
        return commands


class Mpiexec(Launcher):
    """Launcher for mpiexec of PALS or Hydra. It starts one mpiexec for the agent of each node.

    A single mpiexec for all agents would end all agents if a node were lost.

    Args:
        machine, nodes: As for Launcher.
        starts_ranks: False if agents start the ranks. True if another mpiexec starts the ranks on
            all nodes in each attempt. Transports over MPI require this mpiexec.
    """

    name = "mpiexec"

    def __init__(
        self, machine: Machine | None = None, nodes: int = 1, starts_ranks: bool = False
    ) -> None:
        super().__init__(machine, nodes)
        self._starts_ranks = starts_ranks

    def agent_commands(self, nodes: Sequence[str], run_dir: Path) -> list[list[str]]:
        command = ["mpiexec", "--envall", *self._machine.agent_options]
        command += ["-n", "1", "-ppn", "1", "--hosts"]
        return [[*command, node, sys.executable, *_AGENT, str(run_dir), node] for node in nodes]

    def rank_command(
        self, nodes: Sequence[str], ranks_per_node: int, secret: Path, workspace: str, python: str
    ) -> list[str] | None:
        if not self._starts_ranks:
            return None
        options = ["-n", str(len(nodes) * ranks_per_node), "-ppn", str(ranks_per_node)]
        options += ["--envall", "--hosts", ",".join(nodes)]
        if bind := self._machine.bind_option(ranks_per_node):
            options.append(bind)
        return ["mpiexec", *options, python, "-P", "-m", MODULE, str(secret), workspace]


LAUNCHERS: dict[str, type[Launcher]] = {kind.name: kind for kind in (Local, Srun, Mpiexec, Ssh)}


def read_nodes(
    launcher: str, number: int, hosts: Path | None, environ: Mapping[str, str] = os.environ
) -> tuple[str, ...]:
    """Return the names of all nodes of the allocation.

    Args:
        launcher: Name of the launcher. For "local", `number` nodes are emulated.
        number: Number of nodes, including buffer nodes.
        hosts: File with a host name in each line, or None.
        environ: Environment variables.

    Raises:
        ConfigError: There is no allocation, or it has too few nodes.
    """
    if hosts is not None:
        names, origin = _read_hosts(hosts), f"--hosts {hosts}"
    elif launcher == "local":
        return tuple(f"node{index}" for index in range(number))
    elif "SLURM_JOB_NODELIST" in environ:
        command = ["scontrol", "show", "hostnames", environ["SLURM_JOB_NODELIST"]]
        try:
            result = subprocess.run(
                command, capture_output=True, text=True, check=True, timeout=_LIMIT_S
            )
        except (OSError, subprocess.SubprocessError) as error:
            raise ConfigError(f"{shlex.join(command)} failed: {error}; use --hosts FILE") from None
        names, origin = result.stdout.split(), "the Slurm job"
    elif "PBS_NODEFILE" in environ:
        try:
            names = files.read_regular(environ["PBS_NODEFILE"]).decode().split()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"PBS_NODEFILE: {error}; use --hosts FILE") from None
        origin = "PBS_NODEFILE"
    else:
        raise ConfigError(
            "there is no allocation: SLURM_JOB_NODELIST and PBS_NODEFILE are not set; run optimus "
            "launch in a job, name the nodes with --hosts FILE, or use --launcher local"
        )
    nodes = tuple(dict.fromkeys(names))
    if len(nodes) < number:
        raise ConfigError(
            f"--nodes and --buffer-nodes ask for {number} nodes, but {origin} has {len(nodes)}; "
            "lower these options or request more nodes"
        )
    return nodes


def _read_hosts(path: Path) -> list[str]:
    """Return the host names in the file of `--hosts`, which has a different host name in each line.
    Raises ConfigError if the file cannot be read, or if a line is invalid or repeated."""
    try:
        lines = files.read_regular(path).decode().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--hosts {path}: not a readable text file: {error}") from None
    seen: set[str] = set()
    for number, name in enumerate(lines, 1):
        # A name that begins with "-" would be an option of ssh.
        if not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_.:@%-]*", name):
            raise ConfigError(
                f"--hosts {path}: line {number} is {name[:80]!r}; write one host name in each line"
            )
        if name in seen:
            raise ConfigError(f"--hosts {path}: line {number} repeats {name}; remove this line")
        seen.add(name)
    return lines


def read_job_end(environ: Mapping[str, str] = os.environ) -> float:
    """Return the Unix time, in seconds, at which the scheduler ends the job; infinity if this time
    is unknown."""
    if "SLURM_JOB_ID" in environ:
        with contextlib.suppress(KeyError, ValueError):
            return float(int(environ["SLURM_JOB_END_TIME"]))
        text = _output_of("squeue", "-h", "-o", "%e", "-j", environ["SLURM_JOB_ID"]).strip()
        with contextlib.suppress(ValueError):  # "NONE" without a limit
            return datetime.fromisoformat(text).timestamp()
    elif "PBS_JOBID" in environ:
        text = _output_of("qstat", "-f", "-F", "json", environ["PBS_JOBID"])
        # The output of a scheduler may be any JSON value.
        wrong = (ValueError, LookupError, TypeError, AttributeError, RecursionError, OverflowError)
        with contextlib.suppress(*wrong):
            (job,) = json.loads(text)["Jobs"].values()
            hours, minutes, seconds = job["Resource_List"]["walltime"].split(":")
            limit_s = 3600 * int(hours) + 60 * int(minutes) + int(seconds)
            start = datetime.strptime(job["stime"], "%a %b %d %H:%M:%S %Y")
            return start.timestamp() + limit_s
    return math.inf


def _output_of(*command: str) -> str:
    """Run a command of the scheduler and return its output. If the command fails, log a warning and
    return ""."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=_LIMIT_S)
    except (OSError, subprocess.SubprocessError) as error:
        logger.warning("the end of the job is unknown: %s", error)
        return ""
    return done.stdout
