"""AdamW over shards of chunks.

An optimizer whose state is not one number an element (Adafactor, SM3 keep statistics of rows and
columns) would ask the layout for shards that begin with a row (a slot's start and length in
multiples of its row) and reduce its column statistics over the shard group, a sum for Adafactor and
a maximum for SM3; it needs the slots of a chunk, which `step` is given.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from optimus.chunks.states import ChunkStates
from optimus.config import OptimConfig


class AdamW:
    """torch's fused AdamW, one formula for every element: shards are multiples of 32 elements."""

    def __init__(self, optim: OptimConfig) -> None:
        self._optim = optim
        self._optimizer: torch.optim.AdamW | None = None
        self.num_updates = 0

    def step(self, chunks: Sequence[ChunkStates], lr: float) -> None:
        """One update of every chunk's shard from its `grad`."""
        if self._optimizer is None:
            self._bind(chunks)
        for state in self._optimizer.state.values():
            state["step"].fill_(self.num_updates)
        self._optimizer.param_groups[0]["lr"] = lr
        self._optimizer.step()
        self.num_updates += 1

    def _bind(self, chunks: Sequence[ChunkStates]) -> None:
        optim = self._optim
        shards = []
        for one in chunks:
            shard = nn.Parameter(one.master)
            shard.grad = one.grad
            shards.append(shard)
        self._optimizer = torch.optim.AdamW(
            shards,
            lr=optim.lr,
            betas=optim.betas,
            eps=optim.eps,
            weight_decay=optim.weight_decay,
            fused=True,
        )
        for shard, one in zip(shards, chunks, strict=True):
            self._optimizer.state[shard] = {
                "step": torch.zeros((), dtype=torch.float32, device=one.master.device),
                "exp_avg": one.exp_avg,
                "exp_avg_sq": one.exp_avg_sq,
            }
