"""AdamW over shards of chunks.

An optimizer whose state is not one number an element (Adafactor, SM3 keep statistics of rows and
columns) would ask the layout for shards that begin with a row (a slot's start and length in
multiples of its row) and reduce its column statistics over the shard group, a sum for Adafactor and
a maximum for SM3; it needs the slots of a chunk, which `step` is given.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from optimus.chunks.states import ChunkStates
from optimus.config import OptimConfig
from optimus_kernels.adamw import adamw_


class AdamW:
    """Decoupled weight decay (arXiv 1711.05101), one formula for every element."""

    def __init__(self, optim: OptimConfig) -> None:
        self._optim = optim
        self.num_updates = 0

    def step(
        self,
        chunks: Sequence[ChunkStates],
        lr: float,
        grad_scale: float,
        updated: Callable[[ChunkStates], None],
    ) -> None:
        """One update of every chunk's shard from its `grad` times `grad_scale`, and of the rank's
        own part of the parameters; `updated` is called with each chunk behind its own."""
        self.num_updates += 1
        optim = self._optim
        for one in chunks:
            own, setting = one.shard, one.home.setting
            decay = setting.weight_decay
            adamw_(
                one.master,
                one.exp_avg,
                one.exp_avg_sq,
                one.grad,
                None if own.data_ptr() == one.master.data_ptr() else own,
                lr * setting.lr_scale,
                *optim.betas,
                optim.eps,
                optim.weight_decay if decay is None else decay,
                self.num_updates,
                grad_scale,
            )
            updated(one)


def make_optimizer(optim: OptimConfig) -> AdamW:
    """The rule that the settings name: there is one."""
    return AdamW(optim)
