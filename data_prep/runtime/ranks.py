"""The ranks of a command: processes that share work only through files in the output directory.

The ranks can be on any number of machines. A rank that ends with an error writes the message of the
error to the output directory. A rank that works sends heartbeats: the rank regularly updates a file
in the output directory. A waiting rank can therefore detect that another rank has failed or was
lost (docs/formats/dataset.md, "Many machines"). Every item of work is idempotent: if two ranks do
the same item, both ranks write the same bytes to a file with the same name.
"""

from __future__ import annotations

import contextlib
import dataclasses
import heapq
import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from data_prep.runtime.progress import say
from optimus.errors import LostPeerError, counted, one_line
from optimus.io import files

_FAILED, _ALIVE = ".failed-rank-", ".alive-rank-"
"""Name prefixes of the files by which a rank reports its failure (_FAILED) or sends heartbeats
(_ALIVE). The number of the rank and a dot follow."""
_MESSAGE_BYTES = 1 << 20
_HEARTBEATS_PER_SILENCE = 8
_END_S = 1.0
"""Longest wait, in seconds, for the end of the thread that sends heartbeats. If the file system
hangs, the thread does not end."""


class RankFiles:
    """The files in an output directory through which the ranks of a command communicate.

    A rank R that ends with an error writes the message of the error to `.failed-rank-R.*.tmp`. As a
    heartbeat, a rank R that works regularly updates the modification time of
    `.alive-rank-R.*.tmp`.
    """

    def __init__(self, out: Path):
        """Record the names of the files that ranks of earlier runs have left in `out`. It is not an
        error if the directory `out` does not exist."""
        self._out = out
        self._old = self._names(_FAILED)
        self._old_heartbeats: dict[str, int | None] = dict.fromkeys(self._names(_ALIVE))

    def _names(self, prefix: str) -> list[str]:
        try:
            return sorted(name for name in os.listdir(self._out) if name.startswith(prefix))
        except FileNotFoundError:
            return []

    def check(self) -> None:
        """Raise LostPeerError if a rank has failed since this object was created."""
        for name in self._names(_FAILED):
            if name in self._old:
                continue
            with contextlib.suppress(OSError):  # the file is removed or is not a regular file
                reason = files.read_regular(self._out / name, _MESSAGE_BYTES).decode(
                    "utf-8", "replace"
                )
                rank = name.removeprefix(_FAILED).partition(".")[0]
                raise LostPeerError(
                    f"rank {rank} failed: {reason}; remove the cause and run the same command "
                    "again on all ranks"
                )

    def write_failure(self, rank: int, error: Exception) -> None:
        """Write the message of `error` to the output directory, as the failure of `rank`.

        If the directory is missing or full, the method does nothing.
        """
        text = one_line(error) or type(error).__name__
        if isinstance(error, OSError) and error.strerror:
            text = one_line(f"{error.filename or self._out}: {error.strerror}")
        with contextlib.suppress(OSError):  # a failure of the disk may have ended this rank
            if self._out.is_dir():
                path = files.temporary_name(self._out / f"{_FAILED[1:]}{rank}")
                # A file name that is not UTF-8 is a str with lone surrogates.
                files.write_bytes(path, text.encode("utf-8", "backslashreplace"))

    @contextlib.contextmanager
    def alive(self, rank: int, every_s: float) -> Iterator[None]:
        """Context manager that sends heartbeats of `rank`: a thread updates the file
        `.alive-rank-R.*.tmp` every `every_s` seconds."""
        path, end = files.temporary_name(self._out / f"{_ALIVE[1:]}{rank}"), threading.Event()

        def send_heartbeats() -> None:
            warned = False
            while not end.is_set():
                try:
                    _touch(path)
                except OSError as error:
                    if not warned and self._out.is_dir():  # else the directory is created later
                        warned = True
                        say(
                            f"{path}: cannot be updated: {error.strerror}; other ranks may "
                            "conclude that this rank was lost, and end with an error"
                        )
                end.wait(every_s)
            with contextlib.suppress(OSError):
                path.unlink()

        thread = threading.Thread(target=send_heartbeats, daemon=True)
        # The thread inherits this mask, so the main thread receives all signals. A signal to
        # another thread would not interrupt a wait of the main thread.
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        try:
            thread.start()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        try:
            yield
        finally:
            end.set()
            thread.join(_END_S)

    def heartbeats(self, ranks: Collection[int]) -> dict[int, set[tuple[str, int]]]:
        """Return the heartbeats of each rank, read from its files `.alive-rank-R.*.tmp`.

        The clocks of machines differ. Compare a time only with an earlier time of the same file.

        Returns:
            A dict that maps each rank to pairs (name, modification time in ns) of the rank's files.
            A file that existed before this object was created is left out until its modification
            time has changed since the first call.
        """
        heartbeats: dict[int, set[tuple[str, int]]] = {rank: set() for rank in ranks}
        for name in self._names(_ALIVE):
            number = name.removeprefix(_ALIVE).partition(".")[0]
            if not (number.isascii() and number.isdecimal() and int(number) in heartbeats):
                continue
            with contextlib.suppress(OSError):  # the rank has ended and removed its file
                time_ns = os.stat(self._out / name).st_mtime_ns
                if name in self._old_heartbeats:
                    # The time of an old file is first read here and not in `__init__`, because
                    # there may be many files. A change of the time is a heartbeat.
                    if self._old_heartbeats[name] is None:
                        self._old_heartbeats[name] = time_ns
                    if self._old_heartbeats[name] == time_ns:
                        continue
                heartbeats[int(number)].add((name, time_ns))
        return heartbeats

    def remove_old(self) -> None:
        """Remove the failure messages of earlier runs. Call this method when the command has
        finished its work."""
        for name in self._old:
            (self._out / name).unlink(missing_ok=True)


