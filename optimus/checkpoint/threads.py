"""Work in threads: one piece beside what goes on, or many of a kind by a few. Needs no torch.

Reading, writing and hashing let other threads run, so that a few of them keep the disk busy.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from optimus.launch.environment import available_cores

Item = TypeVar("Item")
Result = TypeVar("Result")

_FEW = 4
"""So many tasks are not worth a pool."""


class Task:
    """One piece of work in a thread of its own. Does not keep the process from ending."""

    def __init__(self, work: Callable[[], Any]) -> None:
        self._value: Any = None
        self._error: BaseException | None = None
        self._thread = threading.Thread(
            target=self._run, args=[work], name="optimus-save", daemon=True
        )
        self._thread.start()

    def _run(self, work: Callable[[], Any]) -> None:
        try:
            self._value = work()
        except BaseException as error:  # `value` raises it again
            self._error = error

    def wait(self, timeout_s: float | None = None) -> None:
        self._thread.join(timeout_s)

    @property
    def has_ended(self) -> bool:
        return not self._thread.is_alive()

    def value(self) -> Any:
        """What the work returned; raises what it raised."""
        assert self.has_ended
        if self._error is not None:
            raise self._error
        return self._value


class Stop:
    """Whether what threads do is still wanted; a `threading.Event` that can come too late."""

    def __init__(self) -> None:
        self._lock, self._set, self._claimed = threading.Lock(), False, False

    def set(self) -> bool:
        """Have them stop; False if the work was claimed before."""
        with self._lock:
            self._set = not self._claimed
            return self._set

    def is_set(self) -> bool:
        return self._set

    def claim(self) -> bool:
        """Nobody may stop it from here on; False if somebody has."""
        with self._lock:
            self._claimed = not self._set
            return self._claimed


def in_threads(
    function: Callable[[Item], Result], items: Sequence[Item], threads: int = 0
) -> Iterable[Result]:
    """`function` of every item, in their order; raises what the first that fails raises. `threads`
    0: two for each core that we may use, as half of them wait for the disk; at most 16."""
    if len(items) < _FEW or threads == 1:
        return [function(item) for item in items]
    with ThreadPoolExecutor(threads or min(16, 2 * available_cores())) as pool:
        return list(pool.map(function, items))
