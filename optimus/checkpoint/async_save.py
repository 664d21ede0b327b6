"""Saves of checkpoints in background threads, coordinated by a state machine that all ranks share.

The states are the members of the enum `State`, and the transitions are in the table TRANSITIONS.
All ranks are in the same state. In `poll`, which is called between two updates of the model, the
ranks compute the greatest `Status` of their threads. This status selects the next state.

Threads do not call collectives, because all ranks must call the collectives of a process group in
the same order, and threads cannot ensure this order. A separate process group for the threads
would need more connections between all ranks (gloo) or could not use host memory (nccl).

Therefore a save advances only in `poll`. The commit starts at the first `poll` after the last byte
is durable. At the first `poll` after the commit has ended, the ranks learn its result.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from enum import Enum, IntEnum, auto
from typing import NamedTuple

import torch

from optimus.checkpoint.shard_file import Stop, Task
from optimus.distributed.collectives import Group, all_gather_objects, gather_bytes, greatest
from optimus.errors import NonFiniteError, OptimusError

_PAUSES_S = (0.001, 0.2)
"""First pause and longest pause of `drain` between two calls of `poll`, in seconds."""
_GRACE_S = 30.0
"""Seconds within which the thread of a rank must stop after the save has failed. If the thread has
not stopped after this time, it is assumed to hang."""


class State(Enum):
    """The state of the save of a checkpoint. All ranks are in the same state."""

    WRITING = auto()
    """Every rank writes its slices of the model states."""
    COMMITTING = auto()
    """The first rank writes the index and the manifest, and renames the directory."""
    STOPPING = auto()
    """The save has failed, and the ranks wait until their threads have stopped."""
    CLEANING = auto()
    """The first rank removes the directory of the failed save."""
    ENDED = auto()


class Status(IntEnum):
    """The status of a rank's background thread in the current state of a save.

    The greatest status of all ranks selects the next state of the save.
    """

    DONE = 0
    COMMITTED = 1
    """The thread has renamed the checkpoint's directory to the final name, but has exceeded the
    time limit, before or after the rename."""
    BUSY = 2
    FAILED = 3


TRANSITIONS = {
    (State.WRITING, Status.DONE): State.COMMITTING,
    (State.WRITING, Status.BUSY): State.WRITING,
    (State.WRITING, Status.FAILED): State.STOPPING,
    (State.COMMITTING, Status.DONE): State.ENDED,
    (State.COMMITTING, Status.COMMITTED): State.ENDED,
    (State.COMMITTING, Status.BUSY): State.COMMITTING,
    (State.COMMITTING, Status.FAILED): State.STOPPING,
    (State.STOPPING, Status.DONE): State.CLEANING,
    (State.STOPPING, Status.COMMITTED): State.CLEANING,
    (State.STOPPING, Status.BUSY): State.STOPPING,
    (State.STOPPING, Status.FAILED): State.STOPPING,
    (State.CLEANING, Status.DONE): State.ENDED,
    (State.CLEANING, Status.BUSY): State.CLEANING,
}
"""Maps (current state, greatest status of all ranks) to the next state. Other pairs cannot
occur."""


class Failure(NamedTuple):
    """The reason why the save of a checkpoint has failed."""

    message: str
    nonfinite: bool = False
    """True if the save has failed because the model states contained a NaN or an infinity."""


class Outcome(NamedTuple):
    """The result of the save of a checkpoint. All ranks get the same result."""

    step: int
    failure: Failure | None
    """The reason of the failure; None if the checkpoint was committed."""
    rank: int = 0
    """The rank that reported `failure`."""


class AsyncSave:
    """A checkpoint save in the background, from its start to its commit or its failure.

    On every rank a thread calls `write(stop)`. When `write` has returned on all ranks, a thread of
    the first rank calls `commit(stop, reports)`, and then `after_commit()`. `reports` are the bytes
    that the calls of `write` returned, in the order of ranks. If `write` or `commit` raises
    OptimusError on one rank, the save fails on all ranks. If a thread raises any other exception,
    `poll` raises this exception on the same rank. A failure sets `stop`, which requests the threads
    to end. When the threads have ended, a thread of the first rank calls `clean()`.

    `commit` must call `stop.claim()` before it renames the directory, so that no failure is
    reported for a checkpoint that has its final name. There is one exception: if the rename is not
    complete _GRACE_S seconds after the time limit of the commit, `poll` first reports a failure.
    When the rename has ended, a later `poll` reports that the checkpoint was committed.
    """

    def __init__(
        self,
        name: str,
        step: int,
        group: Group,
        device: torch.device,
        limit_s: float,
        *,
        write: Callable[[Stop], bytes],
        commit: Callable[[Stop, list[bytes]], None],
        clean: Callable[[], None],
        after_commit: Callable[[], None] = lambda: None,
    ) -> None:
        """Start the thread that writes the states of this rank.

        Args:
            name: Name of the checkpoint in messages.
            step: Number of updates that the run has completed.
            group: The group of all ranks.
            device: Device of the tensors in the collectives of `poll`.
            limit_s: Time limit in seconds of the writes. The commit has a separate limit of the
                same length.
            write: Function that writes the states of this rank.
            commit: Function that commits the checkpoint. Called on the first rank.
            clean: Function that removes the directory of a failed save. Called on the first rank.
            after_commit: Function that is called on the first rank after `commit`.
        """
        self.step = step
        self._name, self._group, self._device, self._limit_s = name, group, device, limit_s
        self._commit, self._after_commit, self._clean = commit, after_commit, clean
        self._stop, self._since, self._committed = Stop(), time.monotonic(), False
        self._state, self._status = State.WRITING, Status.BUSY
        self._failure: Failure | None = None
        self._task: Task | None = Task(lambda: write(self._stop))

    @property
    def is_over(self) -> bool:
        """True if the save has ended on all ranks. A slow `after_commit` may still be running."""
        return self._state is State.ENDED

    def poll(self) -> Outcome | None:
        """Advance the save. Return its outcome if this call finds a commit or a failure, else None.

        All ranks must call this method.
        """
        before, status = self._state, self._transition()
        if self._state is before:
            return None
        task, self._task, self._since = self._task, None, time.monotonic()
        outcome = None
        if self._state is State.COMMITTING:
            assert task is not None
            reports = gather_bytes(task.value(), self._group)
            if self._group.rank == 0:
                self._task = Task(lambda: self._run_commit(reports))
        elif self._state is State.STOPPING:
            self._task = task  # the thread may still write
            outcome = self._fail()
        elif self._state is State.CLEANING:
            if task is not None:
                self._failure_of(task)  # raises exceptions other than OptimusError
            if self._group.rank == 0:
                self._task = Task(self._clean)
            if status is Status.COMMITTED:  # the rename ended after the failure was reported
                outcome = Outcome(self.step, None)
        elif before is State.COMMITTING:
            outcome = Outcome(self.step, None)
        return outcome

    def drain(self) -> Outcome | None:
        """Call `poll` until the save has ended. If a thread of a failed save does not stop in
        time, return without further waiting.

        All ranks must call this method.

        Returns:
            The last outcome that `poll` returned, or None if every `poll` returned None.
        """
        outcome, pause = None, _PAUSES_S[0]
        while not self.is_over:
            if self._task is not None and not self._task.has_ended:
                self._task.wait(pause)
                pause = min(2 * pause, _PAUSES_S[1])
            before = self._state
            outcome = self.poll() or outcome
            if before is self._state is State.STOPPING and self._status is Status.FAILED:
                break  # a thread hangs
        return outcome

    def give_up(self) -> None:
        """Request this rank's thread to stop, without waiting. Not a collective."""
        self._stop.set()

    def _transition(self) -> Status:
        """Compute the greatest status of all ranks, set the next state, and return the status."""
        assert not self.is_over
        self._status = Status(greatest(self._local_status(), self._group, self._device))
        self._state = TRANSITIONS[self._state, self._status]
        return self._status

    def _local_status(self) -> Status:
        """Return the status of this rank's thread in the current state."""
        took_s, is_stopping = time.monotonic() - self._since, self._state is State.STOPPING
        if self._task is None or self._task.has_ended:
            if self._state in (State.WRITING, State.COMMITTING) and self._task is not None:
                self._failure = self._failure_of(self._task)
                return Status.FAILED if self._failure else Status.DONE
            return Status.COMMITTED if is_stopping and self._committed else Status.DONE
        if self._state is State.CLEANING:  # the next start of the run removes the rest
            return Status.BUSY if took_s <= _GRACE_S else Status.DONE
        limit_s = min(self._limit_s, _GRACE_S) if is_stopping else self._limit_s
        if took_s <= limit_s:
            return Status.BUSY
        if self._committed:
            return Status.COMMITTED  # only `after_commit` takes long
        if not is_stopping and not self._stop.set() and took_s <= limit_s + _GRACE_S:
            return Status.BUSY  # `commit` has claimed the stop and renames the directory
        self._failure = Failure(
            f"{self._name} not written within checkpoint.timeout_s = {self._limit_s:g}: the disk "
            f"of rank {self._group.rank} is slow or hangs"
        )
        return Status.FAILED

    @staticmethod
    def _failure_of(task: Task) -> Failure | None:
        """Return the OptimusError of an ended thread as a Failure; None if the thread succeeded.
        Raises any other exception of the thread."""
        try:
            task.value()
        except OptimusError as error:
            return Failure(str(error), isinstance(error, NonFiniteError))
        return None

    def _run_commit(self, reports: list[bytes]) -> None:
        self._commit(self._stop, reports)
        self._committed = True
        self._after_commit()

    def _fail(self) -> Outcome:
        """Set `stop`. Return an Outcome with the failure of the lowest rank that has failed. A
        failure because of non-finite values takes precedence over other failures."""
        failures = [
            (rank, failure)
            for rank, failure in enumerate(
                all_gather_objects(self._failure, self._group, Failure | None)
            )
            if failure is not None
        ]
        rank, first = next((each for each in failures if each[1].nonfinite), failures[0])
        self._stop.set()
        return Outcome(self.step, first, rank)
