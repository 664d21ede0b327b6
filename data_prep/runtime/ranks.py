"""Processes on any number of machines that share work through the output directory alone.

A rank that ends in an error leaves a mark in the output directory, so that no other rank waits for
its files: docs/formats/dataset.md, "Many machines". Every item of work is idempotent: if it is done
twice, the same bytes are written under the same name.
"""

from __future__ import annotations

import contextlib
import dataclasses
import heapq
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from data_prep.runtime.progress import say
from optimus.errors import LostPeerError, counted, one_line
from optimus.io import files

_PREFIX = ".failed-rank-"
_MARK_BYTES = 1 << 20


class FailureMarks:
    """Marks of failed ranks in a directory, which need not exist yet."""

    def __init__(self, out: Path):
        self._out = out
        self._old = self._marks()

    def _marks(self) -> set[str]:
        try:
            names = os.listdir(self._out)
        except FileNotFoundError:
            return set()
        return {name for name in names if name.startswith(_PREFIX)}

    def check(self) -> None:
        """Raise LostPeerError if a rank has failed since this object was made."""
        for name in sorted(self._marks() - self._old):
            with contextlib.suppress(OSError):  # the mark is removed or is not a regular file
                reason = files.read_regular(self._out / name, _MARK_BYTES).decode(
                    "utf-8", "replace"
                )
                rank = name.removeprefix(_PREFIX).partition(".")[0]
                raise LostPeerError(
                    f"rank {rank} failed: {reason}; then give the command again on all ranks"
                )

    def write(self, rank: int, error: Exception) -> None:
        """Write a mark if the directory exists and has space."""
        text = one_line(error) or type(error).__name__
        if isinstance(error, OSError) and error.strerror:
            text = one_line(f"{error.filename or self._out}: {error.strerror}")
        with contextlib.suppress(OSError):  # a failure of the disk may have ended this rank
            if self._out.is_dir():
                path = files.temporary_name(self._out / f"failed-rank-{rank}")
                # A file name that is not UTF-8 is a str with lone surrogates.
                files.write_bytes(path, text.encode("utf-8", "backslashreplace"))

    def remove_old(self) -> None:
        """Remove the marks of earlier runs, after the work is done."""
        for name in self._old:
            (self._out / name).unlink(missing_ok=True)


_SILENCE_S = 120.0
"""Default of `WorkerGroup.silence_s`: longer than file systems need to show the files of other
machines."""
_RANK_0_FACTOR = 30
"""Factor of the time limit while rank 0 works for all ranks. Such work, for example the comparison
of ids, may write no files for a long time."""
_POLL_S = (0.05, 5.0)
_RANKS_PER_POLL_S = 50.0
"""The polling interval has one second for this number of ranks, so that all ranks together list a
directory about 50 times per second."""


@dataclass(frozen=True)
class WorkerGroup:
    """The rank of this process, and the number of processes that share the work."""

    rank: int = 0
    world: int = 1
    silence_s: float = _SILENCE_S
    """Seconds without progress of the other ranks after which this rank ends."""
    marks: FailureMarks | None = None
    """Marks of ranks that failed; set by `failure_scope`."""

    @property
    def poll_s(self) -> float:
        """Return the seconds between two checks of the work of other ranks."""
        return min(max(_POLL_S[0], self.world / _RANKS_PER_POLL_S), _POLL_S[1])

    def check(self) -> None:
        """Raise LostPeerError if another rank failed."""
        if self.marks is not None:
            self.marks.check()

    def say(self, line: str) -> None:
        """Print a line on rank 0. Other ranks print nothing."""
        if self.rank == 0:
            say(line)

    def label(self, text: str) -> str:
        """Return `text` for a progress line, with the rank if there are several ranks."""
        return text if self.world == 1 else f"[rank {self.rank} of {self.world}] {text}"


ALONE = WorkerGroup()


