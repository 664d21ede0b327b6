"""Reductions: sums of gradients over microbatches and ranks. The sum of a chunk is in the home tier
of the chunk.

Each loss term is already divided by the number of targets or microbatches in the global batch, so
every reduction is a plain sum. If the states are sharded, each of the n ranks of the reduce group
receives 1/n of the summed chunk, its piece. The ranks of the replica group, which have the same
shard of the states, then gather their pieces into this shard.

`ReduceOnce` reduces each buffer once per step, `ReducePerMicrobatch` after each microbatch.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Collection, Iterator, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from optimus.chunks.buffers import ChunkState, GradBuffer, StateTensor
from optimus.chunks.memory import Copy, Memory, Tier
from optimus.chunks.norm import squares_of
from optimus.chunks.optimizer import UpdateQueue
from optimus.chunks.residency import MAX_COPYING
from optimus.distributed.collectives import (
    Transfer,
    all_gather,
    all_reduce_sum,
    all_to_all,
    reduce_scatter_sum,
)

_MAX_IN_FLIGHT = 2
"""Largest number of buffers that are reduced at the same time. A backend can keep a copy of each of
these buffers."""


class ReduceOnce:
    """Adds up the gradients of microbatches locally, and reduces each buffer once per step. With
    `overlap`, backward continues during the reductions, and `finish` waits until all of them are
    complete.

    A reduction needs additional memory in three cases. If the gradients have another dtype than
    `dtype`, a converted copy of them is reduced. If the states are sharded and `grad` has another
    dtype than `dtype`, the result is received in a separate tensor. If several ranks have the same
    shard, each of these ranks receives a piece of the shard in a separate tensor, and `finish`
    gathers the pieces.
    """

    def __init__(self, dtype: torch.dtype, overlap: bool) -> None:
        self._buffers: list[GradBuffer] = []
        self._dtype = dtype
        self._max_in_flight = _MAX_IN_FLIGHT if overlap else 0
        self._in_flight: deque[tuple[GradBuffer, Transfer]] = deque()
        self._pieces: list[tuple[GradBuffer, Tensor]] = []

    def add(self, buffer: GradBuffer) -> None:
        self._buffers.append(buffer)

    def state_tensors(self) -> Iterator[StateTensor]:
        """Yield nothing: the strategy has no memory between steps."""
        return iter(())

    def temporary_bytes(self, buffer: GradBuffer) -> int:
        """Return the bytes on the device that the reduction of a buffer needs until it ends."""
        group, element = buffer.groups.reduce_group, self._dtype.itemsize
        if group.size == 1:
            return 0
        sent = 0 if buffer.grads.dtype is self._dtype else len(buffer.grads) * element
        if buffer.groups.shard_group.size == 1 or self._is_shard(buffer):
            return sent
        return sent + len(buffer.grads) // group.size * element

    def _is_shard(self, buffer: GradBuffer) -> bool:
        """Return True if a reduction writes its result to the gradient of the shard directly."""
        return buffer.groups.replica_group.size == 1 and buffer.grad.dtype is self._dtype

    @property
    def max_in_flight(self) -> int:
        """Largest number of buffers that are reduced at the same time."""
        return max(1, self._max_in_flight)

    def start(self) -> None:
        self._wait(0)  # a step that was abandoned may have left reductions in flight
        self._pieces.clear()
        for buffer in self._buffers:
            buffer.grads.zero_()

    def reduce(self, buffer: GradBuffer) -> None:
        """Start to reduce a buffer. Without `overlap`, also wait for the reduction. Call this
        method when no later backward of the step adds to the buffer."""
        group = buffer.groups.reduce_group
        if group.size == 1:
            return
        self._wait(max(0, self._max_in_flight - 1))
        sent = buffer.grads.to(self._dtype)
        if buffer.groups.shard_group.size == 1:
            transfer = all_reduce_sum(sent, group, async_op=True)
        else:
            is_shard = self._is_shard(buffer)
            piece = buffer.grad if is_shard else sent.new_empty(len(sent) // group.size)
            transfer = reduce_scatter_sum(piece, sent, group, async_op=True)
        self._in_flight.append((buffer, transfer))
        self._wait(self._max_in_flight)

    def finish(self) -> None:
        self._wait(0)
        for buffer, piece in self._pieces:
            all_gather(buffer.grad, piece.to(buffer.grad.dtype), buffer.groups.replica_group)
        self._pieces.clear()
        for buffer in self._buffers:
            all_reduce_sum(buffer.grad, buffer.groups.partial_group)

    def _wait(self, remaining: int) -> None:
        """Wait for reductions, the oldest first, until only `remaining` are in flight."""
        while len(self._in_flight) > remaining:
            buffer, transfer = self._in_flight.popleft()
            result = transfer.wait()
            into = buffer.grads if buffer.groups.shard_group.size == 1 else buffer.grad
            if result is into:
                continue
            if len(result) == len(into):
                into.copy_(result)
            else:  # `finish` gathers the pieces, so that all ranks gather at the same time
                self._pieces.append((buffer, result))


class _GradCopy(NamedTuple):
    """Gradients of a buffer from the start of their copy to the host until they are added to the
    sum."""

    buffer: GradBuffer
    values: Tensor
    """The tensor on the device that is being copied: `buffer.grads`, or a temporary tensor."""
    copy: Copy
    staging: Tensor
    """The host memory to which the gradients are copied."""


class ReducePerMicrobatch:
    """Reduces the gradients of each backward as soon as they are complete. Each of the n ranks of
    the reduce group keeps 1/n of the sum, in the home tier of the buffer. After a reduction, the
    buffer is set to zero or, with `frees`, freed until the next backward (ZeRO-2).

    With `is_ordered`, microbatches are added in the order of their numbers, so that the bits of the
    sum do not depend on the layout. With w ranks, microbatch i of rank d has the number i * w + d.
    Therefore, after each backward, every rank receives the contributions of ranks 0 to w-1 and adds
    them in rank order. Without `is_ordered`, the collective adds the contributions in `dtype`.

    With `rounds`, the gradients of each backward are rounded to bf16 once, before they are added.
    The gradients of a buffer whose home is the host are rounded before they are copied to the host,
    so that the copy moves 2 bytes per element. Without `rounds`, a buffer is not reduced if its
    home is the device and its reduce group has a single rank.
    """

    def __init__(
        self,
        is_ordered: bool,
        dtype: torch.dtype,
        memory: Memory,
        frees: bool,
        updates: UpdateQueue,
        rounds: bool = False,
    ) -> None:
        self._is_ordered, self._dtype, self._rounds = is_ordered, dtype, rounds
        self.memory, self._frees, self._updates = memory, frees, updates
        self._buffers: list[GradBuffer] = []
        self._pieces: dict[GradBuffer, Tensor] = {}
        self._outdated: set[GradBuffer] = set()
        """Buffers on the host whose piece still contains the sum of the last step. The update of
        that step can still be reading the piece."""
        self._copying: deque[_GradCopy] = deque()
        self._staging: list[Tensor] = []
        """Free page-locked host buffers, 1-D uint8, to which gradients can be copied."""
        self._staging_bytes = 0
        """Bytes of each buffer in `_staging`: the size of the largest gradients that are copied."""
        self._expected: dict[GradBuffer, int] = {}
        self._num_reduced: Counter[GradBuffer] = Counter()
        """Number of reductions of each buffer in the present step."""
        self.squares: dict[GradBuffer, Tensor] = {}
        """Results of `squares_of` for sums that are complete, by buffer."""

    def expect(self, buffer: GradBuffer, reductions: int) -> None:
        """Let the host compute the squares of a buffer's sum in the background, as soon as a step
        has reduced the buffer `reductions` times.

        This has an effect only if the home of the buffer is the host, and if the replica group and
        the partial group have a single rank. Only then is the piece of this rank the final sum of
        its shard. Code outside of this class that changes the sum must first call `forget`.
        """
        groups = buffer.groups
        is_whole = groups.replica_group.size == groups.partial_group.size == 1
        if buffer.home is not Tier.DEVICE and is_whole:
            self._expected[buffer] = reductions

    def forget(self, state: ChunkState) -> None:
        """Discard the squares and the early update of a chunk. Call this method before code outside
        of this class changes the sum, and after all reductions are complete."""
        if self.squares.pop(state, None) is not None:
            self._updates.discard(state.chunk.number)

    def add(self, buffer: GradBuffer) -> None:
        self._buffers.append(buffer)
        count = buffer.groups.reduce_group.size
        if count > 1 or buffer.home is not Tier.DEVICE or self._rounds:
            piece = buffer.grad
            if buffer.groups.replica_group.size > 1 or buffer.grad is buffer.grads:
                piece = self.memory.new(len(buffer.grads) // count, buffer.grad.dtype, buffer.home)
            self._pieces[buffer] = piece
            if buffer.home is not Tier.DEVICE:
                self._staging_bytes = max(self._staging_bytes, self.copied_bytes(buffer))
            if self.memory.has(buffer.grads):
                self._clear(buffer)

    def copied_bytes(self, buffer: GradBuffer) -> int:
        """Return the bytes of the gradients that a reduction of a buffer copies to the host. Until
        the copy is complete, these gradients are on the device, in the buffer or in a temporary
        tensor."""
        count = buffer.groups.reduce_group.size
        is_sum = count > 1 and not self._is_ordered
        length = len(buffer.grads) // count if is_sum else len(buffer.grads)
        if self._rounds:
            return length * torch.bfloat16.itemsize
        return length * (self._dtype if is_sum else buffer.grads.dtype).itemsize

    def _clear(self, buffer: GradBuffer) -> None:
        """Free a buffer, or set it to zero."""
        if self._frees:
            self.memory.free(buffer.grads)
        else:
            buffer.grads.zero_()

    def state_tensors(self) -> Iterator[StateTensor]:
        """Yield the tensors with this rank's pieces of the summed gradients. These tensors keep
        their memory between steps."""
        kept = "gradients" if self._frees else "deterministic"
        for buffer, piece in self._pieces.items():
            chunk = buffer.chunk if isinstance(buffer, ChunkState) else None
            yield StateTensor("tied" if chunk is None else kept, piece, chunk)

    def temporary_bytes(self, buffer: GradBuffer) -> int:
        """Return the bytes on the device that the reduction of a buffer needs until it ends."""
        group, length = buffer.groups.reduce_group, len(buffer.grads)
        rounded = self.copied_bytes(buffer) if self._rounds else 0
        if group.size == 1:
            return rounded
        if self._is_ordered:
            return buffer.grads.element_size() * length + rounded
        sent = 0 if buffer.grads.dtype is self._dtype else length
        return self._dtype.itemsize * (sent + length // group.size) + rounded

    @property
    def max_in_flight(self) -> int:
        """Largest number of buffers that are reduced at the same time."""
        return 1

    def start(self) -> None:
        self._complete_copies(0)  # copies of a step that was abandoned
        self.release()
        self._num_reduced.clear()
        for buffer in self._buffers:
            if buffer.home is Tier.DEVICE:
                self._pieces.get(buffer, buffer.grads).zero_()
            else:
                self._outdated.add(buffer)

    def frees(self, buffer: GradBuffer) -> bool:
        """Return True if a buffer has memory only from a backward to its reduction."""
        return self._frees and buffer in self._pieces

    @property
    def staging_bytes(self) -> int:
        """Bytes of host memory to which gradients are copied from the first step on."""
        return MAX_COPYING * self._staging_bytes

    def allocate(self, buffer: GradBuffer) -> None:
        """Allocate `buffer` and fill it with zeros if its memory is freed. Call this method before
        a backward adds gradients to the buffer."""
        while any(copying.values is buffer.grads for copying in self._copying):
            self._complete_copies(len(self._copying) - 1)
        if not self.memory.has(buffer.grads):
            self.memory.allocate(buffer.grads)
            buffer.grads.zero_()

    def limit_copies(self, num_bytes: float) -> None:
        """Wait for copies of gradients to the host, until the copies that are still in progress
        need at most `num_bytes` bytes on the device."""
        while sum(copying.values.nbytes for copying in self._copying) > num_bytes:
            self._complete_copies(len(self._copying) - 1)

    def reduce(self, buffer: GradBuffer) -> None:
        """Reduce a buffer after a backward pass, and add the result to this rank's piece of the sum
        of gradients. Then free the buffer, or set the buffer to zero."""
        if buffer not in self._pieces or not self.memory.has(buffer.grads):
            return
        if buffer.home is not Tier.DEVICE:  # frees memory of copied gradients before the reduction
            self._complete_copies(MAX_COPYING - 1)
        piece, group = self._pieces[buffer], buffer.groups.reduce_group
        num_contributions = group.size if self._is_ordered else 1
        if group.size == 1:
            received = buffer.grads
        elif self._is_ordered:
            received = torch.empty_like(buffer.grads)
            # On Intel GPUs, all-to-all has killed processes under expert parallelism (autotune.py).
            # On the first run on Intel GPUs, check that this call is safe.
            all_to_all(received, buffer.grads, group)
        else:
            sent = buffer.grads.to(self._dtype)
            received = sent.new_empty(len(piece))
            reduce_scatter_sum(received, sent, group)
        if self._rounds:
            received = received.to(torch.bfloat16)
        if buffer.home is Tier.DEVICE:
            for contribution in received.chunk(num_contributions):
                piece.add_(contribution)
            self._clear(buffer)
            return
        self._num_reduced[buffer] += 1
        is_last = self._num_reduced[buffer] == self._expected.get(buffer)
        while len(self._staging) < MAX_COPYING - len(self._copying):
            self._staging.append(self.memory.new(self._staging_bytes, torch.uint8, Tier.HOST))
        staging = self._staging.pop()
        values = staging[: received.nbytes].view(received.dtype)
        then = partial(self._add, buffer, values.chunk(num_contributions), is_last)
        copy = self.memory.copy(values, received, then=then)
        self._copying.append(_GradCopy(buffer, received, copy, staging))
        if received is not buffer.grads:
            self._clear(buffer)

    def _add(self, buffer: GradBuffer, contributions: Sequence[Tensor], is_last: bool) -> None:
        """Add contributions, which are in host memory, to this rank's piece of the sum of `buffer`.
        `is_last` is True if the step is expected to have no further contributions (see
        `expect`)."""
        piece = self._pieces[buffer]
        if self._is_outdated(buffer):
            # Write x + 0, which has the bits of a sum that begins with zeros, and saves the pass
            # that would set the piece to zero.
            for into, values in _blocks(piece, contributions[0]):
                if values.dtype is into.dtype:
                    torch.add(values, 0.0, out=into)
                else:
                    into.copy_(values).add_(0.0)
            contributions = contributions[1:]
        for contribution in contributions:
            for into, values in _blocks(piece, contribution):
                into.add_(values)
        if is_last:
            self.squares[buffer] = squares_of(piece, self._is_ordered)
            if isinstance(buffer, ChunkState):
                self._updates.begin_early(buffer)
        elif self.squares.pop(buffer, None) is not None and isinstance(buffer, ChunkState):
            self._updates.discard(buffer.chunk.number)

    def _complete_copies(self, remaining: int) -> None:
        """Wait for copies of gradients to the host, the oldest first, until only `remaining` are in
        progress. Free the buffers on the device whose copies are complete."""
        while len(self._copying) > remaining:
            buffer, values, copy, staging = self._copying[0]
            copy.wait()
            self._copying.popleft()
            self._staging.append(staging)
            if values is buffer.grads:
                self._clear(buffer)

    def _is_outdated(self, buffer: GradBuffer) -> bool:
        """Return True if this rank's piece still contains the sum of the last step, which the
        caller must then overwrite. In this case, return only after the update of that step has read
        the piece."""
        if buffer not in self._outdated:
            return False
        self._outdated.remove(buffer)
        if isinstance(buffer, ChunkState):
            self._updates.wait(buffer.chunk.number)
        return True

    def finish(self) -> None:
        self._complete_copies(0)
        for buffer in self._buffers:
            if self._is_outdated(buffer):
                self._pieces[buffer].zero_()
            groups, memory = buffer.groups, self.memory
            if buffer in self._pieces:
                if buffer.grad is buffer.grads and not self.memory.has(buffer.grads):
                    self.memory.allocate(buffer.grads)
                whole = self._pieces[buffer]
                if groups.replica_group.size > 1:
                    piece = memory.on_device(whole)
                    is_here = buffer.home is Tier.DEVICE
                    whole = buffer.grad if is_here else piece.new_empty(len(buffer.grad))
                    all_gather(whole, piece, groups.replica_group)
                memory.store(buffer.grad, whole)
            if groups.partial_group.size > 1:
                whole = memory.on_device(buffer.grad)
                all_reduce_sum(whole, groups.partial_group)
                memory.store(buffer.grad, whole)

    def release(self) -> None:
        """Free the buffers that `finish` has allocated for the update, and the squares."""
        self.squares.clear()
        for buffer in self._pieces:
            if self.memory.has(buffer.grads):
                self._clear(buffer)


def _blocks(piece: Tensor, values: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield pairs of corresponding blocks of `piece` and `values`. If their dtypes are equal, yield
    a single pair with the whole tensors. For operands of different dtypes, torch first converts a
    whole operand. Blocks fit in a CPU cache, so an operation on blocks is three times as fast as on
    whole tensors."""
    length = len(piece) if values.dtype is piece.dtype else _BLOCK
    return zip(piece.split(length), values.split(length), strict=True)


