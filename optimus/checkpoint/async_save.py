"""A save under way: threads write, the ranks' main threads agree on how it goes.

Threads make no collective: those of a backend must be begun in one order on all ranks, and a group
of threads' own would connect every rank to every other once more (gloo), or not be had for host
memory at all (nccl). Instead all ranks `poll` together between updates: one all-reduce of an
integer. What it costs is that a checkpoint is sealed an update after its last byte is durable, and
told of one later."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import NamedTuple

import torch

from optimus.checkpoint.shard_file import Stop, Task
from optimus.distributed.collectives import Group, all_gather_objects, gather_bytes, greatest
from optimus.errors import NonFiniteError, OptimusError

_DONE, _SEALED, _BUSY, _FAILED = range(4)
_PAUSES_S = (0.001, 0.2)
"""The first and the longest sleep between two looks at a thread that is waited for."""
_GRACE_S = 30.0
"""How long a thread may take to stop after a failure before it counts as hanging."""


class Failure(NamedTuple):
    """Why a save came to nothing: one line, and whether that was a NaN or an infinity."""

    what: str
    nonfinite: bool = False


class Outcome(NamedTuple):
    """What became of a save, the same on every rank."""

    step: int
    failure: Failure | None
    rank: int = 0
    """Whose failure it is."""


class Underway:
    """One save on all ranks, from its beginning to its seal, or to its end without one.

    In a thread each, all ranks `write(stop)`; once all have, the first rank's `seal(stop, reports)`
    takes the bytes that they returned, in rank order, and `after_seal` follows. What the first two
    raise as OptimusError on one rank fails the save on all; any other exception is raised where it
    happened. After a failure `stop` is set and, when no thread works any more, the first rank calls
    `clean` in one. `seal` claims `stop` before it gives the checkpoint its name: one that stands
    under its name is never told as failed.
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
        seal: Callable[[Stop, list[bytes]], None],
        clean: Callable[[], None],
        after_seal: Callable[[], None] = lambda: None,
    ) -> None:
        """`name` is for messages, `device` where collectives of `group` take place. `limit_s`: what
        writing may take, and sealing."""
        self.step = step
        self._name, self._group, self._device, self._limit_s = name, group, device, limit_s
        self._seal, self._after_seal, self._clean, self._stop = seal, after_seal, clean, Stop()
        self._since, self._sealed = time.monotonic(), False
        self._phase, self._worst = "writing", _BUSY
        self._found: Failure | None = None
        self._task: Task | None = Task(lambda: write(self._stop))

    @property
    def is_over(self) -> bool:
        """Whether it has ended on all ranks; at most old files may still be in removal."""
        return self._phase == "over"

    def poll(self) -> Outcome | None:
        """Whether it has come to its seal, or failed, since the last call. A collective."""
        assert not self.is_over
        worst = self._worst_of_all()
        if self._phase == "failed":
            if worst not in (_DONE, _SEALED):
                return None
            self._begin_clean()
            return Outcome(self.step, None) if worst == _SEALED else None  # after all
        if self._phase == "cleaning":
            if worst == _DONE:
                self._phase = "over"
            return None
        if worst == _FAILED:
            return self._fail()
        if worst == _BUSY:
            return None
        if self._phase == "writing":
            assert self._task is not None
            self._begin_seal(gather_bytes(self._task.value(), self._group))
            return None
        self._phase = "over"
        return Outcome(self.step, None)

    def drain(self) -> Outcome | None:
        """`poll` until it is over, or until threads have been waited for too long after a failure;
        what came to light meanwhile. A collective."""
        outcome, pause = None, _PAUSES_S[0]
        while not self.is_over:
            if self._task is not None and not self._task.has_ended:
                self._task.wait(pause)
                pause = min(2 * pause, _PAUSES_S[1])
            outcome = self.poll() or outcome
            if self._phase == "failed" and self._worst == _FAILED:
                break  # a thread hangs
        return outcome

    def give_up(self) -> None:
        """Tell this rank's thread to stop: the others cannot be asked any more."""
        self._stop.set()

    def _worst_of_all(self) -> int:
        self._worst = greatest(self._state(), self._group, self._device)
        return self._worst

    def _state(self) -> int:
        """This rank's, in the phase that all are in."""
        took_s = time.monotonic() - self._since
        if self._task is None or self._task.has_ended:
            return self._result()
        if self._phase == "cleaning":  # what is left then goes as the run is begun again
            return _BUSY if took_s <= _GRACE_S else _DONE
        limit_s = min(self._limit_s, _GRACE_S) if self._phase == "failed" else self._limit_s
        if took_s <= limit_s:
            return _BUSY
        if self._sealed:
            return _SEALED  # what comes behind takes long
        if self._phase != "failed" and not self._stop.set() and took_s <= limit_s + _GRACE_S:
            return _BUSY  # it is being given its name
        self._found = Failure(
            f"{self._name} not written within checkpoint.timeout_s = {self._limit_s:g}: the disk "
            f"of rank {self._group.rank} is slow or hangs"
        )
        return _FAILED

    def _result(self) -> int:
        """Of this rank's thread, which has ended."""
        if self._phase in ("writing", "sealing") and self._task is not None:
            self._found = self._failure_of(self._task)
            return _FAILED if self._found else _DONE
        return _SEALED if self._phase == "failed" and self._sealed else _DONE

    @staticmethod
    def _failure_of(task: Task) -> Failure | None:
        try:
            task.value()
        except OptimusError as error:
            return Failure(str(error), isinstance(error, NonFiniteError))
        return None

    def _begin_seal(self, reports: list[bytes]) -> None:
        self._phase, self._task, self._since = "sealing", None, time.monotonic()
        if self._group.rank == 0:
            self._task = Task(lambda: self._run_seal(reports))

    def _run_seal(self, reports: list[bytes]) -> None:
        self._seal(self._stop, reports)
        self._sealed = True
        self._after_seal()

    def _fail(self) -> Outcome:
        """All ranks take the first rank's failure of those that have one; a NaN goes before all."""
        found = all_gather_objects(self._found, self._group, Failure | None)
        told = [(rank, one) for rank, one in enumerate(found) if one is not None]
        rank, first = next((one for one in told if one[1].nonfinite), told[0])
        self._stop.set()
        self._phase, self._since, self._worst = "failed", time.monotonic(), _BUSY
        return Outcome(self.step, first, rank)

    def _begin_clean(self) -> None:
        task, self._task = self._task, None
        self._phase, self._since = "cleaning", time.monotonic()
        if task is not None:
            self._failure_of(task)  # an error of another kind is not lost behind the first
        if self._group.rank == 0:
            self._task = Task(self._clean)
