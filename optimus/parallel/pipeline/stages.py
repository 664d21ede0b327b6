"""Which layers a stage holds: as even in cost as whole layers allow, or as told."""

from __future__ import annotations

from collections.abc import Sequence

from optimus.errors import ConfigError


def assign_layers(
    layer_costs: Sequence[float], num_stages: int, first_cost: float = 0.0, last_cost: float = 0.0
) -> tuple[range, ...]:
    """Contiguous layers for each stage, such that the dearest stage is as cheap as possible.

    `first_cost` (embedding) and `last_cost` (head and loss) come on top of the end stages, in the
    unit of `layer_costs`. Among equals the layers lie as late as possible, since early stages keep
    more microbatches alive. Raises ConfigError where there are more stages than layers.
    """
    num_layers = len(layer_costs)
    if num_stages > num_layers:
        raise ConfigError(
            f"parallel.pp * virtual_stages = {num_stages} stages, but model.num_layers = "
            f"{num_layers}; a stage holds at least one layer, use at most {num_layers} stages"
        )
    sums = [0.0]
    for cost in layer_costs:
        sums.append(sums[-1] + cost)

    def cost_of(stage: int, start: int, stop: int) -> float:
        ends = first_cost * (stage == 0) + last_cost * (stage == num_stages - 1)
        return sums[stop] - sums[start] + ends

    # best[n]: the dearest of the stages from `stage` on, if they begin with layer n.
    infinite = float("inf")
    best = [infinite] * num_layers + [0.0]
    ends: list[list[int]] = []
    for stage in reversed(range(num_stages)):
        row, choice = [infinite] * (num_layers + 1), [0] * (num_layers + 1)
        for start in range(num_layers):
            for stop in range(start + 1, num_layers + 1):
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
            f"parallel.stage_layers = {list(counts)} must give each of {num_stages} stages at "
            f"least one layer and add up to model.num_layers = {num_layers}"
        )
    stages, start = [], 0
    for count in counts:
        stages.append(range(start, start + count))
        start += count
    return tuple(stages)
