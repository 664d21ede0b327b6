"""AdamW with the hyperparameters of torch's parameter groups, for the chunk engine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch

from optimus.chunks.buffers import ChunkState, ShardBuffers
from optimus_kernels import adamw_


class Hyperparameters(NamedTuple):
    """Hyperparameters of AdamW for a parameter in one update."""

    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    step: int
    """Number of updates of the parameter, including this one, for the bias correction."""


class _Range(NamedTuple):
    """Adjacent parameters of a chunk with the same hyperparameters."""

    start: int
    stop: int
    hyperparameters: Hyperparameters


class GroupAdamW:
    """`optimus.chunks.optimizer.Optimizer` whose hyperparameters may differ between parameters.

    As in torch, a parameter without a gradient is not updated, and its updates are counted
    separately.
    """

    moments: Mapping[str, torch.dtype] = {"exp_avg": torch.float32, "exp_avg_sq": torch.float32}

    def __init__(self) -> None:
        self.num_updates = 0
        self._ranges: dict[int, list[_Range]] = {}

    def set(
        self, chunks: Sequence[ChunkState], hyperparameters: Mapping[str, Hyperparameters]
    ) -> None:
        """Set the hyperparameters of the next update of all chunks. All earlier updates must be
        complete.

        Args:
            chunks: All chunks.
            hyperparameters: Those of each parameter to update, by name.
        """
        self._ranges = {}
        for chunk in chunks:
            ranges: list[_Range] = []
            ends = [slot.start for slot in chunk.chunk.slots[1:]] + [chunk.chunk.length]
            for slot, end in zip(chunk.chunk.slots, ends, strict=True):
                if (of_slot := hyperparameters.get(slot.name)) is None:
                    continue
                # The padding after a parameter is updated too: it is zero and stays zero.
                last = ranges[-1] if ranges else None
                if last and last.stop == slot.start and last.hyperparameters == of_slot:
                    ranges[-1] = last._replace(stop=end)
                else:
                    ranges.append(_Range(slot.start, end, of_slot))
            self._ranges[chunk.chunk.number] = ranges

    def update(self, state: ChunkState, lr: float, grad_scale: float) -> None:
        """As `Optimizer.update`; `lr` is not used."""
        self._update(state.buffers, state, grad_scale)

    def update_into(
        self, into: ShardBuffers, state: ChunkState, lr: float, grad_scale: float, number: int
    ) -> None:
        """As `Optimizer.update_into`, with the hyperparameters of `set`; `lr` and `number` are not
        used."""
        for new, present in zip(into.tensors, state.buffers.tensors, strict=True):
            new.copy_(present)
        self._update(into, state, grad_scale)

    def _update(self, buffers: ShardBuffers, state: ChunkState, grad_scale: float) -> None:
        """Update buffers that contain the states of a chunk."""
        shard, master, moments = buffers
        for start, stop, hyperparameters in self._ranges[state.chunk.number]:
            adamw_(
                master[start:stop],
                moments["exp_avg"][start:stop],
                moments["exp_avg_sq"][start:stop],
                state.grad[start:stop],
                None if master is shard else shard[start:stop],
                *hyperparameters,
                grad_scale,
            )
