"""Whole tensors of a model that is divided over ranks, gathered on the first rank."""

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
    """Return a state of all parameters of this rank, gathered from the ranks that have its shards.

    This function is a collective: all ranks that have shards must call it.

    Args:
        engine: The engine of this rank.
        state: "grad", "master", "exp_avg" or "exp_avg_sq". Frozen parameters have only "master".

    Returns:
        The local tensors by parameter. If the state is not sharded, the tensors are views of the
        memory of this rank.
    """
    engine.wait()
    local: dict[str, Tensor] = {}
    for chunk in engine.chunks:
        flat = chunk.grad if state == "grad" else chunk.states[state]
        if flat is chunk.on_disk.get(state):
            flat, on_disk = engine.memory.new(len(flat), flat.dtype), flat
            flat.copy_(engine.read(on_disk))
        flat = chunk.gather(flat)
        local |= {slot.name: chunk.view(flat, slot) for slot in chunk.chunk.slots}
    if state == "master":
        for frozen in engine.frozen.chunks:
            flat = frozen.gather(frozen.shard).float()
            local |= {slot.name: frozen.view(flat, slot) for slot in frozen.chunk.slots}
    return local


class WholeModel:
    """Gathers whole parameters from the ranks.

    Args:
        config: The configuration.
        layout: The layout of this rank.
        groups: The process groups of this rank.
    """

    def __init__(self, config: Config, layout: Layout, groups: Groups) -> None:
        self._config, self._layout, self._groups = config, layout, groups
        self._meta = whole_model(config.model)
        self.shapes = {name: p.shape for name, p in self._meta.named_parameters()}

    def gather(self, engine: ChunkEngine, state: str) -> dict[str, Tensor]:
        """Return the whole tensors of a state, by parameter, on the first rank; {} on the other
        ranks.

        All ranks must call this method. Only the first replica of a tensor is sent.
        """
        local = whole_of(engine, state)
        everyone, mesh = self._groups.everyone, self._layout.mesh
        if everyone.rank == 0:
            return dict(local) if mesh.dp == mesh.world_size else self._receive_all(local)
        for name in self._sent_by(self._groups.coordinate):
            send(local[name].contiguous(), everyone, 0).wait()
        return {}

    def _receive_all(self, local: Mapping[str, Tensor]) -> dict[str, Tensor]:
        everyone, mesh = self._groups.everyone, self._layout.mesh
        sent = {rank: self._sent_by(mesh.coordinate(rank)) for rank in mesh.group_of(0, MODEL)}
        whole: dict[str, Tensor] = {}
        for name, shape in self.shapes.items():
            whole[name] = torch.empty(shape)
            for source, placements in sent.items():
                if name not in placements:
                    continue
                placement = placements[name]
                if source > 0:
                    tensor = receive(torch.empty(placement.local_shape), everyone, source).wait()
                else:
                    tensor = local[name]
                put(placement, whole[name], tensor)
        return whole

    def _sent_by(self, coordinate: Coordinate) -> dict[str, Placement]:
        """Return, by name, the placements of the parameters that the rank at `coordinate` sends.
        Only the first replica of a parameter is sent."""
        mesh, count = self._layout.mesh, self._layout.schedule.num_microbatches
        placements = make_layout(self._config, mesh, coordinate, count).placements
        return {
            name: placement
            for name, placement in placements.items()
            if not any(getattr(coordinate, axis) for axis in placement.kind.copy_axes(()))
            and not (name == "embed.weight" and coordinate.pp > 0)  # the copy on another stage
        }


def put(placement: Placement, whole: Tensor, local: Tensor) -> None:
    """Copy a rank's local tensor to the tensor's intervals in the whole parameter."""
    assert tuple(local.shape) == placement.local_shape, (local.shape, placement)
    for intervals in itertools.product(*map(_with_offsets, placement.intervals)):
        target, source = whole, local
        for dim, (start, size, offset) in enumerate(intervals):
            target, source = target.narrow(dim, start, size), source.narrow(dim, offset, size)
        target.copy_(source)


def _with_offsets(intervals: Intervals) -> list[tuple[int, int, int]]:
    """Return (start in the whole dim, size, start in the local dim) of each interval."""
    triples, offset = [], 0
    for start, stop in intervals:
        triples.append((start, stop - start, offset))
        offset += stop - start
    return triples
