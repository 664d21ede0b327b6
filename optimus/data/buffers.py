"""Pool of arrays. The memory of an array is reused when the array is no longer referenced.

Reuse saves time: the operating system must map and clear the pages of each new large array.
"""

from __future__ import annotations

import weakref
from collections import deque

import numpy as np

_MAX_FREE = 4
"""Largest number of unused arrays that a pool keeps. A loader uses up to four arrays at a time: the
array that its thread fills, an array in its queue, the array of the current updates, and an array
of earlier updates that the caller still references."""


class BufferPool:
    """Pool of arrays that all have the same length and dtype. New arrays reuse the memory of
    deleted arrays.

    An array counts as deleted when nothing refers to the array, to a view of the array, or to a
    tensor that shares the memory of the array. Any thread can delete the last reference.
    """

    def __init__(self, length: int, dtype: type[np.generic]):
        """Create an empty pool of arrays with `length` elements. `take` allocates arrays."""
        self._length, self._dtype = length, dtype
        self._free: deque[np.ndarray] = deque(maxlen=_MAX_FREE)

    def take(self) -> np.ndarray:
        """Return an uninitialized array of shape [length], in the memory of a deleted array if
        possible. Otherwise, the memory is new."""
        try:
            memory = self._free.pop()
        except IndexError:
            memory = np.empty(self._length, self._dtype)
        # Each view of `buffer` must keep `buffer` alive. If the base of `buffer` were an array, as
        # for `buffer = memory[:]`, a view of `buffer` would refer only to that base. The base of
        # `buffer` is a memoryview, so a view of `buffer` refers to `buffer`.
        buffer = np.frombuffer(memory.data, self._dtype)
        weakref.finalize(buffer, self._free.append, memory).atexit = False
        return buffer
