"""Peak memory of activations of pipeline ranks, for a search over many layouts.

`memory.peak_of_step` adds up the bytes of a rank action by action. The bytes during an action are a
sum of products. Each product is the number of microbatches for which a stage keeps a tensor, times
the bytes of the tensor for one microbatch. The numbers of microbatches depend only on the schedule.
For each schedule, this module therefore computes a matrix of these numbers once, with a row for
each action. For each layout, the module multiplies the matrix by the bytes of the layout; the peak
is the maximum of the product. A row is left out if each of its values is at most the value in the
same column of another row, because such a row cannot determine the maximum. Above a certain number
of microbatches, a schedule repeats its rows, so that a schedule with fewer microbatches has the
same matrix.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from optimus.parallel.pipeline.actions import Action, Kind
from optimus.parallel.pipeline.schedules import make_schedule


class StageBytes(NamedTuple):
    """Bytes of a stage for one microbatch, from a `StageProfile`."""

    kept: int
    """Bytes that the stage keeps from the forward to the backward."""
    deferred: int
    """Bytes that the stage keeps from the action I (gradient of the input) to the action W
    (gradients of the weights); 0 if the backward is not divided."""
    forward_peak: int
    """Largest number of bytes during the forward, minus the bytes before the forward."""
    backward_peak: int
    """Largest number of bytes during the backward or the action I, minus the bytes before this
    action."""
    weights_peak: int
    """Largest number of bytes during the action W, minus the bytes before W; 0 if the backward is
    not divided."""


class RankPeaks(NamedTuple):
    """For each action of a pipeline rank with v stages, the numbers of microbatches whose tensors
    are in memory."""

    counts: np.ndarray
    """int64 [number of actions, 5v + 1]. Each row describes the memory during an action. A row has,
    for each stage and each of the five fields of `StageBytes`, the number of microbatches for which
    the bytes of the field are in memory. The last element is the number of tensors in memory that
    the rank has received from other stages or has yet to send."""

    def bytes(self, stages: Sequence[StageBytes], boundary: int) -> int:
        """Return the largest number of bytes of activations and temporary tensors. The result is
        equal to `total` of `peak_of_step`.

        Args:
            stages: The stages of the rank in ascending order.
            boundary: Bytes of a tensor between stages.
        """
        sizes = [size for stage in stages for size in stage]
        return int((self.counts @ np.array([*sizes, boundary])).max())


@lru_cache(maxsize=1 << 12)
def peaks_of(
    schedule: str,
    num_ranks: int,
    virtual_stages: int,
    num_microbatches: int,
    ranks: tuple[int, ...],
) -> RankPeaks:
    """Return the counts of the pipeline ranks `ranks`, whose stages have equal bytes.

    Args:
        schedule, num_ranks, virtual_stages, num_microbatches: As for `make_schedule`.
        ranks: The ranks.
    """
    fewer = _fewer_microbatches(schedule, num_ranks, num_microbatches)
    of_ranks = _counts_of_ranks(schedule, num_ranks, virtual_stages, fewer)
    counts = _undominated(np.concatenate([of_ranks[rank] for rank in ranks]))
    # In gpipe, the large counts include nearly all microbatches, so they grow with
    # `num_microbatches`.
    if schedule == "gpipe":
        counts[:, :-1][counts[:, :-1] > fewer // 2] += num_microbatches - fewer
    return RankPeaks(counts)


@lru_cache(maxsize=1 << 8)
def _counts_of_ranks(
    name: str, num_ranks: int, virtual_stages: int, num_microbatches: int
) -> list[np.ndarray]:
    """Return `RankPeaks.counts` of each rank. The arguments are those of `make_schedule`."""
    schedule = make_schedule(name, num_ranks, virtual_stages, num_microbatches)
    last = schedule.num_stages - 1
    return [
        _undominated(np.array([*_rows(actions, num_ranks, virtual_stages, last)], dtype=np.int64))
        for actions in schedule.ranks
    ]


def _fewer_microbatches(name: str, num_ranks: int, num_microbatches: int) -> int:
    """Return a number of microbatches, at most `num_microbatches`, with which a schedule has the
    same rows of counts as with `num_microbatches`. For gpipe, some counts differ, because these
    counts grow with the number of microbatches; `peaks_of` corrects them."""
    if name == "gpipe":
        return min(num_microbatches, 8)
    if name == "interleaved" and num_microbatches % num_ranks:
        return num_microbatches  # the last round has fewer microbatches
    return min(num_microbatches, 4 * num_ranks)


def _rows(
    actions: Iterable[Action], num_ranks: int, virtual_stages: int, last: int
) -> set[tuple[int, ...]]:
    """Return the rows of `RankPeaks.counts` of a rank, without duplicates."""
    kept, deferred, forward, backward, weights = range(5)
    live = [0] * (5 * virtual_stages + 1)
    rows = set()
    sends = any(action.kind is Kind.SEND_GRADIENT for action in actions)
    # The last gradient that the rank sends is freed only after the other rank has received it.
    live[-1] = int(sends)

    def add_peak(column: int) -> None:
        live[column] += 1
        rows.add(tuple(live))
        live[column] -= 1

    for kind, stage, _ in actions:
        first = 5 * (stage // num_ranks)
        if kind is Kind.RECV_ACTIVATION or kind is Kind.RECV_GRADIENT:
            live[-1] += 1
        elif kind is Kind.F:
            live[-1] -= stage > 0
            add_peak(first + forward)
            live[first + kept] += 1
        elif kind is Kind.B or kind is Kind.I:
            live[-1] -= stage < last
            add_peak(first + backward)
            live[first + kept] -= 1
            live[first + deferred] += kind is Kind.I
            if stage > 0:
                live[-1] += 1 + (num_ranks == 1)
        elif kind is Kind.W:
            add_peak(first + weights)
            live[first + deferred] -= 1
        elif kind is Kind.SEND_GRADIENT:
            live[-1] -= 1
        rows.add(tuple(live))
    return rows


def _undominated(rows: np.ndarray) -> np.ndarray:
    """Return the rows that can give a maximum. A row is left out if each of its values is at most
    the value in the same column of another row."""
    chosen = []
    while len(rows):
        largest = rows[rows.sum(1).argmax()]
        chosen.append(largest)
        rows = rows[(rows > largest).any(1)]
    return np.array(chosen)
