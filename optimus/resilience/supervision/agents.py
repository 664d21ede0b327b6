"""The supervisor's connections to its agents, which start and observe the ranks of one node each.

This module does not import torch.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import os
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

from optimus.checkpoint import store
from optimus.errors import ConfigError, counted
from optimus.io import files
from optimus.io.workspace import Workspace
from optimus.resilience.supervision.agent import (
    BEATS_PER_LIMIT,
    SECRET,
    SUPERVISOR,
    hash_code,
)
from optimus.resilience.supervision.chain import Chain
from optimus.resilience.supervision.channel import Channel, PeerError
from optimus.resilience.supervision.decide import Policy
from optimus.resilience.supervision.launchers import Launcher
from optimus.resilience.supervision.ledger import AttemptStarted, History
from optimus.resilience.supervision.messages import (
    End,
    Hello,
    Kill,
    Message,
    RankReport,
    Report,
    Start,
    Welcome,
)
from optimus.resilience.supervision.staging import staged_python

logger = logging.getLogger(__name__)

_A = TypeVar("_A", bound=Message)

CONFIG = "run.toml"
"""Name of the file in the supervisor's folder with a copy of the configuration."""
LOOK_S = 0.1
"""Interval in seconds at which the supervisor checks the state of agents and ranks."""
_RECONNECT_S = 5.0
"""A supervisor that takes over a run waits at most `heartbeat_s` plus this number of seconds until
agents connect."""
KILLED_S = 5.0
"""Longest time in seconds to wait until agents have killed their ranks, or until agents have
ended."""
_MOST_UNAUTHENTICATED = 64
"""Maximum number of connections that are not authenticated yet."""
_CLOCK_S = 60.0
"""Maximum difference in seconds between the clocks of a node and of the supervisor's machine."""
MIN_OPEN_FILES = 1024
"""Minimum number of files that a process on a node must be allowed to open. The supervisor opens
about 30 files and one more for each node. In a flood of connections, it opens up to 3 *
_MOST_UNAUTHENTICATED additional files."""
_LOG_BYTES = 1 << 28
"""Maximum size, in bytes, of a launch attempt's output in `log/`. Additional lines are not
written."""
_MAX_PROBLEMS = 4
"""Maximum number of nodes whose problems an error message states."""


@dataclass(frozen=True)
class Job:
    """Nodes and settings of a supervised run in one job of the scheduler."""

    run_dir: Path
    config: str
    """The resolved configuration of the run, as TOML text. The ranks of all attempts read a copy of
    this text, so that a change of the user's file does not change a later attempt."""
    nodes: tuple[str, ...]
    """Nodes, in the order of the allocation."""
    ranks_per_node: int
    policy: Policy
    heartbeat_s: float
    timeout_s: float
    """`parallel.timeout_s`: longest time for which ranks wait for each other."""
    supervisor_timeout_s: float
    launcher: Launcher
    settings: str
    """Hash of the settings that must not change in later jobs of the run."""
    frozen: tuple[str, ...] = ()
    """Names of the settings from which the hash `settings` is computed. The name of a section means
    all settings of this section."""
    name: str = ""
    """Name of the scheduler's job."""
    ends_at: float = math.inf
    """Unix time of the end of the job; infinity without a limit."""
    margin_s: float = 120.0
    """The ranks begin to save a checkpoint this number of seconds before the end of the job."""
    pardoned: tuple[str, ...] = ()
    """Excluded nodes that the user has named with `--pardon`. These nodes can get ranks again."""
    stage: Path | None = None
    """Folder on a disk of each node for a copy of the Python environment; None if the environment
    is not copied."""
    chain: Chain | None = None
    """Submits the job that continues the run after this job; None if no job follows."""
    start_limit_s: float = 120.0
    """Time in seconds within which agents must answer after their start, and mpiexec must start
    ranks."""

    def workspace_of(self, attempt: AttemptStarted) -> Workspace:
        """Return the workspace of a launch attempt, which is in the checkpoint directory of the
        run."""
        return Workspace(store.checkpoints_dir(self.run_dir) / f".work-{attempt.workspace}")


