"""Reuse of large CPU buffers: fresh memory costs a page fault every 4 KiB.

Measured at D 2048, F 1024, E 64 in bf16: fresh buffers for weight gradients took 45 % of backward.
The C library returns buffers of this size to the kernel when they are freed and maps new ones in
the next step. This module keeps them, and reuses a buffer once no tensor refers to it: a `.grad`, a
view or a saved activation keeps its buffer like any other memory.

The cost: the process keeps at most 1.5 times the memory that its largest step used at once, also
during evaluation and after a model is deleted. `release` (`optimus_kernels.release_memory` for
users) frees unused buffers; nothing here calls it, because the next step would allocate them again.
The tensors have storage of a fixed size: `untyped_storage().resize_` raises.
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
"""Bytes below which torch's allocator is as fast."""
_GRAIN = 1 << 21
"""Sizes are rounded up to a multiple of this, a huge page, so that slightly different sizes share
buffers."""
_SLACK = 1.25
"""A free buffer serves a request whose rounded size is at least 1/1.25 of the buffer's."""
_SPARE = 1.5
"""Limit of the size of all buffers, as a multiple of the most memory that tensors used at one time.
Above it the least recently used free buffers are released. A limit of 1.0 would release the forward
pass's buffers during backward."""
_MAX_IDLE_REQUESTS = 4096
"""Number of requests after which an unused buffer is released."""

_lock = threading.Lock()
_buffers: list[_Buffer] = []
_requests = 0
_most_used = 0


class _Buffer:
    """Memory that other processes do not share. Each tensor made from it holds a reference to
    `memory`; without such references the buffer is free."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            with contextlib.suppress(OSError):  # Linux without huge pages refuses
                self.memory.madvise(mmap.MADV_HUGEPAGE)
        self.last_request = 0

    def count(self) -> int:
        """Return the reference count of `memory`. Each tensor made from it adds one reference to
        the `_REFERENCES_WHEN_FREE` of a buffer without tensors."""
        return sys.getrefcount(self.memory)

    def free(self) -> bool:
        return self.count() == _REFERENCES_WHEN_FREE


def _references_when_free() -> int:
    unused = _Buffer(mmap.PAGESIZE)
    return unused.count()


_REFERENCES_WHEN_FREE = _references_when_free()


def empty(shape: Sequence[int], like: Tensor) -> Tensor:
    """Return an uninitialized contiguous tensor with the dtype and device of `like`; large ones on
    a CPU use the buffers of this module."""
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
    """Free every buffer that no tensor refers to, and return the number of bytes freed."""
    global _most_used
    with _lock:
        _most_used = 0
        return _drop([buffer for buffer in _buffers if buffer.free()])


def total_bytes() -> int:
    """Return the size of all buffers in bytes, including free ones."""
    return sum(buffer.size for buffer in _buffers)


def _find(size: int) -> _Buffer:
    """Return a free buffer that fits `size` bytes, or else a new one. Before a new one is made,
    free buffers are released that exceed the limit of `_SPARE` or have not been used for
    `_MAX_IDLE_REQUESTS` requests."""
    global _most_used
    size = -(-size // _GRAIN) * _GRAIN
    free = [buffer for buffer in _buffers if buffer.free()]
    fitting = [buffer for buffer in free if size <= buffer.size <= size * _SLACK]
    best = min(fitting, key=lambda buffer: buffer.size, default=None)
    in_use = total_bytes() - sum(buffer.size for buffer in free)
    _most_used = max(_most_used, in_use + (best.size if best else size))
    if best:
        return best
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
    """Unmap buffers to which only `_buffers` and the caller's list refer; return their size in
    bytes."""
    for buffer in released:
        _buffers.remove(buffer)
        buffer.memory.close()
    return sum(buffer.size for buffer in released)
