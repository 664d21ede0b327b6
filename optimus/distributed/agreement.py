"""Agreement of the ranks of a run on the Outcome that ends it, through the store where they met.

A rank that fails publishes its Outcome and gives the others a short time to publish theirs. The
first rank to decide then writes the decision, which all others adopt. It chooses a cause rather
than the loss of a peer, since a loss follows from a cause. Of several causes it chooses rank 0's,
since rank 0 prints an error that all ranks found, else the first that was published. The rank
whose Outcome was chosen prints it.

Each rank does a few operations of the store, however many ranks there are. Each wait has a limit:
the store does not answer while rank 0, whose process contains it, is stopped. The module imports
no torch.
"""

from __future__ import annotations

import os
import socket
import tempfile
import threading
import time
import zlib
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from optimus.errors import LaunchError, OptimusError, Outcome, OutcomeKind, Phase, one_line
from optimus.launch.environment import STARTED, LaunchEnv, prints_for_machine, read_rank

if TYPE_CHECKING:
    from torch.distributed import Store

Answer = TypeVar("Answer")

_DECISION = "optimus/decision"
_CAUSES = ("optimus/cause-of-rank-0", "optimus/cause", "optimus/loss-of-rank-0", "optimus/loss")
"""Keys of published Outcomes, in the order in which they are chosen."""
_PRINTED, _LEFT, _ALL_LEFT = "optimus/printed", "optimus/left", "optimus/all-left"
_OTHERS_S = 1.9
"""Time that a rank that failed waits for the Outcomes of others, and for the line to be printed."""
_STORE_S = 2.0
"""Time that the store may take to answer, in addition to the time for which a call waits."""
_LEAVE_S = 5.0
"""Time that rank 0, which may have the store, waits until all other ranks have left."""


class RunEnded(OptimusError):
    """The end of a run, raised in place of a rank's error once the ranks have agreed.

    Attributes:
        outcome: The agreed Outcome; the same on all ranks, unless they could not agree.
        prints: True on the rank that prints the Outcome.
        is_shared: True if all ranks have agreed and none lost a peer, so that none waits for
            another.
    """

    def __init__(
        self,
        outcome: Outcome,
        prints: bool = True,
        is_shared: bool = False,
        agreement: Agreement | None = None,
    ) -> None:
        super().__init__(outcome.message)
        self.outcome, self.prints, self.is_shared = outcome, prints, is_shared
        self.kind = outcome.kind
        self._agreement = agreement

    def __reduce__(self) -> tuple[Any, ...]:
        return RunEnded, (self.outcome, self.prints, self.is_shared)

    @property
    def line(self) -> str:
        """The line that the rank with `prints` prints. It names the rank unless that is rank 0, and
        the rank's host if the run has several machines."""
        where, outcome = "", self.outcome
        if outcome.rank:
            several = self._agreement is not None and not self._agreement.launch.is_single_machine
            where = f" [rank {outcome.rank}{f', {outcome.host}' if several else ''}]"
        kind = "" if outcome.kind is OutcomeKind.STOPPED else " error:"  # the user asked for a stop
        return f"optimus:{where}{kind} {one_line(outcome.message)}"

    def leave(self) -> None:
        """Leave the agreement. The rank with `prints` must have printed the line before.

        The other ranks wait until the line is printed, since launchers end all ranks when the first
        one ends. Rank 0, which may have the store, leaves last.
        """
        if self._agreement is not None:
            self._agreement.leave(self.prints)
        elif not self.prints:
            # Another rank prints the line, and the launcher would end that rank when this one ends.
            # Without a store this rank cannot know when the line is printed, so it waits.
            time.sleep(_OTHERS_S)


def end_alone(error: OptimusError, phase: Phase = "launch") -> RunEnded:
    """Return the end of a rank that has no store through which to agree with others.

    Of a LaunchError that all ranks of a machine find, only the machine's first rank prints it.
    Any other error is printed by the rank that has it.
    """
    if isinstance(error, RunEnded):
        return error
    prints = not isinstance(error, LaunchError) or error.of_rank or prints_for_machine()
    return RunEnded(outcome_of(error, read_rank(), phase), prints)


def end_without_store(outcome: Outcome, launch: LaunchEnv) -> RunEnded:
    """Return the end of a rank whose store is gone, cannot be reached or does not answer.

    Usually rank 0, whose process contains the store, is lost. Rank 1 and the first rank of every
    machine print that loss. They may be lost, too: another rank prints it if no rank of its machine
    has done so after a wait. Any other Outcome is printed by the rank that has it.
    """
    if outcome.kind is not OutcomeKind.LOST_PEER:
        return RunEnded(outcome)
    is_chosen = launch.rank == 1 or launch.local_rank == 0
    if not is_chosen:
        time.sleep(_OTHERS_S)
    is_first_here = _mark_printed(launch)
    return RunEnded(outcome, is_chosen or is_first_here)


def _mark_printed(launch: LaunchEnv) -> bool:
    """Mark on this machine that a rank of this run prints the loss of the store; return False if
    another rank had marked it.

    The mark is an empty file, since it must outlive the process. A file older than this process is
    of an earlier run at the same address.
    """
    user = os.geteuid()
    name = f"{launch.init_method} {os.environ.get('MASTER_ADDR')} {os.environ.get('MASTER_PORT')}"
    try:
        path = Path(tempfile.gettempdir(), f"optimus-lost-{user}-{zlib.crc32(name.encode()):08x}")
        with suppress(FileExistsError):
            os.close(os.open(path, os.O_CREAT | os.O_EXCL, 0o600))
            return True
        mark, started = path.lstat(), time.time() - (time.monotonic() - STARTED)
        if mark.st_uid == user and mark.st_mtime >= started:
            return False
        os.utime(path, follow_symlinks=False)
    except OSError:  # rather a line too many than none
        pass
    return True


