"""From a whole model to one rank's part: the whole order on one screen.

1. The model is built on the meta device: names and shapes, no memory.
2. Pipeline: what other stages hold is deleted, so that nothing of it is wired or filled.
3. Parameters get this rank's shapes (tensor and expert parallelism divide them by one value, the
   layout's placements) and memory.
4. Tensor parallelism wires communication around attention, feed-forward, embedding and loss.
5. Expert parallelism wires the exchange of tokens around the experts; it comes behind tensor
   parallelism, so that rows are exchanged once and then met by slices of experts.
6. Recomputation wraps what is wired, so that communication is recomputed with its module.
7. Linear layers of a zero-bubble schedule learn to put off their weight gradients, which experts
   always can: last, since it changes how a layer computes and not what.

At size 1 nothing is inserted.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from optimus.config import Config
from optimus.distributed.groups import Groups
from optimus.distributed.mesh import Mesh, Place
from optimus.distributed.rules import ParameterKind
from optimus.model.transformer import Transformer
from optimus.parallel import expert, tensor
from optimus.parallel.layout import Layout
from optimus.parallel.pipeline.plan import plan_stages, schedule_of
from optimus.parallel.pipeline.split import split_linears
from optimus.parallel.placement import Intervals, Placement, keep_stage, materialise, whole_model
from optimus.parallel.recompute import wire_recompute

SLICES = {"ep": expert.slices, "tp": tensor.slices}
"""Of each axis that divides parameters: what one of so many ranks has of a module's own."""


def build_model(
    config: Config, layout: Layout, groups: Groups, device: torch.device
) -> Transformer:
    """This rank's part of the model, with empty parameters in fp32."""
    model = _stages_here(config, layout)
    materialise(model, layout.placements, device)
    if layout.mesh.tp > 1:
        tensor.wire_tensor_parallel(model, groups.over("tp"), config.parallel.sequence_parallel)
    if layout.mesh.ep > 1:
        expert.wire_expert_parallel(model, groups.over("ep"), config.parallel.ep_dispatch)
    if config.recompute.modules:
        wire_recompute(model, config.recompute.modules)
    if layout.schedule.splits_backward:
        split_linears(model)
    return model


def make_layout(config: Config, mesh: Mesh, place: Place, num_microbatches: int) -> Layout:
    """The layout of the rank at `place` with so many microbatches a step."""
    schedule = schedule_of(config, mesh, num_microbatches)
    layout = Layout(mesh, place, schedule, plan_stages(config, mesh.pp), {})
    model, in_sequence = _stages_here(config, layout), config.parallel.sequence_parallel
    return replace(layout, placements=place_parameters(model, mesh, place, in_sequence))


def _stages_here(config: Config, layout: Layout) -> Transformer:
    """What the stages of this rank have of the model, whole and on the meta device."""
    model = whole_model(config.model)
    layers = {layer for stage in layout.stages for layer in layout.layers[stage]}
    keep_stage(model, layers, layout.has_first, layout.has_last)
    return model


def place_parameters(
    model: Transformer, mesh: Mesh, place: Place, sequence_parallel: bool = False
) -> dict[str, Placement]:
    """Every parameter of `model` (whole, say on meta) as the rank at `place` holds it, by name."""
    divided: dict[str, dict[str, tuple[int, Intervals]]] = {}
    for prefix, module in model.named_modules():
        for axis, slices in SLICES.items():
            for name, dim, intervals in slices(module, getattr(place, axis), getattr(mesh, axis)):
                full = f"{prefix}.{name}" if prefix else name
                divided.setdefault(full, {})[axis] = dim, intervals
    placements = {}
    for name, parameter in model.named_parameters():
        by_axis, shape = divided.get(name, {}), tuple(parameter.shape)
        dims = dict(by_axis.values())
        assert len(dims) == len(by_axis), f"{name}: two axes divide one dim: {by_axis}"
        partial = sequence_parallel and mesh.tp > 1 and tensor.meets_a_part_of_the_sequence(name)
        kind = ParameterKind(tuple(by_axis), ("tp",) if partial else ())
        local = tuple(dims.get(dim, ((0, size),)) for dim, size in enumerate(shape))
        placements[name] = Placement(shape, kind, local)
    return placements