@dataclass
class Node:
    """State of a node of the allocation, as the supervisor knows it."""

    name: str
    channel: Channel | None = None
    hello: Hello | None = None
    heard_at: float = -math.inf
    """Time of the agent's last message, by the supervisor's clock."""
    attempt: int = 0
    """Number of the launch attempt to which `ranks` belongs."""
    ranks: dict[int, RankReport] = field(default_factory=dict)
    ended: dict[int, int] = field(default_factory=dict)
    """The ranks of this node that have ended. The dict maps each of these ranks to a number. Over
    all nodes, these numbers ascend in the order in which the ranks ended."""
    kill_sent_at: float = -math.inf
    """Time of the last request to kill ranks, by the supervisor's clock."""
    asked: type[Message] = Message
    """Type of the answer that the supervisor waits for."""
    answer: asyncio.Future[Any] | None = None
    failure: str = ""
    """Reason why the agent cannot start the ranks of the launch attempt."""
    problem: str = ""
    """Reason why the agent of the node was refused or does not answer."""
    is_staged: bool = False
    """True if the node has a copy of the environment of the ranks."""
    has_lost_ranks: bool = False
    """True if the agent was started again, so that the ranks of the launch attempt on this node
    have ended."""


class Agents:
    """Starts the agents of a job, receives their reports, and sends them requests.

    An agent is a process that starts and observes the ranks of one node. It authenticates with the
    launch secret.
    """

    def __init__(self, job: Job, history: History, secret: bytes) -> None:
        """Store the arguments. Agents are started by `start`.

        Args:
            job: The job.
            history: History of the run, to which the supervisor adds events later.
            secret: The launch secret, which all processes of this launch know.
        """
        self._job, self._history, self._secret = job, history, secret
        self._folder = job.run_dir / SUPERVISOR
        self.nodes = {name: Node(name) for name in job.nodes}
        self.clock_s = 0.0
        """Seconds for which this process has run. The silence of agents is measured with this
        clock. The clock stops while this process is suspended or waits for a disk, so that agents
        do not seem to be silent only because this process has not read messages."""
        self.commands: list[subprocess.Popen[bytes]] = []
        """Launcher commands that started agents or ranks. They were started without asyncio,
        because asyncio would kill them when this supervisor ends, and the next supervisor needs the
        agents."""
        self.staged: Path | None = None
        """Folder of the copy of the Python environment on each node; None if ranks use the
        environment of this process."""
        self._code = hash_code()
        self._problems: set[str] = set()
        """The reasons for which agents were refused."""
        self._unauthenticated: list[asyncio.StreamWriter] = []
        self._refused = self._num_ended = 0
        self._log_attempt = 0
        self._log: BinaryIO | None = None
        self._log_bytes = self._log_dropped = 0
        self._tasks: set[asyncio.Task[None]] = set()
        self._servers: list[asyncio.Server] = []
        self._connections: set[asyncio.Task[None]] = set()

    async def listen(self) -> tuple[list[str], int]:
        """Listen for agents at the addresses of this machine. Return the addresses and the port.

        Raises:
            OSError: This machine cannot listen at any address.
        """
        hosts, port, problem = [], 0, OSError("this machine has no address to listen at")
        for host in self._job.launcher.addresses():
            try:
                # asyncio accepts up to `backlog` connections at once, before any is refused.
                server = await asyncio.start_server(
                    self._on_connection, host, port, backlog=_MOST_UNAUTHENTICATED
                )
            except OSError as error:  # an interface that is down, or the port is in use there
                problem = error
                continue
            port = server.sockets[0].getsockname()[1]
            self._servers.append(server)
            hosts.append(host)
        if not hosts:
            raise problem
        return hosts, port

    async def close(self) -> None:
        """Close all connections, and stop listening."""
        for server in self._servers:
            server.close()
        for task in self._connections:
            task.cancel()
        await asyncio.gather(*self._connections, return_exceptions=True)

    async def wait_for_known(self) -> None:
        """Wait for a limited time until the agents of the previous supervisor have connected to
        this supervisor."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._job.heartbeat_s + _RECONNECT_S):
                while any(node.channel is None for node in self.nodes.values()):
                    await asyncio.sleep(LOOK_S)

    async def start(self) -> None:
        """Start the agents that are not connected, and wait until they answer."""
        job = self._job
        # A node without a connection may still have running ranks, which a second agent could not
        # control.
        busy = self._history.running.nodes if self._history.running is not None else ()
        wanted = [
            node.name
            for node in self.nodes.values()
            if node.name not in busy and self._history.standing(node.name) != "excluded"
        ]
        absent = self._without_agent(wanted)
        commands = job.launcher.agent_commands(absent, job.run_dir)
        for name in absent:
            self.nodes[name].problem = ""
        processes = dict(zip(absent, map(self.run, commands), strict=True))
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(job.start_limit_s):
                while any(
                    processes[name].poll() is None and not self.nodes[name].problem
                    for name in self._without_agent(absent)
                ):
                    await asyncio.sleep(LOOK_S)
        for name in self._without_agent(wanted):
            status = processes[name].poll() if name in processes else None
            reason = f"no agent answers within {job.start_limit_s:.0f} s"
            if status is not None:
                reason = f"{job.launcher.name} ended with status {status} before an agent answered"
            node = self.nodes[name]
            node.problem = node.problem or reason
            logger.warning("no agent on %s: %s", name, node.problem)

    def _without_agent(self, nodes: Sequence[str]) -> list[str]:
        return [name for name in nodes if self.nodes[name].channel is None]

    def run(
        self, command: Sequence[str], variables: Mapping[str, str] | None = None
    ) -> subprocess.Popen[bytes]:
        """Start a launcher command with `variables` added to the environment. Raises OSError."""
        environ = {**os.environ, **(variables or {})}
        process = subprocess.Popen(
            command, env=environ, stdin=subprocess.DEVNULL, start_new_session=True
        )
        self.commands.append(process)
        return process

    def check(self) -> None:
        """Raise ConfigError if the run needs more nodes than can be used."""
        policy, launcher = self._job.policy, self._job.launcher
        needed = policy.sizes[0 if policy.on_exhausted == "shrink" else -1]
        excluded = {n for n in self.nodes if self._history.standing(n) == "excluded"}
        usable = [
            node.name
            for node in self.nodes.values()
            if node.channel is not None and node.name not in excluded
        ]
        if len(usable) < needed:
            problems = [
                f"{node.name}: {'excluded' if node.name in excluded else node.problem}"
                for node in self.nodes.values()
                if node.name not in usable
            ]
            more = len(problems) - _MAX_PROBLEMS
            problems[_MAX_PROBLEMS:] = [f"and {counted(more, 'other')}"] if more > 0 else []
            raise ConfigError(
                f"--nodes {policy.sizes[-1]}: only {counted(len(usable), 'node')} can be used "
                f"({', '.join(usable) or 'none'}; {'; '.join(problems)}); check that the launcher "
                f"{launcher.name!r} reaches the other nodes, use an excluded node again with "
                "--pardon NODE, or request more nodes"
            )

    async def start_ranks(self, attempt: AttemptStarted, name: str) -> None:
        """Request the agent of the node `name` to start the ranks of a launch attempt on this
        node."""
        job, node = self._job, self.nodes[name]
        per_node, index = attempt.ranks_per_node, attempt.nodes.index(name)
        first = self.nodes[attempt.nodes[0]]
        host = job.launcher.meeting_host(first.hello.host if first.hello else attempt.nodes[0])
        node.attempt, node.ranks, node.ended = attempt.attempt, {}, {}
        node.has_lost_ranks, node.failure = False, ""
        workspace = self._job.workspace_of(attempt)
        await self.say(
            node,
            Start(
                attempt=attempt.attempt,
                ranks=tuple(range(index * per_node, (index + 1) * per_node)),
                arguments=("train", str(self._folder / CONFIG)),
                workspace=str(workspace.path),
                job_end=None if math.isinf(job.ends_at) else job.ends_at - job.margin_s,
                mpiexec_s=job.start_limit_s if self.rank_command((name,), "") else None,
                variables={
                    **job.launcher.variables(self._most_ranks()),
                    "WORLD_SIZE": str(len(attempt.nodes) * per_node),
                    "MASTER_ADDR": host,
                    "MASTER_PORT": str(attempt.port),
                },
            ),
        )

    def rank_command(self, nodes: Sequence[str], workspace: str) -> list[str] | None:
        """Return the command that starts the ranks of a launch attempt; None if agents start the
        ranks.

        Args:
            nodes: The nodes of the attempt, in the order of their ranks.
            workspace: Name of the attempt's workspace.
        """
        job, secret = self._job, self._folder / SECRET
        python = staged_python(self.staged) if self.staged is not None else sys.executable
        return job.launcher.rank_command(nodes, job.ranks_per_node, secret, workspace, python)

    def _most_ranks(self) -> int:
        return len(self._job.nodes) * self._job.ranks_per_node

    async def _on_connection(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        """Receive the messages of a new connection until it is lost or the supervisor ends."""
        task: asyncio.Task[None] | None = asyncio.current_task()
        assert task is not None
        self._connections.add(task)
        with contextlib.suppress(asyncio.CancelledError):  # asyncio would print a traceback
            await self._serve(reader, writer)
        self._connections.discard(task)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if len(self._unauthenticated) >= _MOST_UNAUTHENTICATED:
            # Close the oldest connection that is not authenticated. Agents authenticate
            # immediately, so this connection is probably not from an agent.
            self._unauthenticated.pop(0).close()
        self._unauthenticated.append(writer)
        try:
            channel = await Channel.open(reader, writer, "supervisor", self._secret)
        except PeerError as error:
            self._refused += 1
            if self._refused <= 10 or self._refused % 1000 == 0:
                logger.warning("refused connection %d: %s", self._refused, error)
            return
        finally:
            if writer in self._unauthenticated:
                self._unauthenticated.remove(writer)
        node: Node | None = None
        try:
            hello = await channel.receive(Hello)
            node = self._welcome(channel, hello)
            if node is None:
                other = self.nodes.get(hello.node)
                is_needed = other is not None and other.channel is None  # the agent can try again
                has_ended = hello.attempt in self._history.ends and not is_needed
                if not hello.attempt or has_ended:  # otherwise its ranks may still run and save
                    await channel.send(End())
                return
            await channel.send(
                Welcome(
                    orphan_s=self._job.supervisor_timeout_s,
                    beat_s=self._job.heartbeat_s / BEATS_PER_LIMIT,
                    variables=dict(self._job.launcher.variables(self._most_ranks())),
                    forks_ranks=self.rank_command((node.name,), "") is None,
                )
            )
            while True:
                message = await channel.receive(Message)
                if node.channel is channel:
                    self._receive(node, message)
                elif isinstance(message, Report):  # the agent has a newer connection
                    self._receive(node, message.model_copy(update={"ranks": ()}))
        except (OSError, EOFError):
            pass  # the connection is lost
        except PeerError as error:
            sender = node.name if node is not None else channel.peer
            logger.warning("connection of %s closed: %s", sender, error)
        finally:
            if node is not None and node.channel is channel:
                node.channel = None
                if node.answer is not None and not node.answer.done():
                    node.answer.set_exception(
                        OSError(f"the connection to the agent of {node.name} is lost")
                    )
            await channel.close()

    def _welcome(self, channel: Channel, hello: Hello) -> Node | None:
        """Check the first message of an agent that has connected. Return the agent's node. If the
        agent must be refused, log a warning and return None."""
        node, problem = self.nodes.get(hello.node), ""
        if node is None:
            problem = f"{hello.node!r} is not a node of the allocation"
        elif node.channel is not None and node.hello is not None and hello.pid != node.hello.pid:
            problem = f"{node.name} has an agent already"
        elif hello.code != self._code:
            problem = f"{node.name} has other files of Optimus; install the same version there"
        elif abs(hello.time - time.time()) > _CLOCK_S:
            seconds = hello.time - time.time()
            problem = f"the clock of {node.name} differs by {seconds:.0f} s; set the clocks"
        elif 0 <= hello.open_files < MIN_OPEN_FILES:
            number = counted(hello.open_files, "file")
            problem = f"{node.name} can open only {number}; raise ulimit -n"
        if problem:
            if problem not in self._problems:  # the agent may connect again
                self._problems.add(problem)
                logger.warning("an agent is refused: %s", problem)
            if node is not None:
                node.problem = problem
            return None
        assert node is not None
        is_same_agent = node.hello is not None and hello.pid == node.hello.pid
        node.channel, node.hello, node.heard_at = channel, hello, self.clock_s
        running = self._history.running
        was_asked = running is not None and node.attempt == running.attempt
        if running is not None and hello.attempt == running.attempt:
            # After a takeover: the agent may be lost before the supervisor observes the attempt.
            node.attempt = running.attempt
        if running and is_same_agent and was_asked and hello.attempt < running.attempt:
            self.spawn(self.start_ranks(running, node.name))  # the request was lost
        return node

    def _receive(self, node: Node, message: Message) -> None:
        """Process a message from an agent."""
        node.heard_at = self.clock_s
        if isinstance(message, Report):
            running, number = self._history.running, message.attempt
            present = running is not None and node.name in running.nodes and running.attempt
            has_ranks = any(report.status is None for report in message.ranks)
            if has_ranks and number != present and self.clock_s - node.kill_sent_at > KILLED_S:
                # The node was suspended and continues now, or the request to kill did not arrive.
                node.kill_sent_at = self.clock_s
                self.spawn(self.say(node, Kill(attempt=number)))
            if number == node.attempt:
                node.failure = message.failure
                for report in message.ranks:
                    node.ranks[report.rank] = report
                    if report.status is not None and report.rank not in node.ended:
                        node.ended[report.rank] = self._num_ended
                        self._num_ended += 1
            try:
                self._write_log(number, message.lines, message.dropped)
            except OSError as error:  # lost output must not end the run
                self._log_dropped += len(message.lines)
                if self._log_dropped < 1000:
                    logger.warning("output of ranks is not written to log/: %s", error.strerror)
        elif isinstance(message, node.asked) and node.answer and not node.answer.done():
            node.answer.set_result(message)

    def _write_log(self, attempt: int, lines: Sequence[str], dropped: int) -> None:
        """Print output of ranks, and append it to the log of their attempt. Raises OSError."""
        if not lines or not attempt:
            return
        for line in lines:
            sys.stderr.write(f"{line}\n")
        if self._log is not None and self._log_attempt != attempt:
            self._log.close()
            self._log = None
        if self._log is None:
            self._log_attempt = attempt
            path = self._job.run_dir / "log" / f"attempt-{attempt:04d}.log"
            self._log = files.open_append(path)
            self._log_bytes = os.fstat(self._log.fileno()).st_size
        for line in lines:
            data = f"{line}\n".encode()
            if self._log_bytes + len(data) > _LOG_BYTES:
                self._log_dropped += 1
            else:
                self._log_bytes += len(data)
                self._log.write(data)
        if dropped:
            self._log.write(f"{counted(dropped, 'line')} of output were not kept\n".encode())

    async def say(self, node: Node, message: Message) -> None:
        """Send a message to an agent. Do nothing if the connection to the agent is lost."""
        if node.channel is not None:
            with contextlib.suppress(OSError):
                await node.channel.send(message)

    async def say_to_all(self, message: Message) -> None:
        """Send a message to all agents that are connected."""
        await asyncio.gather(*(self.say(node, message) for node in self.nodes.values()))

    async def ask(
        self, node: Node, message: Message, answer: type[_A], limit_s: float | None = None
    ) -> _A:
        """Send a message to an agent, and return the agent's answer, which has the type `answer`.

        Raises:
            OSError: The connection is lost.
            TimeoutError: The agent does not answer in time.
        """
        if node.channel is None:
            raise OSError(f"the connection to the agent of {node.name} is lost")
        node.asked, node.answer = answer, asyncio.get_running_loop().create_future()
        await self.say(node, message)
        async with asyncio.timeout(limit_s or self._job.heartbeat_s + KILLED_S):
            received: _A = await node.answer
            return received

    async def wait_for_ends(self, commands: Sequence[subprocess.Popen[bytes]]) -> None:
        """Wait for launcher commands to end. After KILLED_S seconds, terminate the commands that
        still run."""
        end = time.monotonic() + KILLED_S
        while any(process.poll() is None for process in commands) and time.monotonic() < end:
            await asyncio.sleep(LOOK_S)
        for process in commands:
            if process.poll() is None:  # a launcher that waits for a lost node
                process.terminate()

    def spawn(self, coroutine: Any) -> None:
        """Run a coroutine in a new task, and keep a reference to the task until it ends."""
        task = asyncio.ensure_future(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def heard(self) -> list[Node]:
        """Return the nodes whose agent has sent a message in the last `heartbeat_s` seconds.

        If the connection of such an agent is lost, the agent either connects again or becomes
        silent.
        """
        limit_s, now = self._job.heartbeat_s, self.clock_s
        return [node for node in self.nodes.values() if now - node.heard_at <= limit_s]

    def is_cut_off(self, now: float) -> bool:
        """Return True if this machine seems to be cut off from all other machines.

        The result is True if all agents of other machines are silent, if at least two of these
        agents have become silent at the same time, and if all agents of this machine answer.
        """
        limit_s, host = self._job.heartbeat_s, socket.gethostname()
        heard = [(node.hello.host, node.heard_at) for node in self.nodes.values() if node.hello]
        others = [heard_at for name, heard_at in heard if name != host]
        local = [heard_at for name, heard_at in heard if name == host]
        last = max(others, default=now)
        silent = [heard_at for heard_at in others if last - heard_at <= limit_s]  # not lost earlier
        if len(silent) < 2 or now - last <= limit_s:
            return False
        return all(now - heard_at <= limit_s for heard_at in local)

    async def run_clock(self) -> None:
        """Advance `clock_s` until this task is cancelled."""
        before = time.monotonic()
        while True:
            await asyncio.sleep(LOOK_S / 2)
            now = time.monotonic()
            self.clock_s += min(now - before, 2 * LOOK_S)
            before = now
