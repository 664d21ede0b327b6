"""Large CPU buffers that are used again: fresh memory costs a page fault every 4 KiB.

Measured at D 2048, F 1024, E 64 in bf16: fresh weight-gradient buffers took 45 % of backward. The
C library gives buffers of this size back to the kernel when they are freed and asks again at the
next step. Here they stay, and each is handed out again once no tensor refers to it: a `.grad`, a
view or a saved activation keeps its buffer like any other memory.

What that costs: the process keeps at most 1.5 times what was in use at once in its largest step,
also while it evaluates or after a model is gone. `release`, for users
`optimus_kernels.release_memory`, gives back what is free; nothing here calls it, since the next
step would pay again. Tensors made here are of fixed storage: `untyped_storage().resize_` raises.
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
"""Bytes below which torch's allocator does as well."""
_GRAIN = 1 << 21
"""Sizes are rounded up to this: a huge page, and so that sizes that vary a little fit again."""
_SLACK = 1.25
"""A free buffer serves a request that, rounded up, is at least 1/1.25 of its size."""
_SPARE = 1.5
"""All buffers together are at most this much of what was in use at once, or the free ones that were
taken longest ago are given back. At 1.0 a forward pass's buffers would go in the backward pass."""
_OLD = 4096
"""Requests after which a buffer that nobody wanted is given back."""

_lock = threading.Lock()
_buffers: list[_Buffer] = []
_requests = 0
_most_used = 0


class _Buffer:
    """Private memory of this process. Tensors made of it hold references to `memory`."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            with contextlib.suppress(OSError):  # kernels built without huge pages refuse
                self.memory.madvise(mmap.MADV_HUGEPAGE)
        self.last = 0

    def count(self) -> int:
        """References to the memory, tensors' and our own."""
        return sys.getrefcount(self.memory)

    def free(self) -> bool:
        return self.count() == _OWN_REFERENCES


def _own_references() -> int:
    unused = _Buffer(mmap.PAGESIZE)
    return unused.count()


_OWN_REFERENCES = _own_references()


def empty(shape: Sequence[int], like: Tensor) -> Tensor:
    """An uninitialised dense tensor of like's dtype and device; on a CPU from the buffers here."""
    size = math.prod(shape) * like.element_size()
    if not like.is_cpu or size < SMALLEST:
        return like.new_empty(shape)
    global _requests
    with _lock:
        _requests += 1
        buffer = _find(size)
        buffer.last = _requests
        count = math.prod(shape)
        return torch.frombuffer(buffer.memory, dtype=like.dtype, count=count).view(shape)


def release() -> int:
    """Give every buffer back that no tensor refers to; returns the bytes."""
    global _most_used
    with _lock:
        _most_used = 0
        return _drop([buffer for buffer in _buffers if buffer.free()])


def held() -> int:
    """Bytes of all buffers, free ones included."""
    return sum(buffer.size for buffer in _buffers)


def _find(size: int) -> _Buffer:
    """A free buffer that fits, or a new one, for which others may have to go."""
    global _most_used
    size = -(-size // _GRAIN) * _GRAIN
    free = [buffer for buffer in _buffers if buffer.free()]
    fitting = [buffer for buffer in free if size <= buffer.size <= size * _SLACK]
    found = min(fitting, key=lambda buffer: buffer.size, default=None)
    in_use = held() - sum(buffer.size for buffer in free)
    _most_used = max(_most_used, in_use + (found.size if found else size))
    if found:
        return found
    too_much = held() + size - _SPARE * _most_used
    gone = []
    for buffer in sorted(free, key=lambda buffer: buffer.last):
        if too_much > 0 or _requests - buffer.last > _OLD:
            gone.append(buffer)
            too_much -= buffer.size
    _drop(gone)
    made = _Buffer(size)
    _buffers.append(made)
    return made


def _drop(gone: list[_Buffer]) -> int:
    """These go; nobody but `_buffers` and the caller's list refers to them."""
    for buffer in gone:
        _buffers.remove(buffer)
        buffer.memory.close()
    return sum(buffer.size for buffer in gone)
