"""Saving a model alone: every rank writes its part of the masters, in bf16, into common files.

Where each parameter lies follows from the model; no rank holds more than its own part of it, and
nothing is sent. The first rank reads the files once, for their hashes, and compares what lies there
with what the writers say they wrote.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy
import torch
import xxhash

from optimus.checkpoint.manifest import FileEntry
from optimus.checkpoint.pieces import Piece, Scatter, Span, whole_box
from optimus.checkpoint.rank_states import RankStates
from optimus.checkpoint.reshard import runs_between
from optimus.checkpoint.save import Generation, Saver
from optimus.checkpoint.staging import share_of
from optimus.checkpoint.stream import PIECE
from optimus.checkpoint.threads import Stop
from optimus.config import ModelConfig
from optimus.errors import OptimusError
from optimus.model.hf import plan_hf, write_hf_json
from optimus.model.tensor_files import as_bytes
from optimus.model.tensor_writer import TensorWriter

DTYPE = torch.bfloat16
_BLOCK_BYTES = 4 << 20


def model_parts(states: RankStates, scatter: Scatter) -> list[tuple[str, Span]]:
    """Which masters of which spans this rank writes."""
    return [one for one in share_of(states, scatter) if one[0] == "master"]


class ModelSaver(Saver):
    """Writes models alone, as Hugging Face directories."""

    def __init__(
        self,
        states: RankStates,
        config: ModelConfig,
        scatter: Scatter,
        *,
        staged: bool,
        limit_s: float,
        begin_s: float,
    ) -> None:
        """Raises ConfigError if transformers cannot express the model."""
        parts, limits = model_parts(states, scatter), {"limit_s": limit_s, "begin_s": begin_s}
        super().__init__(states, parts, DTYPE, staged=staged, **limits)
        self._config, self._plan = config, plan_hf(config, dict.fromkeys(states.shapes, DTYPE))
        self.bytes = sum(self._plan.sizes.values())

    def _name_of(self, rank: int) -> str:
        return f"weights of rank {rank}"

    def _write(self, states: RankStates, generation: Generation, step: int, stop: Stop) -> int:
        total, memory = 0, torch.empty(PIECE, dtype=DTYPE) if self._staging is None else None
        with TensorWriter(generation.directory, self._plan) as files:
            for state, span in self._parts:
                for piece, at in _pieces(span):
                    if stop.is_set():
                        raise OptimusError(f"model of step {step}: no longer wanted")
                    here = slice(at, at + piece.stop - piece.start)
                    if memory is None:
                        values = self._staging.taken(state, span)[here]
                    else:
                        values = memory[: piece.stop - piece.start]
                        values.copy_(states.memory(state, span)[here])
                    data = as_bytes(values)
                    box = whole_box(states.shapes[piece.name])
                    for start, begun, length in (2 * runs_between(box, piece)).tolist():
                        part = data[begun : begun + length]
                        files.write_bytes(piece.name, start // 2, part)
                    total += _sum(data)
            files.finish()
        return total

    def _describe(
        self, states: RankStates, generation: Generation, step: int, stop: Stop, reports: list[Any]
    ) -> dict[str, Any]:
        directory = generation.directory
        with TensorWriter(directory, self._plan) as files:
            files.write_headers()
            files.finish()
        write_hf_json(directory, self._config, self._plan)
        entries, total = [], -sum(one for one in reports if one is not None)
        for name, size in self._plan.sizes.items():
            entry, found = _look(directory / name, len(self._plan.headers[name]), stop)
            total += found
            if entry.size != size:
                raise OptimusError(f"{name}: {entry.size} bytes, not {size} as written")
            entries.append(entry)
        if total % (1 << 64):
            raise OptimusError(f"model of step {step}: its files do not hold what was written")
        return {"kind": "model", "entries": entries}


def _pieces(span: Span) -> Iterator[tuple[Piece, int]]:
    """Those of a span, of PIECE elements at most, each with its place in the span."""
    for piece, at in span.pieces:
        for start in range(piece.start, piece.stop, PIECE):
            one = piece._replace(start=start, stop=min(start + PIECE, piece.stop))
            yield one, at + start - piece.start


def _sum(data: memoryview) -> int:
    """Of 16-bit numbers; whoever adds what parts give finds the whole's."""
    return int(numpy.frombuffer(data, numpy.uint16).sum(dtype=numpy.uint64))


def _look(path: Path, begin: int, stop: Stop) -> tuple[FileEntry, int]:
    """What a manifest says of a file, and the sum of its numbers from byte `begin` on."""
    digest, size, total = xxhash.xxh3_64(), 0, 0
    with open(path, "rb", buffering=0) as file:
        while block := file.read(_BLOCK_BYTES if size else begin):
            if stop.is_set():
                raise OptimusError(f"{path.name}: no longer wanted")
            digest.update(block)
            total += _sum(memoryview(block)) if size else 0
            size += len(block)
    return FileEntry(path.name, size, digest.hexdigest()), total
