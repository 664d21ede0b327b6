"""Checkpoints of simulated ranks: real shard files of numbered elements, without a process."""

from __future__ import annotations

from pathlib import Path

import numpy

from optimus.checkpoint.format import Index, decode, encode
from optimus.checkpoint.load import Readers, Want
from optimus.checkpoint.save import write_shard
from optimus.checkpoint.shard_file import Identity
from optimus.checkpoint.slices import Piece, spans_to_read, spans_to_write
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


def take(whole: numpy.ndarray, piece: Piece) -> numpy.ndarray:
    for dim, intervals in enumerate(piece.box):
        index = numpy.concatenate([numpy.arange(*one) for one in intervals])
        whole = whole.take(index, dim)
    return whole.reshape(-1)[piece.start : piece.stop]


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
        spans = spans_to_write(
            one.held, one.boxes, mesh, mesh.coordinate(rank), scatter, ends_of(holdings)
        )

        def bytes_of(state, span):
            memory = numpy.zeros(span.stop - span.start, dtype=numpy.float32)
            for piece, at in span.pieces:
                memory[at : at + piece.stop - piece.start] = take(states[state][piece.name], piece)
            return memoryview(memory).cast("B")

        if spans:
            identity = Identity(f"generation {step}", step, rank)
            parts = [(state, span) for state in STATES for span in spans]
            written.append(write_shard(directory, identity, parts, bytes_of))
    return decode(encode(f"generation {step}", step, written, all_shapes(holdings)))


def wants_of(holding: Holding, holdings: Holdings, rank: int, fill: bool = True) -> list[Want]:
    """What the rank reads, into memory that is filled with -1, or not touched."""
    mesh, wants = holdings.mesh, []
    for span in spans_to_read(holding.held, holding.boxes, mesh, mesh.coordinate(rank)):
        for state in STATES:
            memory = numpy.empty(span.stop - span.start, dtype=numpy.float32)
            if fill:
                memory.fill(-1)
            wants.append(Want(state, span.pieces, memoryview(memory).cast("B")))
    return wants


def assert_loads(directory: Path, index: Index, holdings: Holdings, states: dict) -> None:
    """Every rank of the layout reads its part of every state, to the bit."""
    for rank in range(holdings.mesh.world_size):
        wants = wants_of(holdings.of(rank), holdings, rank)
        with Readers(directory, index, 1) as readers:
            readers.read(wants)
        for want in wants:
            memory = numpy.frombuffer(want.memory, dtype=numpy.float32)
            for piece, at in want.pieces:
                expected = take(states[want.state][piece.name], piece)
                assert numpy.array_equal(memory[at : at + len(expected)], expected), piece.name
