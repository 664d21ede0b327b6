"""Which part of every parameter a rank holds: a value, from shapes and the rank's place alone.

The model is built whole on the meta device; each parameter then gets the intervals of each dim that
this rank keeps. Initial weights, checkpoints and the planner all read this one description.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from optimus.config import ModelConfig
from optimus.dist.mesh import Mesh, Place
from optimus.dist.rules import ParameterKind
from optimus.model.attention import Attention
from optimus.model.layers import MLP, Embedding
from optimus.model.moe import Experts
from optimus.model.transformer import Transformer

Intervals = tuple[tuple[int, int], ...]
"""Ranges [start, stop) of one dim, in order; their elements lie one behind the other."""


@dataclass(frozen=True)
class Placement:
    """One parameter on one rank."""

    shape: tuple[int, ...]
    """Of the whole parameter."""
    kind: ParameterKind
    intervals: tuple[Intervals, ...]
    """What this rank holds of each dim."""

    @property
    def local_shape(self) -> tuple[int, ...]:
        return tuple(sum(stop - start for start, stop in dim) for dim in self.intervals)

    def take(self, whole: Tensor) -> Tensor:
        """This rank's part of a whole parameter; a view where the part is one block."""
        for dim, intervals in enumerate(self.intervals):
            parts = [whole.narrow(dim, start, stop - start) for start, stop in intervals]
            whole = parts[0] if len(parts) == 1 else torch.cat(parts, dim)
        return whole

    def of_one(self) -> Placement:
        """The same for one entry of the first dim, such as an expert."""
        return Placement(self.shape[1:], self.kind, self.intervals[1:])


def whole_model(config: ModelConfig) -> Transformer:
    """The model on the meta device: names and shapes without memory."""
    with torch.device("meta"):
        return Transformer(config)


def place_parameters(
    model: Transformer, mesh: Mesh, place: Place, sequence_parallel: bool = False
) -> dict[str, Placement]:
    """Every parameter of `model` (whole, say on meta) as the rank at `place` holds it, by name.

    Which parameters a pipeline stage has is a matter of what is left of the model: `keep_stage`.
    """
    placements: dict[str, Placement] = {}
    divided = dict(_divided(model, mesh, place))
    for name, parameter in model.named_parameters():
        shape = tuple(parameter.shape)
        whole = tuple(((0, size),) for size in shape)
        kind, dims = divided.get(name, (ParameterKind(), {}))
        if mesh.tp > 1 and sequence_parallel and _meets_a_part_of_the_sequence(name):
            kind = ParameterKind(partial_over_tp=True)
        intervals = tuple(dims.get(dim, whole[dim]) for dim in range(len(shape)))
        placements[name] = Placement(shape, kind, intervals)
    return placements


def _meets_a_part_of_the_sequence(name: str) -> bool:
    """Under sequence parallelism the norms of the residual stream and biases added behind a
    reduction see a share of the tokens on each tensor-parallel rank; the router sees all."""
    module, _, leaf = name.rpartition(".")
    last = module.rpartition(".")[2]
    norm = last in ("attention_norm", "mlp_norm", "final_norm")
    return norm or (last, leaf) == ("o_proj", "bias")


def _divided(model: nn.Module, mesh: Mesh, place: Place):
    """(name, (kind, {dim: intervals})) of every parameter that tp or ep divides."""
    for prefix, module in model.named_modules():
        for name, kind, dims in _rules(module, mesh, place):
            yield f"{prefix}.{name}" if prefix else name, (kind, dims)


def _rules(module: nn.Module, mesh: Mesh, place: Place):
    """Megatron's division: columns of what opens a block, rows of what closes it."""
    slice_of = ParameterKind(divided_by_tp=mesh.tp > 1)

    def columns(size: int) -> Intervals:
        return (share(size, place.tp, mesh.tp),)

    if isinstance(module, Attention):
        for name in ("q_proj", "k_proj", "v_proj"):
            linear = getattr(module, name)
            yield f"{name}.weight", slice_of, {0: columns(linear.out_features)}
            if linear.bias is not None:
                yield f"{name}.bias", slice_of, {0: columns(linear.out_features)}
        yield "o_proj.weight", slice_of, {1: columns(module.o_proj.in_features)}
        for name in ("q_norm", "k_norm"):
            for inner, parameter in getattr(module, name).named_parameters():
                yield f"{name}.{inner}", slice_of, {0: columns(len(parameter))}
    elif isinstance(module, MLP):
        for name in ("gate_proj", "up_proj"):
            yield f"{name}.weight", slice_of, {0: columns(getattr(module, name).out_features)}
        yield "down_proj.weight", slice_of, {1: columns(module.down_proj.in_features)}
    elif isinstance(module, Experts):
        kind = ParameterKind(expert=True, divided_by_tp=mesh.tp > 1)
        held = (share(module.gate_up.shape[0], place.ep, mesh.ep),)
        inner = module.down.shape[2]
        start, stop = share(inner, place.tp, mesh.tp)
        both = ((start, stop), (inner + start, inner + stop))  # gate rows, then up rows
        yield "gate_up", kind, {0: held, 1: both if mesh.tp > 1 else ((0, 2 * inner),)}
        yield "down", kind, {0: held, 2: ((start, stop),)}
    elif isinstance(module, Embedding):
        yield "weight", slice_of, {0: columns(module.weight.shape[0])}
    elif isinstance(module, Transformer) and module.head is not None:
        yield "head.weight", slice_of, {0: columns(module.head.out_features)}


def share(size: int, index: int, count: int) -> tuple[int, int]:
    """The range of `size` that part `index` of `count` takes; parts differ by one at most."""
    return size * index // count, size * (index + 1) // count


def keep_stage(model: Transformer, layers: Collection[int], is_first: bool, is_last: bool) -> None:
    """Delete from a whole model what the stages of this rank do not hold.

    Tied embeddings stay on the last stage too, which uses them as its head.
    """
    for name in list(model.blocks):
        if int(name) not in layers:
            del model.blocks[name]
    if not is_first and not (is_last and model.config.tie_embeddings):
        model.embed = None
    if not is_last:
        model.final_norm, model.head = None, None


def materialise(model: Transformer, placements: dict[str, Placement], device: torch.device) -> None:
    """Replace the meta parameters by empty ones of this rank's shapes, buffers included."""
    for prefix, module in model.named_modules():
        for name, _ in list(module.named_parameters(recurse=False)):
            full = f"{prefix}.{name}" if prefix else name
            empty = torch.empty(placements[full].local_shape, device=device)
            setattr(module, name, nn.Parameter(empty))
        if isinstance(module, Experts):
            module.first_expert = placements[f"{prefix}.gate_up"].intervals[0][0][0]
        for name, buffer in list(module.named_buffers(recurse=False)):
            assert buffer.device.type != "meta", f"buffer {prefix}.{name} has no value on meta"
