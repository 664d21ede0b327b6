"""Functions that derive the pipeline stages and the pipeline schedule from a configuration.

This module does not import torch, so that launchers can also check the configuration.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise

from optimus.config import Config
from optimus.distributed.mesh import Mesh
from optimus.errors import ConfigError, counted
from optimus.model.flops import head_multiply_adds, layer_multiply_adds
from optimus.parallel.pipeline.actions import Schedule
from optimus.parallel.pipeline.schedules import make_schedule


def stages_per_rank(config: Config, num_ranks: int) -> int:
    """Return the number of pipeline stages of each rank. With `offload.order` = "layer", each layer
    is a stage."""
    if config.offload.order == "layer":
        return config.model.num_layers // num_ranks
    return config.parallel.virtual_stages


def needs_ring(config: Config, num_ranks: int) -> bool:
    """Return True if the run needs channels between the last and the first pipeline rank. Runs with
    several stages per rank need these channels. With `offload.mode` = "auto", the result is always
    True, because this mode can select `offload.order` = "layer", with several stages per rank."""
    return config.offload.mode == "auto" or stages_per_rank(config, num_ranks) > 1


def plan_stages(config: Config, num_ranks: int) -> tuple[range, ...]:
    """Return the indices of the layers of each pipeline stage.

    Raises:
        ConfigError: there are more stages than layers.
        ConfigError: parallel.stage_layers does not match the number of stages or layers.
    """
    parallel, model = config.parallel, config.model
    if config.offload.order == "layer":
        return tuple(range(layer, layer + 1) for layer in range(model.num_layers))
    num_stages = num_ranks * parallel.virtual_stages
    if parallel.stage_layers:
        return layers_by_hand(parallel.stage_layers, model.num_layers, num_stages)
    seq_len = config.train.seq_len or model.max_position_embeddings
    layers = [layer_multiply_adds(model, seq_len, n) for n in range(model.num_layers)]
    return assign_layers(layers, num_stages, head_multiply_adds(model))


def assign_layers(
    layer_costs: Sequence[float], num_stages: int, last_cost: float = 0.0
) -> tuple[range, ...]:
    """Return the layers of each stage: contiguous ranges that minimise the largest cost of a stage.

    Among equally good assignments, the result has the fewest layers on early stages, because early
    stages keep the activations of more microbatches.

    Args:
        layer_costs: the cost of each layer, in any unit.
        num_stages: the number of stages.
        last_cost: the cost of the output head and the loss on the last stage, in the same unit.

    Raises:
        ConfigError: there are more stages than layers.
    """
    num_layers = len(layer_costs)
    if num_stages > num_layers:
        raise ConfigError(
            f"parallel.pp * parallel.virtual_stages = {counted(num_stages, 'stage')}, but "
            f"model.num_layers = {num_layers}; each stage needs at least one layer: use at most "
            f"{counted(num_layers, 'stage')}"
        )
    if num_stages == 1:  # skip the search, whose time grows with the square of num_layers
        return (range(num_layers),)
    sums = list(accumulate(layer_costs, initial=0.0))

    def cost_of(stage: int, start: int, stop: int) -> float:
        return sums[stop] - sums[start] + last_cost * (stage == num_stages - 1)

    # best[n]: minimum, over all assignments in which the later stages begin at layer n, of the cost
    # of the most expensive of these stages.
    infinite = float("inf")
    best = [infinite] * num_layers + [0.0]
    ends: list[list[int]] = []
    for stage in reversed(range(num_stages)):
        row, choice = [infinite] * (num_layers + 1), [0] * (num_layers + 1)
        for start in range(num_layers):
            for stop in range(start + 1, num_layers + 1):
                if sums[stop] - sums[start] > row[start]:
                    break  # with more layers, this stage would be even more expensive
                worst = max(cost_of(stage, start, stop), best[stop])
                if worst < row[start]:
                    row[start], choice[start] = worst, stop
        best = row
        ends.insert(0, choice)
    stages, start = [], 0
    for choice in ends:
        stages.append(range(start, choice[start]))
        start = choice[start]
    return tuple(stages)


def layers_by_hand(counts: Sequence[int], num_layers: int, num_stages: int) -> tuple[range, ...]:
    """Return the layer indices of each stage, for the layer counts in `parallel.stage_layers`.

    Raises:
        ConfigError: the counts do not match the number of stages or layers, or a count is below 1.
    """
    if len(counts) != num_stages or sum(counts) != num_layers or min(counts) < 1:
        raise ConfigError(
            f"parallel.stage_layers = {list(counts)} must have one layer count of at least 1 for "
            f"each of {counted(num_stages, 'stage')}, and the counts must add up to "
            f"model.num_layers = {num_layers}"
        )
    return tuple(range(*ends) for ends in pairwise(accumulate(counts, initial=0)))


def schedule_of(config: Config, mesh: Mesh, num_microbatches: int) -> Schedule:
    """Return the pipeline schedule that a configuration selects.

    If the pipeline has only one stage, the schedule is always 1f1b. With `offload.order` = "layer",
    the schedule is gpipe with one stage for each layer.
    """
    parallel = config.parallel
    if config.offload.order == "layer":
        # If several ranks add to a sum, deterministic mode adds microbatch by microbatch.
        is_ordered = config.train.deterministic and mesh.dp * mesh.ep > 1
        return make_schedule(
            "gpipe",
            mesh.pp,
            stages_per_rank(config, mesh.pp),
            num_microbatches,
            reduce_each=is_ordered,
        )
    several = mesh.pp * parallel.virtual_stages > 1
    return make_schedule(
        parallel.schedule if several else "1f1b",
        mesh.pp,
        parallel.virtual_stages,
        num_microbatches,
        reduce_each=config.train.deterministic
        or config.optim.resident != "all"
        or config.offload.host_share > 0
        or config.offload.rounds_gradients(config.train),
    )
