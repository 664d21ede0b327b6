"""Process that mpiexec runs for each rank. This process, not the agent, starts the rank.

Some transports need ranks that the launcher starts. For example, oneCCL over MPI gets addresses
from MPI's process manager. A single mpiexec per attempt then starts `python -P -m
optimus.resilience.supervision.launched_rank SECRET WORKSPACE` for each rank. This process connects
to the agent of its node, starts the rank as its child process, and reports the exit status of the
rank to the agent. This process then waits until the agent closes the connection, because mpiexec
ends all processes when one of the processes ends. The exit status of mpiexec therefore does not
show how a single rank ended.

This module does not import torch.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import json
import logging
import os
import select
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

from optimus.errors import OptimusError
from optimus.launch.environment import read_rank
from optimus.launch.signals import STOP_SIGNALS
from optimus.launch.spawn import prepare_rank
from optimus.observe.log import set_up_logging
from optimus.resilience.supervision.channel import read_secret
from optimus.resilience.supervision.warm_process import MAX_BYTES, ForkedProcess

logger = logging.getLogger(__name__)

MODULE = "optimus.resilience.supervision.launched_rank"
_CONNECT_S = 120.0
"""Seconds for which a process that mpiexec has started waits for the agent of its node."""
_RETRY_S = 0.05
_ANSWER_S = 30.0
"""Longest time in seconds to wait for an answer of the process at the other end of a connection."""
_CREDENTIALS = struct.Struct("3i")
"""Layout of struct ucred, which SO_PEERCRED returns: process ID, user ID and group ID."""


def _socket_path(secret: bytes, workspace: str, rank: int) -> str:
    """Return the path of the socket for messages between the agent and the process that mpiexec
    starts for a rank. Other users cannot guess the path, and each attempt has another path."""
    text = f"rank {rank} of {workspace}"
    name = hmac.new(secret, text.encode(), "sha256").hexdigest()[:32]
    return os.path.join(tempfile.gettempdir(), f"optimus-{name}")


def _check_user(connection: socket.socket) -> None:
    """Raise OSError if the process at the other end of `connection` belongs to another user."""
    size = _CREDENTIALS.size
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size)
    if _CREDENTIALS.unpack(credentials)[1] != os.geteuid():
        raise OSError("the process at the other end of the connection belongs to another user")


# -- The agent's side -----------------------------------------------------------------------------


class LaunchedProcess(ForkedProcess):
    """A rank that mpiexec has started, with the interface of asyncio's Process."""

    was_lost = False
    """True if mpiexec has ended the rank, or the process that started the rank was lost."""

    def __init__(self, stdout: asyncio.StreamReader, connection: socket.socket) -> None:
        super().__init__(stdout)
        self._connection = connection
        self._observer = asyncio.create_task(self._observe())

    async def _observe(self) -> None:
        loop = asyncio.get_running_loop()
        try:
            while data := await loop.sock_recv(self._connection, MAX_BYTES):
                answer = json.loads(data)
                if answer["is"] == "started":
                    self.pid = answer["pid"]
                    self.has_pid.set()
                else:
                    self.end(answer["status"])
        except (OSError, ValueError, KeyError, TypeError):
            pass  # an answer of another version of Optimus
        if self.returncode is None:
            self.was_lost = True
            self.end(-signal.SIGKILL)  # the kernel kills the rank with its parent process
        self.has_pid.set()

    def close(self) -> None:
        """Close the connection to the rank's parent process, which then kills the rank and ends."""
        self._observer.cancel()
        self._connection.close()
        if self.returncode is None:
            self.end(-signal.SIGKILL)


