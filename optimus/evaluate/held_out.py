"""The loss on held-out instances, the same number on every data- and pipeline-parallel layout."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from optimus.data.dataset import FiniteSource
from optimus.data.loader import Microbatch, make_microbatch
from optimus.distributed.collectives import Group
from optimus.distributed.exact import exact_sums
from optimus.model.transformer import Transformer

_AT_ONCE = 16  # microbatches held in memory; a pipeline passes them on in rounds of its length


@dataclass(frozen=True)
class HeldOutLoss:
    """Mean cross-entropy in nats over the targets of `tokens` read tokens."""

    loss: float
    tokens: int


CrossEntropies = Callable[[list[Microbatch]], list[Tensor]]
"""Runs microbatches forward; their cross-entropy sums (fp32 scalars, nats), or [] on a rank whose
part of the model gives none: all ranks of a pipeline call it alike."""


def held_out_loss(
    cross_entropies: CrossEntropies,
    dataset: FiniteSource,
    batch_size: int,
    group: Group,
    data_rank: int = 0,
    num_data_ranks: int = 1,
    max_instances: int = 0,
    document_mask: bool = False,
) -> HeldOutLoss:
    """Evaluate the first `max_instances` instances (0: all), batch j on data rank j mod the number
    of data ranks; a collective of the whole `group`.

    Batches are the same on every layout, and their sums are joined exactly. Those of a round have
    one size on all data ranks, which expert parallelism needs: whole batches first, then what is
    left of the instances one by one. A data rank without a batch left in a round runs the round's
    first as well, without counting it. `document_mask`: documents do not
    see each other, as in a run with `data.document_mask`.
    """
    count = min(max_instances or dataset.num_instances, dataset.num_instances)
    whole = count - count % batch_size
    rounds = [
        (place, place + data_rank * size, size, stop)
        for start, stop, size in ((0, whole, batch_size), (whole, count, 1))
        for place in range(start, stop, size * num_data_ranks)
    ]
    own: list[Tensor] = []
    for first in range(0, len(rounds), _AT_ONCE):
        now = rounds[first : first + _AT_ONCE]
        batches, counts = [], []
        for place, start, size, stop in now:
            counts.append(start < stop)
            start = start if start < stop else place
            batches.append(make_microbatch(dataset, start, start + size, document_mask))
        sums = zip(counts, cross_entropies(batches), strict=False)
        own += [ce_sum for counted, ce_sum in sums if counted]
    values = torch.stack(own) if own else torch.zeros(0)
    (total,) = exact_sums([values], group)
    targets = count * (dataset.context - 1)
    return HeldOutLoss(total / targets, count * dataset.context)


def by_model(model: Transformer, device: torch.device) -> CrossEntropies:
    """For a whole model on one device."""

    @torch.no_grad()
    def run(batches: list[Microbatch]) -> list[Tensor]:
        return [model.losses(b.tokens.to(device), b.document_ids).ce_sum for b in batches]

    return run
