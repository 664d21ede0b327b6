"""Optimizers that update shards of chunks. An optimizer declares its moments, and each shard has
memory for them.

Adafactor and SM3 are not implemented. They keep a statistic for each row and for each column of a
parameter, and not for each element. Such an optimizer would need shards that begin with a row of a
parameter, and therefore slots whose start and length are multiples of the length of a row. It would
also have to reduce its statistics of columns over the shard group, with a sum (Adafactor) or a
maximum (SM3).
"""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from optimus.chunks.buffers import ChunkState, ShardBuffers
from optimus.chunks.disk import DiskTier
from optimus.chunks.memory import Action, Pace, worker
from optimus.config import OptimConfig
from optimus_kernels import adamw_, adamw_into


class Optimizer(Protocol):
    """An element-wise update rule."""

    moments: Mapping[str, torch.dtype]
    """Dtype of each moment, by name. Moments are all optimizer states except the master weights.
    Checkpoint files use the same names."""
    num_updates: int
    """Number of updates, including the present update, for the bias correction."""

    def update(self, state: ChunkState, lr: float, grad_scale: float) -> None:
        """Update a chunk's shard of masters, moments and parameters from its `grad`.

        Args:
            state: The chunk.
            lr: Learning rate.
            grad_scale: Factor by which the gradient is multiplied, for clipping and the loss scale.
        """

    def update_into(
        self, into: ShardBuffers, state: ChunkState, lr: float, grad_scale: float, number: int
    ) -> None:
        """Write the states after the update to other buffers. The states of the chunk are not
        changed.

        Args:
            into: The buffers, with the lengths and dtypes of `state.buffers`.
            state, lr, grad_scale: As for `update`.
            number: Number of updates, including this update, for the bias correction.
        """


class AdamW:
    """AdamW with decoupled weight decay (arXiv 1711.05101)."""

    moments: Mapping[str, torch.dtype] = {"exp_avg": torch.float32, "exp_avg_sq": torch.float32}

    def __init__(self, optim: OptimConfig) -> None:
        self._optim = optim
        self.num_updates = 0

    def update(self, state: ChunkState, lr: float, grad_scale: float) -> None:
        self._update(state, None, lr, grad_scale, self.num_updates)

    def update_into(
        self, into: ShardBuffers, state: ChunkState, lr: float, grad_scale: float, number: int
    ) -> None:
        self._update(state, into, lr, grad_scale, number)

    def _update(
        self,
        state: ChunkState,
        into: ShardBuffers | None,
        lr: float,
        grad_scale: float,
        number: int,
    ) -> None:
        optim, options = self._optim, state.groups.options
        shard, master, _ = into or state.buffers
        update = adamw_ if into is None else partial(adamw_into, _states_of(into))
        decay = options.weight_decay
        update(
            *_states_of(state.buffers),
            state.grad,
            None if master is shard else shard,
            lr * options.lr_scale,
            *optim.betas,
            optim.eps,
            optim.weight_decay if decay is None else decay,
            number,
            grad_scale,
        )


def _states_of(buffers: ShardBuffers) -> tuple[Tensor, Tensor, Tensor]:
    return buffers.master, buffers.moments["exp_avg"], buffers.moments["exp_avg_sq"]


class _EarlyUpdate(NamedTuple):
    """An update of a chunk that was submitted to the thread before `UpdateQueue.add` was called for
    the chunk."""

    job: Future[None]
    into: ShardBuffers
    """Buffers for the states after the update."""
    arguments: tuple[float, float, int]
    """The arguments `lr`, `grad_scale` and `number` of `Optimizer.update_into`."""


