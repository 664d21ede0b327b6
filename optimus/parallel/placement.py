"""Which part of every parameter a rank holds: a value, from shapes and the rank's place alone.

The model is built whole on the meta device; each parameter then gets the intervals of each dim that
this rank keeps. Initial weights, checkpoints and the planner all read this one description.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from optimus.config import ModelConfig
from optimus.distributed.rules import ParameterKind
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


def share(size: int, index: int, count: int) -> tuple[int, int]:
    """The range of `size` that part `index` of `count` takes; parts differ by one at most."""
    return size * index // count, size * (index + 1) // count


def materialise(model: Transformer, placements: dict[str, Placement], device: torch.device) -> None:
    """Replace the meta parameters of a model by empty ones of this rank's shapes."""
    for prefix, module in model.named_modules():
        for name, _ in list(module.named_parameters(recurse=False)):
            full = f"{prefix}.{name}" if prefix else name
            empty = torch.empty(placements[full].local_shape, device=device)
            module.register_parameter(name, nn.Parameter(empty))
        for name, buffer in module.named_buffers(recurse=False):
            assert buffer.device.type != "meta", f"buffer {prefix}.{name} has no value on meta"
