"""Implementation of the option `--nproc N`: start N ranks as child processes, and wait for them.

This module does not import torch.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import math
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path

from optimus.errors import OutcomeKind
from optimus.launch.environment import COMMAND_STARTED, RENDEZVOUS, STARTED, available_cores
from optimus.launch.signals import (
    STOP_SIGNALS,
    report_early_stop,
    report_interrupt,
    signal_name,
)

logger = logging.getLogger(__name__)

_POLL_S = 0.05
_GRACE_S = 5.0
"""Maximum number of seconds from the failure of a rank until the other ranks are killed."""
_STOP_GRACE_S = 60.0
"""Seconds from the end of the first rank of a stopped run until the remaining ranks are killed.
Until then, the remaining ranks can finish writing and closing files."""
_STOPPED = OutcomeKind.STOPPED.exit_status
_PR_SET_PDEATHSIG = 1
NO_VARIABLES: Mapping[str, str] = {}
_CAUSES = (OutcomeKind.NONFINITE, OutcomeKind.USAGE, OutcomeKind.STOPPED, OutcomeKind.FAILED)
"""Kinds of outcome in order of precedence. If ranks have ended with kinds in this list, the run has
the exit status of the first of these kinds. Otherwise, if the exit status of a rank is not 0, the
run has the exit status of LOST_PEER."""


def spawn_local(
    arguments: Sequence[str], nproc: int, variables: Mapping[str, str] = NO_VARIABLES
) -> int:
    """Run `optimus ARGUMENTS` as `nproc` ranks on this machine. Wait until all ranks have ended.

    Stop signals are passed on to the ranks. A second Ctrl-C kills the ranks. If a rank fails, the
    other ranks are killed after at most _GRACE_S seconds.

    Args:
        arguments: Arguments of the command `optimus`.
        nproc: Number of ranks.
        variables: Environment variables of the ranks in addition to those of this process.

    Returns:
        The exit status of the run.
    """
    ranks: list[subprocess.Popen] = []
    with (
        tempfile.TemporaryDirectory(prefix="optimus-") as directory,
        _passing_signals(ranks) as passed,
    ):
        for rank in range(nproc):
            ranks.append(_start(arguments, rank, nproc, Path(directory), variables))
        if passed:  # a signal arrived while ranks were being started
            _send(ranks, signal.SIGTERM)
        return _watch(ranks, passed)


def _start(
    arguments: Sequence[str],
    rank: int,
    nproc: int,
    directory: Path,
    variables: Mapping[str, str],
) -> subprocess.Popen:
    environ = {
        "OMP_NUM_THREADS": str(max(1, available_cores() // nproc)),
        "GLOO_SOCKET_IFNAME": "lo",
        **os.environ,
        **variables,
        "RANK": str(rank),
        "WORLD_SIZE": str(nproc),
        "LOCAL_RANK": str(rank),
        "LOCAL_WORLD_SIZE": str(nproc),
        RENDEZVOUS: f"file://{directory}/rendezvous",
        COMMAND_STARTED: str(STARTED),
    }
    # -P: the working directory, which another user may own, is not searched for modules.
    command = [sys.executable, "-P", "-m", "optimus.cli", *arguments]
    # With a separate session, the terminal's Ctrl-C reaches only the spawner, not the ranks.
    return subprocess.Popen(
        command,
        env=environ,
        start_new_session=True,
        preexec_fn=partial(prepare_rank, os.getpid()),
    )


def prepare_rank(spawner: int) -> None:
    # Until the rank installs its handlers, SIGTERM ends the rank, and the rank ignores the other
    # stop signals. By default, Python would print a traceback for SIGINT.
    for number in STOP_SIGNALS:
        if number != signal.SIGTERM:
            signal.signal(number, signal.SIG_IGN)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != spawner:  # the spawner ended before prctl was called
            os._exit(1)


@contextlib.contextmanager
def _passing_signals(ranks: list[subprocess.Popen]) -> Iterator[list[int]]:
    """Context manager that forwards received stop signals to `ranks`.

    It yields a list, to which it appends the number of each received signal. At the end of the
    context, it kills the ranks that still run.
    """
    passed: list[int] = []

    def pass_on(number: int, frame: object) -> None:
        passed.append(number)
        if passed.count(signal.SIGINT) > 1:
            return  # `_watch` kills the ranks
        # Each rank receives `number`, and then SIGTERM. A rank that has started its first step
        # stops because of `number` and ignores the SIGTERM. The SIGTERM ends each rank that has not
        # started its first step.
        for sent in (number, signal.SIGTERM):
            _send(ranks, sent)

    numbers = [n for n in STOP_SIGNALS if signal.getsignal(n) is not signal.SIG_IGN]
    before = {number: signal.signal(number, pass_on) for number in numbers}
    try:
        yield passed
    finally:
        _send(ranks, signal.SIGKILL)
        for number, handler in before.items():
            signal.signal(number, handler)


def _send(ranks: list[subprocess.Popen], number: int) -> None:
    for rank in ranks:
        with contextlib.suppress(ProcessLookupError):
            if rank.poll() is None:
                rank.send_signal(number)


def _watch(ranks: list[subprocess.Popen], passed: list[int]) -> int:
    stopped_at = failed_at = math.inf
    while None in (statuses := [rank.poll() for rank in ranks]):
        now = time.monotonic()
        if _STOPPED in statuses:
            stopped_at = min(stopped_at, now)
        if not {*statuses} <= {None, 0, _STOPPED}:
            failed_at = min(failed_at, now)
        if (
            now - stopped_at > _STOP_GRACE_S
            or now - failed_at > _GRACE_S
            # After a usage error there is no need to wait for the exit statuses of other ranks.
            or OutcomeKind.USAGE.exit_status in statuses
            or _ended_early(passed, statuses)  # the other ranks would wait for the ended rank
            or passed.count(signal.SIGINT) > 1
        ):
            break
        time.sleep(_POLL_S)
    statuses = [rank.poll() for rank in ranks]
    _send(ranks, signal.SIGKILL)
    for rank in ranks:
        rank.wait()
    if _ended_early(passed, statuses):
        return report_early_stop(passed[0])
    for number, status in enumerate(statuses):
        if status is not None and status < 0:
            logger.error("rank %d was ended by %s", number, signal_name(-status))
    otherwise = OutcomeKind.LOST_PEER if any(statuses) else OutcomeKind.DONE
    kind = next((cause for cause in _CAUSES if cause.exit_status in statuses), otherwise)
    if None in statuses and kind in (OutcomeKind.DONE, OutcomeKind.STOPPED):
        if passed.count(signal.SIGINT) > 1:
            return report_interrupt()
        has_failed = not {*statuses} <= {None, 0, _STOPPED}
        logger.error(
            "rank %d was killed: it did not end within %.0f s after another rank had %s; "
            "`optimus checkpoint list` shows which checkpoints are complete",
            statuses.index(None),
            _GRACE_S if has_failed else _STOP_GRACE_S,
            "failed" if has_failed else "stopped",
        )
        failed = OutcomeKind.FAILED
        kind = failed if failed.exit_status in statuses else OutcomeKind.LOST_PEER
    return kind.exit_status


def _ended_early(passed: list[int], statuses: Sequence[int | None]) -> bool:
    """Return True if a stop signal has ended a rank before the rank's first step. `passed` are the
    received stop signals, `statuses` the return codes of the ranks."""
    # From its first step on, a rank handles SIGTERM and is no longer ended by this signal.
    return bool(passed) and -signal.SIGTERM in statuses
