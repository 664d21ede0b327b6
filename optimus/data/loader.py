"""Loader of a rank's microbatches. A thread prefetches the microbatches of the next updates
(optimizer steps)."""

from __future__ import annotations

import itertools
import queue
import threading
from collections import deque
from typing import NamedTuple

import numpy as np
import torch

from optimus.data.buffers import BufferPool
from optimus.data.dataset import InstanceSource
from optimus.data.documents import document_ids
from optimus.io import files

_PREFETCH = 2
"""Number of groups that the thread of a loader reads ahead: the next group, and a second group in
case a read is slow. A group contains the microbatches of consecutive updates."""
_GROUP_BYTES = 1 << 21
"""Maximum size in bytes of the token ids in a group, unless the group has a single update. The
thread of the loader puts a whole group into the queue at once. The thread therefore wakes the
training thread once per group instead of once per update."""


def microbatch_starts(
    step: int, instances_per_step: int, microbatch_size: int, data_rank: int, num_data_ranks: int
) -> list[int]:
    """Return the first instance of each microbatch that data rank `data_rank` reads in update
    `step`.

    All data ranks together read `instances_per_step` consecutive instances in an update. Updates
    are counted from 1. Microbatch i of an update belongs to data rank i % num_data_ranks.

    Returns:
        The number of the first instance of each microbatch, in order. Update 1 begins with instance
        0, and each later update continues after the last instance of the previous update.
    """
    first = (step - 1) * instances_per_step
    numbers = range(data_rank, instances_per_step // microbatch_size, num_data_ranks)
    return [first + number * microbatch_size for number in numbers]


class Microbatch(NamedTuple):
    """Input of a forward pass. A model computes its losses with `model.losses(*microbatch)`."""

    tokens: torch.Tensor
    """Token ids, int64 [microbatch_size, tokens per instance]."""
    document_ids: torch.Tensor | None = None
    """Document number of each token, int32, with the shape of `tokens`. If `document_ids` is None,
    attention crosses the boundaries of documents."""


def make_microbatch(
    dataset: InstanceSource, start: int, stop: int, document_mask: bool
) -> Microbatch:
    """Return instances [start, stop) as a microbatch, with document ids if `document_mask` is True.
    Raises DataError if an instance cannot be read."""
    tokens = dataset.read(start, stop)
    ids = torch.from_numpy(document_ids(tokens, dataset.eos_id)) if document_mask else None
    return Microbatch(torch.from_numpy(tokens), ids)


class Loader(files.Closing):
    """Loader of the microbatches of one data-parallel rank.

    A thread prefetches the microbatches of the next updates. Callers can request updates in any
    order. A Loader is a context manager.
    """

    def __init__(
        self,
        dataset: InstanceSource,
        instances_per_step: int,
        microbatch_size: int,
        data_rank: int,
        num_data_ranks: int,
        document_mask: bool = False,
    ):
        """Create a loader. The first call of `microbatches` starts the thread of the loader.

        Args:
            dataset: Source of the instances.
            instances_per_step: Number of instances that all ranks together read in an update, a
                multiple of `microbatch_size * num_data_ranks`.
            microbatch_size: Instances per microbatch.
            data_rank: Index of this rank among the ranks that read different data.
            num_data_ranks: Number of the ranks that read different data.
            document_mask: True to return document ids with the tokens.
        """
        assert 0 <= data_rank < num_data_ranks, (data_rank, num_data_ranks)
        assert instances_per_step % (microbatch_size * num_data_ranks) == 0, instances_per_step
        self._dataset = dataset
        self._split = (instances_per_step, microbatch_size, data_rank, num_data_ranks)
        self._document_mask = document_mask
        num_tokens = instances_per_step // num_data_ranks * dataset.context  # of an update
        self._max_updates = max(1, _GROUP_BYTES // (num_tokens * np.dtype(np.int64).itemsize))
        self._tokens = BufferPool(self._max_updates * num_tokens, np.int64)
        self._ids = BufferPool(self._max_updates * num_tokens, np.int32)
        # SimpleQueue is written in C and faster than Queue. The thread takes a ticket for each
        # group of updates. The number of tickets limits how far the thread reads ahead. A ticket of
        # False ends the thread.
        self._groups: queue.SimpleQueue = queue.SimpleQueue()
        self._tickets: queue.SimpleQueue[bool] = queue.SimpleQueue()
        self._updates: deque[list[Microbatch]] = deque()  # not yet returned, of the current group
        self._stopping = False
        self._thread: threading.Thread | None = None
        self._next_step = 0

    def microbatches(self, step: int) -> list[Microbatch]:
        """Return this rank's microbatches of update `step`, in order. Updates are counted from 1.

        Raises:
            DataError: An instance of the update cannot be read.
        """
        assert step >= 1, step
        if self._thread is None or step != self._next_step:
            self._restart(step)
        self._next_step = step + 1
        if not self._updates:
            result = self._groups.get()
            self._tickets.put(True)
            if isinstance(result, BaseException):
                self.close()
                raise result
            self._updates.extend(result)
        return self._updates.popleft()

    def close(self) -> None:
        """End the thread of the loader. The next call of `microbatches` starts a new thread."""
        if self._thread is not None:
            self._stopping = True
            self._tickets.put(False)  # wakes the thread
            self._thread.join()
            self._thread = None

    def _restart(self, step: int) -> None:
        self.close()
        self._updates.clear()
        self._groups, self._tickets = queue.SimpleQueue(), queue.SimpleQueue()
        self._stopping = False
        for _ in range(_PREFETCH):
            self._tickets.put(True)
        self._thread = threading.Thread(
            target=self._read_ahead, args=(step,), name="optimus-loader", daemon=True
        )
        self._thread.start()

    def _read_ahead(self, step: int) -> None:
        updates = 1  # the first update is needed soon; the size of a group then doubles each time
        while self._tickets.get() and not self._stopping:
            try:
                result: list[list[Microbatch]] | BaseException = self._read(step, updates)
            except BaseException as error:  # `microbatches` raises this error
                if updates > 1:  # read single updates: only the unreadable update must raise
                    updates = 1
                    self._tickets.put(True)
                    continue
                result = error
            self._groups.put(result)
            if isinstance(result, BaseException):
                return
            step += updates
            updates = min(2 * updates, self._max_updates)

    def _read(self, step: int, updates: int) -> list[list[Microbatch]]:
        """Read this rank's microbatches of the updates [step, step + updates). Return a list that
        contains, for each update, the list of its microbatches."""
        _, size, _, _ = self._split
        steps = range(step, step + updates)
        starts = [start for s in steps for start in microbatch_starts(s, *self._split)]
        shape = (len(starts) * size, self._dataset.context)
        tokens = self._tokens.take()[: shape[0] * shape[1]].reshape(shape)
        # Each call of `read` reads as many consecutive instances as possible. `breaks` are the
        # microbatches that do not begin directly after the previous microbatch.
        breaks = [n for n in range(1, len(starts)) if starts[n] != starts[n - 1] + size]
        for first, stop in itertools.pairwise([0, *breaks, len(starts)]):
            self._dataset.read(
                starts[first], starts[stop - 1] + size, tokens[first * size : stop * size]
            )
        ids = None
        if self._document_mask:
            ids = self._ids.take()[: shape[0] * shape[1]].reshape(shape)
            document_ids(tokens, self._dataset.eos_id, ids)
        microbatches = [
            Microbatch(
                torch.from_numpy(tokens[row : row + size]),
                None if ids is None else torch.from_numpy(ids[row : row + size]),
            )
            for row in range(0, shape[0], size)
        ]
        count = len(starts) // updates
        return [microbatches[n * count : (n + 1) * count] for n in range(updates)]