_BLOCK = 1 << 18
"""Number of elements of a block."""


def most_gradients(
    together: Sequence[Collection[int]],
    sizes: Sequence[int] | np.ndarray,
    copied: Sequence[int] | np.ndarray,
    reduction: int,
) -> np.ndarray:
    """Return the largest number of bytes on the device that buffers and their reductions need
    during a backward. Element n of the result is for the last n buffers, from n = 0 to the number
    of buffers.

    While a segment computes, the gradients of other segments are copied to the host, at most
    `MAX_COPYING` buffers at the same time. A reduction waits until only `MAX_COPYING` - 1 buffers
    are being copied.

    Args:
        together: For each segment, the buffers that have memory during its backward.
        sizes: Bytes of each buffer.
        copied: `ReducePerMicrobatch.copied_bytes` of each buffer; 0 for a buffer whose gradients
            stay on the device.
        reduction: Bytes of the temporary tensors of a reduction.
    """
    is_now = np.zeros((len(together), len(sizes) + 1), dtype=bool)
    for row, buffers in zip(is_now, together, strict=True):
        row[[len(sizes) - buffer for buffer in buffers]] = True
    now = np.where(is_now, [0, *sizes[::-1]], 0).cumsum(axis=1)
    others = np.where(is_now, 0, [0, *copied[::-1]])
    in_flight = before = np.zeros_like(now)
    for _ in range(MAX_COPYING):
        largest = np.maximum.accumulate(others, axis=1)
        in_flight, before = in_flight + largest, in_flight
        # Replace each value that exceeds all earlier values of its row by the largest earlier value
        # (0 if there is no earlier value).
        earlier = np.concatenate([np.zeros_like(largest[:, :1]), largest[:, :-1]], axis=1)
        others = np.minimum(others, earlier)
    return (now + np.maximum(in_flight, before + reduction)).max(axis=0, initial=reduction)
