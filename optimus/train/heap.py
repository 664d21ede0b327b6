"""Memory that glibc's heap keeps free but can no longer use, given back to the system.

Small blocks that live long settle between an update's tensors: oneDNN keeps a compiled product for
each number of rows that an expert got, 120 KB each of the latest 1024. Where one stands, the next
tensor does not fit, and the heap grows, at each such place by up to 32 MB; larger blocks are mapped
by themselves. docs/benchmarks/step.md has what a long run held with and without this.
"""

from __future__ import annotations

import ctypes
import resource
from pathlib import Path

_EVERY = 16
"""Updates at least from one time to the next: giving back takes a tenth of a second."""


class Heap:
    """This process's own memory from update to update. No-op where malloc is not glibc's, or where
    nothing tells what a process holds."""

    def __init__(self) -> None:
        self._trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        self._limit = 0
        self._updates = _EVERY
        """Since the last time."""

    def after_update(self) -> None:
        """Give free pages back if the process holds an eighth more than it did after the first
        update behind the last time.

        What an update takes it touches anew then, as it always does with blocks beyond 32 MB.
        """
        if self._trim is None or not (held := own_bytes()):
            return
        self._updates += 1
        if self._updates == 1:
            self._limit = held + held // 8
        if held > self._limit and self._updates > _EVERY:
            self._trim(0)
            self._updates = 0


def own_bytes() -> int:
    """Resident memory of this process, without pages of files and shared ones; 0: not known."""
    try:
        _, resident, shared, *_ = Path("/proc/self/statm").read_text().split()
    except OSError:
        return 0
    return (int(resident) - int(shared)) * resource.getpagesize()
