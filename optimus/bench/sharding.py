"""EPSO against SO: the same states divided in two ways, updated in turn by the same ranks."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from optimus.bench.ours import make_ours
from optimus.bench.pairs import paired, race
from optimus.chunks.engine import ChunkEngine
from optimus.chunks.optimizer import AdamW
from optimus.config import Config
from optimus.dist.world import World


def compare_shardings(so: Config, epso: Config, world: World, rounds: int) -> dict[str, Any]:
    """Seconds of the slowest rank and paired ratios, EPSO by SO.

    `update` is AdamW over the shards alone, in processor seconds of the rank; `step` is all that
    stands between a backward and the next forward (reduction, norm, update, gather), on the wall.
    A collective of all ranks.
    """
    both = {"so": make_ours(so, world), "epso": make_ours(epso, world)}
    updates = {name: _make_update(one.states, one.config) for name, one in both.items()}
    steps = {name: _make_step(one.states) for name, one in both.items()}
    update_s = race(updates, rounds, world, time.thread_time)
    step_s = race(steps, rounds, world)
    experts, others = _elements(both["so"].states)
    dp, ep = both["so"].groups.mesh.dp, both["so"].groups.mesh.ep
    return {
        "dp": dp,
        "ep": ep,
        "experts": experts,
        "others": others,
        "predicted": (experts / dp + others / (dp * ep)) / (experts / dp + others / dp),
        "shard_elements": [one.states.layout.shard_length for one in both.values()],
        "update": _told(update_s),
        "step": _told(step_s),
    }


def _told(seconds: dict[str, list[float]]) -> dict[str, Any]:
    so, epso = seconds["so"], seconds["epso"]
    return {"so_s": so, "epso_s": epso, "paired": paired(epso, so)}


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
        states.gradients.reduce(0)
        states.gradients.finish()
        states.grad_norm()
        states.update(1e-4)
        states.wait()

    states.gradients.start()
    for one in states.chunks:
        one.grads.fill_(1e-3)
    return step
