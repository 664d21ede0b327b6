"""AdamW over shards of chunks.

An optimizer whose state is not a number for each element (Adafactor and SM3 keep statistics of rows
and columns) would need shards that begin with a row, so a layout in which the start and the length
of a slot are multiples of its row. It would reduce its statistics of columns over the shard group,
as a sum (Adafactor) or a maximum (SM3).
"""

from __future__ import annotations

from optimus.chunks.buffers import ChunkState
from optimus.config import OptimConfig
from optimus_kernels.adamw import adamw_


class AdamW:
    """AdamW with decoupled weight decay (arXiv 1711.05101), one formula for every element."""

    def __init__(self, optim: OptimConfig) -> None:
        self._optim = optim
        self.num_updates = 0
        """Number of updates, including the current one, for the bias correction."""

    def update(self, state: ChunkState, lr: float, grad_scale: float) -> None:
        """Update a chunk's shard of masters, moments and parameters from its `grad`.

        Args:
            state: The chunk.
            lr: Learning rate.
            grad_scale: Factor of the gradient, for clipping and the loss scale.
        """
        optim, options = self._optim, state.groups.options
        decay = options.weight_decay
        has_master = state.shard.data_ptr() != state.master.data_ptr()
        adamw_(
            state.master,
            state.exp_avg,
            state.exp_avg_sq,
            state.grad,
            state.shard if has_master else None,
            lr * options.lr_scale,
            *optim.betas,
            optim.eps,
            optim.weight_decay if decay is None else decay,
            self.num_updates,
            grad_scale,
        )


def make_optimizer(optim: OptimConfig) -> AdamW:
    """Return the optimizer of a configuration. AdamW is the only one."""
    return AdamW(optim)
