"""The agent of a node: starts and observes the node's ranks, and reports to the supervisor.

The launcher starts one agent on each node of the allocation, including buffer nodes, with `python
-P -m optimus.resilience.supervision.agent RUN_DIR NODE`. An agent outlives its supervisor. While no
supervisor runs, the ranks continue to train, and the agents try to connect to the next supervisor.
If no supervisor answers within a time limit, the agents let the ranks save a checkpoint and end.

This module does not import torch.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import logging
import os
import resource
import shutil
import signal
import socket
import sys
import tarfile
import tempfile
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import psutil

from optimus.errors import ConfigError, OptimusError, one_line, refuse_if
from optimus.io import files
from optimus.launch.spawn import prepare_rank
from optimus.observe.log import set_up_logging
from optimus.resilience.supervision.attempt import Attempt, create_page, read_page
from optimus.resilience.supervision.channel import Channel, PeerError, read_secret
from optimus.resilience.supervision.launched_rank import LaunchedProcess, receive_rank
from optimus.resilience.supervision.messages import (
    End,
    FindPort,
    FreePort,
    Hello,
    Kill,
    Killed,
    Message,
    RankReport,
    Report,
    Signal,
    Stage,
    Staged,
    Start,
    Welcome,
)
from optimus.resilience.supervision.staging import remove_environment, unpack_environment
from optimus.resilience.supervision.warm_process import ForkedProcess, WarmProcess

logger = logging.getLogger(__name__)

SUPERVISOR = ".supervisor"
"""Name of the folder in the run directory for the supervisor's files."""
ADDRESS, SECRET = "address.json", "secret"
BEATS_PER_LIMIT = 6
"""Number of reports that an agent sends within `resilience.heartbeat_s`."""
_KILL_S = 2.0
"""Longest time in seconds to wait until processes have ended after SIGKILL."""
_SAVE_S = 600.0
"""Time in seconds within which ranks without a supervisor must save a checkpoint and end."""
_WARM_S = 10.0
"""Longest time in seconds to wait for the imports of the warm process, which forks ranks. After
this time, ranks are started as new interpreters."""
_OUTPUT_S = 1.0
"""Longest time in seconds to read the output of a rank after the rank has ended. A limit is needed
because a child process of the rank may keep the pipe open."""
_RETRY_S = 0.1
_CONNECT_S = 0.2, 2.0
"""Shortest and longest time limit in seconds for connecting to the supervisor."""
_PAUSE_S = 0.1
"""Shortest time in seconds between two reports."""
_ADDRESS_S = 0.5
"""Time in seconds between two reads of the supervisor's address file."""
_LINES = 10_000
"""Maximum number of output lines that an agent keeps until it can send them. Additional lines are
dropped and counted."""
_LINE_BYTES = 16_384
_REPORT_CHARS = 100_000
"""When the output lines in a report have together at least this number of characters, the remaining
lines wait for the next report. JSON needs up to 6 bytes for a character."""


@dataclass
class _Rank:
    """A process that runs a rank, and the observations of the agent on this process."""

    rank: int
    process: asyncio.subprocess.Process | ForkedProcess
    page: Path
    message: str = ""
    """The last error that the rank has printed."""
    was_ended: bool = False
    """True if the agent has sent a signal to the process, or mpiexec has ended the process."""
    status: int | None = None

    def report(self) -> RankReport:
        """Return a record of the present state of this rank, for the supervisor."""
        progress = None
        with contextlib.suppress(OSError):
            progress = read_page(self.page)
        return RankReport(
            rank=self.rank,
            pid=self.process.pid,
            status=self.status,
            was_ended=self.was_ended,
            message=self.message,
            progress=progress,
        )


