"""Agreement of all ranks, through torch's store (TCPStore), on the reason why a run ends.

An `Outcome` describes why a rank ends. Each failed rank publishes its Outcome in the store and
waits briefly for the other ranks. Then one rank writes one of the published Outcomes to the store
as the decision. All ranks end with the decided Outcome. Only the rank that published the decided
Outcome prints its message.

If there are several Outcomes, a cause, such as a data error, takes precedence over the loss of a
peer. Among several causes or several losses, the Outcome of rank 0 takes precedence over the
Outcomes of other ranks. This module does not import torch: callers pass the store.
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
from optimus.launch import environment
from optimus.launch.environment import LaunchEnv, prints_for_machine, read_rank

if TYPE_CHECKING:
    from torch.distributed import Store

Answer = TypeVar("Answer")

_DECISION = "optimus/decision"
# Causes come before losses, because a peer is lost only as a consequence of a cause. Among causes,
# the cause of rank 0 is first, so that rank 0 prints an error that all ranks have.
_CAUSES = ("optimus/cause-of-rank-0", "optimus/cause", "optimus/loss-of-rank-0", "optimus/loss")
"""Store keys under which ranks publish their Outcomes. The decision is the Outcome of the first key
that is set. An Outcome is either a cause, such as a data error, or the loss of a peer."""
_PRINTED, _LEFT, _ALL_LEFT = "optimus/printed", "optimus/left", "optimus/all-left"
_OTHERS_S = 1.9
"""Longest time, in seconds, that a rank waits for the other ranks to publish their Outcomes, and
for another rank to print the error."""
_STORE_S = 2.0
"""Time limit, in seconds, of the store operations in one call of an Agreement method. The time for
which the method waits for other ranks is not counted."""
_LEAVE_S = 5.0
"""Longest time, in seconds, that rank 0 waits for the calls of `RunEnded.leave` on other ranks."""


class RunEnded(OptimusError):
    """Error that ends a rank after the ranks have agreed on an Outcome. This error replaces the
    rank's original error.

    Attributes:
        outcome: The Outcome that ends the run. If the ranks have agreed, all ranks have the same
            Outcome.
        prints: True if this rank prints the Outcome.
        is_shared: True if all ranks have agreed and no rank has lost a peer. In this case, the
            process group can be destroyed.
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
        """Message for the user, as a single line. If a rank other than rank 0 published the
        Outcome, the line names that rank."""
        where, outcome = "", self.outcome
        if outcome.rank:
            several = self._agreement is not None and not self._agreement.launch.is_single_machine
            where = f" [rank {outcome.rank}{f', {outcome.host}' if several else ''}]"
        kind = "" if outcome.kind is OutcomeKind.STOPPED else " error:"  # the user asked for a stop
        return f"optimus:{where}{kind} {one_line(outcome.message)}"

    def leave(self) -> None:
        """Wait until it is safe for this rank to exit. Call this method on all ranks.

        A rank whose `prints` is True must print `line` before this call. On the other ranks, the
        call waits until `line` is printed, because a launcher ends all ranks when the first rank
        exits. On rank 0, the call also waits until all ranks, or all except a lost rank, have
        called `leave`. Both waits have a time limit. If several ranks are lost, rank 0 waits for
        the whole limit, because it cannot know whether a slow rank still needs the store.
        """
        if self._agreement is not None:
            self._agreement.leave(self.prints)
        elif not self.prints:
            # Another rank prints the line. If this rank exited first, the launcher could end the
            # other rank before the line is printed. Without a store this rank can only wait for a
            # fixed time.
            time.sleep(_OTHERS_S)


def end_alone(error: OptimusError, phase: Phase = "launch") -> RunEnded:
    """Return the RunEnded of a rank that has no store and cannot agree with other ranks.

    The rank prints `error`, with one exception: a LaunchError that all ranks of the machine raise
    is printed only if `prints_for_machine` returns True.
    """
    if isinstance(error, RunEnded):
        return error
    prints = not isinstance(error, LaunchError) or error.of_rank or prints_for_machine()
    return RunEnded(outcome_of(error, read_rank(), phase), prints)


def end_without_store(outcome: Outcome, launch: LaunchEnv) -> RunEnded:
    """Return the RunEnded of a rank that does not get an answer from the store.

    If `outcome` is a failure of this rank, such as a data error, this rank prints the failure. If
    `outcome` is the loss of a peer, some ranks print the loss, among them at least one rank of each
    machine.
    """
    if outcome.kind is not OutcomeKind.LOST_PEER:
        return RunEnded(outcome)
    # The lost peer is usually rank 0, whose process has the store. Rank 1 and the first rank of
    # each machine print the loss. Another rank also prints the loss if no rank of its machine has
    # printed it.
    is_chosen = launch.rank == 1 or launch.local_rank == 0
    if not is_chosen:
        time.sleep(_OTHERS_S)
    is_first_here = _mark_printed(launch)
    return RunEnded(outcome, is_chosen or is_first_here)


def _mark_printed(launch: LaunchEnv) -> bool:
    """Return True if this rank must print the message about the lost store, or False if another
    rank of this machine prints it.

    The first rank that calls this function creates a file, which shows the other ranks that the
    message is printed. If the file cannot be created, return True.
    """
    # A file marks the message as printed, because the mark must outlive this process. A file older
    # than this process is from an earlier run at the same address.
    user = os.geteuid()
    name = f"{launch.init_method} {os.environ.get('MASTER_ADDR')} {os.environ.get('MASTER_PORT')}"
    try:
        path = Path(tempfile.gettempdir(), f"optimus-lost-{user}-{zlib.crc32(name.encode()):08x}")
        with suppress(FileExistsError):
            os.close(os.open(path, os.O_CREAT | os.O_EXCL, 0o600))
            return True
        mark, started = path.lstat(), time.time() - (time.monotonic() - environment.STARTED)
        if mark.st_uid == user and mark.st_mtime >= started:
            return False
        os.utime(path, follow_symlinks=False)
    except OSError:  # it is better to print the loss twice than never
        pass
    return True


