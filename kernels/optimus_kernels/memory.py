"""Reuse of large CPU buffers, to avoid the page faults of newly allocated memory.

The C library returns large freed buffers to the operating system. This module keeps the buffers
that it allocates, and reuses a buffer when no tensor refers to the buffer.

All buffers together take up to 1.5 times the peak memory of the buffers in use. `release` frees the
buffers that no tensor refers to. The storage of a tensor that uses a buffer cannot be resized.
"""

from __future__ import annotations

import contextlib
import math
import mmap
import sys
import threading
from collections.abc import Sequence

import torch
from torch import Tensor

SMALLEST = 1 << 20
"""Smallest size in bytes of a tensor that uses a buffer of this module. For smaller tensors, a
buffer is not faster than torch's allocator."""
_GRAIN = 1 << 21
"""Size in bytes of a huge page. The size of each buffer is a multiple of this size."""
_SLACK = 1.25
"""Maximum ratio of the size of a reused buffer to the requested size. The requested size is rounded
up to a multiple of _GRAIN."""
# A limit of 1.0 would release the buffers of the forward pass during backward.
_SPARE = 1.5
"""Limit of the total size of all buffers, as a multiple of the peak size of the buffers in use.
Above the limit, free buffers are released."""
_MAX_IDLE_REQUESTS = 4096
"""A free buffer is idle if its last use was more than this number of buffer requests ago. All idle
buffers are released when a new buffer is created."""

_lock = threading.Lock()
_buffers: list[_Buffer] = []
_requests = 0
_most_used = 0


class _Buffer:
    """Memory of one buffer. The buffer is free if no tensor refers to `memory`."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            with contextlib.suppress(OSError):  # Linux without huge pages
                self.memory.madvise(mmap.MADV_HUGEPAGE)
        self.last_request = 0

    def count(self) -> int:
        """Return the reference count of `memory`. Each tensor that uses the buffer adds 1."""
        return sys.getrefcount(self.memory)

    def free(self) -> bool:
        return self.count() == _REFERENCES_WHEN_FREE


_REFERENCES_WHEN_FREE = _Buffer(mmap.PAGESIZE).count()


def empty(shape: Sequence[int], like: Tensor) -> Tensor:
    """Return an uninitialized contiguous tensor with the dtype and device of `like`. Large tensors
    on a CPU use buffers of this module."""
    size = math.prod(shape) * like.element_size()
    if not like.is_cpu or size < SMALLEST:
        return like.new_empty(shape)
    global _requests
    with _lock:
        _requests += 1
        buffer = _find(size)
        buffer.last_request = _requests
        count = math.prod(shape)
        return torch.frombuffer(buffer.memory, dtype=like.dtype, count=count).view(shape)


def release() -> int:
    """Free every buffer that no tensor refers to. Return the number of bytes that were freed."""
    global _most_used
    with _lock:
        _most_used = 0
        return _drop([buffer for buffer in _buffers if buffer.free()])


def total_bytes() -> int:
    """Return the size of all buffers in bytes, including free buffers."""
    return sum(buffer.size for buffer in _buffers)


def _find(size: int) -> _Buffer:
    """Return the smallest free buffer that has from `size` to _SLACK * `size` bytes, or a new
    buffer if there is no such buffer. `size` is rounded up to a multiple of _GRAIN."""
    global _most_used
    size = -(-size // _GRAIN) * _GRAIN
    free = [buffer for buffer in _buffers if buffer.free()]
    fitting = [buffer for buffer in free if size <= buffer.size <= size * _SLACK]
    best = min(fitting, key=lambda buffer: buffer.size, default=None)
    in_use = total_bytes() - sum(buffer.size for buffer in free)
    _most_used = max(_most_used, in_use + (best.size if best else size))
    if best:
        return best
    # Release the least recently used buffers above the limit, and all idle buffers.
    excess = total_bytes() + size - _SPARE * _most_used
    released = []
    for buffer in sorted(free, key=lambda buffer: buffer.last_request):
        if excess > 0 or _requests - buffer.last_request > _MAX_IDLE_REQUESTS:
            released.append(buffer)
            excess -= buffer.size
    _drop(released)
    buffer = _Buffer(size)
    _buffers.append(buffer)
    return buffer


def _drop(released: list[_Buffer]) -> int:
    """Unmap free buffers, remove them from `_buffers`, and return their total size in bytes."""
    for buffer in released:
        _buffers.remove(buffer)
        buffer.memory.close()
    return sum(buffer.size for buffer in released)
