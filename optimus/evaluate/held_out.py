"""Loss on held-out data. The result is bit-identical for all data-parallel and pipeline-parallel
sizes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from optimus.data.dataset import FiniteSource
from optimus.data.loader import Microbatch, make_microbatch
from optimus.distributed.collectives import Group, exact_sums
from optimus.model.transformer import Transformer

_AT_ONCE = 16  # number of batches that are in memory and pass through the pipeline together


@dataclass(frozen=True)
class HeldOutLoss:
    """Result of `held_out_loss`: mean cross-entropy per predicted token in nats, and number of
    tokens in the evaluated instances."""

    loss: float
    tokens: int


CrossEntropies = Callable[[list[Microbatch]], list[Tensor]]
"""Function that returns a list of fp32 scalars: for each microbatch, the cross-entropy in nats,
summed over all predicted tokens. All ranks of a model replica must call the function with the same
microbatches. The function returns the list on one of these ranks, and [] on the other ranks."""


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
    """Return the mean loss on the first instances (token sequences) of a data set. All ranks of
    `group` must call this function.

    The batches do not depend on the number of ranks, and their losses are summed exactly. The
    result is therefore bit-identical for all numbers of data ranks and pipeline stages.

    Args:
        cross_entropies: Function that computes the cross-entropy sums of microbatches.
        dataset: The instances.
        batch_size: Instances per batch.
        group: All ranks that call this function.
        data_rank: Index of this rank among the ranks that read different data.
        num_data_ranks: Number of ranks that read different data.
        max_instances: Number of instances to evaluate; 0 for all instances.
        document_mask: True to keep attention within documents, as `data.document_mask` does.

    Returns:
        The mean loss and the number of tokens; the same on all ranks.
    """
    count = min(max_instances or dataset.num_instances, dataset.num_instances)
    whole = count - count % batch_size
    # In a round, each data rank evaluates one batch. All batches of a round have the same size,
    # because expert parallelism requires equal sizes. Instances after the last full batch are
    # evaluated one by one.
    rounds = [
        (round_start, round_start + data_rank * size, size, stop)
        for start, stop, size in ((0, whole, batch_size), (whole, count, 1))
        for round_start in range(start, stop, size * num_data_ranks)
    ]
    ce_sums: list[Tensor] = []
    for first in range(0, len(rounds), _AT_ONCE):
        now = rounds[first : first + _AT_ONCE]
        batches, counts = [], []
        for round_start, start, size, stop in now:
            counts.append(start < stop)
            start = start if start < stop else round_start  # no batch left: ignore the result
            batches.append(make_microbatch(dataset, start, start + size, document_mask))
        sums = zip(counts, cross_entropies(batches), strict=False)
        ce_sums += [ce_sum for counted, ce_sum in sums if counted]
    values = torch.stack(ce_sums) if ce_sums else torch.zeros(0)
    (total,) = exact_sums([values], group)
    targets = count * (dataset.context - 1)
    return HeldOutLoss(total / targets, count * dataset.context)


def by_model(model: Transformer, device: torch.device) -> CrossEntropies:
    """Return a `CrossEntropies` function that uses `model`, a complete model on `device`."""

    @torch.no_grad()
    def run(batches: list[Microbatch]) -> list[Tensor]:
        return [model.losses(b.tokens.to(device), b.document_ids).ce_sum for b in batches]

    return run
