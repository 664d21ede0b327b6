"""EPSO against SO: the same states divided in two ways, updated in turn by the same ranks."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from optimus.bench.pairs import paired, race
from optimus.chunks.engine import ChunkEngine
from optimus.chunks.optimizer import AdamW
from optimus.config import Config
from optimus.dist.groups import join_groups
from optimus.dist.world import World
from optimus.model.init import initialise_
from optimus.train.preflight import divide
from optimus.train.shard import Shard


def compare_shardings(so: Config, epso: Config, world: World, rounds: int) -> dict[str, Any]:
    """Seconds of the slowest rank and paired ratios, EPSO by SO.

    `update` is AdamW over the shards alone, in processor seconds of the rank; `step` is all that
    stands between a backward and the next forward (reduction, norm, update, gather), on the wall.
    A collective of all ranks.
    """
    mesh, plan = divide(so, world.size)
    groups = join_groups(mesh, world)
    contestants = []
    for config in (so, epso):
        shard = Shard(config, groups, plan, world.device)
        initialise_(shard.model, 0, shard.layout.placements)
        contestants.append((shard.make_states(), config))
    updates = [_make_update(states, config) for states, config in contestants]
    steps = [_make_step(states) for states, _ in contestants]
    update_s = race(updates, rounds, world, time.thread_time)
    step_s = race(steps, rounds, world, time.perf_counter)
    experts, others = _elements(contestants[0][0])
    dp, ep = mesh.dp, mesh.ep
    return {
        "dp": dp,
        "ep": ep,
        "experts": experts,
        "others": others,
        "predicted": (experts / dp + others / (dp * ep)) / (experts / dp + others / dp),
        "shard_elements": [states.layout.shard_length for states, _ in contestants],
        "update": {"so_s": update_s[0], "epso_s": update_s[1], "paired": paired(*update_s[::-1])},
        "step": {"so_s": step_s[0], "epso_s": step_s[1], "paired": paired(*step_s[::-1])},
    }


def _elements(states: ChunkEngine) -> tuple[int, int]:
    """Of this rank's experts and of all else."""
    sizes = {name: slot.stop - slot.start for name, slot in states.slots.items()}
    experts = sum(size for name, size in sizes.items() if ".experts." in name)
    return experts, sum(sizes.values()) - experts


def _make_update(states: ChunkEngine, config: Config) -> Callable[[], None]:
    optimizer = AdamW(config.optim)
    return lambda: optimizer.step(states.chunks, 1e-4, 1.0, lambda one: None)


def _make_step(states: ChunkEngine) -> Callable[[], None]:
    def step() -> None:
        states.reduce(0)
        states.finish()
        states.grad_norm()
        states.update(1e-4)
        states.wait()

    states.start()
    for one in states.chunks:
        one.grads.fill_(1e-3)
    return step