def outcome_of(error: OptimusError, rank: int, phase: Phase, step: int = 0) -> Outcome:
    """Return the Outcome of this rank, which ends because of `error`."""
    return Outcome(error.kind, str(error), rank, socket.gethostname(), step, phase)


class Agreement:
    """One rank's side of the agreement.

    Args:
        store: The store where the ranks met.
        launch: This rank and the number of ranks.
    """

    def __init__(self, store: Store, launch: LaunchEnv) -> None:
        self.launch = launch
        self._store = store
        self._round = ""

    def start(self, failure: Outcome | None, absence: Outcome, limit_s: float) -> None:
        """Wait until all ranks have called this; return if all of them can start.

        Args:
            failure: The Outcome of this rank if it cannot start; None if it can.
            absence: The Outcome of this rank if it can start and others are not here in time.
            limit_s: Seconds to wait for the others.

        Raises:
            RunEnded: A rank cannot start or is absent; raised on every rank that is here.
        """

        def ask() -> RunEnded | None:
            if failure is not None:
                self._publish(failure)
            if not self._wait_for_all("start", limit_s) and failure is None:
                self._publish(absence)
            if not self._store.check([_DECISION]) and not any(map(self._has, _CAUSES)):
                return None
            return self._decided()

        ended = self._within(
            limit_s, ask, lambda: end_without_store(failure or absence, self.launch)
        )
        if ended is not None:
            raise ended

    def end(self, outcome: Outcome) -> RunEnded:
        """Return the end that the ranks agree on. This rank ends because of `outcome`."""

        def ask() -> RunEnded:
            # A loss is published also after the decision, which it does not change: ranks that come
            # later must know that a rank may wait for another.
            if outcome.kind is OutcomeKind.LOST_PEER or not self._has(_DECISION):
                self._publish(outcome)
            return self._decided(self._wait_for_all("end", _OTHERS_S))

        return self._within(_OTHERS_S, ask, lambda: end_without_store(outcome, self.launch))

    def publish(self, outcome: Outcome) -> None:
        """Publish an Outcome that this rank prints without agreement, so that ranks that end
        because of it adopt it."""
        self._within(0.0, lambda: self._publish(outcome), lambda: None)

    def leave(self, has_printed: bool) -> None:
        """Leave the agreement, as `RunEnded.leave` says."""

        def ask() -> None:
            if has_printed:
                self._store.set(_PRINTED, "1")
            else:
                self._wait(_PRINTED, _OTHERS_S)
            if self._store.add(_LEFT, 1) >= self._store.add(f"optimus/{self._round}", 0):
                self._store.set(_ALL_LEFT, "1")
            if self.launch.is_first:
                self._wait(_ALL_LEFT, _LEAVE_S)

        self._within(_OTHERS_S + _LEAVE_S, ask, lambda: None)

    def _publish(self, outcome: Outcome) -> None:
        of_first, of_any = _CAUSES[2:] if outcome.kind is OutcomeKind.LOST_PEER else _CAUSES[:2]
        if self.launch.is_first:
            self._store.set(of_first, outcome.to_json())
        self._store.compare_set(of_any, "", outcome.to_json())

    def _wait_for_all(self, round_: str, limit_s: float) -> bool:
        """Wait until all ranks have come to this round, or until a rank has decided before that;
        return whether all have come."""
        self._round, all_here = round_, f"optimus/all-at-{round_}"
        if self._store.add(f"optimus/{round_}", 1) == self.launch.world_size:
            self._store.compare_set(all_here, "", "all")  # unless a rank has decided before
        self._wait(all_here, limit_s)
        return self._has(all_here) and self._store.get(all_here) == b"all"

    def _decided(self, all_are_here: bool = False) -> RunEnded:
        """Return the decision of the first rank to decide, which may be this one."""
        key = next(filter(self._has, _CAUSES))
        text = self._store.compare_set(_DECISION, "", self._store.get(key).decode())
        # Wake the ranks that still wait for all.
        self._store.compare_set(f"optimus/all-at-{self._round}", "", "decided")
        outcome = Outcome.from_json(text)
        is_shared = all_are_here and not any(map(self._has, _CAUSES[2:]))
        return RunEnded(outcome, outcome.rank == self.launch.rank, is_shared, self)

    def _has(self, key: str) -> bool:
        return self._store.check([key])

    def _wait(self, key: str, limit_s: float) -> None:
        with suppress(RuntimeError):  # limit reached; if the store is lost, the next call raises
            self._store.wait([key], timedelta(seconds=limit_s))

    def _within(
        self, wait_s: float, ask: Callable[[], Answer], otherwise: Callable[[], Answer]
    ) -> Answer:
        """Return `ask()`, or `otherwise()` if the store is gone or does not answer in time.

        `ask` runs in a thread, since torch waits without a limit for a store whose process is
        stopped.
        """
        answers: list[Answer] = []

        def run() -> None:
            with suppress(RuntimeError, ValueError):  # ValueError: a text that is no Outcome
                answers.append(ask())

        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        thread.join(wait_s + _STORE_S)
        return answers[0] if answers else otherwise()
