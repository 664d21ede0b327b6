"""A checkpoint's files compared with its checksums, by several threads. Needs no torch.

Reading and hashing let other threads run, so that a few of them keep the disk busy.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")

_FEW = 4
"""So many tasks are not worth a pool."""


def default_threads() -> int:
    """Two for each core that we may use, as half of them wait for the disk; at most 16."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return min(16, 2 * (cores or 1))


def in_threads(
    function: Callable[[Item], Result], items: Sequence[Item], threads: int = 0
) -> Iterable[Result]:
    """`function` of every item, in their order; raises what the first that fails raises."""
    if len(items) < _FEW or threads == 1:
        return [function(item) for item in items]
    with ThreadPoolExecutor(threads or default_threads()) as pool:
        return list(pool.map(function, items))
