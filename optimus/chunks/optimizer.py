"""Optimizers that update shards of chunks. An optimizer declares its moments, and each shard has
memory for them.

There is no Adafactor and no SM3. They keep a statistic for each row and column instead of each
element. Such an optimizer would need shards that begin with a row, and therefore slots whose start
and length are multiples of a row. It would also have to reduce its statistics of columns over the
shard group, with a sum (Adafactor) or a maximum (SM3).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Protocol

import torch

from optimus.chunks.buffers import ChunkState
from optimus.chunks.memory import Pace, worker
from optimus.config import OptimConfig
from optimus_kernels import adamw_


class Optimizer(Protocol):
    """An element-wise update rule."""

    moments: Mapping[str, torch.dtype]
    """Dtype of each moment, by name. Moments are the states of an element other than its master
    weight. Checkpoint files use the same names."""
    num_updates: int
    """Number of updates, including the current one. A bias correction uses it."""

    def update(self, state: ChunkState, lr: float, grad_scale: float) -> None:
        """Update a chunk's shard of masters, moments and parameters from its `grad`.

        Args:
            state: The chunk.
            lr: Learning rate.
            grad_scale: Factor by which the gradient is multiplied, for clipping and the loss scale.
        """


class AdamW:
    """AdamW with decoupled weight decay (arXiv 1711.05101)."""

    moments: Mapping[str, torch.dtype] = {"exp_avg": torch.float32, "exp_avg_sq": torch.float32}

    def __init__(self, optim: OptimConfig) -> None:
        self._optim = optim
        self.num_updates = 0

    def update(self, state: ChunkState, lr: float, grad_scale: float) -> None:
        optim, options = self._optim, state.groups.options
        decay = options.weight_decay
        has_master = state.shard.data_ptr() != state.master.data_ptr()
        adamw_(
            state.master,
            state.moments["exp_avg"],
            state.moments["exp_avg_sq"],
            state.grad,
            state.shard if has_master else None,
            lr * options.lr_scale,
            *optim.betas,
            optim.eps,
            optim.weight_decay if decay is None else decay,
            self.num_updates,
            grad_scale,
        )


class UpdateQueue:
    """Chunks that a thread of the host updates, one after the other.

    The next forward may begin before all updates are complete. Code that reads or writes the states
    or the gradients of a chunk must first wait for its update.

    Args:
        optimizer: Updates a chunk.
        rate: Elements that the host of an emulated device updates per second; None to update as
            fast as this machine does.
    """

    def __init__(self, optimizer: Optimizer, rate: float | None = None) -> None:
        self._optimizer = optimizer
        self._pace = None if rate is None else Pace(rate)
        self._thread: ThreadPoolExecutor | None = None
        self._pending: dict[int, Future[None]] = {}
        self._lock = threading.Lock()
        """Protects `_error` and removals from `_pending`."""
        self._error: BaseException | None = None
        """First error of an update. The states are then partly updated and must not be used."""

    def add(self, state: ChunkState, lr: float, grad_scale: float) -> None:
        """Add a chunk to the queue. The arguments are those of `Optimizer.update`."""
        if self._thread is None:
            self._thread = worker("optimizer", torch.get_num_threads())
        self._raise_error()
        number = state.chunk.number
        assert number not in self._pending, f"chunk {number} is in the queue already"
        update = partial(self._optimizer.update, state, lr, grad_scale)
        if self._pace is not None:
            update = partial(self._pace.run, update, len(state.shard), time.monotonic())
        self._pending[number] = self._thread.submit(update)

    def is_done(self, number: int) -> bool:
        """Return True unless the update of chunk `number` is in progress or in the queue."""
        update = self._pending.get(number)
        return update is None or update.done()

    def wait(self, number: int) -> None:
        """Wait for the update of chunk `number`, if it is in the queue. Several threads may call
        this. Raises the first error of an update; the updates that are still in the queue are then
        not done."""
        update = self._pending.get(number)
        self._raise_error()
        if update is None:
            return
        try:
            update.result()
        except BaseException as error:
            with self._lock:
                self._error = self._error or error
            if self._thread is not None:
                self._thread.shutdown(wait=False, cancel_futures=True)
            if self._error is error:
                raise
            raise self._error from None  # this update was only cancelled
        with self._lock:
            if self._pending.get(number) is update:
                del self._pending[number]

    def wait_for_all(self) -> None:
        """Wait for the updates of all chunks in the queue. Raises as `wait` does."""
        self._raise_error()
        for number in list(self._pending):
            self.wait(number)

    def _raise_error(self) -> None:
        if self._error is not None:
            raise self._error


def make_optimizer(optim: OptimConfig) -> Optimizer:
    """Return the optimizer of a configuration. AdamW is the only one."""
    return AdamW(optim)
