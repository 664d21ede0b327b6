"""Run a function on several ranks from a test: `ranks(4, function, *arguments)`.

The ranks are forked from a server (server.py) that has imported everything already, so that
four of them stand in a process group after a tenth of a second.
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
"""Limit for the server to import everything, on a busy machine."""
_SPARE_S = 30.0
"""How much longer than a job's own limits the server may take before it counts as lost."""


class RanksFailed(Exception):
    """At least one rank did not return. `outcomes` tells, by rank, how each one ended."""

    def __init__(self, title: str, outcomes: Sequence[Outcome]) -> None:
        self.outcomes = list(outcomes)
        failures = [outcome for outcome in outcomes if not outcome.returned]
        # Who was merely waiting for the others comes last.
        failures.sort(key=lambda outcome: (outcome.how == "stopped", outcome.rank))
        lines = [f"{title}: {len(failures)} of {len(outcomes)} ranks failed"]
        super().__init__("\n".join(lines + [_describe(outcome) for outcome in failures]))


class RankPool:
    """A server of forked ranks, started by the first job and ended by `close`."""

    def __init__(self, scratch: str | os.PathLike, **environ: str) -> None:
        """`scratch`: for files of the ranks; `environ`: what the server has besides."""
        self._scratch, self._environ = os.fspath(scratch), environ
        self._server: subprocess.Popen | None = None
        self._control: Connection | None = None

    @property
    def server_pid(self) -> int | None:
        return None if self._server is None else self._server.pid

    def run(
        self,
        size: int,
        function: Callable,
        *arguments: Any,
        timeout_s: float = 60.0,
        grace_s: float = 5.0,
        start_world: bool = True,
    ) -> list[Any]:
        """Call `function(*arguments)` on `size` ranks; their results, by rank.

        `function` stands at the top of a module that the ranks import for themselves; arguments and
        results are pickled. Each rank has torchrun's variables and a rendezvous file in its
        environment and, unless `start_world` is false, has called `start_world()` (which makes no
        process group for a single rank). After a first failure the others have `grace_s` to end;
        after `timeout_s` all are killed, with their stacks noted. Raises RanksFailed if any rank
        did not return.
        """
        title = f"{function.__module__}.{function.__qualname__}"
        assert "<" not in title, f"{title} must stand at the top of a module: ranks import it"
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
        """End the server and with it every rank."""
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
        except BaseException:  # Ctrl-C as well: whatever was under way ends with the server
            self.close()
            raise

    def _start(self) -> None:
        self._control, theirs = Pipe()
        environ = dict(os.environ, OMP_NUM_THREADS="1", MKL_NUM_THREADS="1") | self._environ
        environ["PYTHONPATH"] = os.pathsep.join(
            filter(None, [str(_ROOT), environ.get("PYTHONPATH")])
        )
        code = f"from tests.kit.ranks.server import main; main({theirs.fileno()})"
        with theirs:
            self._server = subprocess.Popen(
                [sys.executable, "-c", code],
                env=environ,
                pass_fds=[theirs.fileno()],
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
    parts = [f"rank {outcome.rank} {outcome.how}:"]
    parts.append(textwrap.indent(outcome.text.strip() or "(it left no word)", "    "))
    if outcome.output.strip():
        parts.append(f"  rank {outcome.rank} wrote:")
        parts.append(textwrap.indent(outcome.output.rstrip()[-4000:], "    "))
    return "\n".join(parts)