@dataclass
class Agent:
    """Process that starts the ranks of one node, observes them, and reports to the supervisor."""

    run_dir: Path
    node: str
    folder: Path
    """Folder for the files of this agent, on a disk of the node."""
    code: str = field(default_factory=lambda: hash_code())
    """Hash of the Python files of Optimus when this agent started. Later changes of the files do
    not change this attribute."""
    attempt: int = 0
    """Number of the last attempt that this agent has started."""
    ranks: dict[int, _Rank] = field(default_factory=dict)
    failure: str = ""
    """Reason why the ranks of the launch attempt cannot be started; "" if they can."""
    stop_signal: int = 0
    """Last signal that the supervisor has sent to the ranks of the launch attempt; 0 if none. Ranks
    that start later also receive this signal."""
    starting: asyncio.Task[None] | None = None
    """Task that starts ranks."""
    watchers: list[asyncio.Task[None]] = field(default_factory=list)
    """Tasks that read the output of the ranks."""
    variables: dict[str, str] = field(default_factory=dict)
    """Environment variables of the warm process."""
    warm: WarmProcess = field(default_factory=WarmProcess)
    lines: deque[str] = field(default_factory=deque)
    """Output of ranks that has not been sent to a supervisor."""
    dropped: int = 0
    """Number of output lines that were dropped and are not reported yet."""
    address: bytes = b""
    """Content of the address file of the supervisor to which this agent is connected."""
    staged: tuple[str, Path] | None = None
    """Hash and parent folder of this node's copy of the Python environment; None without a copy."""
    orphan_s: float = 60.0
    """Seconds without a supervisor after which the ranks save a checkpoint and end. Each supervisor
    sets this value."""

    async def run(self) -> None:
        """Carry out the requests of the supervisor, and of supervisors that take over later.

        Return when a supervisor ends this agent, or when no supervisor has answered for `orphan_s`
        seconds.
        """
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT, signal.SIGHUP):
            # The scheduler sends these signals before the end of a job. The agent sends SIGTERM to
            # the ranks, which then save a checkpoint.
            if signal.getsignal(number) is not signal.SIG_IGN:  # nohup ignores SIGHUP
                loop.add_signal_handler(number, partial(self._signal_ranks, signal.SIGTERM))
        lost_at, is_connected = time.monotonic(), False
        while True:
            try:
                # After a network failure, TCP may wait as long as the failure lasted before it
                # retransmits. A new connection with a short time limit succeeds earlier.
                limit_s = min(max((time.monotonic() - lost_at) / 8, _CONNECT_S[0]), _CONNECT_S[1])
                channel = await self._connect(limit_s)
                is_connected = True
                if await self._serve(channel):
                    break
            except (OSError, EOFError, OptimusError, ValueError):
                if is_connected:
                    lost_at, is_connected = time.monotonic(), False
                await asyncio.sleep(_RETRY_S)
            if time.monotonic() - lost_at > self.orphan_s:
                logger.warning(
                    "%s: no supervisor has answered for %.0f s; the ranks save and end",
                    self.node,
                    time.monotonic() - lost_at,
                )
                self._signal_ranks(signal.SIGTERM)
                with contextlib.suppress(TimeoutError):  # `_kill` ends ranks that hang
                    async with asyncio.timeout(_SAVE_S):
                        await asyncio.gather(*(r.process.wait() for r in self.ranks.values()))
                break
        await self._kill()
        await self.warm.end()
        if self.staged is not None:
            remove_environment(*self.staged)

    async def _connect(self, limit_s: float) -> Channel:
        """Connect to the present supervisor. Raises OSError or OptimusError.

        Args:
            limit_s: Time limit for connecting to each address of the supervisor, in seconds.
        """
        folder = self.run_dir / SUPERVISOR
        secret = await asyncio.to_thread(read_secret, folder / SECRET)
        self.address = await asyncio.to_thread(self._read_address)
        hosts, port = parse_address(self.address)
        problem: Exception = OSError("the address file of the supervisor names no host")
        for host in hosts:
            try:
                async with asyncio.timeout(limit_s):
                    reader, writer = await asyncio.open_connection(host, port)
                return await Channel.open(reader, writer, "agent", secret)
            except (OSError, TimeoutError, PeerError) as error:
                problem = error
        raise problem

    def _read_address(self) -> bytes:
        return files.read_regular(self.run_dir / SUPERVISOR / ADDRESS, 1 << 16)

    async def _check_supervisor(self) -> None:
        """Raise OSError if another supervisor has taken over.

        The state of the connection does not show a takeover, because the connection to the earlier
        supervisor stays open if the earlier supervisor is suspended.
        """
        # Read the file in a thread, because reports must continue while the shared file system does
        # not answer.
        if await asyncio.to_thread(self._read_address) != self.address:
            raise OSError("another supervisor has taken over")

    async def _watch_address(self) -> None:
        while True:
            await self._check_supervisor()
            await asyncio.sleep(_ADDRESS_S)

    async def _serve(self, channel: Channel) -> bool:
        """Carry out the requests of a supervisor, and send reports. Return True if the supervisor
        ends this agent.

        Raises:
            OSError, EOFError, PeerError: The connection is lost.
        """
        await channel.send(self._hello())
        welcome = await channel.receive(Message)
        if isinstance(welcome, End):
            return True
        if not isinstance(welcome, Welcome):
            raise PeerError(f"received the message {type(welcome).__name__} instead of Welcome")
        self.orphan_s, self.variables = welcome.orphan_s, welcome.variables
        if welcome.forks_ranks:
            await self.warm.start(self.variables)
        tasks = [
            asyncio.create_task(self._report(channel, welcome.beat_s)),
            asyncio.create_task(self._watch_address()),
            asyncio.create_task(self._obey_all(channel)),
        ]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            return any(bool(task.result()) for task in done)  # or raises the error of a task
        finally:
            for task in tasks:
                task.cancel()
            await channel.close()

    async def _obey_all(self, channel: Channel) -> bool:
        while not await self._obey(channel, await channel.receive(Message)):
            pass
        return True

    def _hello(self) -> Hello:
        return Hello(
            node=self.node,
            host=socket.gethostname(),
            pid=os.getpid(),
            code=self.code,
            time=time.time(),
            open_files=resource.getrlimit(resource.RLIMIT_NOFILE)[0],
            attempt=self.attempt,
        )

    async def _obey(self, channel: Channel, message: Message) -> bool:
        """Carry out the request in a supervisor's message. Return True if this agent must end.

        Raises:
            OSError: Another supervisor has taken over.
        """
        await self._check_supervisor()
        match message:
            case FindPort():
                try:
                    answer = FreePort(port=await asyncio.to_thread(_free_port, message.host))
                except OSError as error:
                    reason = f"it cannot listen at {message.host}: {one_line(error)}"
                    answer = FreePort(port=0, problem=reason)
                await channel.send(answer)
            case Stage():
                self.staged = (message.digest, Path(message.parent))
                problem = await asyncio.to_thread(self._stage, Path(message.archive))
                await channel.send(Staged(problem=problem))
            case Start():
                await self._kill()
                self.attempt, self.failure, self.stop_signal = message.attempt, "", 0
                self.ranks, self.watchers = {}, []
                self.starting = asyncio.create_task(self._start(message))
            case Signal():
                self.stop_signal = message.number
                self._signal_ranks(message.number)
            case Kill():
                if self.attempt <= message.attempt:
                    await self._kill()
                await channel.send(Killed(attempt=self.attempt))
            case End():
                return True
        return False

    def _stage(self, archive: Path) -> str:
        """Unpack the Python environment of the ranks from `archive`. Return the reason of a
        failure; "" if the environment is unpacked."""
        assert self.staged is not None
        try:
            unpack_environment(archive, *self.staged)
        except (OSError, tarfile.TarError) as error:
            return one_line(error)
        return ""

    async def _start(self, message: Start) -> None:
        """Start the ranks of a launch attempt on this node. If they cannot be started, store the
        reason in `failure`."""
        try:
            folder = self.folder / f"attempt-{self.attempt:04d}"
            folder.mkdir(parents=True)
            for local_rank, rank in enumerate(message.ranks):
                await self._start_rank(message, local_rank, rank, folder / f"rank-{rank}")
        except (OSError, ValueError) as error:
            self.failure = f"the ranks cannot be started: {one_line(error)}"

    async def _start_rank(self, message: Start, local_rank: int, rank: int, page: Path) -> None:
        create_page(page)
        workspace = Path(message.workspace)
        attempt = Attempt(self.attempt, self.node, workspace, page, message.job_end)
        environ = {
            **message.variables,
            **attempt.variables(),
            "RANK": str(rank),
            "LOCAL_RANK": str(local_rank),
            "LOCAL_WORLD_SIZE": str(len(message.ranks)),
        }
        arguments, limit_s = message.arguments, message.mpiexec_s
        process: asyncio.subprocess.Process | ForkedProcess
        if limit_s is None:
            process = await self._start_process({**os.environ, **environ}, arguments)
        else:
            secret = await asyncio.to_thread(read_secret, self.run_dir / SUPERVISOR / SECRET)
            name = workspace.name.removeprefix(".work-")
            process = await receive_rank(secret, name, rank, environ, arguments, limit_s)
        self.ranks[rank] = _Rank(rank, process, page)
        self.watchers.append(asyncio.create_task(self._watch(self.ranks[rank])))
        if self.stop_signal:  # the signal arrived while this rank was being started
            self._signal_ranks(self.stop_signal)

    async def _start_process(
        self, environ: Mapping[str, str], arguments: Sequence[str]
    ) -> asyncio.subprocess.Process | ForkedProcess:
        """Start `optimus ARGUMENTS`: if possible, by a fork of the warm process, else as a new
        interpreter."""
        if await self.warm.wait_until_ready(_WARM_S):
            try:
                return await self.warm.fork(environ, arguments)
            except (OSError, TimeoutError):
                await self._replace_warm()  # kills all ranks that the warm process forked
                if self.ranks:
                    raise OSError("the process that forks ranks does not answer") from None
            except ValueError:  # the environment is too large
                pass
        return await asyncio.create_subprocess_exec(
            # -P: do not search the working directory for modules: it may be another user's.
            *(sys.executable, "-P", "-m", "optimus.cli", *arguments),
            env=environ,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            limit=_LINE_BYTES,
            start_new_session=True,
            preexec_fn=partial(prepare_rank, os.getpid()),
        )

    async def _watch(self, rank: _Rank) -> None:
        """Read the output of a rank until the rank ends, then store its exit status."""
        stream = rank.process.stdout
        assert stream is not None, "the output is a pipe"
        reading = asyncio.create_task(self._read_output(rank, stream))
        status = await rank.process.wait()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_OUTPUT_S):
                await reading
        if isinstance(rank.process, LaunchedProcess) and rank.process.was_lost:
            rank.was_ended = True  # the end of the rank does not show a failure of this node
        # Kill the rank's child processes now. Later, another process group may have the same ID.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(rank.process.pid, signal.SIGKILL)
        rank.status = status

    async def _read_output(self, rank: _Rank, stream: asyncio.StreamReader) -> None:
        while line := await _read_line(stream):
            text = line.decode("utf-8", "replace").rstrip("\n")
            if "error:" in text:
                rank.message = one_line(text)
            if len(self.lines) < _LINES:
                self.lines.append(f"{self.node} rank {rank.rank}: {text}")
            else:
                self.dropped += 1

    def _take_lines(self) -> list[str]:
        """Remove output lines from `lines` for the next report, and return the removed lines."""
        lines: list[str] = []
        length = 0
        while self.lines and length < _REPORT_CHARS:
            lines.append(self.lines.popleft())
            length += len(lines[-1])
        return lines

    async def _report(self, channel: Channel, beat_s: float) -> None:
        """Send a report every `beat_s` seconds, and soon after a rank has ended or printed a line.

        Raises:
            OSError: The connection is lost. It also counts as lost if sent bytes are unacknowledged
                for more than 2 * `beat_s` seconds.
        """
        sent: set[int] = set()
        acknowledged_at = time.monotonic()
        while True:
            ranks = [rank.report() for rank in self.ranks.values()]
            lines, dropped = self._take_lines(), 0
            if not self.lines:
                dropped, self.dropped = self.dropped, 0
            report = Report(
                attempt=self.attempt,
                ranks=tuple(ranks),
                lines=tuple(lines),
                dropped=dropped,
                failure=self.failure,
            )
            async with asyncio.timeout(self.orphan_s):  # a suspended supervisor reads nothing
                await channel.send(report)
            await asyncio.sleep(min(_PAUSE_S, beat_s))
            sent = {entry.rank for entry in ranks if entry.status is not None}
            end = time.monotonic() + beat_s
            while time.monotonic() < end and not self.lines:
                if {r.rank for r in self.ranks.values() if r.status is not None} != sent:
                    break
                await asyncio.sleep(min(0.02, beat_s))
            if not channel.unacknowledged_bytes():
                acknowledged_at = time.monotonic()
            elif time.monotonic() - acknowledged_at > 2 * beat_s:
                channel.abort()
                raise OSError("the machine of the supervisor acknowledges no report")

    def _signal_ranks(self, number: int) -> None:
        """Send a signal to all ranks that run."""
        for rank in self.ranks.values():
            if rank.process.returncode is None:
                rank.was_ended = True
                with contextlib.suppress(ProcessLookupError):
                    try:
                        os.killpg(rank.process.pid, number)
                    except ProcessLookupError:  # a forked process is not a group leader yet
                        os.kill(rank.process.pid, number)

    async def _kill(self) -> None:
        """Kill all ranks and their child processes, and wait until they have ended."""
        if self.starting is not None:
            self.starting.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self.starting
            self.starting = None
        trees = []
        running = [rank for rank in self.ranks.values() if rank.process.returncode is None]
        for rank in running:
            with contextlib.suppress(psutil.NoSuchProcess):
                trees += psutil.Process(rank.process.pid).children(recursive=True)
        self._signal_ranks(signal.SIGKILL)
        for process in trees:  # a child may have left the rank's process group
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        try:
            async with asyncio.timeout(_KILL_S):
                await asyncio.gather(*(rank.process.wait() for rank in self.ranks.values()))
        except TimeoutError:  # the warm process reports no ends: it may be suspended
            await self._replace_warm()
        for rank in self.ranks.values():
            if isinstance(rank.process, LaunchedProcess):
                rank.process.close()

    async def _replace_warm(self) -> None:
        is_used = self.warm.is_ready
        await self.warm.end()
        self.warm = WarmProcess()
        if is_used:
            await self.warm.start(self.variables)


