"""An update of ours against torch's FSDP2 (`fully_shard`) on the same model, batch and ranks."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from optimus.bench.meters import paired, race
from optimus.bench.ours import make_ours
from optimus.bench.step import PlainLoop
from optimus.config import Config
from optimus.data.batch import BatchPlan
from optimus.data.loader import Microbatch
from optimus.distributed.collectives import all_reduce_sum
from optimus.distributed.world import World
from optimus.errors import OptimusError, counted
from optimus.model.init import initialise_
from optimus.model.transformer import Transformer


class Fsdp(PlainLoop):
    """What one writes with FSDP2: every block and the rest sharded. Parameters stay gathered
    between forward and backward, which is the faster of its two ways and nearer to ours."""

    def __init__(self, config: Config, plan: BatchPlan, world: World) -> None:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import FSDPModule, fully_shard

        model, self._world = Transformer(config.model), world
        initialise_(model, 0)
        mesh = init_device_mesh("cpu", (world.size,))
        for module in (*model.blocks.values(), model):
            fully_shard(module, mesh=mesh, reshard_after_forward=False)
            assert isinstance(module, FSDPModule)
            module.set_force_sum_reduction_for_comms(True)  # gloo has no mean
            module.set_gradient_divide_factor(1.0)  # the loss carries the scale
        super().__init__(config, model, plan, world.device)
        whole: nn.Module = model
        whole.forward = super().objective

    def objective(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        return self._model(tokens)  # through its forward hooks

    def run(self, microbatches: list[Microbatch]) -> float:
        """One update; the loss as ours counts it."""
        loss = torch.tensor([super().run(microbatches)])
        all_reduce_sum(loss, self._world.everyone)
        return float(loss)


def against_fsdp(config: Config, world: World, rounds: int) -> dict[str, Any]:
    """Seconds of a whole update and paired ratios, ours by FSDP2's. A collective of all ranks.

    Raises OptimusError if the two do not train alike.
    """
    ours = make_ours(config, world)
    updater, own = ours.updater(), ours.microbatches()
    theirs = Fsdp(config, ours.plan, world)
    losses: tuple[list[float], list[float]] = ([], [])
    ways = {
        "ours": lambda: losses[0].append(updater.run(len(losses[0]) + 1, own).loss),
        "fsdp2": lambda: losses[1].append(theirs.run(own)),
    }
    seconds = race(ways, rounds, world)
    worst = max(abs(a / b - 1) for a, b in zip(*losses, strict=True))
    if not worst < 1e-3:
        raise OptimusError(
            f"ours and FSDP2 part by {worst:.1e} of the loss in {counted(rounds, 'update')}"
        )
    return {
        "ours_s": seconds["ours"], "fsdp2_s": seconds["fsdp2"],
        "paired": paired(seconds["ours"], seconds["fsdp2"]), "losses_differ_by": worst,
    }  # fmt: skip
