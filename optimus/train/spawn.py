"""`--nproc N`: local ranks as child processes, watched until all have ended. Needs no torch."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from optimus.launch_env import COMMAND_STARTED, RENDEZVOUS, STARTED, available_cores

_POLL_S = 0.05
_GRACE_S = 5.0
"""How long ranks may take to notice by themselves that another one ended in error."""
_PR_SET_PDEATHSIG = 1
# A rank's own finding explains more than a peer's complaint that it vanished.
_TELLING = (4, 2, 3, 1)


def spawn_local(arguments: Sequence[str], nproc: int, stdout: int | None = None) -> int:
    """Run `optimus ARGUMENTS` as `nproc` local ranks; return the exit status of the whole.
    `stdout`: the file descriptor that is to be their standard output, by default this process's.

    SIGTERM, SIGUSR1 and Ctrl-C are passed on, so that ranks finish their step and save; a second
    Ctrl-C kills. When a rank ends in error the others are ended too and its status is returned;
    a rank killed by a signal counts as lost (5).
    """
    with tempfile.TemporaryDirectory(prefix="optimus-") as directory:
        ranks = [_start(arguments, rank, nproc, Path(directory), stdout) for rank in range(nproc)]
        with _passing_signals(ranks) as passed:
            code = _watch(ranks)
            if passed and all(rank.returncode == -signal.SIGTERM for rank in ranks):
                print("optimus: stopped before the first step", file=sys.stderr)
                return 3
            return code


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
    command = [sys.executable, "-m", "optimus.cli", *arguments]
    # A session of its own keeps Ctrl-C from reaching ranks directly, in the middle of a step.
    return subprocess.Popen(
        command, env=environ, stdout=stdout, start_new_session=True, preexec_fn=_die_with_parent
    )


def _die_with_parent() -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


@contextlib.contextmanager
def _passing_signals(ranks: list[subprocess.Popen]) -> Iterator[list[int]]:
    """Yields the signals passed on so far."""
    passed: list[int] = []

    def pass_on(number: int, frame: object) -> None:
        passed.append(number)
        again = passed.count(signal.SIGINT) > 1
        _send(ranks, signal.SIGKILL if again else signal.SIGTERM)

    numbers = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
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


def _watch(ranks: list[subprocess.Popen]) -> int:
    failed_at = None
    while any(rank.poll() is None for rank in ranks):
        if failed_at is None and any(rank.returncode for rank in ranks):
            failed_at = time.monotonic()
        refused = any(rank.returncode == 2 for rank in ranks)  # nobody else knows more
        if refused or (failed_at is not None and time.monotonic() - failed_at > _GRACE_S):
            break
        time.sleep(_POLL_S)
    ended_alone = [rank.poll() for rank in ranks]
    _send(ranks, signal.SIGKILL)
    for rank in ranks:
        rank.wait()
    for number, status in enumerate(ended_alone):
        if status is not None and status < 0:
            name = signal.Signals(-status).name
            print(f"optimus: rank {number} was ended by {name}", file=sys.stderr)
    return _verdict([status for status in ended_alone if status is not None])


def _verdict(statuses: list[int]) -> int:
    """One exit status for all ranks."""
    for code in _TELLING:
        if code in statuses:
            return code
    return 5 if any(statuses) else 0