@contextlib.contextmanager
def failure_scope(group: WorkerGroup, out: Path) -> Iterator[WorkerGroup]:
    """Return a context for a command that writes to `out`. Its value is the group to use.

    If a rank fails in the context, the other ranks finish their shares, which a later run can use.
    They then raise LostPeerError instead of waiting for the failed rank.
    """
    if group.world == 1 or group.marks is not None:
        yield group
        return
    marks = FailureMarks(out)
    try:
        yield dataclasses.replace(group, marks=marks)
    except LostPeerError:  # the mark exists
        raise
    except Exception as error:
        marks.write(group.rank, error)
        raise
    marks.remove_old()


def share(sizes: Sequence[int], rank: int, world: int) -> list[int]:
    """Return the indices of the items of `rank`.

    Items are assigned in the order of decreasing size, each to the rank with the smallest sum.

    No rank gets more than 4/3 of the best possible maximum (Graham 1969). All ranks compute the
    same assignment. An item of size 0 counts as 1.
    """
    loads = [(0, other) for other in range(world)]
    mine = []
    for index in sorted(range(len(sizes)), key=lambda index: (-sizes[index], index)):
        load, other = heapq.heappop(loads)
        if other == rank:
            mine.append(index)
        heapq.heappush(loads, (load + max(1, sizes[index]), other))
    return mine


class PrepTask(Protocol):
    """Items of work that ranks share. Each item is idempotent."""

    @property
    def folder(self) -> Path:
        """Return the directory of the items. Unfinished files in it grow while a rank works."""

    def plan(self) -> Sequence[int]:
        """Return the size of each item. The sizes decide the shares, so all ranks need the same."""

    def missing(self) -> list[int]:
        """Return the indices of items that are not done, as cheaply as possible."""

    def do(self, items: list[int]) -> None:
        """Do the items with these indices."""

    def verify(self) -> list[int]:
        """Return the indices of incorrect items. It is called only if no item is missing."""


def run_task(group: WorkerGroup, task: PrepTask) -> None:
    """Do this rank's share of a task, and wait until the other ranks have done theirs.

    Rank 0 also verifies the items of all ranks.

    Raises:
        LostPeerError: another rank failed, or there was no progress for one to two times
            `group.silence_s`: no item was completed, and no file in `task.folder` grew.
    """

    def missing() -> list[int]:
        return task.missing() or (task.verify() if group.rank == 0 else [])

    task.do(share(task.plan(), group.rank, group.world))
    if group.world == 1:
        return
    left, sign, since = missing(), None, time.monotonic()
    while left:
        group.check()
        time.sleep(group.poll_s)
        before, left = left, missing()
        if set(before) - set(left):
            sign, since = None, time.monotonic()
        elif time.monotonic() - since >= group.silence_s:
            if sign == (sign := growth(task.folder)):  # rare, because it lists many files
                raise _silent(
                    f"{counted(len(left), 'item')} of other ranks in {task.folder}", group.silence_s
                )
            since = time.monotonic()


def growth(folder: Path) -> tuple[int, int]:
    """Return the number of unfinished files in `folder` and the sum of their bytes."""
    count = size = 0
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.name.startswith("."):  # temporary names
                try:
                    size += entry.stat().st_size
                except FileNotFoundError:
                    continue
                count += 1
    return count, size


def wait_for(group: WorkerGroup, done: Callable[[], bool], do: Callable[[], object]) -> None:
    """Call `do` on rank 0. On the other ranks, wait until `done` returns True.

    Raises LostPeerError if another rank failed or rank 0 takes too long.
    """
    if group.rank == 0:
        do()
        return
    since, limit_s = time.monotonic(), _RANK_0_FACTOR * group.silence_s
    while not done():
        group.check()
        if time.monotonic() - since >= limit_s:
            raise _silent("work that rank 0 does for all ranks", limit_s)
        time.sleep(group.poll_s)


def _silent(awaited: str, waited_s: float) -> LostPeerError:
    return LostPeerError(
        f"waited {waited_s:g} s for {awaited} and saw no progress; a rank was lost or has "
        "not started: run the same command again on all ranks"
    )