def _touch(path: Path) -> None:
    try:
        os.utime(path)
    except FileNotFoundError:  # at the start, or if a run without locks removed the file
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))


_SILENCE_S = 120.0
"""Default of `WorkerGroup.silence_s`. A file that another machine has written appears in a shared
file system in less than this time."""
_STUCK_FACTOR = 30
"""If no rank makes progress for _STUCK_FACTOR * `silence_s` seconds, a waiting rank ends with an
error, even if the other ranks send heartbeats. The factor is large because some steps, such as the
comparison of ids, do not write files for a long time."""
_MOST_WATCHED = 16
"""Largest number of ranks whose heartbeats a waiting rank reads. Rank r first reads the heartbeats
of ranks r + 1, r + 2 and so on, and then of ranks 0, 1 and so on. Without a limit, each rank could
read the heartbeats of all other ranks."""
_POLL_S = (0.05, 5.0)
_RANKS_PER_POLL_S = 50.0
"""The polling interval in seconds is the number of ranks divided by `_RANKS_PER_POLL_S`, within the
limits `_POLL_S`. Up to 250 ranks together then list a directory at most 50 times per second."""


@dataclass(frozen=True)
class WorkerGroup:
    """A group of processes (ranks) that share work, and the rank of this process in the group."""

    rank: int = 0
    world: int = 1
    silence_s: float = _SILENCE_S
    """Seconds without a heartbeat (an update of the file `.alive-rank-R.*.tmp`) after which a rank
    is considered lost. A rank that waits for a lost rank ends with an error."""
    files: RankFiles | None = None
    """The files through which the ranks communicate; set by `failure_scope`."""

    @property
    def poll_s(self) -> float:
        """Return the interval, in seconds, at which this rank checks the progress of the other
        ranks."""
        return min(max(_POLL_S[0], self.world / _RANKS_PER_POLL_S), _POLL_S[1])

    def check(self) -> None:
        """Raise LostPeerError if another rank failed."""
        if self.files is not None:
            self.files.check()

    def say(self, line: str) -> None:
        """Print a line on rank 0. Does nothing on other ranks."""
        if self.rank == 0:
            say(line)

    def label(self, text: str) -> str:
        """Return `text` for a progress line, with the rank if there are several ranks."""
        return text if self.world == 1 else f"[rank {self.rank} of {self.world}] {text}"


ALONE = WorkerGroup()


