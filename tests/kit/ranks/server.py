"""The process that test ranks are forked from.

Importing torch takes seconds, and much more when many processes do it at once, so one server
imports everything once and forks a child per rank. That is safe only while it has a single thread,
which holds as long as it has run no torch operation: it imports, forks, waits, and nothing else.
Linux only.

It ends when its control connection closes, that is when pytest ends, however that happens; the
children end with it.
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
"""Not SIGUSR1, which a trainer may take for itself."""
_DUMP_S = 0.3
"""Time for a rank to write its stacks before it is killed."""
_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True)
class Job:
    """A function for `size` ranks. `arguments` is pickled: only the ranks know the types in it."""

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
    """Where each job makes, and removes, a folder for its rendezvous and outputs."""


@dataclass
class Outcome:
    """How one rank ended."""

    rank: int
    how: str = "running"
    """`returned`, `raised`, `died` (by a signal or an exit), `timed out`, or `stopped` because
    another rank failed and this one did not end within the grace period."""
    payload: bytes | None = None
    """The pickled result or exception; None if there is none or it cannot be pickled."""
    text: str = ""
    """The traceback, the status, or the stacks at the end."""
    output: str = ""
    """What the rank wrote to standard output and error."""

    @property
    def returned(self) -> bool:
        return self.how == "returned"

    def value(self) -> Any:
        """The result or the exception itself."""
        return None if self.payload is None else pickle.loads(self.payload)


def main(control_fd: int) -> None:
    """Serve jobs, one at a time, until the other end of the connection closes."""
    control = Connection(control_fd)
    _preload()
    threads = os.listdir("/proc/self/task")
    assert len(threads) == 1, f"an import started threads ({len(threads)}); forking is not safe"
    gc.collect()
    gc.freeze()
    control.send("ready")
    with suppress(EOFError, ConnectionResetError, BrokenPipeError):
        while True:
            control.send(_Round(control.recv(), control).run())


def _preload() -> None:
    import optimus

    # Test modules import pytest; the first step of an optimizer imports torch._dynamo.
    for name in ("torch.distributed", "torch._dynamo", "pytest"):
        importlib.import_module(name)
    for module in pkgutil.walk_packages(optimus.__path__, "optimus."):
        # A module that does not import fails the tests that use it, in their own ranks.
        with suppress(Exception):
            importlib.import_module(module.name)


class _Round:
    """One job: its ranks, and what became of them."""

    def __init__(self, job: Job, control: Connection) -> None:
        self.job, self.control = job, control
        self.scratch = Path(tempfile.mkdtemp(dir=job.scratch))
        self.deadline = time.monotonic() + job.timeout_s
        self.failed = False
        self.outcomes = [Outcome(rank) for rank in range(job.size)]
        self.pids: list[int] = []
        self.live: dict[Connection, int] = {}

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
        ours, theirs = Pipe(duplex=False)
        pid = os.fork()
        if pid == 0:
            self.control.close()
            ours.close()
            for other in self.live:
                other.close()
            _be_rank(self.job, rank, theirs, self.scratch)
        theirs.close()
        self.pids.append(pid)
        self.live[ours] = rank

    def _step(self) -> None:
        left = self.deadline - time.monotonic()
        ready = wait([self.control, *self.live], timeout=left) if left > 0 else []
        if self.control in ready:
            raise EOFError("the other side speaks out of turn or is gone")
        if not ready:
            self._end_the_rest()
        for connection in ready:
            self._hear(connection)

    def _hear(self, connection: Connection) -> None:
        outcome = self.outcomes[self.live[connection]]
        try:
            outcome.how, outcome.payload, outcome.text = connection.recv()
        except (EOFError, OSError):
            del self.live[connection]
            connection.close()
            self._reap(outcome)
        if outcome.how not in ("running", "returned") and not self.failed:
            self.failed = True
            self.deadline = min(self.deadline, time.monotonic() + self.job.grace_s)

    def _reap(self, outcome: Outcome) -> None:
        code = os.waitstatus_to_exitcode(os.waitpid(self.pids[outcome.rank], 0)[1])
        if code < 0:
            outcome.how, outcome.text = "died", f"killed by {signal.Signals(-code).name}"
        elif code > 0 or outcome.how == "running":
            outcome.how, outcome.text = "died", f"left with exit status {code}"

    def _end_the_rest(self) -> None:
        """Time is up: note where each rank stands, then kill them."""
        for rank in self.live.values():
            os.kill(self.pids[rank], _SHOW_STACKS)
        time.sleep(_DUMP_S)
        for connection, rank in self.live.items():
            outcome = self.outcomes[rank]
            if outcome.how == "running":
                outcome.how = "stopped" if self.failed else "timed out"
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


def _be_rank(job: Job, rank: int, report: Connection, scratch: Path) -> NoReturn:
    """The life of a forked rank: run the function, report, leave without the server's clean-up."""
    os.setpgid(0, 0)
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    output = os.open(scratch / f"{rank}.out", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    with open(scratch / f"{rank}.stacks", "w") as stacks:
        faulthandler.register(_SHOW_STACKS, file=stacks, all_threads=True)
        try:
            message = ("returned", _call(job, rank, scratch), "")
        except BaseException as error:  # SystemExit too: it would unwind into the server's loop
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
    function = reduce(getattr, job.function.split("."), importlib.import_module(job.module))
    arguments = pickle.loads(job.arguments)
    if not job.start_world:
        return pickle.dumps(function(*arguments))

    import torch.distributed as distributed

    from optimus.distributed.world import end_world, start_world

    if start_world(timeout_s=job.timeout_s, device="cpu").size > 1:
        # A rank that is done before another has connected would break that other's start.
        distributed.barrier()
    result = pickle.dumps(function(*arguments))
    end_world()
    return result


def _pickled(error: BaseException) -> bytes | None:
    """The exception for the test to look at, where it survives the journey."""
    try:
        payload = pickle.dumps(error)
        pickle.loads(payload)
    except Exception:
        return None
    return payload
