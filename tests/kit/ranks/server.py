"""Server process from which ranks of tests are forked. Linux only.

An import of torch takes seconds, and longer if many processes import torch at the same time. The
server imports torch once and forks a child for each rank. Forking is safe only from a single
thread. The server runs no torch operation, because the first operation would start threads.

The server ends when its control connection is closed. The connection is also closed when the pytest
process ends for any reason. When the server ends, its ranks end too.
"""

from __future__ import annotations

import ctypes
import faulthandler
import gc
import importlib
import os
import pickle
import pkgutil
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import reduce
from multiprocessing.connection import Connection, Pipe, wait
from pathlib import Path
from typing import Any, NoReturn

_SHOW_STACKS = signal.SIGRTMAX - 1
"""Signal that makes a rank write its stacks. It is not SIGUSR1, because a trainer can have a
handler for SIGUSR1."""
_DUMP_S = 0.3
"""Seconds in which a rank can write its stacks before it is killed."""
_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True)
class Job:
    """A function for `size` ranks. `arguments` is pickled, so that only the ranks import the types
    of the arguments."""

    size: int
    module: str
    function: str
    arguments: bytes
    start_world: bool
    timeout_s: float
    grace_s: float
    environ: Mapping[str, str]
    sys_path: tuple[str, ...]
    folder: str
    scratch: str
    """Directory in which each job makes, and removes, a folder for its rendezvous and outputs."""


@dataclass
class Outcome:
    """End of a rank."""

    rank: int
    how: str = "running"
    """`returned`, `raised`, `died` (by a signal or an exit), `timed out`, or `stopped` (killed
    because another rank failed and this rank did not end within the grace period)."""
    payload: bytes | None = None
    """The pickled result or exception; None if the rank has neither, or if pickling failed."""
    text: str = ""
    """The traceback of an exception, the exit status or signal of a rank that died, or the stacks
    at the time limit."""
    output: str = ""
    """Standard output and standard error of the rank."""

    @property
    def returned(self) -> bool:
        return self.how == "returned"

    def value(self) -> Any:
        """Return the result or the exception."""
        return None if self.payload is None else pickle.loads(self.payload)


def main(control_fd: int) -> None:
    """Run jobs, one after the other, until the other end of the connection is closed."""
    control = Connection(control_fd)
    _preload()
    threads = os.listdir("/proc/self/task")
    assert len(threads) == 1, f"an import started {len(threads) - 1} threads: forking is unsafe"
    gc.collect()
    gc.freeze()
    control.send("ready")
    with suppress(EOFError, ConnectionResetError, BrokenPipeError):
        while True:
            control.send(_RunningJob(control.recv(), control).run())


def _preload() -> None:
    import optimus

    # Test modules import pytest; the first step of an optimizer imports torch._dynamo.
    for name in ("torch.distributed", "torch._dynamo", "pytest"):
        importlib.import_module(name)
    for module in pkgutil.walk_packages(optimus.__path__, "optimus."):
        # Ignore failed imports: tests that use the module fail in their ranks.
        with suppress(Exception):
            importlib.import_module(module.name)


