"""Checkpoints that simulated ranks save under one layout and load under another, in one process.

`Holdings` computes the shards of each rank. `save` and `assert_loads` write and read real shard
files. `all_layouts` and `pairwise` list layouts of 1, 2, 4 and 8 ranks.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy
from numpy.typing import NDArray

from optimus.checkpoint.index import ADAMW_STATES, Index, decode, encode
from optimus.checkpoint.load import Readers, ReadRequest
from optimus.checkpoint.save import write_shard
from optimus.checkpoint.shard_file import Identity
from optimus.checkpoint.slices import (
    Box,
    ChunkShard,
    ParamSlice,
    Scatter,
    Share,
    StateSlice,
    share_of,
    slices_to_read,
    slices_to_write,
)
from optimus.chunks.layout import Parameter, lay_out
from optimus.config import Config, make_config
from optimus.distributed.mesh import Coordinate, Mesh
from optimus.parallel.apply import make_layout
from tests.kit.runs.tiny import tiny_tree

Array = NDArray[numpy.float32]


class Holding(NamedTuple):
    """Shards of a rank. For each parameter of the rank, `boxes` maps the parameter's name to the
    slice on this rank, and `shapes` maps the name to the whole shape."""

    shards: list[ChunkShard]
    boxes: dict[str, Box]
    shapes: dict[str, tuple[int, ...]]


def layout_config(mesh: Mesh, **overrides: Any) -> Config:
    """Return the configuration of `tiny_tree` with overrides and the sizes of a mesh."""
    tree = tiny_tree("d", "r", **overrides)
    return make_config(tree | {"parallel": tree.get("parallel", {}) | mesh._asdict()})


class Holdings:
    """Shards of the states on all ranks of a mesh."""

    def __init__(self, config: Config, mesh: Mesh) -> None:
        self.config, self.mesh = config, mesh
        self._layouts: dict[tuple[int, int, int], Any] = {}
        """Layouts by (pp, ep, tp). Ranks that differ only in dp have the same layout."""

    def of(self, rank: int) -> Holding:
        """Return the shards of a rank."""
        mesh, coordinate = self.mesh, self.mesh.coordinate(rank)
        key = (coordinate.pp, coordinate.ep, coordinate.tp)
        if key not in self._layouts:
            self._layouts[key] = self._lay_out(rank)
        chunks, boxes, shapes = self._layouts[key]
        shards = []
        for chunk in chunks:
            sharding, copies, far = chunk.key[1:]
            number = share_of(mesh, coordinate, sharding).index
            shards.append(ChunkShard(chunk, number * chunk.shard_length, copies, far))
        return Holding(shards, boxes, shapes)

    def _lay_out(self, rank: int) -> tuple[Any, dict[str, Box], dict[str, tuple[int, ...]]]:
        mesh, config = self.mesh, self.config
        layout = make_layout(config, mesh, mesh.coordinate(rank), 8)
        parameters = []
        for name, placement in layout.placements.items():
            kind = placement.kind
            adding = tuple(axis for axis in kind.sum_axes if axis not in kind.partial)
            sharding = kind.shard_axes(config.optim.sharding)
            far = name == "embed.weight" and not layout.has_first
            use = (layout.stage_of(name), kind.divided, kind.partial)
            key = (use, sharding, kind.copy_axes(sharding), far)
            sizes = mesh.size_of(adding), mesh.size_of(sharding)
            parameters.append(Parameter(name, placement.local_shape, key, *sizes))
        boxes = {name: placement.intervals for name, placement in layout.placements.items()}
        shapes = {name: placement.shape for name, placement in layout.placements.items()}
        chunks = lay_out(parameters, config.optim.chunk_length).chunks
        return chunks, boxes, shapes


WholeStates = dict[str, dict[str, Array]]
"""Whole fp32 arrays by state and parameter."""


def whole_states(shapes: Mapping[str, tuple[int, ...]], seed: int = 0) -> WholeStates:
    """Return random values of all states, for parameters with the whole shapes `shapes`."""
    generator = numpy.random.default_rng(seed)
    return {
        state: {
            name: generator.random(shape, dtype=numpy.float32) for name, shape in shapes.items()
        }
        for state in ADAMW_STATES
    }


def take(whole: Array, param: ParamSlice) -> Array:
    """Return the elements of a slice of a whole parameter as a one-dimensional array."""
    for dim, intervals in enumerate(param.box):
        index = numpy.concatenate([numpy.arange(*interval) for interval in intervals])
        whole = whole.take(index, dim)
    return whole.reshape(-1)[param.start : param.stop]


def all_shapes(holdings: Holdings) -> dict[str, tuple[int, ...]]:
    """Return the whole shapes of all parameters."""
    ranks = range(holdings.mesh.world_size)
    return {name: shape for rank in ranks for name, shape in holdings.of(rank).shapes.items()}


def turns_of(config: Config, mesh: Mesh, coordinate: Coordinate) -> dict[str, Share]:
    """Return a dict that maps the tied embeddings to the share that a rank writes to a checkpoint:
    the first and the last stage write one half each. Return {} if only one stage has the
    embeddings."""
    tied = config.model.tie_embeddings and mesh.pp > 1
    return {"embed.weight": Share(int(coordinate.pp > 0), 2)} if tied else {}


def save(
    directory: Path,
    holdings: Holdings,
    states: WholeStates,
    scatter: Scatter = "balanced",
    step: int = 7,
) -> Index:
    """Write the shard files of all ranks to a directory. Return the index of the shard files."""
    reports, mesh = [], holdings.mesh

    def batches(state: str, state_slice: StateSlice) -> list[memoryview]:
        memory = numpy.zeros(state_slice.stop - state_slice.start, dtype=numpy.float32)
        for param, at in state_slice.params:
            memory[at : at + param.stop - param.start] = take(states[state][param.name], param)
        return [memory.data.cast("B")]

    for rank in range(mesh.world_size):
        holding, coordinate = holdings.of(rank), mesh.coordinate(rank)
        turns = turns_of(holdings.config, mesh, coordinate)
        slices = slices_to_write(holding.shards, holding.boxes, mesh, coordinate, scatter, turns)
        if slices:
            identity = Identity(f"generation {step}", step, rank)
            pairs = [(state, state_slice) for state in ADAMW_STATES for state_slice in slices]
            reports.append(write_shard(directory, identity, ADAMW_STATES, pairs, batches))
    return decode(encode(f"generation {step}", step, ADAMW_STATES, reports, all_shapes(holdings)))


def requests_of(
    holding: Holding, holdings: Holdings, rank: int, fill: bool = True
) -> list[ReadRequest]:
    """Return the read requests of a rank. With `fill`, the memory of the requests is filled with
    -1."""
    mesh, requests = holdings.mesh, []
    for state_slice in slices_to_read(holding.shards, holding.boxes, mesh, mesh.coordinate(rank)):
        for state in ADAMW_STATES:
            memory = numpy.empty(state_slice.stop - state_slice.start, dtype=numpy.float32)
            if fill:
                memory.fill(-1)
            requests.append(ReadRequest(state, state_slice.params, memory.data.cast("B")))
    return requests


def assert_loads(directory: Path, index: Index, holdings: Holdings, states: WholeStates) -> None:
    """Read the shards of all ranks, and assert that the elements of the shards equal those in
    `states`."""
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
"""Size of checksummed blocks in bytes. With this small size, read ranges start and end inside
blocks."""


class Layout(NamedTuple):
    """Settings that divide the model, its states and the writes of a checkpoint among ranks."""

    mesh: tuple[int, int, int, int]
    sharding: str
    chunk_length: int
    schedule: str
    scatter: Scatter

    def __str__(self) -> str:
        sizes = "".join(f"{a}{n}" for a, n in zip(("pp", "dp", "ep", "tp"), self.mesh, strict=True))
        return f"{sizes}-{self.sharding}-{self.chunk_length}-{self.schedule}-{self.scatter}"

    def holdings(self) -> Holdings:
        """Return the shards of all ranks."""
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
"""A checkpoint is saved under the first layout and loaded under the second layout."""


def all_layouts() -> list[Layout]:
    """Return all layouts with the schedules 1f1b and interleaved. Other schedules place layers as
    1f1b does."""
    layouts = []
    scatters: tuple[Scatter, ...] = ("balanced", "paper")
    for pp, dp, ep, tp in itertools.product((1, 2, 4, 8), repeat=4):
        if pp * dp * ep * tp > 8:
            continue
        schedules = ["1f1b", "interleaved"] if pp in (2, 4) else ["1f1b"]
        for sharding, length, schedule, scatter in itertools.product(
            ("none", "so", "epso"), (700, 20_000, 1 << 24), schedules, scatters
        ):
            layouts.append(Layout((pp, dp, ep, tp), sharding, length, schedule, scatter))
    return layouts


def pairwise(seed: int = 0) -> list[Pair]:
    """Return a small sample of pairs (saving layout, loading layout). Each mesh occurs on both
    sides. For each other field of Layout, each value on the saving side occurs together with each
    value on the loading side."""
    generator, layouts = random.Random(seed), all_layouts()
    drawn = [(generator.choice(layouts), generator.choice(layouts)) for _ in range(2000)]
    features = {pair: set(_features(pair)) for pair in drawn}
    missing, sample = set().union(*features.values()), []
    while missing:
        best = max(drawn, key=lambda pair: len(features[pair] & missing))
        sample.append(best)
        missing -= features[best]
    return sample


def _features(pair: Pair) -> Iterator[tuple[Any, ...]]:
    saving, loading = pair
    yield from (("saves", saving.mesh), ("loads", loading.mesh))
    yield from itertools.product(enumerate(saving[1:]), enumerate(loading[1:]))
