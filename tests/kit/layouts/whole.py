"""Whole tensors of a model that ranks hold in parts, on the first of them: for tests to compare."""

from __future__ import annotations

import itertools
from collections.abc import Mapping

import torch
from torch import Tensor

from optimus.chunks.engine import ChunkEngine
from optimus.config import Config
from optimus.config.axes import MODEL
from optimus.distributed.collectives import receive, send
from optimus.distributed.groups import Groups
from optimus.distributed.mesh import Coordinate
from optimus.parallel.apply import make_layout
from optimus.parallel.layout import Layout
from optimus.parallel.placement import Intervals, Placement, whole_model


def whole_of(engine: ChunkEngine, state: str) -> dict[str, Tensor]:
    """A state of every parameter of a rank, by name, put together over shards: a collective of
    their ranks. Views of this rank's memory where nothing is divided. Frozen ones have a master."""
    engine.wait()
    out = {}
    for one in engine.chunks:
        flat = one.gather(one.grad if state == "grad" else one.states[state])
        out |= {slot.name: one.view(flat, slot) for slot in one.chunk.slots}
    if state == "master":
        out |= {name: view.float() for name, view in engine.frozen.parameters().items()}
    return out


class WholeModel:
    """Names and shapes of the whole model, and which rank holds which part of it."""

    def __init__(self, config: Config, layout: Layout, groups: Groups) -> None:
        self._config, self._layout, self._groups = config, layout, groups
        self._meta = whole_model(config.model)
        self.shapes = {name: p.shape for name, p in self._meta.named_parameters()}

    def gather(self, engine: ChunkEngine, state: str) -> dict[str, Tensor]:
        """Whole tensors on the first rank, {} on others. A collective of all ranks; ranks that hold
        but copies give nothing."""
        local = whole_of(engine, state)
        everyone, mesh = self._groups.everyone, self._layout.mesh
        if everyone.rank == 0:
            return dict(local) if mesh.dp == mesh.world_size else self._receive_all(local)
        for name in self._held_by(self._groups.coordinate):
            send(local[name].contiguous(), everyone, 0).wait()
        return {}

    def _receive_all(self, local: Mapping[str, Tensor]) -> dict[str, Tensor]:
        everyone, mesh = self._groups.everyone, self._layout.mesh
        held = {rank: self._held_by(mesh.coordinate(rank)) for rank in mesh.group_of(0, MODEL)}
        out: dict[str, Tensor] = {}
        for name, shape in self.shapes.items():
            out[name] = torch.empty(shape)
            for source, parts in held.items():
                if name not in parts:
                    continue
                part = local.get(name)
                if source > 0:
                    part = receive(torch.empty(parts[name].local_shape), everyone, source).wait()
                put(parts[name], out[name], part)
        return out

    def _held_by(self, place: Coordinate) -> dict[str, Placement]:
        """What the rank at `place` gives: each part of each parameter is given once."""
        mesh, count = self._layout.mesh, self._layout.schedule.num_microbatches
        everything = make_layout(self._config, mesh, place, count).placements
        given = {}
        for name, placement in everything.items():
            is_copy = any(getattr(place, axis) for axis in placement.kind.copy_axes(()))
            far_end = name == "embed.weight" and place.pp > 0
            if not (is_copy or far_end):
                given[name] = placement
        return given


def put(placement: Placement, whole: Tensor, part: Tensor) -> None:
    """Write a rank's part into its place in the whole parameter."""
    assert tuple(part.shape) == placement.local_shape, (part.shape, placement)
    for chosen in itertools.product(*map(_with_offsets, placement.intervals)):
        there, here = whole, part
        for dim, (start, size, offset) in enumerate(chosen):
            there, here = there.narrow(dim, start, size), here.narrow(dim, offset, size)
        there.copy_(here)


def _with_offsets(intervals: Intervals) -> list[tuple[int, int, int]]:
    """(start in the whole, size, start in the part) of each interval."""
    out, offset = [], 0
    for start, stop in intervals:
        out.append((start, stop - start, offset))
        offset += stop - start
    return out
