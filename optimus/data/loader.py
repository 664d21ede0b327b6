"""Which microbatches a rank reads for an update, and a thread that has them ready in time."""

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

_AHEAD = 2  # stretches read in advance: one being used, one waiting hides any single slow read
_STRETCH_BYTES = 1 << 21
"""Updates smaller than this are read and handed over several at a time: waking a thread on another
core costs as much as reading 100 KiB."""


def microbatch_starts(
    step: int, instances_per_step: int, microbatch_size: int, data_rank: int, num_data_ranks: int
) -> list[int]:
    """First instance of each microbatch that a data rank does in update `step` (from 1), in order.

    The update reads instances [(step-1)*G, step*G); microbatch i of data rank d of w is number
    i*w + d of the update (CONTRACT.md, "Ranks").
    """
    first = (step - 1) * instances_per_step
    numbers = range(data_rank, instances_per_step // microbatch_size, num_data_ranks)
    return [first + number * microbatch_size for number in numbers]


class Microbatch(NamedTuple):
    """What one forward pass reads: `model.losses(*microbatch)`."""

    tokens: torch.Tensor
    """int64 [microbatch_size, C]."""
    document_ids: torch.Tensor | None = None
    """int32 [microbatch_size, C], the document of each token within its instance; None: no mask."""


def make_microbatch(
    dataset: InstanceSource, start: int, stop: int, document_mask: bool
) -> Microbatch:
    """Instances [start, stop) of `dataset`, with document ids if they are asked for."""
    tokens = dataset.read(start, stop)
    ids = torch.from_numpy(document_ids(tokens, dataset.eos_id)) if document_mask else None
    return Microbatch(torch.from_numpy(tokens), ids)


class Loader(files.Closing):
    """Microbatches of one data rank, read ahead by a thread. A context manager.

    Stateless in the update number: any update may be asked for at any time, by any number of
    ranks; consecutive ones are ready in advance.
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
        """`document_mask`: give document ids with the tokens. An update is whole microbatches of
        all ranks."""
        assert 0 <= data_rank < num_data_ranks, (data_rank, num_data_ranks)
        assert instances_per_step % (microbatch_size * num_data_ranks) == 0, instances_per_step
        self._dataset = dataset
        self._split = (instances_per_step, microbatch_size, data_rank, num_data_ranks)
        self._document_mask = document_mask
        items = instances_per_step // num_data_ranks * dataset.context  # of an update, here
        self._most_updates = max(1, _STRETCH_BYTES // (items * np.dtype(np.int64).itemsize))
        self._tokens = BufferPool(self._most_updates * items, np.int64)
        self._ids = BufferPool(self._most_updates * items, np.int32)
        # Queues in C, whose hand-over costs a fraction of queue.Queue's; tickets bound how far the
        # thread reads ahead, and an empty one ends it.
        self._ready: queue.SimpleQueue = queue.SimpleQueue()
        self._tickets: queue.SimpleQueue[bool] = queue.SimpleQueue()
        self._stretch: deque[list[Microbatch]] = deque()  # updates handed over, not yet asked for
        self._stopping = False
        self._thread: threading.Thread | None = None
        self._next_step = 0

    def microbatches(self, step: int) -> list[Microbatch]:
        """This rank's microbatches of update `step` (from 1), in order.

        Raises whatever reading raised, DataError above all.
        """
        assert step >= 1, step
        if self._thread is None or step != self._next_step:
            self._restart(step)
        self._next_step = step + 1
        if not self._stretch:
            result = self._ready.get()
            self._tickets.put(True)
            if isinstance(result, BaseException):
                self.close()
                raise result
            self._stretch.extend(result)
        return self._stretch.popleft()

    def close(self) -> None:
        """End the thread; a later `microbatches` starts another."""
        if self._thread is not None:
            self._stopping = True
            self._tickets.put(False)  # wakes a thread that waits
            self._thread.join()
            self._thread = None

    def _restart(self, step: int) -> None:
        self.close()
        self._stretch.clear()
        self._ready, self._tickets, self._stopping = queue.SimpleQueue(), queue.SimpleQueue(), False
        for _ in range(_AHEAD):
            self._tickets.put(True)
        self._thread = threading.Thread(
            target=self._read_ahead, args=(step,), name="optimus-loader", daemon=True
        )
        self._thread.start()

    def _read_ahead(self, step: int) -> None:
        updates = 1  # the first is wanted soon; each stretch after it is twice as long
        while self._tickets.get() and not self._stopping:
            try:
                result: list[list[Microbatch]] | BaseException = self._read(step, updates)
            except BaseException as error:  # handed over: the caller raises it
                if updates > 1:  # at the update that it belongs to, not before
                    updates = 1
                    self._tickets.put(True)
                    continue
                result = error
            self._ready.put(result)
            if isinstance(result, BaseException):
                return
            step += updates
            updates = min(2 * updates, self._most_updates)

    def _read(self, step: int, updates: int) -> list[list[Microbatch]]:
        """The microbatches of some updates from `step` on: one piece of memory for all of them."""
        _, size, _, _ = self._split
        steps = range(step, step + updates)
        starts = [start for one in steps for start in microbatch_starts(one, *self._split)]
        shape = (len(starts) * size, self._dataset.context)
        tokens = self._tokens.take()[: shape[0] * shape[1]].reshape(shape)
        for first, stop in _runs(starts, size):
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


def _runs(starts: list[int], size: int) -> list[tuple[int, int]]:
    """Microbatches [first, stop) each, of those at `starts`, that follow one another."""
    breaks = [n for n in range(1, len(starts)) if starts[n] != starts[n - 1] + size]
    return list(itertools.pairwise([0, *breaks, len(starts)]))
