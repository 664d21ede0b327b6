"""Memory of activations of all pipeline ranks, without a walk through each schedule.

`peak_of_step` adds up the bytes of a rank action by action. During each action, these are a sum of
products: the numbers of microbatches between their passes, times the bytes that a stage keeps for
one microbatch. The numbers depend only on the schedule, so they are computed once and multiplied
with the bytes of each model and microbatch. Numbers that are all at most those of another action of
the same kind are left out. From some number of microbatches on, a schedule repeats itself.
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
    """Bytes between the forward and the backward."""
    deferred: int
    """Bytes between the actions I and W; 0 if the backward is not divided."""
    forward_peak: int
    """Largest number of bytes during the forward, less the bytes before it."""
    backward_peak: int
    weights_peak: int


class RankPeaks(NamedTuple):
    """Numbers of tensors during the actions of some pipeline ranks with v stages each."""

    counts: np.ndarray
    """int64 [number of actions, 5v + 1]. A row has, for each stage, the number of microbatches of
    each of the fields of `StageBytes`, and then the number of tensors from or to other stages."""

    def bytes(self, stages: Sequence[StageBytes], boundary: int) -> int:
        """Return the most bytes of activations and temporary tensors, as `peak_of_step`.

        Args:
            stages: The stages of the rank in ascending order.
            boundary: Size of a tensor between stages.
        """
        sizes = [size for stage in stages for size in stage]
        return int((self.counts @ np.array([*sizes, boundary])).max())


@lru_cache(maxsize=1 << 12)
def peaks_of(
    schedule: str, num_ranks: int, virtual_stages: int, num_microbatches: int, rank: int
) -> RankPeaks:
    """Return the peaks of the pipeline rank `rank`. The arguments are those of `make_schedule`."""
    return _peaks_of_ranks(schedule, num_ranks, virtual_stages, num_microbatches)[rank]


@lru_cache(maxsize=1 << 8)
def _peaks_of_ranks(
    name: str, num_ranks: int, virtual_stages: int, num_microbatches: int
) -> list[RankPeaks]:
    fewer = _fewer_microbatches(name, num_ranks, num_microbatches)
    schedule = make_schedule(name, num_ranks, virtual_stages, fewer)
    last = schedule.num_stages - 1
    ranks = []
    for actions in schedule.ranks:
        counts = _undominated(_rows(actions, num_ranks, virtual_stages, last))
        if name == "gpipe":  # numbers near that of all microbatches grow with it
            counts[:, :-1][counts[:, :-1] > fewer // 2] += num_microbatches - fewer
        ranks.append(RankPeaks(counts))
    return ranks


def _fewer_microbatches(name: str, num_ranks: int, num_microbatches: int) -> int:
    """Return a number of microbatches with which the rows are the same, or for gpipe have the same
    differences to the number of microbatches."""
    if name == "gpipe":
        return min(num_microbatches, 8)
    if name == "interleaved" and num_microbatches % num_ranks:
        return num_microbatches  # rounds of different sizes
    return min(num_microbatches, 4 * num_ranks)


def _rows(
    actions: Iterable[Action], num_ranks: int, virtual_stages: int, last: int
) -> set[tuple[int, ...]]:
    """Return the rows of `RankPeaks.counts` of a rank, without duplicates."""
    kept, deferred, forward, backward, weights = range(5)
    live = [0] * (5 * virtual_stages + 1)
    rows = set()
    sends = any(action.kind is Kind.SEND_GRADIENT for action in actions)
    live[-1] = int(sends)  # the last gradient that was sent is freed after its arrival

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


def _undominated(rows: set[tuple[int, ...]]) -> np.ndarray:
    """Return the rows that have a larger number than each other row in some column."""
    table = np.array(sorted(rows, key=sum, reverse=True), dtype=np.int64)
    chosen: list[np.ndarray] = []
    for row in table:
        if not chosen or not (np.array(chosen) >= row).all(1).any():
            chosen.append(row)
    return np.array(chosen)
