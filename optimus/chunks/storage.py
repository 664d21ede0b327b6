"""Memory of a flat buffer that comes and goes under views of it, which stay as they are.

Parameters and gradients are views of chunks for good, and autograd saves such views. Freed storage
gives its bytes back and a view of it must not be touched; refilled storage, wherever it lies then,
makes all of them valid again. (Exchanging `.data` of views instead loses those that autograd or
recomputation holds.)
"""

from __future__ import annotations

import torch
from torch import Tensor


class Memory:
    """Frees and allocates whole buffers.

    A freed buffer that is read crashes the process. With `poison`, for tests, it keeps its memory
    and is filled with NaN, so that a use of it shows in what is computed.
    """

    def __init__(self, poison: bool = False) -> None:
        self.poison = poison
        self._freed: set[int] = set()

    def free(self, flat: Tensor) -> None:
        """Give the memory of a buffer back; its contents are lost."""
        storage = flat.untyped_storage()
        self._freed.add(storage._cdata)
        if self.poison:
            flat.fill_(torch.nan)
        else:
            storage.resize_(0)

    def allocate(self, flat: Tensor) -> None:
        """Give a freed buffer memory again, of any contents."""
        storage = flat.untyped_storage()
        self._freed.discard(storage._cdata)
        if not self.poison:
            storage.resize_(flat.numel() * flat.itemsize)

    def holds(self, flat: Tensor) -> bool:
        """Whether a buffer has memory, or would have without poison."""
        return flat.untyped_storage()._cdata not in self._freed


class Kept(Memory):
    """Leaves every buffer its memory: what is given back is set to zero instead."""

    def free(self, flat: Tensor) -> None:
        flat.zero_()

    def allocate(self, flat: Tensor) -> None:
        """It has its memory."""

    def holds(self, flat: Tensor) -> bool:
        return True
