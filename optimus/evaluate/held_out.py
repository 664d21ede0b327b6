"""The loss on held-out instances, the same number on every data-parallel layout."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import nn

from optimus.data.dataset import FiniteSource
from optimus.data.loader import make_microbatch
from optimus.dist.collectives import Group, all_gather


@dataclass(frozen=True)
class HeldOutLoss:
    """Mean cross-entropy in nats over the targets of `tokens` read tokens."""

    loss: float
    tokens: int


@torch.no_grad()
def held_out_loss(
    model: nn.Module,
    dataset: FiniteSource,
    batch_size: int,
    group: Group,
    device: torch.device,
    max_instances: int = 0,
    document_mask: bool = False,
) -> HeldOutLoss:
    """Evaluate the first `max_instances` instances (0: all), batch j on rank j mod size.

    Batches are the same on every layout, and their sums are joined exactly. `document_mask`:
    documents do not see each other, as in a run with `data.document_mask`.
    """
    count = min(max_instances or dataset.num_instances, dataset.num_instances)
    starts = list(range(0, count, batch_size))
    rounds = -(-len(starts) // group.size)
    own = torch.zeros(rounds, device=device)
    was_training = model.training
    model.eval()
    for position, start in enumerate(starts[group.rank :: group.size]):
        batch = make_microbatch(dataset, start, min(start + batch_size, count), document_mask)
        own[position] = model.losses(batch.tokens.to(device), batch.document_ids).ce_sum
    model.train(was_training)
    every = own.new_empty(rounds * group.size)
    all_gather(every, own, group)
    targets = count * (dataset.context - 1)
    return HeldOutLoss(math.fsum(every.tolist()) / targets, count * dataset.context)