async def receive_rank(
    secret: bytes,
    workspace: str,
    rank: int,
    environ: Mapping[str, str],
    arguments: Sequence[str],
    limit_s: float,
) -> LaunchedProcess:
    """Wait until mpiexec has started the process for a rank. Then let this process run
    `optimus ARGUMENTS`.

    Args:
        secret: The launch secret.
        workspace: Name of the attempt's workspace (`AttemptStarted.workspace`).
        rank: The rank.
        environ: Variables of the rank, in addition to the variables that mpiexec sets.
        arguments: Arguments of `optimus`.
        limit_s: Longest time to wait for mpiexec.

    Raises:
        OSError: The process does not connect within the limit, or does not start the rank.
    """
    path, loop = _socket_path(secret, workspace, rank), asyncio.get_running_loop()
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(path)
        try:
            os.chmod(path, 0o600)
            listener.listen()
            listener.setblocking(False)
            try:
                async with asyncio.timeout(limit_s):
                    connection, _ = await loop.sock_accept(listener)
            except TimeoutError:
                raise OSError(f"mpiexec has not started rank {rank} in {limit_s:.0f} s") from None
        finally:
            os.unlink(path)
    try:
        _check_user(connection)
        connection.setblocking(False)
        read_end, write_end = os.pipe()
        try:
            stream = asyncio.StreamReader(limit=1 << 14)
            protocol = asyncio.StreamReaderProtocol(stream)
            await loop.connect_read_pipe(lambda: protocol, os.fdopen(read_end, "rb", 0))
            request = json.dumps({"environ": dict(environ), "arguments": list(arguments)})
            socket.send_fds(connection, [request.encode()], [write_end])
        finally:
            os.close(write_end)
        process = LaunchedProcess(stream, connection)
    except BaseException:
        connection.close()
        raise
    try:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_ANSWER_S):
                await process.has_pid.wait()
        if not process.pid:
            raise OSError(f"the process that mpiexec has started for rank {rank} does not answer")
    except BaseException:  # also if the agent ends the attempt meanwhile
        process.close()
        raise
    return process


# -- The process that mpiexec starts --------------------------------------------------------------


def main(argv: Sequence[str]) -> int:
    """Start a rank for the agent of this node, and report the end of the rank to the agent. Return
    exit status 1 if no agent can be reached, else 0."""
    secret_file, workspace = argv
    for number in STOP_SIGNALS:  # mpiexec forwards signals; only the agent ends the rank
        signal.signal(number, lambda number, frame: None)
    rank = read_rank()
    try:
        connection = _connect(_socket_path(read_secret(Path(secret_file)), workspace, rank))
    except (OSError, OptimusError) as error:
        set_up_logging(rank)
        logger.error("no agent on this node: %s", error)
        return 1
    with connection:
        connection.settimeout(_ANSWER_S)
        data, fds, _, _ = socket.recv_fds(connection, MAX_BYTES, 1)
        connection.settimeout(None)
        if not data:
            return 0  # the attempt has ended
        request = json.loads(data)
        process = subprocess.Popen(
            # -P: the working directory, which may be another user's, is not searched.
            [sys.executable, "-P", "-m", "optimus.cli", *request["arguments"]],
            env={**os.environ, **request["environ"]},
            stdin=subprocess.DEVNULL,
            stdout=fds[0],
            stderr=subprocess.STDOUT,
            close_fds=False,  # the rank uses its connection to the process manager of MPI
            start_new_session=True,
            preexec_fn=partial(prepare_rank, os.getpid()),
        )
        os.close(fds[0])
        connection.send(json.dumps({"is": "started", "pid": process.pid}).encode())
        _wait(process, connection)
    return 0


def _connect(path: str) -> socket.socket:
    """Connect to the agent's socket at `path`. Try again for _CONNECT_S seconds, because the agent
    may not listen yet. Raises OSError."""
    end = time.monotonic() + _CONNECT_S
    while True:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            connection.connect(path)
            _check_user(connection)
            return connection
        except OSError:
            connection.close()
            if time.monotonic() > end:
                raise
        time.sleep(_RETRY_S)


def _wait(process: subprocess.Popen[bytes], connection: socket.socket) -> None:
    """Wait for the end of the rank and report it to the agent. When the agent closes the
    connection, kill the rank and return."""
    poll = select.poll()
    poll.register(connection, select.POLLIN)
    ended = os.pidfd_open(process.pid)
    poll.register(ended, select.POLLIN)
    while True:
        ready = {fd for fd, _ in poll.poll()}
        if ended in ready:
            poll.unregister(ended)
            status = {"is": "ended", "status": process.wait()}
            with contextlib.suppress(OSError):  # the agent has closed the connection
                connection.send(json.dumps(status).encode())
        if connection.fileno() in ready:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            return


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
