"""The plan of a run, without the checks that need torch or an unused run directory."""

from __future__ import annotations

from optimus.config import Config
from optimus.train.resolve import RunPlan, find_start, read_inputs


def resolve(config: Config, world_size: int) -> RunPlan:
    """Return the plan of a run of `world_size` ranks. Creates nothing."""
    inputs = read_inputs(config, world_size)
    return RunPlan(*inputs, *find_start(config, inputs.batch, inputs.data.training))
