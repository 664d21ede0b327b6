"""Construction of one rank's model from a model on the meta device.

On the meta device, parameters have shapes but no memory. `build_model` has three steps:

1. Delete the modules of other ranks' pipeline stages.
2. Apply parallel styles. A style replaces modules by parallel versions.
3. Replace the meta parameters by this rank's slices on the device (`materialise`). The slices do
   not have memory for their values yet.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any, Protocol

import torch

from optimus.config import Config, ModelConfig, ParallelConfig
from optimus.distributed.groups import Groups
from optimus.distributed.mesh import ENDS, Coordinate, Mesh, ParameterKind
from optimus.model.transformer import Transformer
from optimus.parallel import expert, tensor
from optimus.parallel.deferred_linear import DeferredLinears
from optimus.parallel.layout import Layout
from optimus.parallel.pipeline.plan import plan_stages, schedule_of
from optimus.parallel.pipeline.schedules import make_schedule
from optimus.parallel.placement import Intervals, Placement, materialise
from optimus.parallel.recompute import Recompute

SLICES = {"ep": expert.slices, "tp": tensor.slices}
"""Maps the name of a mesh axis to a function `slices(module, index, size)`. For each parameter of
`module` that the axis divides, the function yields the slice of the rank with the index `index`
along the axis."""


class ParallelStyle(Protocol):
    """Interface of a parallel style, which replaces modules of a model by parallel versions.

    The class of a new module is a subclass of the replaced module's class. A style does not change
    the names of parameters.
    """

    def apply(self, model: Transformer) -> None:
        """Replace modules of `model` in place. `model` is on the meta device."""


def build_model(
    config: Config, layout: Layout, groups: Groups, device: torch.device
) -> Transformer:
    """Return this rank's model. The parameters are fp32 tensors on `device`. Memory for the values
    of the parameters is allocated later (see `materialise`)."""
    model = _model_of_stages(config.model, *_kept_stages(layout))
    with torch.device("meta"):
        for style in _styles(config.parallel, config.recompute.modules, layout, groups):
            style.apply(model)
    materialise(model, layout.placements, device)
    return model


def _styles(
    parallel: ParallelConfig, recomputed: Sequence[str], layout: Layout, groups: Groups
) -> Iterator[ParallelStyle]:
    """Yield the parallel styles that the model needs, in the order in which to apply them."""
    # Styles that replace outer modules come first, because a new outer module creates new children.
    if recomputed:
        # Recompute is first, so that backward repeats the communication that later styles add.
        yield Recompute(recomputed)
    if layout.mesh.tp > 1:
        yield tensor.TensorParallel(groups.over("tp"), parallel.sequence_parallel)
    if layout.mesh.ep > 1:
        # Experts are children of the feed-forward networks that tensor parallelism replaces.
        yield expert.ExpertParallel(groups.over("ep"), parallel.ep_dispatch)
    if layout.schedule.splits_backward:
        # Experts and RowParallelLinear already defer gradients. DeferredLinears replaces the other
        # linear layers, whose class is nn.Linear.
        yield DeferredLinears()


def make_layout(
    config: Config, mesh: Mesh, coordinate: Coordinate, num_microbatches: int
) -> Layout:
    """Return the layout of the rank at `coordinate`.

    `num_microbatches` is the number of microbatches per data-parallel rank and step.
    """
    schedule = schedule_of(config, mesh, num_microbatches)
    in_sequence = config.parallel.sequence_parallel
    layout = Layout(
        mesh,
        coordinate,
        schedule,
        plan_stages(config, mesh.pp),
        {},
        sequence_shares=mesh.tp if in_sequence else 1,
    )
    rank = mesh, coordinate, in_sequence
    placements = _placements_of(config.model, _kept_stages(layout), *rank)
    return replace(layout, placements=dict(placements))


def layout_of_layers(
    config: Config,
    mesh: Mesh,
    coordinate: Coordinate,
    layers: tuple[int, ...],
    divides_backward: bool,
) -> Layout:
    """Return the layout of a rank whose model has only the layers `layers`. There is no pipeline
    parallelism. Profiles of operations use such layouts.

    Args:
        config: The configuration.
        mesh, coordinate: As for `make_layout`, with pp = 1.
        layers: Indices of the layers.
        divides_backward: True if the pipeline schedule divides each backward pass into the actions
            I and W.
    """
    schedule = make_schedule("zb-h1" if divides_backward else "1f1b", 1, 1, 1)
    in_sequence = config.parallel.sequence_parallel
    shares = mesh.tp if in_sequence else 1
    layout = Layout(mesh, coordinate, schedule, (layers,), {}, sequence_shares=shares)
    rank = mesh, coordinate, in_sequence
    placements = _placements_of(config.model, _kept_stages(layout), *rank)
    return replace(layout, placements=dict(placements))


def _kept_stages(layout: Layout) -> tuple[frozenset[int], bool, bool]:
    """Return the arguments of `Transformer.keep_stages` for a rank."""
    layers = (layer for stage in layout.stages for layer in layout.layers[stage])
    return frozenset(layers), layout.has_first, layout.has_last


def _model_of_stages(
    model_config: ModelConfig, layers: frozenset[int], has_first: bool, has_last: bool
) -> Transformer:
    """Return a model on the meta device with only some pipeline stages. The parameters are not
    divided over tp and ep ranks."""
    with torch.device("meta"):
        model = Transformer(model_config, layers)
    model.keep_stages(layers, has_first, has_last)
    return model


@lru_cache(maxsize=64)  # a search for the placement of states plans the same rank several times
def _placements_of(
    model_config: ModelConfig, kept: tuple[frozenset[int], bool, bool], *rank: Any
) -> dict[str, Placement]:
    """Return the result of `make_placements` for a model with only the stages `kept`. `rank`
    contains the arguments of `make_placements` after `model`."""
    return make_placements(_model_of_stages(model_config, *kept), *rank)


def make_placements(
    model: Transformer, mesh: Mesh, coordinate: Coordinate, sequence_parallel: bool = False
) -> dict[str, Placement]:
    """Return a dict from parameter name to the parameter's placement on the rank at `coordinate`.

    Args:
        model: a model whose parameters are not divided over ranks. It may be on the meta device.
        mesh: the sizes of all axes of the device mesh.
        coordinate: the index of the rank along each axis.
        sequence_parallel: the value of `parallel.sequence_parallel`.
    """
    divided: dict[str, dict[str, tuple[int, Intervals]]] = {}
    for prefix, module in model.named_modules():
        for axis, slices in SLICES.items():
            for name, dim, intervals in slices(
                module, getattr(coordinate, axis), getattr(mesh, axis)
            ):
                full = f"{prefix}.{name}" if prefix else name
                divided.setdefault(full, {})[axis] = dim, intervals
    placements = {}
    for name, parameter in model.named_parameters():
        by_axis, shape = divided.get(name, {}), tuple(parameter.shape)
        dims = dict(by_axis.values())
        assert len(dims) == len(by_axis), f"{name}: two axes divide one dim: {by_axis}"
        partial = sequence_parallel and mesh.tp > 1 and tensor.sees_share_of_sequence(name)
        stages = ENDS if name in model.shared_uses.values() else ()
        kind = ParameterKind(tuple(by_axis), ("tp",) if partial else (), stages)
        local = tuple(dims.get(dim, ((0, size),)) for dim, size in enumerate(shape))
        placements[name] = Placement(shape, kind, local)
    return placements
