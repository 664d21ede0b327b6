"""What a rank trains in a benchmark: a fresh model, its states, what updates them, a batch."""

from __future__ import annotations

from typing import NamedTuple

import torch

from optimus.chunks.engine import ChunkEngine
from optimus.config import Config
from optimus.data.batch import BatchPlan
from optimus.data.loader import Microbatch
from optimus.distributed.groups import Groups, join_groups
from optimus.distributed.world import World
from optimus.observe.events import NO_RECORDER, Recorder
from optimus.rank.model import RankModel
from optimus.train.resolve import divide
from optimus.train.update import Updater


class Ours(NamedTuple):
    """One rank's part."""

    config: Config
    world: World
    groups: Groups
    plan: BatchPlan
    part: RankModel
    states: ChunkEngine

    def updater(self) -> Updater:
        """From here on experts add their gradients to the chunks themselves."""
        return Updater(
            self.config, self.groups, self.part, self.states, self.plan, self.world.device
        )

    def microbatches(self) -> list[Microbatch]:
        """An update's, of random tokens."""
        plan, seed = self.plan, self.config.train.seed + self.groups.data.rank
        generator = torch.Generator().manual_seed(seed)
        shape = (plan.microbatch_size, plan.seq_len)
        return [
            Microbatch(torch.randint(self.config.model.vocab_size, shape, generator=generator))
            for _ in range(plan.microbatches_per_rank)
        ]


def make_ours(config: Config, world: World, recorder: Recorder = NO_RECORDER) -> Ours:
    """Make the model and its states; `recorder` receives collectives and pipeline actions. A
    collective of all ranks."""
    mesh, plan = divide(config, world.size)
    groups = join_groups(mesh, world, config.parallel.virtual_stages, recorder)
    part = RankModel(config, groups, plan, world.device)
    return Ours(config, world, groups, plan, part, part.make_states())