async def _read_line(stream: asyncio.StreamReader) -> bytes:
    """Return the next line of a stream; b"" at the end of the stream.

    A line that is longer than _LINE_BYTES is returned in pieces by several calls.
    """
    try:
        return await stream.readuntil(b"\n")
    except asyncio.IncompleteReadError as error:
        return error.partial
    except asyncio.LimitOverrunError as error:
        return await stream.read(error.consumed)


def parse_address(content: bytes) -> tuple[list[str], int]:
    """Return the hosts and the port in the supervisor's address file. Raises ConfigError."""
    try:
        value = json.loads(content)
        hosts, port = [str(host) for host in value["hosts"]], int(value["port"])
    except (ValueError, KeyError, TypeError, RecursionError, OverflowError):
        raise ConfigError(f"{SUPERVISOR}/{ADDRESS} is damaged; launch the run again") from None
    refuse_if(
        not 0 < port < 1 << 16,
        f"{SUPERVISOR}/{ADDRESS} has the port {port}, which is not from 1 to 65535; launch the run "
        "again",
    )
    return hosts, port


def hash_code() -> str:
    """Return a hash of all Python files of the package `optimus`. The supervisor refuses an agent
    with another hash, because all nodes must have the same files."""
    root = Path(__file__).resolve().parents[2]
    content = b""
    for path in sorted(root.rglob("*.py")):
        content += os.fsencode(path.relative_to(root)) + b"\n" + path.read_bytes()
    return files.xxh3_bytes(content)


def _free_port(host: str) -> int:
    """Return a port of the address `host` at which no process listens. Raises OSError."""
    with socket.create_server((host, 0)) as server:
        return server.getsockname()[1]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the agent of a node."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("run_dir", type=Path)
    parser.add_argument("node", nargs="?", help="name of this node in the allocation")
    args = parser.parse_args(argv)
    set_up_logging(0)
    node = args.node or os.environ.get("SLURMD_NODENAME") or socket.gethostname()
    folder = Path(tempfile.mkdtemp(prefix="optimus-agent-"))
    try:
        asyncio.run(Agent(args.run_dir, node, folder).run())
    except ConfigError as error:
        logger.error("%s", error)
        return error.kind.exit_status
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
