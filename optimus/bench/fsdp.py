"""An update of ours against torch's FSDP2 (`fully_shard`) on the same model, batch and ranks."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from optimus.bench.meters import random_microbatches
from optimus.bench.pairs import paired, race
from optimus.config import Config
from optimus.data.loader import Microbatch
from optimus.dist.collectives import all_reduce_sum
from optimus.dist.groups import join_groups
from optimus.dist.world import World
from optimus.errors import OptimusError
from optimus.model.init import initialise_
from optimus.model.transformer import Transformer
from optimus.train.batch import BatchPlan
from optimus.train.preflight import divide
from optimus.train.shard import Shard
from optimus.train.update import Updater


class Fsdp:
    """What one writes with FSDP2: every block and the rest sharded, gradients added up in fp32,
    norm, clipping and fused AdamW. Parameters stay gathered between forward and backward, which is
    the faster of its two ways and nearer to ours."""

    def __init__(self, config: Config, plan: BatchPlan, world: World) -> None:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        self._config, self._plan, self._world = config, plan, world
        self._model = Transformer(config.model)
        initialise_(self._model, 0)
        mesh = init_device_mesh("cpu", (world.size,))
        for module in (*self._model.blocks.values(), self._model):
            fully_shard(module, mesh=mesh, reshard_after_forward=False)
            module.set_force_sum_reduction_for_comms(True)  # gloo has no mean
            module.set_gradient_divide_factor(1.0)  # the loss carries the scale
        self._model.forward = self._objective
        optim = config.optim
        self._optimizer = torch.optim.AdamW(
            self._model.parameters(), lr=optim.lr, betas=optim.betas, eps=optim.eps,
            weight_decay=optim.weight_decay, fused=True,
        )  # fmt: skip

    def _objective(self, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        terms, settings = self._model.losses(tokens), self._config.model
        routers = settings.aux_loss_coef * terms.aux + settings.z_loss_coef * terms.z
        loss = terms.ce_sum / self._plan.targets + routers / self._plan.num_microbatches
        return loss, terms.ce_sum.detach()

    def run(self, microbatches: list[Microbatch]) -> float:
        """One update; the loss as ours counts it."""
        total = torch.zeros(1)
        for number, one in enumerate(microbatches, start=1):
            self._model.set_requires_gradient_sync(number == len(microbatches))
            loss, ce_sum = self._model(one.tokens)
            loss.backward()
            total += ce_sum
        all_reduce_sum(total, self._world.everyone)
        nn.utils.clip_grad_norm_(self._model.parameters(), self._config.optim.clip_norm)
        self._optimizer.step()
        self._optimizer.zero_grad()
        return float(total) / self._plan.targets


def against_fsdp(config: Config, world: World, rounds: int) -> dict[str, Any]:
    """Seconds of a whole update and paired ratios, ours by FSDP2's. A collective of all ranks.

    Raises OptimusError if the two do not train alike.
    """
    mesh, plan = divide(config, world.size)
    groups = join_groups(mesh, world)
    shard = Shard(config, groups, plan, world.device)
    initialise_(shard.model, 0, shard.layout.placements)
    updater = Updater(config, groups, shard, shard.make_states(), plan, world.device)
    theirs = Fsdp(config, plan, world)
    own = random_microbatches(config, plan, seed=world.rank)
    losses: tuple[list[float], list[float]] = ([], [])
    ways = [
        lambda: losses[0].append(updater.run(len(losses[0]) + 1, own).loss),
        lambda: losses[1].append(theirs.run(own)),
    ]
    ours_s, theirs_s = race(ways, rounds, world)
    worst = max(abs(a / b - 1) for a, b in zip(*losses, strict=True))
    if not worst < 1e-3:
        raise OptimusError(f"ours and FSDP2 part by {worst:.1e} of the loss in {rounds} updates")
    return {
        "ours_s": ours_s, "fsdp2_s": theirs_s,
        "paired": paired(ours_s, theirs_s), "losses_differ_by": worst,
    }  # fmt: skip
