"""`--nproc N`: local ranks as child processes, watched until all have ended. Needs no torch."""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

from optimus.launch.environment import COMMAND_STARTED, RENDEZVOUS, STARTED, available_cores
from optimus.launch.signals import STOP_SIGNALS, report_early_stop

logger = logging.getLogger(__name__)

_POLL_S = 0.05
_GRACE_S = 5.0
"""How long ranks may take to notice by themselves that another one ended in error."""
_PR_SET_PDEATHSIG = 1
# A rank's own finding explains more than a peer's complaint that it vanished.
_TELLING = (4, 2, 3, 1)


def spawn_local(arguments: Sequence[str], nproc: int, stdout: int | None = None) -> int:
    """Run `optimus ARGUMENTS` as `nproc` local ranks; return the exit status of the whole.
    `stdout`: the file descriptor that is to be their standard output, by default this process's.

    Ctrl-C, SIGTERM, SIGUSR1 and SIGHUP are passed on, so that ranks finish their step and save; a
    second Ctrl-C kills. Ranks that have not begun their first step end at once. When a rank ends in
    error the others are ended too and its status is returned; a rank killed by a signal counts as
    lost (5).
    """
    ranks: list[subprocess.Popen] = []
    with (
        tempfile.TemporaryDirectory(prefix="optimus-") as directory,
        _passing_signals(ranks) as passed,
    ):
        for rank in range(nproc):
            ranks.append(_start(arguments, rank, nproc, Path(directory), stdout))
        if passed:  # before all had been started
            _send(ranks, signal.SIGTERM)
        code = _watch(ranks, passed)
        return report_early_stop(passed[0]) if passed and _ended_early(ranks) else code


def _start(
    arguments: Sequence[str], rank: int, nproc: int, directory: Path, stdout: int | None
) -> subprocess.Popen:
    environ = {
        "OMP_NUM_THREADS": str(max(1, available_cores() // nproc)),
        "GLOO_SOCKET_IFNAME": "lo",
        **os.environ,
        "RANK": str(rank),
        "WORLD_SIZE": str(nproc),
        "LOCAL_RANK": str(rank),
        "LOCAL_WORLD_SIZE": str(nproc),
        RENDEZVOUS: f"file://{directory}/rendezvous",
        COMMAND_STARTED: str(STARTED),
    }
    # -P: modules in the working directory, which may be anybody's, do not come before ours.
    command = [sys.executable, "-P", "-m", "optimus.cli", *arguments]
    # A session of its own keeps Ctrl-C from reaching ranks directly, in the middle of a step.
    return subprocess.Popen(
        command,
        env=environ,
        stdout=stdout,
        start_new_session=True,
        preexec_fn=partial(_prepare_rank, os.getpid()),
    )


def _prepare_rank(spawner: int) -> None:
    # Until the rank takes its signals over, SIGTERM ends it and the others do nothing: Python would
    # answer SIGINT with a traceback.
    for number in STOP_SIGNALS:
        if number != signal.SIGTERM:
            signal.signal(number, signal.SIG_IGN)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != spawner:  # it ended before that
            os._exit(1)


@contextlib.contextmanager
def _passing_signals(ranks: list[subprocess.Popen]) -> Iterator[list[int]]:
    """Yields the signals passed on so far."""
    passed: list[int] = []

    def pass_on(number: int, frame: object) -> None:
        passed.append(number)
        again = passed.count(signal.SIGINT) > 1
        # The signal itself names the reason in the ranks' message; SIGTERM ends a rank that has not
        # begun its first step, and is ignored after another signal.
        for each in (signal.SIGKILL,) if again else (number, signal.SIGTERM):
            _send(ranks, each)

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


def _ended_early(ranks: list[subprocess.Popen]) -> bool:
    """Return whether a rank ended by SIGTERM, as only those do that have not begun training."""
    return any(rank.returncode == -signal.SIGTERM for rank in ranks)


def _watch(ranks: list[subprocess.Popen], passed: list[int]) -> int:
    failed_at = None
    while any(rank.poll() is None for rank in ranks):
        if failed_at is None and any(rank.returncode for rank in ranks):
            failed_at = time.monotonic()
        refused = any(rank.returncode == 2 for rank in ranks)  # nobody else knows more
        if passed and _ended_early(ranks):  # the others would wait for it in vain
            break
        if refused or (failed_at is not None and time.monotonic() - failed_at > _GRACE_S):
            break
        time.sleep(_POLL_S)
    ended_alone = [rank.poll() for rank in ranks]
    _send(ranks, signal.SIGKILL)
    for rank in ranks:
        rank.wait()
    for number, status in enumerate(ended_alone):
        if status is not None and status < 0 and not (passed and _ended_early(ranks)):
            name = signal.Signals(-status).name
            logger.error("rank %d was ended by %s", number, name)
    return _verdict([status for status in ended_alone if status is not None])


def _verdict(statuses: list[int]) -> int:
    """One exit status for all ranks."""
    for code in _TELLING:
        if code in statuses:
            return code
    return 5 if any(statuses) else 0
