"""Placements: the slices of parameters on a rank, computed from shapes and the rank's coordinate.

A placement is computed from the undivided model on the meta device; it has, for each dim of a
parameter, the intervals that this rank keeps. Initial weights, checkpoints and the planner all use
placements.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from optimus.config import ModelConfig
from optimus.distributed.rules import ParameterKind
from optimus.model.transformer import Transformer

Intervals = tuple[tuple[int, int], ...]
"""Ranges [start, stop) of one dim; the rank's slice concatenates them in this order."""


@dataclass(frozen=True)
class Placement:
    """The slice of one parameter on one rank."""

    shape: tuple[int, ...]
    """Shape of the whole parameter."""
    kind: ParameterKind
    intervals: tuple[Intervals, ...]
    """This rank's intervals of each dim."""

    @property
    def local_shape(self) -> tuple[int, ...]:
        return tuple(sum(stop - start for start, stop in dim) for dim in self.intervals)

    def slice_of(self, whole: Tensor) -> Tensor:
        """Return this rank's slice of a whole parameter; a view if each dim has one interval."""
        for dim, intervals in enumerate(self.intervals):
            ranges = [whole.narrow(dim, start, stop - start) for start, stop in intervals]
            whole = ranges[0] if len(ranges) == 1 else torch.cat(ranges, dim)
        return whole

    def of_entry(self) -> Placement:
        """Return the placement of one entry of the first dim, such as an expert."""
        return Placement(self.shape[1:], self.kind, self.intervals[1:])


def whole_model(config: ModelConfig) -> Transformer:
    """Return the undivided model on the meta device: names and shapes without memory."""
    with torch.device("meta"):
        return Transformer(config)


def share(size: int, index: int, count: int) -> tuple[int, int]:
    """Return the range [start, stop) of share `index` if `size` elements are divided into `count`
    shares, whose sizes differ by one element at most."""
    return size * index // count, size * (index + 1) // count


def materialise(model: Transformer, placements: dict[str, Placement], device: torch.device) -> None:
    """Replace the meta parameters of a model by empty parameters on `device`, in the shapes of this
    rank's slices."""
    for prefix, module in model.named_modules():
        for name, _ in list(module.named_parameters(recurse=False)):
            full = f"{prefix}.{name}" if prefix else name
            empty = torch.empty(placements[full].local_shape, device=device)
            module.register_parameter(name, nn.Parameter(empty))
        for name, buffer in module.named_buffers(recurse=False):
            assert buffer.device.type != "meta", f"buffer {prefix}.{name} has no value on meta"
