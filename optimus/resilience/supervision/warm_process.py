"""The agent's connection to the warm process of its node, which forks ranks (optimus/warm.py).

This module does not import torch.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from optimus.launch.spawn import prepare_rank

MAX_BYTES = 1 << 17
"""Maximum size in bytes of a request to fork a rank. If the environment of a rank is too large for
a request, the rank is not forked."""
_FORK_S = 5.0
"""Longest time in seconds to wait until the warm process has forked a rank."""


class ForkedProcess:
    """A rank that a warm process has forked, with the interface of asyncio's Process."""

    def __init__(self, stdout: asyncio.StreamReader) -> None:
        self.stdout, self.pid = stdout, 0
        self.returncode: int | None = None
        self.has_pid, self._has_ended = asyncio.Event(), asyncio.Event()

    def end(self, status: int) -> None:
        """Record that the process has ended with the exit status `status`."""
        self.returncode = status
        self._has_ended.set()

    async def wait(self) -> int:
        """Wait for the end of the process, and return its exit status; -N if signal N ended the
        process."""
        await self._has_ended.wait()
        assert self.returncode is not None
        return self.returncode


class WarmProcess:
    """The agent's connection to the warm process of its node, which has imported all modules of a
    run and forks ranks (optimus/warm.py)."""

    def __init__(self) -> None:
        self.is_ready = False
        """True if ranks can be forked."""
        self._socket: socket.socket | None = None
        self._process: asyncio.subprocess.Process | None = None
        self._waiting: list[ForkedProcess] = []
        self._running: dict[int, ForkedProcess] = {}

    async def start(self, variables: Mapping[str, str]) -> None:
        """Start the warm process, unless this object has already started it.

        Args:
            variables: Environment variables that libraries read at their import, such as
                OMP_NUM_THREADS.

        Raises:
            OSError: The process cannot be started.
        """
        if self._process is not None:
            return
        mine, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        mine.setblocking(False)
        self._socket = mine
        with theirs:
            self._process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-P", "-m", "optimus.warm"),
                env={**os.environ, **variables},
                stdin=theirs.fileno(),
                start_new_session=True,
                preexec_fn=partial(prepare_rank, os.getpid()),
            )
        asyncio.get_running_loop().add_reader(mine.fileno(), self._on_answer)

    async def wait_until_ready(self, limit_s: float) -> bool:
        """Wait until ranks can be forked. Return False if the warm process is lost or is not ready
        within `limit_s` seconds."""
        end = time.monotonic() + limit_s
        while not self.is_ready and self._socket is not None and time.monotonic() < end:
            await asyncio.sleep(0.02)
        return self.is_ready

    async def fork(self, environ: Mapping[str, str], arguments: Sequence[str]) -> ForkedProcess:
        """Fork a rank that runs `optimus ARGUMENTS`.

        Raises:
            ValueError: The environment and the arguments are too large for a request.
            OSError, TimeoutError: The warm process is lost or does not answer. The caller must end
                the warm process, since it may still fork the rank.
        """
        assert self._socket is not None and self.is_ready
        request = json.dumps({"environ": dict(environ), "arguments": list(arguments)}).encode()
        if len(request) > MAX_BYTES:
            raise ValueError("the environment and the arguments are too large for a request")
        read_end, write_end = os.pipe()
        stream = asyncio.StreamReader(limit=1 << 14)
        protocol = asyncio.StreamReaderProtocol(stream)
        loop = asyncio.get_running_loop()
        await loop.connect_read_pipe(lambda: protocol, os.fdopen(read_end, "rb", 0))
        forked = ForkedProcess(stream)
        self._waiting.append(forked)
        try:
            socket.send_fds(self._socket, [request], [write_end])
        finally:
            os.close(write_end)
        async with asyncio.timeout(_FORK_S):
            await forked.has_pid.wait()
        return forked

    def _on_answer(self) -> None:
        assert self._socket is not None
        try:
            data = self._socket.recv(MAX_BYTES)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._on_loss()
            return
        answer: dict[str, Any] = json.loads(data)
        match answer["is"]:
            case "ready":
                self.is_ready = True
            case "forked":
                forked = self._waiting.pop(0)
                forked.pid = answer["pid"]
                self._running[forked.pid] = forked
                forked.has_pid.set()
            case "ended":
                self._running.pop(answer["pid"]).end(answer["status"])

    def _on_loss(self) -> None:
        """Record that the warm process has ended and that the kernel has killed the ranks that it
        had forked."""
        assert self._socket is not None
        asyncio.get_running_loop().remove_reader(self._socket.fileno())
        self._socket.close()
        self._socket, self.is_ready = None, False
        for forked in self._running.values():
            forked.end(-signal.SIGKILL)
        self._running = {}

    async def end(self) -> None:
        """Kill the warm process, if it runs, and the ranks that it has forked."""
        if self._process is not None and self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()
            await self._process.wait()
        if self._socket is not None:
            self._on_loss()