@contextlib.contextmanager
def failure_scope(group: WorkerGroup, out: Path) -> Iterator[WorkerGroup]:
    """Context manager for a command that writes to `out`. It yields the group that the command must
    use. With several ranks, the yielded group is a copy of `group` that detects failures of other
    ranks.

    If a rank fails or is killed within the context, the other ranks finish their shares of the
    work. A later run can use the finished shares. The other ranks then raise LostPeerError instead
    of waiting for the lost rank.
    """
    if group.world == 1 or group.files is not None:
        yield group
        return
    rank_files = RankFiles(out)
    with rank_files.alive(group.rank, group.silence_s / _HEARTBEATS_PER_SILENCE):
        try:
            yield dataclasses.replace(group, files=rank_files)
        except LostPeerError:  # the failed rank has written its message
            raise
        except Exception as error:
            rank_files.write_failure(group.rank, error)
            raise
        rank_files.remove_old()


def assign(sizes: Sequence[int], world: int) -> list[int]:
    """Assign items of work to ranks. Return the rank of each item.

    Items are assigned in the order of decreasing size, each to the rank with the smallest sum of
    sizes. The largest sum is at most 4/3 of the smallest possible largest sum (Graham 1969). All
    ranks compute the same assignment. An item of size 0 is counted as 1.
    """
    loads = [(0, rank) for rank in range(world)]
    ranks = [0] * len(sizes)
    for index in _by_size(sizes):
        load, rank = heapq.heappop(loads)
        ranks[index] = rank
        heapq.heappush(loads, (load + max(1, sizes[index]), rank))
    return ranks


def share(sizes: Sequence[int], rank: int, world: int) -> list[int]:
    """Return the indices of the items that `assign` gives to `rank`, the largest first."""
    ranks = assign(sizes, world)
    return [index for index in _by_size(sizes) if ranks[index] == rank]


def _by_size(sizes: Sequence[int]) -> list[int]:
    return sorted(range(len(sizes)), key=lambda index: (-sizes[index], index))


class PrepTask(Protocol):
    """Protocol of a step of data preparation. The step is divided into items of work, which are
    distributed over the ranks. If two ranks do the same item, the result is the same as if a single
    rank does the item."""

    @property
    def folder(self) -> Path:
        """Return the directory to which ranks write the results of items. Ranks detect progress by
        the growth of the unfinished files in this directory."""

    def plan(self) -> Sequence[int]:
        """Return the size of each item. All ranks must return equal sizes, because each rank
        computes the assignment of items to ranks from the sizes."""

    def missing(self) -> list[int]:
        """Return the indices of items that are not done. Ranks call this method often, so it should
        be fast and need not read the results of items: `verify` is called later."""

    def do(self, items: list[int]) -> None:
        """Do the items with the indices `items`."""

    def verify(self) -> list[int]:
        """Check the results of all items, after `missing` has returned []. Return the indices of
        items with missing or incorrect results."""


def run_task(group: WorkerGroup, task: PrepTask) -> None:
    """Do this rank's share of the items of a task, and wait until the other ranks have done their
    shares.

    Rank 0 also verifies the items of all ranks.

    Raises:
        LostPeerError: Another rank failed, was lost or does not make progress. See `_wait`.
    """
    sizes = task.plan()
    task.do(share(sizes, group.rank, group.world))
    if group.world == 1:
        return
    ranks = assign(sizes, group.world)

    def remaining() -> Counter[int]:
        missing = task.missing() or (task.verify() if group.rank == 0 else [])
        return Counter(ranks[index] for index in missing)

    _wait(group, remaining, lambda: growth(task.folder), f"items in {task.folder}")


def growth(folder: Path) -> tuple[int, int]:
    """Return the number of unfinished files in `folder` and the sum of their bytes."""
    count = size = 0
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.name.startswith("."):  # an unfinished file has a temporary name
                try:
                    size += entry.stat().st_size
                except FileNotFoundError:
                    continue
                count += 1
    return count, size


def wait_for(group: WorkerGroup, done: Callable[[], bool], do: Callable[[], object]) -> None:
    """Call `do` on rank 0. On the other ranks, wait until `done` returns True.

    Raises LostPeerError like `_wait`.
    """
    if group.rank == 0:
        do()
        return
    work = "work that rank 0 does for all ranks"
    _wait(group, lambda: Counter() if done() else Counter([0]), lambda: None, work)


