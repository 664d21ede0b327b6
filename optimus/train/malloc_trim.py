"""Return free memory of glibc's fragmented heap to the operating system, with malloc_trim.

oneDNN allocates small, long-lived blocks between the tensors of an update. These blocks fragment
the heap, so the heap grows during a run. docs/benchmarks/step.md reports the memory use with and
without this module.
"""

from __future__ import annotations

import ctypes
import resource
from pathlib import Path

_MIN_UPDATES = 16
"""Minimum number of updates between two calls of malloc_trim. A call takes a tenth of a second."""


class MallocTrim:
    """Calls glibc's malloc_trim between updates if the memory of this process has grown. Does
    nothing without glibc's malloc or without /proc."""

    def __init__(self) -> None:
        self._trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        self._limit = 0
        self._updates = _MIN_UPDATES
        """Number of updates since the last trim. The initial value allows a trim after the first
        update."""

    def after_update(self) -> None:
        """Call malloc_trim after the first update. Call it again if the memory of this process has
        grown by more than an eighth since the update that followed the last call. At least
        _MIN_UPDATES updates pass between two calls."""
        if self._trim is None or not (used := private_bytes()):
            return
        self._updates += 1
        if self._updates == 1:  # the update after a trim requests new pages for its tensors
            self._limit = used + used // 8
        if used > self._limit and self._updates > _MIN_UPDATES:
            self._trim(0)
            self._updates = 0


def private_bytes() -> int:
    """Return the resident memory of this process in bytes, without file-backed and shared pages.
    Return 0 if the memory is unknown."""
    try:
        _, resident, shared, *_ = Path("/proc/self/statm").read_text().split()
    except OSError:
        return 0
    return (int(resident) - int(shared)) * resource.getpagesize()
