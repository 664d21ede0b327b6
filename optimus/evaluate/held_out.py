"""The loss on held-out instances, the same number on every data- and pipeline-parallel layout."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from optimus.data.dataset import FiniteSource
from optimus.data.loader import Microbatch, make_microbatch
from optimus.dist.collectives import Group
from optimus.dist.exact import exact_sums

_AT_ONCE = 16  # microbatches held in memory; a pipeline fills with them


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

    Batches are the same on every layout, and their sums are joined exactly. A data rank without a
    batch left runs the first once more for the others' sake, without counting it. `document_mask`:
    documents do not see each other, as in a run with `data.document_mask`.
    """
    count = min(max_instances or dataset.num_instances, dataset.num_instances)
    starts = list(range(0, count, batch_size))
    rounds = -(-len(starts) // num_data_ranks)
    own: list[Tensor] = []
    for first in range(0, rounds, _AT_ONCE):
        numbers = [
            turn * num_data_ranks + data_rank
            for turn in range(first, min(first + _AT_ONCE, rounds))
        ]
        batches = []
        for number in numbers:
            start = starts[number] if number < len(starts) else 0
            stop = min(start + batch_size, count)
            batches.append(make_microbatch(dataset, start, stop, document_mask))
        sums = zip(numbers, cross_entropies(batches), strict=False)
        own += [ce_sum for number, ce_sum in sums if number < len(starts)]
    values = torch.stack(own) if own else torch.zeros(0)
    (total,) = exact_sums([values], group)
    targets = count * (dataset.context - 1)
    return HeldOutLoss(total / targets, count * dataset.context)


def by_model(model: nn.Module, device: torch.device) -> CrossEntropies:
    """For a whole model on one device."""

    @torch.no_grad()
    def run(batches: list[Microbatch]) -> list[Tensor]:
        return [model.losses(b.tokens.to(device), b.document_ids).ce_sum for b in batches]

    return run
