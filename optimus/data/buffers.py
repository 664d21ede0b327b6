"""Pool of arrays. The memory of an array is reused when the array is no longer referenced.

Reuse saves time: the operating system must map and clear the pages of each new large array.
"""

from __future__ import annotations

import weakref
from collections import deque

import numpy as np

_MAX_FREE = 4  # arrays: being filled, waiting, in use, and still kept by the user


class BufferPool:
    """Pool of arrays of one length and dtype. New arrays reuse the memory of deleted arrays.

    An array counts as deleted when nothing refers to the array, to its views, or to tensors that
    share its memory. Any thread may delete the last reference.
    """

    def __init__(self, length: int, dtype: type[np.generic]):
        """Create an empty pool of arrays with `length` elements. `take` allocates arrays."""
        self._length, self._dtype = length, dtype
        self._free: deque[np.ndarray] = deque(maxlen=_MAX_FREE)

    def take(self) -> np.ndarray:
        """Return an uninitialized array of shape [length], in the memory of a deleted array if
        possible."""
        try:
            memory = self._free.pop()
        except IndexError:
            memory = np.empty(self._length, self._dtype)
        # `buffer` must live as long as its views. A view keeps only its base alive, which is the
        # array at the end of the chain of views. The memoryview ends this chain at `buffer`.
        buffer = np.frombuffer(memory.data, self._dtype)
        weakref.finalize(buffer, self._free.append, memory).atexit = False
        return buffer
