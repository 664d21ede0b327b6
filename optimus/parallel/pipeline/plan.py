"""The pipeline that a configuration asks for. Needs no torch, so a launcher can ask first."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise

from optimus.config import Config
from optimus.distributed.mesh import Mesh
from optimus.errors import ConfigError, counted
from optimus.model.flops import head_multiply_adds, layer_multiply_adds
from optimus.parallel.pipeline.actions import Schedule
from optimus.parallel.pipeline.schedules import make_schedule


def plan_stages(config: Config, num_ranks: int) -> tuple[range, ...]:
    """The layers of every stage of a run; ConfigError where they cannot be divided so."""
    parallel, model = config.parallel, config.model
    num_stages = num_ranks * parallel.virtual_stages
    if parallel.stage_layers:
        return layers_by_hand(parallel.stage_layers, model.num_layers, num_stages)
    seq_len = config.train.seq_len or model.max_position_embeddings
    layers = [layer_multiply_adds(model, seq_len, n) for n in range(model.num_layers)]
    return assign_layers(layers, num_stages, head_multiply_adds(model))


def assign_layers(
    layer_costs: Sequence[float], num_stages: int, last_cost: float = 0.0
) -> tuple[range, ...]:
    """Contiguous layers for each stage, such that the dearest stage is as cheap as possible.

    `last_cost` (head and loss) comes on top of the last stage's, in the unit of `layer_costs`.
    Among equals the layers lie as late as possible, since early stages keep more microbatches
    alive. Raises ConfigError where there are more stages than layers.
    """
    num_layers = len(layer_costs)
    if num_stages > num_layers:
        raise ConfigError(
            f"parallel.pp * virtual_stages = {counted(num_stages, 'stage')}, but "
            "model.num_layers = "
            f"{num_layers}; a stage holds at least one layer, use at most "
            f"{counted(num_layers, 'stage')}"
        )
    if num_stages == 1:  # the search below takes time by the square of the layers
        return (range(num_layers),)
    sums = list(accumulate(layer_costs, initial=0.0))

    def cost_of(stage: int, start: int, stop: int) -> float:
        return sums[stop] - sums[start] + last_cost * (stage == num_stages - 1)

    # best[n]: the dearest of the stages from `stage` on, if they begin with layer n.
    infinite = float("inf")
    best = [infinite] * num_layers + [0.0]
    ends: list[list[int]] = []
    for stage in reversed(range(num_stages)):
        row, choice = [infinite] * (num_layers + 1), [0] * (num_layers + 1)
        for start in range(num_layers):
            for stop in range(start + 1, num_layers + 1):
                if sums[stop] - sums[start] > row[start]:
                    break  # more layers only make this stage dearer
                dearest = max(cost_of(stage, start, stop), best[stop])
                if dearest < row[start]:
                    row[start], choice[start] = dearest, stop
        best = row
        ends.insert(0, choice)
    stages, start = [], 0
    for choice in ends:
        stages.append(range(start, choice[start]))
        start = choice[start]
    return tuple(stages)


def layers_by_hand(counts: Sequence[int], num_layers: int, num_stages: int) -> tuple[range, ...]:
    """`parallel.stage_layers` as ranges; ConfigError unless it names every layer once."""
    if len(counts) != num_stages or sum(counts) != num_layers or min(counts) < 1:
        raise ConfigError(
            f"parallel.stage_layers = {list(counts)} must give each of "
            f"{counted(num_stages, 'stage')} at "
            f"least one layer and add up to model.num_layers = {num_layers}"
        )
    return tuple(range(*ends) for ends in pairwise(accumulate(counts, initial=0)))


def schedule_of(config: Config, mesh: Mesh, num_microbatches: int) -> Schedule:
    """The schedule that a configuration asks for; for a single stage all are the same."""
    parallel = config.parallel
    several = mesh.pp * parallel.virtual_stages > 1
    return make_schedule(
        parallel.schedule if several else "1f1b",
        mesh.pp,
        parallel.virtual_stages,
        num_microbatches,
        reduce_each=config.train.deterministic or config.optim.resident != "all",
    )
