"""Checkpoints of simulated ranks: real shard files of numbered elements, without a process."""

from __future__ import annotations

from pathlib import Path

import numpy

from optimus.checkpoint.format import Index, decode, encode
from optimus.checkpoint.load import Readers, ReadRequest
from optimus.checkpoint.save import write_shard
from optimus.checkpoint.shard_file import Identity
from optimus.checkpoint.slices import ParamSlice, slices_to_read, slices_to_write
from optimus.chunks.layout import STATES
from tests.helpers.held import Holding, Holdings


def whole_states(shapes: dict, seed: int = 0) -> dict[str, dict[str, numpy.ndarray]]:
    """By state and name, values of which no two are alike."""
    generator = numpy.random.default_rng(seed)
    return {
        state: {
            name: generator.random(shape, dtype=numpy.float32) for name, shape in shapes.items()
        }
        for state in STATES
    }


def take(whole: numpy.ndarray, param: ParamSlice) -> numpy.ndarray:
    for dim, intervals in enumerate(param.box):
        index = numpy.concatenate([numpy.arange(*one) for one in intervals])
        whole = whole.take(index, dim)
    return whole.reshape(-1)[param.start : param.stop]


def all_shapes(holdings: Holdings) -> dict[str, tuple[int, ...]]:
    ranks = range(holdings.mesh.world_size)
    return {name: shape for rank in ranks for name, shape in holdings.of(rank).shapes.items()}


def ends_of(holdings: Holdings) -> tuple[str, ...]:
    tied = holdings.config.model.tie_embeddings and holdings.mesh.pp > 1
    return ("embed.weight",) if tied else ()


def save(
    directory: Path, holdings: Holdings, states: dict, scatter: str = "balanced", step: int = 7
) -> Index:
    """Write what every rank of the layout writes; the index of it."""
    written, mesh = [], holdings.mesh
    for rank in range(mesh.world_size):
        one = holdings.of(rank)
        slices = slices_to_write(
            one.shards, one.boxes, mesh, mesh.coordinate(rank), scatter, ends_of(holdings)
        )

        def bytes_of(state, state_slice):
            memory = numpy.zeros(state_slice.stop - state_slice.start, dtype=numpy.float32)
            for param, at in state_slice.params:
                memory[at : at + param.stop - param.start] = take(states[state][param.name], param)
            return memoryview(memory).cast("B")

        if slices:
            identity = Identity(f"generation {step}", step, rank)
            parts = [(state, state_slice) for state in STATES for state_slice in slices]
            written.append(write_shard(directory, identity, parts, bytes_of))
    return decode(encode(f"generation {step}", step, written, all_shapes(holdings)))


def requests_of(
    holding: Holding, holdings: Holdings, rank: int, fill: bool = True
) -> list[ReadRequest]:
    """What the rank reads, into memory that is filled with -1, or not touched."""
    mesh, requests = holdings.mesh, []
    for state_slice in slices_to_read(holding.shards, holding.boxes, mesh, mesh.coordinate(rank)):
        for state in STATES:
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
