"""Pool of forked ranks, on which a test runs a function: `ranks(4, function, *arguments)`.

The ranks are forked from a server (server.py) that has imported torch and Optimus, so that four
ranks form a process group within 0.1 s.
"""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import textwrap
from collections.abc import Callable, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import Any

from tests.kit.ranks.server import Job, Outcome

_ROOT = Path(__file__).resolve().parents[3]
_START_S = 120.0
"""Time limit in seconds for the imports of the server, with a margin for a busy machine."""
_SPARE_S = 30.0
"""Seconds for which the pool waits for the server's answer after the time limits of a job."""


class RanksFailed(Exception):
    """At least one rank did not return. `outcomes[rank]` is the outcome of rank `rank`."""

    def __init__(self, title: str, outcomes: Sequence[Outcome]) -> None:
        self.outcomes = list(outcomes)
        failures = [outcome for outcome in outcomes if not outcome.returned]
        # In the message, ranks that only waited for other ranks come last.
        failures.sort(key=lambda outcome: (outcome.how == "stopped", outcome.rank))
        lines = [f"{title}: {len(failures)} of {len(outcomes)} ranks failed"]
        super().__init__("\n".join(lines + [_describe(outcome) for outcome in failures]))


class RankPool:
    """Runs functions on ranks that a server process forks. The first call of `run` starts the
    server, and `close` ends the server.

    Args:
        scratch: A directory for files of the ranks.
        environ: Additional environment variables of the server and its ranks.
    """

    def __init__(self, scratch: str | os.PathLike[str], **environ: str) -> None:
        self._scratch, self._environ = os.fspath(scratch), environ
        self._server: subprocess.Popen[bytes] | None = None
        self._control: Connection | None = None

    @property
    def server_pid(self) -> int | None:
        """The process ID of the server; None if the server does not run."""
        return None if self._server is None else self._server.pid

    def run(
        self,
        size: int,
        function: Callable[..., Any],
        *arguments: Any,
        timeout_s: float = 60.0,
        grace_s: float = 5.0,
        start_world: bool = True,
    ) -> list[Any]:
        """Call `function(*arguments)` on forked ranks.

        Each rank has the variables of torchrun and a rendezvous file in its environment.

        Args:
            size: Number of ranks.
            function: A function at the top level of a module, which the ranks import. Arguments and
                results are pickled.
            timeout_s: Time limit in seconds. After this time, the stacks of all ranks are recorded
                and the ranks are killed.
            grace_s: Seconds in which the other ranks must end after the first failure.
            start_world: True to call `start_world()` before the function. With one rank,
                `start_world` makes no process group.

        Returns:
            The results, by rank.

        Raises:
            RanksFailed: A rank did not return.
        """
        title = f"{function.__module__}.{function.__qualname__}"
        assert "<" not in title, f"move {title} to the top level of a module: ranks import it"
        job = Job(
            size=size,
            module=function.__module__,
            function=function.__qualname__,
            arguments=pickle.dumps(arguments),
            start_world=start_world,
            timeout_s=timeout_s,
            grace_s=grace_s,
            environ=dict(os.environ),
            sys_path=tuple(sys.path),
            folder=os.getcwd(),
            scratch=self._scratch,
        )
        outcomes = self._ask(job)
        if not all(outcome.returned for outcome in outcomes):
            raise RanksFailed(title, outcomes)
        return [outcome.value() for outcome in outcomes]

    def close(self) -> None:
        """End the server and all its ranks."""
        if self._control is not None:
            self._control.close()
        if self._server is not None:
            try:
                self._server.wait(timeout=10)
            except subprocess.TimeoutExpired:
                self._server.kill()
                self._server.wait()
        self._server = self._control = None

    def _ask(self, job: Job) -> list[Outcome]:
        try:
            if self._control is None:
                self._start()
            assert self._control is not None
            self._control.send(job)
            return self._receive(job.timeout_s + job.grace_s + _SPARE_S)
        except BaseException:  # including Ctrl-C: closing the server also ends a job in progress
            self.close()
            raise

    def _start(self) -> None:
        self._control, control_of_server = Pipe()
        environ = dict(os.environ, OMP_NUM_THREADS="1", MKL_NUM_THREADS="1") | self._environ
        environ["PYTHONPATH"] = os.pathsep.join(
            filter(None, [str(_ROOT), environ.get("PYTHONPATH")])
        )
        code = f"from tests.kit.ranks.server import main; main({control_of_server.fileno()})"
        with control_of_server:
            self._server = subprocess.Popen(
                [sys.executable, "-c", code],
                env=environ,
                pass_fds=[control_of_server.fileno()],
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )
        self._receive(_START_S)

    def _receive(self, within_s: float) -> Any:
        assert self._control is not None and self._server is not None
        if not self._control.poll(within_s):
            raise RuntimeError(f"the rank server did not answer within {within_s:.0f} s")
        with suppress(EOFError, ConnectionResetError):
            return self._control.recv()
        raise RuntimeError(
            f"the rank server ended with status {self._server.wait()}; see its output"
        )


def _describe(outcome: Outcome) -> str:
    text = textwrap.indent(outcome.text.strip() or "(no message)", "    ")
    paragraphs = [f"rank {outcome.rank} {outcome.how}:", text]
    if outcome.output.strip():
        output = textwrap.indent(outcome.output.rstrip()[-4000:], "    ")
        paragraphs += [f"  rank {outcome.rank} printed:", output]
    return "\n".join(paragraphs)
