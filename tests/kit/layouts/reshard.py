"""Checkpoints that pass between layouts: what each rank holds, real shard files of simulated ranks,
and the layouts of 1, 2, 4 and 8 ranks between which they must pass to the bit."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy

from optimus.checkpoint.format import ADAMW_STATES, Index, decode, encode
from optimus.checkpoint.load import Readers, ReadRequest
from optimus.checkpoint.save import write_shard
from optimus.checkpoint.shard_file import Identity
from optimus.checkpoint.slices import (
    Box,
    ChunkShard,
    ParamSlice,
    Share,
    share_of,
    slices_to_read,
    slices_to_write,
)
from optimus.chunks.layout import Parameter, lay_out
from optimus.config import Config, make_config
from optimus.distributed.mesh import Coordinate, Mesh
from optimus.parallel.apply import make_layout
from tests.kit.runs.tiny import tiny_tree


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
            adding = tuple(axis for axis in kind.sum_axes if axis not in kind.partial)
            sharding = kind.shard_axes(config.optim.sharding)
            far = name == "embed.weight" and not layout.has_first
            key = (
                (layout.stage_of(name), kind.divided, kind.partial),
                sharding,
                kind.copy_axes(sharding),
                far,
            )
            sizes = mesh.size_of(adding), mesh.size_of(sharding)
            parameters.append(Parameter(name, placement.local_shape, key, *sizes))
        boxes = {name: one.intervals for name, one in layout.placements.items()}
        shapes = {name: one.shape for name, one in layout.placements.items()}
        chunks = lay_out(parameters, config.optim.chunk_length).chunks
        return chunks, boxes, shapes


def whole_states(shapes: dict, seed: int = 0) -> dict[str, dict[str, numpy.ndarray]]:
    """By state and name, values of which no two are alike."""
    generator = numpy.random.default_rng(seed)
    return {
        state: {
            name: generator.random(shape, dtype=numpy.float32) for name, shape in shapes.items()
        }
        for state in ADAMW_STATES
    }


def take(whole: numpy.ndarray, param: ParamSlice) -> numpy.ndarray:
    for dim, intervals in enumerate(param.box):
        index = numpy.concatenate([numpy.arange(*one) for one in intervals])
        whole = whole.take(index, dim)
    return whole.reshape(-1)[param.start : param.stop]


def all_shapes(holdings: Holdings) -> dict[str, tuple[int, ...]]:
    ranks = range(holdings.mesh.world_size)
    return {name: shape for rank in ranks for name, shape in holdings.of(rank).shapes.items()}


def turns_of(config: Config, mesh: Mesh, coordinate: Coordinate) -> dict[str, Share]:
    """Return the turns in which the end stages write tied embeddings."""
    tied = config.model.tie_embeddings and mesh.pp > 1
    return {"embed.weight": Share(int(coordinate.pp > 0), 2)} if tied else {}


def save(
    directory: Path, holdings: Holdings, states: dict, scatter: str = "balanced", step: int = 7
) -> Index:
    """Write what every rank of the layout writes; the index of it."""
    written, mesh = [], holdings.mesh
    for rank in range(mesh.world_size):
        one = holdings.of(rank)
        coordinate = mesh.coordinate(rank)
        turns = turns_of(holdings.config, mesh, coordinate)
        slices = slices_to_write(one.shards, one.boxes, mesh, coordinate, scatter, turns)

        def bytes_of(state, state_slice):
            memory = numpy.zeros(state_slice.stop - state_slice.start, dtype=numpy.float32)
            for param, at in state_slice.params:
                memory[at : at + param.stop - param.start] = take(states[state][param.name], param)
            return memoryview(memory).cast("B")

        if slices:
            identity = Identity(f"generation {step}", step, rank)
            parts = [(state, state_slice) for state in ADAMW_STATES for state_slice in slices]
            written.append(write_shard(directory, identity, ADAMW_STATES, parts, bytes_of))
    return decode(encode(f"generation {step}", step, ADAMW_STATES, written, all_shapes(holdings)))


def requests_of(
    holding: Holding, holdings: Holdings, rank: int, fill: bool = True
) -> list[ReadRequest]:
    """What the rank reads, into memory that is filled with -1, or not touched."""
    mesh, requests = holdings.mesh, []
    for state_slice in slices_to_read(holding.shards, holding.boxes, mesh, mesh.coordinate(rank)):
        for state in ADAMW_STATES:
            memory = numpy.empty(state_slice.stop - state_slice.start, dtype=numpy.float32)
            if fill:
                memory.fill(-1)
            requests.append(ReadRequest(state, state_slice.params, memoryview(memory).cast("B")))
    return requests


def assert_loads(directory: Path, index: Index, holdings: Holdings, states: dict) -> None:
    """Every rank of the layout reads its part of every state, to the bit."""
    for rank in range(holdings.mesh.world_size):
        requests = requests_of(holdings.of(rank), holdings, rank)
        with Readers(directory, index, 1) as readers:
            readers.read(requests)
        for request in requests:
            memory = numpy.frombuffer(request.memory, dtype=numpy.float32)
            for param, at in request.params:
                expected = take(states[request.state][param.name], param)
                assert numpy.array_equal(memory[at : at + len(expected)], expected), param.name


_MODEL = {
    "model__num_layers": 8,
    "model__num_attention_heads": 8,
    "model__num_experts": 8,
    "model__tie_embeddings": True,
}
BLOCK_BYTES = 1 << 13
"""Small, so that ranges begin and end within blocks."""


class Layout(NamedTuple):
    """How the ranks divide the model and its states, and by which rule they write."""

    mesh: tuple[int, int, int, int]
    sharding: str
    chunk_length: int
    schedule: str
    scatter: str

    def __str__(self) -> str:
        sizes = "".join(f"{a}{n}" for a, n in zip(("pp", "dp", "ep", "tp"), self.mesh, strict=True))
        return f"{sizes}-{self.sharding}-{self.chunk_length}-{self.schedule}-{self.scatter}"

    def holdings(self) -> Holdings:
        mesh = Mesh(*self.mesh)
        config = layout_config(
            mesh,
            optim__sharding=self.sharding,
            optim__chunk_length=self.chunk_length,
            parallel__schedule=self.schedule,
            parallel__virtual_stages=2 if self.schedule == "interleaved" else 1,
            **_MODEL,
        )
        return Holdings(config, mesh)


Pair = tuple[Layout, Layout]
"""Saved under the first, loaded under the second."""


def all_layouts() -> list[Layout]:
    """Of the schedules only interleaved ones place layers in another way."""
    return list(_layouts())


def _layouts() -> Iterator[Layout]:
    for mesh in itertools.product((1, 2, 4, 8), repeat=4):
        if math.prod(mesh) > 8:
            continue
        schedules = ["1f1b", "interleaved"] if mesh[0] in (2, 4) else ["1f1b"]
        for sharding, length, schedule, scatter in itertools.product(
            ("none", "so", "epso"), (700, 20_000, 1 << 24), schedules, ("balanced", "paper")
        ):
            yield Layout(mesh, sharding, length, schedule, scatter)


def pairwise(seed: int = 0) -> list[Pair]:
    """Few pairs in which every mesh saves and loads, and every two other choices meet, one of the
    layout that saves and one of that which loads."""
    generator, every = random.Random(seed), all_layouts()
    drawn = [(generator.choice(every), generator.choice(every)) for _ in range(2000)]
    features = {pair: set(_features(pair)) for pair in drawn}
    missing, chosen = set().union(*features.values()), []
    while missing:
        best = max(drawn, key=lambda pair: len(features[pair] & missing))
        chosen.append(best)
        missing -= features[best]
    return chosen


def _features(pair: Pair) -> Iterator[tuple]:
    one, other = pair
    yield from (("saves", one.mesh), ("loads", other.mesh))
    yield from itertools.product(enumerate(one[1:]), enumerate(other[1:]))
