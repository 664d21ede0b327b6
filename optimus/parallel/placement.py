"""Placements: descriptions of the slices of parameters that one rank has.

For each dim of a parameter, the placement lists the intervals of indices that the rank's slice
contains.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from optimus.config import ModelConfig
from optimus.distributed.mesh import ParameterKind
from optimus.model.transformer import Transformer

Intervals = tuple[tuple[int, int], ...]
"""Index ranges [start, stop) along one dim of a parameter. A rank's slice contains the elements of
all ranges, in this order."""


@dataclass(frozen=True)
class Placement:
    """Description of the slice of one parameter on one rank."""

    shape: tuple[int, ...]
    """Shape of the whole parameter."""
    kind: ParameterKind
    intervals: tuple[Intervals, ...]
    """For each dim of the parameter, the intervals of indices that the slice contains."""

    @property
    def local_shape(self) -> tuple[int, ...]:
        return tuple(sum(stop - start for start, stop in dim) for dim in self.intervals)

    def slice_of(self, whole: Tensor) -> Tensor:
        """Return this rank's slice of the parameter `whole`. The slice may be a view of `whole`."""
        for dim, intervals in enumerate(self.intervals):
            ranges = [whole.narrow(dim, start, stop - start) for start, stop in intervals]
            whole = ranges[0] if len(ranges) == 1 else torch.cat(ranges, dim)
        return whole

    def of_entry(self) -> Placement:
        """Return the placement of `parameter[i]`, where i is any index in this rank's slice. The
        result does not depend on i.

        For example, if a parameter has the weights of all experts, `parameter[i]` is one expert's
        weight.
        """
        return Placement(self.shape[1:], self.kind, self.intervals[1:])


def whole_model(config: ModelConfig) -> Transformer:
    """Return the undivided model on the meta device. The parameters have names and shapes, but no
    memory."""
    with torch.device("meta"):
        return Transformer(config)


def share(size: int, index: int, count: int) -> tuple[int, int]:
    """Divide `size` elements into `count` shares. Return the element range [start, stop) of the
    share `index`.

    The numbers of elements in the shares differ by at most one.
    """
    return size * index // count, size * (index + 1) // count


def materialise(model: Transformer, placements: dict[str, Placement], device: torch.device) -> None:
    """Replace the meta parameters of a model by this rank's slices on `device`.

    All elements of a slice have the same memory address, so that the model needs very little memory
    until its parameters become views of chunks, the flat buffers of model states. The elements are
    NaN, so that the loss is NaN if a parameter is used before it becomes a view of a chunk.
    """
    for prefix, module in model.named_modules():
        for name, _ in list(module.named_parameters(recurse=False)):
            full = f"{prefix}.{name}" if prefix else name
            value = torch.full((), math.nan, device=device).expand(placements[full].local_shape)
            module.register_parameter(name, nn.Parameter(value))
        for name, buffer in module.named_buffers(recurse=False):
            assert buffer.device.type != "meta", f"buffer {prefix}.{name} has no value on meta"