def outcome_of(error: OptimusError, rank: int, phase: Phase, step: int = 0) -> Outcome:
    """Return the Outcome of a rank that ends because of `error`."""
    return Outcome(error.kind, str(error), rank, socket.gethostname(), step, phase)


class Agreement:
    """Agreement of all ranks on the Outcome of the run. Each rank publishes its Outcome in the
    store. All ranks then end with the same Outcome.

    Args:
        store: torch's store, which all ranks share.
        launch: This rank and the number of ranks.
    """

    def __init__(self, store: Store, launch: LaunchEnv) -> None:
        self.launch = launch
        self._store = store
        self._round = ""

    def start(self, failure: Outcome | None, absence: Outcome, limit_s: float) -> None:
        """Wait until all ranks have called `start`. Raise RunEnded if any rank cannot start.

        Args:
            failure: Outcome of this rank if this rank cannot start; None if it can start.
            absence: Outcome to publish if another rank has not called `start` within `limit_s`.
            limit_s: Longest time, in seconds, to wait for the other ranks.

        Raises:
            RunEnded: A rank cannot start or has not called `start` in time. All ranks that have
                called `start` raise RunEnded.
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
        """Publish `outcome`, the Outcome of this rank. Wait for the decision of all ranks, and
        return a RunEnded with the decided Outcome."""

        def ask() -> RunEnded:
            # The loss of a peer is published even after the decision. This Outcome does not change
            # the decision, but makes `is_shared` False on the ranks that read the decision later.
            # These ranks must not destroy the process group, because a rank may still wait for
            # another rank.
            if outcome.kind is OutcomeKind.LOST_PEER or not self._has(_DECISION):
                self._publish(outcome)
            return self._decided(self._wait_for_all("end", _OTHERS_S))

        return self._within(_OTHERS_S, ask, lambda: end_without_store(outcome, self.launch))

    def publish(self, outcome: Outcome) -> None:
        """Write the Outcome of this rank to the store. Does not wait for a decision of all ranks.

        If other ranks fail because this rank ends, they find the cause in the store.
        """
        self._within(0.0, lambda: self._publish(outcome), lambda: None)

    def leave(self, has_printed: bool) -> None:
        """Wait until it is safe for this rank to exit, as `RunEnded.leave` describes. `has_printed`
        is True if this rank has printed the message that says why the run ended."""

        def ask() -> None:
            if has_printed:
                self._store.set(_PRINTED, "1")
            else:
                self._wait(_PRINTED, _OTHERS_S)
            # A slow rank may detect a lost rank only after the other ranks have decided. The slow
            # rank then needs the store: without the store, it would print the loss again.
            joined = self._store.add(f"optimus/{self._round}", 0)
            if self._store.add(_LEFT, 1) >= max(joined, self.launch.world_size - 1):
                self._store.set(_ALL_LEFT, "1")
            if self.launch.is_first:  # the process of rank 0 may contain the store
                self._wait(_ALL_LEFT, _LEAVE_S)

        self._within(_OTHERS_S + _LEAVE_S, ask, lambda: None)

    def _publish(self, outcome: Outcome) -> None:
        of_first, of_any = _CAUSES[2:] if outcome.kind is OutcomeKind.LOST_PEER else _CAUSES[:2]
        if self.launch.is_first:
            self._store.set(of_first, outcome.to_json())
        self._store.compare_set(of_any, "", outcome.to_json())

    def _wait_for_all(self, round_: str, limit_s: float) -> bool:
        """Wait, at most `limit_s` seconds, until all ranks have called this method with the same
        `round_`, "start" or "end". Return True if all ranks have called the method in time and
        before a rank has written the decision."""
        self._round, all_here = round_, f"optimus/all-at-{round_}"
        if self._store.add(f"optimus/{round_}", 1) == self.launch.world_size:
            self._store.compare_set(all_here, "", "all")  # unless a rank has decided
        self._wait(all_here, limit_s)
        return self._has(all_here) and self._store.get(all_here) == b"all"

    def _decided(self, all_are_here: bool = False) -> RunEnded:
        """Return a RunEnded with the decided Outcome. If the store does not contain a decision yet,
        first decide and write the decision. `all_are_here` is True if all ranks have called
        `end`."""
        key = next(filter(self._has, _CAUSES), None)
        if key is None:  # the file of a FileStore was removed
            raise RuntimeError(
                "the store has lost its keys: it does not contain the Outcome of any rank"
            )
        text = self._store.compare_set(_DECISION, "", self._store.get(key).decode())
        # Wake the ranks that still wait for all ranks to reach the round.
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
        """Call the function `ask`, which uses the store, and return its result. Return
        `otherwise()` if the store is lost or `ask` takes longer than `wait_s` + _STORE_S
        seconds."""
        answers: list[Answer] = []

        def run() -> None:
            with suppress(RuntimeError, ValueError):  # ValueError: the text is not an Outcome
                answers.append(ask())

        # torch waits without a time limit for a store whose process is suspended.
        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        thread.join(wait_s + _STORE_S)
        return answers[0] if answers else otherwise()
