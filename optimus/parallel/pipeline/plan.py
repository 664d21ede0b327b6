"""The pipeline that a configuration asks for. Needs no torch, so a launcher can ask first."""

from __future__ import annotations

from optimus.config import Config
from optimus.dist.mesh import Mesh
from optimus.model.flops import head_multiply_adds, layer_multiply_adds
from optimus.parallel.pipeline.actions import Schedule
from optimus.parallel.pipeline.schedules import make_schedule
from optimus.parallel.pipeline.stages import assign_layers, layers_by_hand


def plan_stages(config: Config, num_ranks: int) -> tuple[range, ...]:
    """The layers of every stage of a run; ConfigError where they cannot be divided so."""
    parallel, model = config.parallel, config.model
    num_stages = num_ranks * parallel.virtual_stages
    if parallel.stage_layers:
        return layers_by_hand(parallel.stage_layers, model.num_layers, num_stages)
    seq_len = config.train.seq_len or model.max_position_embeddings
    layers = [layer_multiply_adds(model, seq_len, n) for n in range(model.num_layers)]
    return assign_layers(layers, num_stages, 0.0, head_multiply_adds(model))


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