class _RunningJob:
    """Ranks of a job, and their outcomes."""

    def __init__(self, job: Job, control: Connection) -> None:
        self.job, self.control = job, control
        self.scratch = Path(tempfile.mkdtemp(dir=job.scratch))
        self.deadline = time.monotonic() + job.timeout_s
        self.has_failed = False
        self.outcomes = [Outcome(rank) for rank in range(job.size)]
        self.pids: list[int] = []
        self.live: dict[Connection, int] = {}
        """Ranks that run, by the connection through which they report."""

    def run(self) -> list[Outcome]:
        try:
            for rank in range(self.job.size):
                self._fork(rank)
            while self.live:
                self._step()
        finally:
            for rank in self.live.values():
                self._kill(rank)
            for outcome in self.outcomes:
                outcome.output = self._read(f"{outcome.rank}.out")
            shutil.rmtree(self.scratch, ignore_errors=True)
        return self.outcomes

    def _fork(self, rank: int) -> None:
        receiver, sender = Pipe(duplex=False)
        pid = os.fork()
        if pid == 0:
            self.control.close()
            receiver.close()
            for other in self.live:
                other.close()
            _run_rank(self.job, rank, sender, self.scratch)
        sender.close()
        self.pids.append(pid)
        self.live[receiver] = rank

    def _step(self) -> None:
        """Wait until a rank reports or ends, or until the next deadline."""
        remaining_s = self.deadline - time.monotonic()
        connections = [self.control, *self.live]
        ready = wait(connections, timeout=remaining_s) if remaining_s > 0 else []
        if self.control in ready:
            raise EOFError("the test process ended, or sent a message during a job")
        if not ready:
            self._end_all()
        for connection in [connection for connection in self.live if connection in ready]:
            self._receive(connection)

    def _receive(self, connection: Connection) -> None:
        outcome = self.outcomes[self.live[connection]]
        try:
            outcome.how, outcome.payload, outcome.text = connection.recv()
        except (EOFError, OSError):
            del self.live[connection]
            connection.close()
            self._reap(outcome)
        if outcome.how not in ("running", "returned") and not self.has_failed:
            self.has_failed = True
            self.deadline = min(self.deadline, time.monotonic() + self.job.grace_s)

    def _reap(self, outcome: Outcome) -> None:
        code = os.waitstatus_to_exitcode(os.waitpid(self.pids[outcome.rank], 0)[1])
        if code < 0:
            outcome.how, outcome.text = "died", f"killed by {signal.Signals(-code).name}"
        elif code > 0 or outcome.how == "running":
            outcome.how, outcome.text = "died", f"ended with exit status {code}"

    def _end_all(self) -> None:
        """After the deadline, record the stacks of the ranks that still run, and kill these
        ranks."""
        for rank in self.live.values():
            os.kill(self.pids[rank], _SHOW_STACKS)
        time.sleep(_DUMP_S)
        for connection, rank in self.live.items():
            outcome = self.outcomes[rank]
            if outcome.how == "running":
                outcome.how = "stopped" if self.has_failed else "timed out"
                outcome.text = self._read(f"{rank}.stacks")
            self._kill(rank)
            connection.close()
        self.live.clear()

    def _kill(self, rank: int) -> None:
        for kill in (os.killpg, os.kill):
            with suppress(ProcessLookupError):
                kill(self.pids[rank], signal.SIGKILL)
        with suppress(ChildProcessError):
            os.waitpid(self.pids[rank], 0)

    def _read(self, name: str) -> str:
        with suppress(OSError):
            return (self.scratch / name).read_text(errors="replace")
        return ""


def _run_rank(job: Job, rank: int, report: Connection, scratch: Path) -> NoReturn:
    """Run the function in a forked rank, report, and exit without the clean-up of the server."""
    os.setpgid(0, 0)
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    output = os.open(scratch / f"{rank}.out", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    with open(scratch / f"{rank}.stacks", "w") as stacks:
        faulthandler.register(_SHOW_STACKS, file=stacks, all_threads=True)
        message: tuple[str, bytes | None, str]
        try:
            message = ("returned", _call(job, rank, scratch), "")
        except BaseException as error:  # also SystemExit, which would unwind the server's loop
            message = ("raised", _pickled(error), traceback.format_exc())
        sys.stdout.flush()
        sys.stderr.flush()
        report.send(message)
        os._exit(0)


def _call(job: Job, rank: int, scratch: Path) -> bytes:
    os.environ.clear()
    os.environ.update(job.environ)
    os.environ.update(
        RANK=str(rank),
        WORLD_SIZE=str(job.size),
        LOCAL_RANK=str(rank),
        LOCAL_WORLD_SIZE=str(job.size),
        OPTIMUS_RENDEZVOUS=f"file://{scratch}/rendezvous",
        GLOO_SOCKET_IFNAME="lo",
        OMP_NUM_THREADS="1",
    )
    os.chdir(job.folder)
    sys.path[:] = job.sys_path
    from optimus.observe.log import set_up_logging

    set_up_logging(rank)
    module: Any = importlib.import_module(job.module)
    function = reduce(getattr, job.function.split("."), module)
    arguments = pickle.loads(job.arguments)
    if not job.start_world:
        return pickle.dumps(function(*arguments))

    import torch.distributed as distributed

    from optimus.distributed.world import end_world, start_world

    if start_world(timeout_s=job.timeout_s, device="cpu").size > 1:
        # If a rank ended before another rank has connected to it, the other rank could not start.
        distributed.barrier()
    result = pickle.dumps(function(*arguments))
    end_world()
    return result


def _pickled(error: BaseException) -> bytes | None:
    """Return a pickled exception; None if the exception cannot be pickled or unpickled."""
    try:
        payload = pickle.dumps(error)
        pickle.loads(payload)
    except Exception:
        return None
    return payload
