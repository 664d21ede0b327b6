"""Saving a model alone: every rank writes its part of the masters, in bf16, into common files.

Where each parameter lies follows from the model; no rank holds more than its own part of it, and
nothing is sent. The first rank makes the files before any writes, and in the end reads them once,
for their hashes, and compares what lies there with what the writers say they wrote.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import xxhash

from optimus.checkpoint.manifest import FileEntry
from optimus.checkpoint.pieces import Piece, Scatter, Span, whole_box
from optimus.checkpoint.rank_states import RankStates
from optimus.checkpoint.reshard import runs_between
from optimus.checkpoint.save import Generation, Saver
from optimus.checkpoint.staging import share_of
from optimus.checkpoint.stream import PIECE
from optimus.checkpoint.threads import Stop, in_threads
from optimus.config import ModelConfig
from optimus.errors import OptimusError
from optimus.hf import plan_hf, write_hf_json
from optimus.io import files
from optimus.io.safetensors import as_bytes
from optimus.io.safetensors_writer import Checksum, TensorWriter, create_files

DTYPE = torch.bfloat16
_BLOCK_BYTES = 4 << 20


def model_parts(states: RankStates, scatter: Scatter) -> list[tuple[str, Span]]:
    """Which masters of which spans this rank writes."""
    return [one for one in share_of(states, scatter) if one[0] == "master"]


class ModelSaver(Saver):
    """Writes models alone, as Hugging Face directories."""

    _report = dict[str, Checksum]

    def __init__(
        self, states: RankStates, config: ModelConfig, scatter: Scatter, **how: Any
    ) -> None:
        """`how`: as for Saver. Raises ConfigError if transformers cannot express the model."""
        super().__init__(states, model_parts(states, scatter), DTYPE, **how)
        self._config, self._plan = config, plan_hf(config, dict.fromkeys(states.shapes, DTYPE))
        self.bytes = sum(self._plan.sizes.values())

    def _name_of(self, rank: int) -> str:
        return f"weights of rank {rank}"

    def _prepare(self, directory: Path) -> None:
        create_files(directory, self._plan)

    def _write(
        self, states: RankStates, generation: Generation, step: int, stop: Stop
    ) -> dict[str, Checksum]:
        memory = torch.empty(PIECE, dtype=DTYPE) if self._staging is None else None
        with TensorWriter(generation.directory, self._plan, checksums=True) as writer:
            for state, span in self._parts:
                for piece, at in _pieces(span):
                    if stop.is_set():
                        raise OptimusError(f"model of step {step}: no longer wanted")
                    here = slice(at, at + piece.stop - piece.start)
                    if memory is None:
                        assert self._staging is not None
                        values = self._staging.taken(state, span)[here]
                    else:
                        values = memory[: piece.stop - piece.start]
                        values.copy_(states.memory(state, span)[here])
                    data = as_bytes(values)
                    box = whole_box(states.shapes[piece.name])
                    for start, begun, length in (2 * runs_between(box, piece)).tolist():
                        part = data[begun : begun + length]
                        writer.write_bytes(piece.name, start // 2, part)
            writer.finish()
        return writer.written

    def _describe(
        self, states: RankStates, generation: Generation, step: int, stop: Stop, reports: list[Any]
    ) -> dict[str, Any]:
        directory = generation.directory
        write_hf_json(directory, self._config, self._plan)

        def look(name: str) -> FileEntry:
            told = [one[name] for one in reports if one and name in one]
            header, size = self._plan.headers[name], self._plan.sizes[name]
            return _look(directory / name, header, size, told, stop)

        return {"kind": "model", "entries": list(in_threads(look, list(self._plan.sizes)))}


def _pieces(span: Span) -> Iterator[tuple[Piece, int]]:
    """Those of a span, of PIECE elements at most, each with its place in the span."""
    for piece, at in span.pieces:
        for start in range(piece.start, piece.stop, PIECE):
            one = piece._replace(start=start, stop=min(start + PIECE, piece.stop))
            yield one, at + start - piece.start


def _look(path: Path, header: bytes, size: int, told: Sequence[Checksum], stop: Stop) -> FileEntry:
    """What a manifest says of a file, as it lies on the disk. Raises OptimusError unless that is
    `header` and then what the writers have told, all of `size` bytes."""
    digest, found = xxhash.xxh3_64(header), Checksum()
    with open(path, "rb") as file:
        files.sync_to_disk(file.fileno())  # of all writers here; none writes any more
        if (there := os.fstat(file.fileno()).st_size) != size:
            raise OptimusError(f"{path.name}: {there} bytes, not {size} as written")
        has_header = file.read(len(header)) == header
        while block := file.read(_BLOCK_BYTES):
            if stop.is_set():
                raise OptimusError(f"{path.name}: no longer wanted")
            digest.update(block)
            found = found.plus(memoryview(block), len(header) + found.nbytes)
    written = Checksum(size - len(header), sum(one.weighted_sum for one in told))
    if not has_header or found != written or sum(one.nbytes for one in told) != written.nbytes:
        raise OptimusError(f"{path.name} does not hold what was to be written")
    return FileEntry(path.name, size, digest.hexdigest())
