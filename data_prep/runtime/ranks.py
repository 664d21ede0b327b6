"""Processes on any number of machines that share work through the output directory alone.

A rank that ends in an error leaves a mark in the output directory, so that no other rank waits for
its files: docs/formats/dataset.md, "Many machines". Every item of work is idempotent: done twice,
it is the same bytes under the same name.
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


class Peers:
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
        """Raise LostPeerError if a rank has failed since this one started."""
        for name in sorted(self._marks() - self._old):
            with contextlib.suppress(OSError):  # it is gone, or no file that a rank wrote
                reason = files.read_regular(self._out / name, _MARK_BYTES).decode(
                    "utf-8", "replace"
                )
                rank = name.removeprefix(_PREFIX).partition(".")[0]
                raise LostPeerError(
                    f"rank {rank} failed: {reason}; give the command again on all ranks then"
                )

    def tell(self, rank: int, error: Exception) -> None:
        """Write a mark, if the directory exists and has space."""
        text = one_line(error) or type(error).__name__
        if isinstance(error, OSError) and error.strerror:
            text = one_line(f"{error.filename or self._out}: {error.strerror}")
        with contextlib.suppress(OSError):  # what ended this rank may be the disk itself
            if self._out.is_dir():
                path = files.temporary_name(self._out / f"failed-rank-{rank}")
                # A name of a file may be no UTF-8, and is a str with lone surrogates then.
                files.write_bytes(path, text.encode("utf-8", "backslashreplace"))

    def forget_old(self) -> None:
        """Remove the marks of earlier runs: the work is done."""
        for name in self._old:
            (self._out / name).unlink(missing_ok=True)


_SILENCE_S = 120.0
"""Longer than file systems take to show another machine's files."""
_RANK_0_FACTOR = 30
"""Rank 0 may work for all others without new files, such as on the comparison of ids."""
_POLL_S = (0.05, 5.0)
_RANKS_PER_POLL_S = 50.0
"""Polling slows down with the world, so that all ranks together list a directory 50 times a s."""


@dataclass(frozen=True)
class Team:
    """This process among those that share the work."""

    rank: int = 0
    world: int = 1
    silence_s: float = _SILENCE_S
    """Seconds without progress of the others after which this rank ends."""
    peers: Peers | None = None
    """Marks of ranks that failed; set by `together`."""

    @property
    def poll_s(self) -> float:
        """Return the seconds between two checks of the work of other ranks."""
        return min(max(_POLL_S[0], self.world / _RANKS_PER_POLL_S), _POLL_S[1])

    def check(self) -> None:
        """Raise LostPeerError if another rank failed."""
        if self.peers is not None:
            self.peers.check()

    def say(self, line: str) -> None:
        """Print a line as rank 0, for all ranks."""
        if self.rank == 0:
            say(line)

    def label(self, text: str) -> str:
        """Return `text` for a line of progress, with the rank where there are several."""
        return text if self.world == 1 else f"[rank {self.rank} of {self.world}] {text}"


ALONE = Team()


@contextlib.contextmanager
def together(team: Team, out: Path) -> Iterator[Team]:
    """Yield the team for a command that writes to `out`, in which an error of a rank reaches all.

    The others finish their share, which a later run uses, and stop instead of waiting.
    """
    if team.world == 1 or team.peers is not None:
        yield team
        return
    peers = Peers(out)
    try:
        yield dataclasses.replace(team, peers=peers)
    except LostPeerError:  # the mark exists
        raise
    except Exception as error:
        peers.tell(team.rank, error)
        raise
    peers.forget_old()


def share(sizes: Sequence[int], rank: int, world: int) -> list[int]:
    """Return the items of `rank`: largest first, each given to the rank that has least so far.

    No rank gets more than 4/3 of the best possible maximum (Graham 1969). Every rank computes the
    same; an item of no size counts as 1.
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
    """Items that ranks do together. Each item is idempotent."""

    @property
    def folder(self) -> Path:
        """Return the directory of the items, in which unfinished files show progress."""

    def plan(self) -> Sequence[int]:
        """Return the size of each item, by which items are divided; the same on all ranks."""

    def missing(self) -> list[int]:
        """Return the indices of items that are not done, as cheaply as possible."""

    def do(self, items: list[int]) -> None:
        """Do the items with these indices."""

    def verify(self) -> list[int]:
        """Return the indices of items that are not as they should be, once none is missing."""


def do_together(team: Team, task: PrepTask) -> None:
    """Do this rank's share of a task, and wait until the other ranks have done theirs.

    Rank 0 also verifies the items of all ranks.

    Raises:
        LostPeerError: another rank failed, or no item was completed and no file grew in
            `task.folder` for `team.silence_s` to twice that.
    """

    def missing() -> list[int]:
        return task.missing() or (task.verify() if team.rank == 0 else [])

    task.do(share(task.plan(), team.rank, team.world))
    if team.world == 1:
        return
    left, sign, since = missing(), None, time.monotonic()
    while left:
        team.check()
        time.sleep(team.poll_s)
        before, left = left, missing()
        if set(before) - set(left):
            sign, since = None, time.monotonic()
        elif time.monotonic() - since >= team.silence_s:
            if sign == (sign := growth(task.folder)):  # looked at rarely: it asks for many files
                raise _silent(
                    f"{counted(len(left), 'item')} of other ranks in {task.folder}", team.silence_s
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


def wait_for(team: Team, done: Callable[[], bool], do: Callable[[], object]) -> None:
    """Do as rank 0 what one rank does for all; as another rank, wait until it is `done`.

    Raises LostPeerError where another rank failed, or rank 0 takes longer than it may.
    """
    if team.rank == 0:
        do()
        return
    since, limit_s = time.monotonic(), _RANK_0_FACTOR * team.silence_s
    while not done():
        team.check()
        if time.monotonic() - since >= limit_s:
            raise _silent("what rank 0 does for all", limit_s)
        time.sleep(team.poll_s)


def _silent(awaited: str, waited_s: float) -> LostPeerError:
    return LostPeerError(
        f"waited {waited_s:g} s without progress for {awaited}; a rank was lost or has "
        "not started: run the same command again on all ranks"
    )
