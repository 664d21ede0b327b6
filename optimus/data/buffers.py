"""Memory for batches, used again once nothing refers to the batch that was in it.

A buffer of some MiB that is made anew each time is mapped, cleared page by page and unmapped each
time, which costs more than filling it.
"""

from __future__ import annotations

import weakref
from collections import deque

import numpy as np

_KEPT = 4  # one read, one waiting, one used, and one that the user holds a little longer


class BufferPool:
    """Arrays of one size. What is lent is never written to while anything refers to it.

    The end of the last reference, to the array or to any view or tensor of it, is what gives the
    memory back, in whichever thread that happens.
    """

    def __init__(self, items: int, dtype: type[np.generic]):
        """`items` of `dtype` an array; memory is taken from the system as it is written to."""
        self._items, self._dtype = items, dtype
        self._free: deque[np.ndarray] = deque(maxlen=_KEPT)

    def take(self) -> np.ndarray:
        """An array [items] of unknown content."""
        try:
            memory = self._free.pop()
        except IndexError:
            memory = np.empty(self._items, self._dtype)
        # Views of an array refer to what owns the memory, not to the array; through a memoryview,
        # which numpy does not look behind, they refer to `lent`.
        lent = np.frombuffer(memory.data, self._dtype)
        weakref.finalize(lent, self._free.append, memory).atexit = False
        return lent
