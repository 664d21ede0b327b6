"""Return memory to the system that glibc's heap keeps free and can no longer use.

Small blocks that live long are allocated between the tensors of an update: oneDNN caches a compiled
product for each number of rows that an expert got, 120 KB each, the latest 1024. The next tensor
does not fit into the gap before such a block, so the heap grows, by up to 32 MB a gap. Larger
blocks have mappings of their own. docs/benchmarks/step.md gives the memory of a long run with and
without this module.
"""

from __future__ import annotations

import ctypes
import resource
from pathlib import Path

_MIN_UPDATES = 16
"""Least number of updates between two trims: a trim takes a tenth of a second."""


class MallocTrim:
    """Trims this process's heap between updates. Does nothing without glibc's malloc or without
    /proc."""

    def __init__(self) -> None:
        self._trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        self._limit = 0
        self._updates = _MIN_UPDATES
        """Updates since the last trim."""

    def after_update(self) -> None:
        """Trim if the process uses an eighth more memory than after the first update that followed
        the last trim.

        The next update touches its pages again, as it always does for blocks beyond 32 MB.
        """
        if self._trim is None or not (used := private_bytes()):
            return
        self._updates += 1
        if self._updates == 1:
            self._limit = used + used // 8
        if used > self._limit and self._updates > _MIN_UPDATES:
            self._trim(0)
            self._updates = 0


def private_bytes() -> int:
    """Return the resident memory of this process without file and shared pages; 0 if unknown."""
    try:
        _, resident, shared, *_ = Path("/proc/self/statm").read_text().split()
    except OSError:
        return 0
    return (int(resident) - int(shared)) * resource.getpagesize()
