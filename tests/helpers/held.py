"""What every rank of a layout holds, as values: chunks and boxes without a process or a tensor."""

from __future__ import annotations

from typing import Any, NamedTuple

from optimus.checkpoint.slices import Box, ChunkShard, share_of
from optimus.chunks.layout import Parameter, lay_out
from optimus.config import Config, make_config
from optimus.distributed.mesh import Mesh
from optimus.distributed.rules import copy_axes, shard_axes, sum_axes
from optimus.parallel.apply import make_layout
from tests.helpers.tiny import tiny_tree


class Holding(NamedTuple):
    """One rank's shards, and the boxes and shapes of its parameters by name."""

    shards: list[ChunkShard]
    boxes: dict[str, Box]
    shapes: dict[str, tuple[int, ...]]


def layout_config(mesh: Mesh, tree: dict[str, Any] | None = None, **overrides: Any) -> Config:
    tree = tree or tiny_tree("d", "r", **overrides)
    return make_config(tree | {"parallel": tree.get("parallel", {}) | mesh._asdict()})


class Holdings:
    """What the ranks of a mesh hold; ranks that differ in dp alone share a chunk layout."""

    def __init__(self, config: Config, mesh: Mesh) -> None:
        self.config, self.mesh = config, mesh
        self._layouts: dict[tuple[int, int, int], Any] = {}

    def of(self, rank: int) -> Holding:
        mesh, place = self.mesh, self.mesh.coordinate(rank)
        key = (place.pp, place.ep, place.tp)
        if key not in self._layouts:
            self._layouts[key] = self._lay_out(rank)
        chunks, boxes, shapes = self._layouts[key]
        held = []
        for chunk in chunks:
            sharding, copies, far = chunk.key[1:]
            number = share_of(mesh, place, sharding).index
            held.append(ChunkShard(chunk, number * chunk.shard_length, copies, far))
        return Holding(held, boxes, shapes)

    def _lay_out(self, rank: int) -> tuple:
        mesh, config = self.mesh, self.config
        layout = make_layout(config, mesh, mesh.coordinate(rank), 8)
        parameters = []
        for name, placement in layout.placements.items():
            kind = placement.kind
            adding = tuple(axis for axis in sum_axes(kind) if axis not in kind.partial)
            sharding = shard_axes(kind, config.optim.sharding)
            far = name == "embed.weight" and not layout.has_first
            key = ((layout.stage_of(name), kind), sharding, copy_axes(kind, sharding), far)
            sizes = mesh.size_of(adding), mesh.size_of(sharding)
            parameters.append(Parameter(name, placement.local_shape, key, *sizes))
        boxes = {name: one.intervals for name, one in layout.placements.items()}
        shapes = {name: one.shape for name, one in layout.placements.items()}
        chunks = lay_out(parameters, config.optim.chunk_length).chunks
        return chunks, boxes, shapes
