"""Device memory of gradients and of their reductions during a backward, computed only from sizes.

`GradReducer.temporary_bytes` counts the same bytes for the gradient buffers of a real run. Tests
compare the two numbers.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from optimus.config import Config
from optimus.config.hardware import BYTES


class Buffer(NamedTuple):
    """Buffer of gradients that are reduced together."""

    length: int
    """Number of elements, with padding."""
    dtype: str
    reduce: int
    """Number of ranks over which the gradients are summed."""
    shard: int
    """Number of ranks over which the optimizer states are divided."""
    stage: int
    """Index of the pipeline stage."""
    segments: tuple[int, int]
    """Indices of the first and the last model segment (embedding, block or head) with parameters
    whose gradients are in the buffer."""


class GradientMemory:
    """Memory that gradients and their reductions need only during a backward, for any rank whose
    states are all on the device."""

    def __init__(self, config: Config) -> None:
        optim, train = config.optim, config.train
        self._dtype = optim.grad_reduce_dtype
        self._overlap, self._deterministic = optim.overlap, train.deterministic
        self._frees = optim.resident != "all"
        self._rounds = config.offload.rounds_gradients(train)

    def bytes(self, buffers: Sequence[Buffer], by_segment: bool) -> int:
        """Return the largest number of bytes on the device during a backward, in addition to the
        bytes that are allocated between steps.

        Args:
            buffers: All buffers of the rank.
            by_segment: True if buffers are allocated and reduced segment by segment, False if they
                are allocated and reduced stage by stage (`GradReducer.attach`).
        """
        several = any(buffer.reduce > 1 for buffer in buffers)
        reduces_each = self._frees or self._rounds or (self._deterministic and several)
        if reduces_each:
            sizes = sorted(map(self._reduced_after_each, buffers))
            reduction = sum(sizes[-1:])
        else:
            sizes = sorted(map(self._reduced_once, buffers))
            reduction = sum(sizes[-2 if self._overlap else -1 :])
        if not self._frees:
            return reduction
        freed = [buffer for buffer in buffers if buffer.reduce > 1 or self._rounds]
        together = _by_segment(freed) if by_segment else _by_stage(freed)
        most = max((sum(b.length * BYTES[b.dtype] for b in live) for live in together), default=0)
        return most + reduction

    def _reduced_once(self, buffer: Buffer) -> int:
        """Return the bytes of temporary memory that a reduction once per step needs for a buffer
        (`ReduceOnce`)."""
        if buffer.reduce == 1:
            return 0
        is_shard = buffer.reduce == buffer.shard and self._dtype == "fp32"
        piece = 0 if buffer.shard == 1 or is_shard else buffer.length // buffer.reduce
        return self._sent(buffer) + piece * BYTES[self._dtype]

    def _sent(self, buffer: Buffer) -> int:
        """Return the bytes of a copy of the gradients in `optim.grad_reduce_dtype`; 0 if the buffer
        has this dtype."""
        return 0 if buffer.dtype == self._dtype else buffer.length * BYTES[self._dtype]

    def _reduced_after_each(self, buffer: Buffer) -> int:
        """Return the bytes of temporary memory that a reduction after each microbatch needs for a
        buffer (`ReducePerMicrobatch`)."""
        is_sum = buffer.reduce > 1 and not self._deterministic
        length = buffer.length // buffer.reduce if is_sum else buffer.length
        rounded = BYTES["bf16"] * length if self._rounds else 0
        if buffer.reduce == 1:
            return rounded
        if self._deterministic:
            return buffer.length * BYTES[buffer.dtype] + rounded
        piece = buffer.length // buffer.reduce * BYTES[self._dtype]
        return self._sent(buffer) + piece + rounded


def _by_segment(buffers: Sequence[Buffer]) -> Iterator[Iterable[Buffer]]:
    """For each segment whose backward allocates a buffer, yield the buffers that exist during this
    backward."""
    for now in {buffer.segments[1] for buffer in buffers}:
        yield [b for b in buffers if b.segments[0] <= now <= b.segments[1]]


def _by_stage(buffers: Sequence[Buffer]) -> Iterator[Iterable[Buffer]]:
    """For each stage, yield the buffers that exist during its backward."""
    for stage in {buffer.stage for buffer in buffers}:
        yield [b for b in buffers if b.stage == stage]
