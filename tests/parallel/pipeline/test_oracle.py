"""Our executor against torch.distributed.pipelining: the same losses and gradients.

torch's package is another author's schedules, sends and autograd on the same layers; it knows
nothing of actions, chunks or our loss, which is written out here in plain torch.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from optimus.train.rank_model import RankModel
from tests.helpers.tiny import CONTEXT, DENSE, tiny_tree
from tests.helpers.updates import make_shard, numbered

MICROBATCHES = 4
TOLERANCE = 1e-6
Result = tuple[list[float], dict[str, Tensor]]
"""Each microbatch's loss, [] but on the last rank, and the gradients of this rank's parameters."""


class Part(nn.Module):
    """One stage as torch's package wants it: a module from what arrives to what leaves."""

    def __init__(self, shard: RankModel) -> None:
        super().__init__()
        self.model = shard.model
        self.first, self.last = shard.layout.has_first, shard.layout.has_last

    def forward(self, x: Tensor) -> Tensor:
        x, _ = self.model.run_blocks(self.model.embed(x) if self.first else x)
        return self.model.logits(x) if self.last else x


def both_ways(schedule: str) -> tuple[Result, Result]:
    """One batch on two ranks: by our executor into chunks, and by torch's package."""
    layout = {"parallel__pp": 2, "parallel__schedule": schedule}
    batch = {"train__global_batch_tokens": MICROBATCHES * CONTEXT}
    tree = tiny_tree("d", "r", **DENSE, **layout, **batch)
    one = make_shard(tree)
    other = make_shard(tree, one.world)
    tokens = torch.cat([numbered(n).tokens for n in range(MICROBATCHES)])
    mine = ours(one.shard, tokens, one.plan.targets)
    return mine, theirs(other.shard, schedule, tokens, one.plan.targets)


def ours(shard: RankModel, tokens: Tensor, targets: int) -> Result:
    states = shard.make_states()
    states.gradients.start()
    microbatches = [(one, None) for one in tokens.split(1)]
    terms = shard.executor.run(
        microbatches,
        lambda stage, microbatch: states.gradients.reduce(stage),
        states.gradients.finish,
    )
    sums = [terms[place].ce_sum for place in sorted(terms)]
    losses = [float(ce_sum) / targets for ce_sum in sums if ce_sum is not None]
    return losses, gradients(shard)


def theirs(shard: RankModel, schedule: str, tokens: Tensor, targets: int) -> Result:
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

    def loss(logits: Tensor, tokens: Tensor) -> Tensor:
        rows = logits[:, :-1].flatten(0, 1)
        return F.cross_entropy(rows, tokens[:, 1:].flatten(), reduction="sum") / targets

    pp = shard._groups.over("pp")
    stage = PipelineStage(Part(shard), pp.rank, pp.size, tokens.device)
    made = {"1f1b": Schedule1F1B, "gpipe": ScheduleGPipe}[schedule](
        stage, n_microbatches=MICROBATCHES, loss_fn=loss, scale_grads=False
    )
    losses: list[Tensor] = []
    if pp.rank == 0:
        made.step(tokens)
    else:
        made.step(target=tokens, losses=losses)
    return [float(one.detach()) for one in losses], gradients(shard)


def gradients(shard: RankModel) -> dict[str, Tensor]:
    return {name: p.grad.clone() for name, p in shard.model.named_parameters()}


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
def test_torchs_package_finds_the_same_losses_and_gradients(ranks, schedule):
    for rank, (mine, oracle) in enumerate(ranks(2, both_ways, schedule, start_world=False)):
        assert len(mine[0]) == (MICROBATCHES if rank == 1 else 0)
        assert mine[0] == pytest.approx(oracle[0], rel=TOLERANCE)
        assert mine[1].keys() == oracle[1].keys()
        for name, gradient in oracle[1].items():
            error = float((mine[1][name] - gradient).norm() / gradient.norm())
            assert error < TOLERANCE, f"rank {rank}: {name} is off by {error:.1e}"