class _Watch:
    """Detector of lost ranks and missing progress, for a rank that waits for other ranks.

    Time is counted in calls of `look` instead of seconds. A period in which this process or the
    file system was suspended is therefore not counted.
    """

    def __init__(self, group: WorkerGroup) -> None:
        self._group = group
        self._looks = 0
        self._heartbeats: dict[int, tuple[int, object]] = {}
        self._silent: Counter[int] = Counter()
        """Maps each rank to the number of calls of `look` since its last heartbeat or completed
        item."""
        self._heard: set[int] = set()
        """The ranks that have sent a heartbeat or completed an item in this run."""
        self._progress: object = None
        self._idle = 0
        """Number of consecutive periods without progress. A period is `_HEARTBEATS_PER_SILENCE`
        calls of `look`."""

    def look(self, left: Counter[int], progress: Callable[[], object]) -> tuple[list[int], bool]:
        """Check the ranks that still have items to do.

        A rank is lost if it has sent no heartbeat for `silence_s` seconds. If a rank has never sent
        a heartbeat, it may start late: such a rank is lost only if, in addition, no rank has made
        progress for `silence_s` seconds.

        Args:
            left: The number of items that each rank still has to do.
            progress: Function that returns a value that changes while ranks work.

        Returns:
            (ranks that are lost, True if no rank made progress for `_STUCK_FACTOR` times
            `silence_s` seconds).
        """
        # `progress` is called only once per `silence_s` seconds, because it lists many files.
        if self._looks % _HEARTBEATS_PER_SILENCE == 0:
            before, self._progress = self._progress, (left, progress())
            self._idle = self._idle + 1 if self._progress == before else 0
        self._looks += 1
        in_turn = sorted(left, key=lambda rank: (rank <= self._group.rank, rank))
        watched = sorted(in_turn[:_MOST_WATCHED])
        heartbeats = self._group.files.heartbeats(watched) if self._group.files else {}
        for rank in watched:
            before, now = self._heartbeats.get(rank), (left[rank], heartbeats.get(rank))
            self._silent[rank] = self._silent[rank] + 1 if now == before else 0
            if now[1] or (before is not None and now[0] < before[0]):
                self._heard.add(rank)
            self._heartbeats[rank] = now
        lost = [
            rank
            for rank in watched
            if self._silent[rank] >= _HEARTBEATS_PER_SILENCE and (rank in self._heard or self._idle)
        ]
        return lost, self._idle >= _STUCK_FACTOR


def _wait(
    group: WorkerGroup,
    remaining: Callable[[], Counter[int]],
    progress: Callable[[], object],
    work: str,
) -> None:
    """Wait until all ranks have done their items.

    Args:
        group: The ranks.
        remaining: Function that returns the number of items that each rank still has to do.
        progress: Function that returns a value that changes while ranks work.
        work: Description of the items, for the message of an error.

    Raises:
        LostPeerError: A rank failed or was lost (see `_Watch.look`), or there was no progress for
            `_STUCK_FACTOR` times `group.silence_s`.
    """
    watch, next_look = _Watch(group), 0.0
    while left := remaining():
        group.check()
        if time.monotonic() >= next_look:
            next_look = time.monotonic() + group.silence_s / _HEARTBEATS_PER_SILENCE
            lost, is_stuck = watch.look(left, progress)
            if lost:
                if group.files:  # for ranks that do not read the heartbeats of the lost rank
                    silence = LostPeerError(
                        f"no heartbeat of this rank for {group.silence_s:g} s; check its process"
                    )
                    group.files.write_failure(lost[0], silence)
                raise LostPeerError(
                    f"no heartbeat of rank {', '.join(map(str, lost))} for {group.silence_s:g} "
                    f"s while waiting for {work}: the rank was lost or has not started; run the "
                    "same command again on all ranks"
                )
            if is_stuck:
                raise LostPeerError(
                    f"no progress for {_STUCK_FACTOR * group.silence_s:g} s while waiting for "
                    f"{work} ({counted(len(left), 'rank')} not ready); check the process of rank "
                    f"{min(left)}, and run the same command again on all ranks"
                )
        time.sleep(group.poll_s)