class UpdateQueue:
    """Chunks that a thread of the host updates, one after the other.

    The next forward can begin before all updates are complete. Code that reads or writes the states
    or the gradients of a chunk must first wait for the update of the chunk.

    An update can begin during the backward pass, before the norm of all gradients is known. Such an
    early update assumes that the gradients will not be clipped. It uses the arguments with which
    `add` will be called if this assumption is correct, and writes to spare buffers. If `add` is
    called with these arguments, the spare buffers are exchanged with the states of the chunk.
    Otherwise the result of the early update is not used, and the chunk is updated after the call of
    `add`.

    Args:
        optimizer: Updates a chunk.
        rate: Elements that the host of an emulated device updates per second; None to update as
            fast as this machine does.
        threads: Number of threads of an update.
        poison: True to fill spare buffers with NaN, for tests.
        disk: Tier that contains the states on disk of some chunks (`ChunkState.on_disk`). These
            chunks are not updated early.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        rate: float | None = None,
        threads: int = 1,
        poison: bool = False,
        disk: DiskTier | None = None,
    ) -> None:
        self._optimizer, self._num_threads, self._disk = optimizer, threads, disk
        self._pace = None if rate is None else Pace(rate)
        self._poison = poison
        self._thread: ThreadPoolExecutor | None = None
        self._pending: dict[int, Future[None]] = {}
        """Updates that `add` has submitted and that no call of `wait` has removed, by chunk."""
        self._lock = threading.Lock()
        """Protects all attributes below, and removals from `_pending`."""
        self._error: BaseException | None = None
        """First error of an update; None without an error. After an error, some states are updated
        and others are not, so the states must not be used."""
        self._spare: dict[_Sizes, list[ShardBuffers]] = defaultdict(list)
        """Spare buffers that no early update uses, by the lengths and dtypes of the buffers'
        tensors."""
        self._early: dict[int, _EarlyUpdate] = {}
        """Early updates of the present step, by chunk."""
        self._expected: tuple[float, float, int] | None = None
        """Arguments of the early updates of the present step; None if early updates must not
        begin."""

    def add_spare(self, buffers: ShardBuffers) -> None:
        """Add spare buffers, so that one more chunk with the sizes of `buffers` can be updated
        early."""
        self._keep_spare(buffers)

    def start_step(self, expected: tuple[float, float] | None) -> None:
        """Start a step. Discard early updates of the previous step for which `add` was not called.

        Args:
            expected: The arguments `lr` and `grad_scale` with which `add` will probably be called;
                None for a step without early updates.
        """
        self.stop_early()
        with self._lock:
            for early in self._early.values():
                self._keep_spare(early.into)
            self._early.clear()
            number = self._optimizer.num_updates + 1
            self._expected = None if expected is None else (*expected, number)

    def begin_early(self, state: ChunkState) -> None:
        """Begin the early update of a chunk whose gradient is complete, if spare buffers with the
        sizes of the chunk's buffers are free. Any thread can call this method."""
        with self._lock:
            spare = self._spare[_sizes_of(state.buffers)]
            if self._expected is None or not spare or self._error is not None or state.on_disk:
                return
            into = spare.pop()
            update = partial(self._optimizer.update_into, into, state, *self._expected)
            job = self._submit(update, len(state.shard))
            self._early[state.chunk.number] = _EarlyUpdate(job, into, self._expected)

    def discard(self, number: int) -> None:
        """Discard the early update of the chunk `number`, because the gradient of the chunk
        changes. Any thread can call this method."""
        with self._lock:
            if (early := self._early.pop(number, None)) is not None:
                early.job.cancel()
                # This job may still be writing to the buffers. The next job that uses the buffers
                # runs in the same thread, after this job.
                self._keep_spare(early.into)

    def stop_early(self) -> None:
        """Cancel the early updates that have not started, and start no more in this step. Call this
        method before the first `add` of a step, so that the chunks are updated in the order of the
        calls of `add`."""
        with self._lock:
            self._expected = None
            for early in self._early.values():
                early.job.cancel()

    def add(self, state: ChunkState, lr: float, grad_scale: float) -> None:
        """Add a chunk to the queue. The arguments are those of `Optimizer.update`."""
        self._raise_error()
        number = state.chunk.number
        assert number not in self._pending, f"chunk {number} is in the queue already"
        if state.on_disk:
            assert self._disk is not None
            self._disk.begin_read(number, state.on_disk)
            update = partial(self._update_on_disk, self._disk, state, lr, grad_scale)
            self._pending[number] = self._submit(update, 0)
            return
        with self._lock:
            early = self._early.pop(number, None)
            if early is not None and early.job.cancel():
                self._keep_spare(early.into)
                early = None
            if early is None:
                update = partial(self._optimizer.update, state, lr, grad_scale)
                self._pending[number] = self._submit(update, len(state.shard))
            else:
                finish = partial(self._finish, early, state, lr, grad_scale)
                self._pending[number] = self._submit(finish, 0)

    def _submit(self, job: Action, size: int) -> Future[None]:
        """Let the thread run a job that updates `size` elements."""
        if self._thread is None:
            self._thread = worker("optimizer", self._num_threads)
        if self._pace is not None and size:
            job = partial(self._pace.run, job, size, time.monotonic())
        return self._thread.submit(job)

    def _finish(self, early: _EarlyUpdate, state: ChunkState, lr: float, grad_scale: float) -> None:
        """Use the result of an early update if `lr` and `grad_scale` are its arguments. Otherwise
        update the chunk."""
        early.job.result()
        if early.arguments == (lr, grad_scale, self._optimizer.num_updates):
            state.exchange(early.into)
        else:
            self._update_now(state, lr, grad_scale)
        with self._lock:
            self._keep_spare(early.into)

    def _update_on_disk(
        self, disk: DiskTier, state: ChunkState, lr: float, grad_scale: float
    ) -> None:
        with disk.updating(state.chunk.number) as tensors:
            self._update_now(state.with_states(tensors), lr, grad_scale)

    def _update_now(self, state: ChunkState, lr: float, grad_scale: float) -> None:
        """Update a chunk in the calling thread. On an emulated host, the update takes as long as
        the rate of the emulated host determines."""
        if self._pace is None:
            self._optimizer.update(state, lr, grad_scale)
        else:
            update = partial(self._optimizer.update, state, lr, grad_scale)
            self._pace.run(update, len(state.shard), time.monotonic())

    def _keep_spare(self, buffers: ShardBuffers) -> None:
        if self._poison:
            for tensor in buffers.tensors:
                tensor.fill_(torch.nan)
        self._spare[_sizes_of(buffers)].append(buffers)

    def is_done(self, number: int) -> bool:
        """Return True unless the update of chunk `number` is in progress or in the queue."""
        update = self._pending.get(number)
        return update is None or update.done()

    def wait(self, number: int) -> None:
        """Wait for the update of chunk `number`, if this update is in the queue. Several threads
        can call this method. Raises the first error of an update. After an error, the updates that
        are still in the queue are cancelled."""
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
            if self._disk is not None:
                self._disk.fail(error)
            if self._error is error:
                raise
            raise self._error from None  # `error` is only the cancellation of this update
        with self._lock:
            if self._pending.get(number) is update:
                del self._pending[number]

    def wait_for_all(self) -> None:
        """Wait for the updates of all chunks in the queue, and until updated states on disk are
        written. Raises as `wait` does."""
        self._raise_error()
        for number in list(self._pending):
            self.wait(number)
        if self._disk is not None:
            self._disk.flush()

    def _raise_error(self) -> None:
        if self._error is not None:
            raise self._error
        if self._disk is not None:
            self._disk.check()


_Sizes = tuple[tuple[int, torch.dtype], ...]


def _sizes_of(buffers: ShardBuffers) -> _Sizes:
    return tuple((len(tensor), tensor.dtype) for tensor in buffers.tensors)


def make_optimizer(optim: OptimConfig) -> Optimizer:
    """Return the optimizer of a configuration, which is always AdamW."""
    return AdamW(optim)
