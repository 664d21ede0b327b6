"""Weights of a model from whatever directory holds them: a checkpoint or a Hugging Face one.

Weights in the order in which files hold them, piece by piece: little of them is in memory.

Saving a model alone: every rank writes its part of the masters, in bf16, into common files.

Where each parameter lies follows from the model; no rank holds more than its own part of it, and
nothing is sent. The first rank makes the files before any writes, and in the end reads them once,
for their hashes, and compares what lies there with what the writers say they wrote."""

from __future__ import annotations

import itertools
import math
import os
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import xxhash
from torch import Tensor

from optimus.checkpoint.format import FROZEN, FileEntry, Manifest, is_checkpoint, read_manifest
from optimus.checkpoint.load import Readers, Want
from optimus.checkpoint.save import Generation, RankStates, Saver, share_of
from optimus.checkpoint.shard_file import Stop, in_threads
from optimus.checkpoint.slices import PIECE, Piece, Scatter, Span, runs_between, whole_box
from optimus.config import ModelConfig, load_saved_config
from optimus.errors import CheckpointError, OptimusError, counted
from optimus.hf import (
    check_hf_weights,
    hf_tensors,
    is_hf_directory,
    plan_hf,
    read_hf_config,
    write_hf_json,
)
from optimus.io import files
from optimus.io.safetensors import DTYPES, TensorFiles, as_bytes, check_shapes
from optimus.io.safetensors_writer import Checksum, TensorWriter, create_files
from optimus.io.tensor_file import MODEL, TensorFile
from optimus.model.identity import first_difference
from optimus.model.transformer import Transformer

CONFIG = "config.toml"


def model_config_of(path: Path, compare_counts: bool = True) -> ModelConfig:
    """Return the `[model]` section that the weights at `path` belong to; `compare_counts` as for
    `read_hf_config`."""
    if is_hf_directory(path):
        return read_hf_config(path, compare_counts)
    if is_checkpoint(path):
        return load_saved_config(path / CONFIG).model
    raise CheckpointError(f"{path}: neither a checkpoint nor a Hugging Face directory")


def check_weights(config: ModelConfig, path: Path) -> None:
    """Refuse weights that do not fit `config`, from their headers, before anything is built.

    Raises CheckpointError naming the first setting or tensor in which the stored model differs.
    """
    # The headers are read once, below: this config.json builds no model.
    if difference := first_difference(config, model_config_of(path, compare_counts=False)):
        key, ours, theirs = difference
        raise CheckpointError(
            f"model.{key} = {ours!r}, but the model at {path} has {theirs!r}; load it into the "
            "configuration it was made with"
        )
    if is_hf_directory(path):
        check_hf_weights(config, path)
        return
    found: Mapping[str, Sequence[int]]
    if full := _sharded(path):
        found = full.index().shapes
    else:
        file = TensorFile(path / MODEL)
        file.close()
        found, path = {name: one.shape for name, one in file.tensors.items()}, file.path
    # A model of more layers would take memory before its tensors could be compared.
    layers = {name.split(".")[1] for name in found if name.startswith("blocks.")}
    if config.num_layers > len(layers):
        raise CheckpointError(
            f"{path}: model.num_layers = {config.num_layers}, but its weights have "
            f"{counted(len(layers), 'layer')}"
        )
    try:
        with torch.device("meta"):
            expected = {name: p.shape for name, p in Transformer(config).named_parameters()}
    except (RuntimeError, TypeError, OverflowError):
        raise CheckpointError(
            f"{path}: its configuration describes a tensor of more elements than torch can count"
        ) from None
    check_shapes(path, found, expected)


def check_content(manifest: Manifest) -> None:
    """Check that a checkpoint can be loaded: its configurations are readable and agree, and its
    weights are the tensors of their model, of types that are read. Reads no weights.

    Raises:
        CheckpointError, ConfigError: Names the file, and the first setting or tensor.
    """
    path, listed = manifest.path, {entry.name for entry in manifest.files}
    model = read_hf_config(path) if "config.json" in listed else model_config_of(path)
    if CONFIG in listed:
        config = load_saved_config(path / CONFIG)
        if difference := first_difference(config.model, model):
            key, ours, theirs = difference
            raise CheckpointError(
                f"{path / CONFIG}: model.{key} = {ours!r}, but config.json has {theirs!r}"
            )
        frozen = manifest.settings.get(FROZEN)
        if frozen is not None and manifest.is_sharded and frozen != list(config.optim.frozen):
            raise CheckpointError(
                f"{path / CONFIG}: {FROZEN} = {list(config.optim.frozen)}, but the manifest has "
                f"{frozen}"
            )
    if manifest.is_sharded:  # of fp32 alone
        check_weights(model, path)
    else:
        open_weights(model, path).close()


def load_weights(model: Transformer, path: Path) -> None:
    """Fill the parameters of `model` from a directory, casting; raises CheckpointError."""
    with open_weights(model.config, path) as weights:
        fill(model, weights)


def fill(model: Transformer, weights: Weights) -> None:
    """Copy weights into the parameters of `model`, casting. Raises CheckpointError."""
    parameters = dict(model.named_parameters())
    for name, start, values in weights.stretches():
        parameters[name].data.view(-1)[start : start + len(values)].copy_(values)


def open_weights(config: ModelConfig, path: Path) -> Weights:
    """What `check_weights` lets pass of a directory, to be read once; raises CheckpointError."""
    check_weights(config, path)
    full = _sharded(path)
    return ShardWeights(full) if full else FileWeights(config, path)


def _sharded(path: Path) -> Manifest | None:
    """The manifest of a checkpoint whose weights lie in shard files."""
    manifest = read_manifest(path) if is_checkpoint(path) else None
    return manifest if manifest is not None and manifest.is_sharded else None


_OPEN_FILES = 32
"""Shard files that are open at once, each with a block of 4 MiB."""


class Weights(files.Closing, ABC):
    """Weights in the order in which files hold them, piece by piece: little of them is in memory.

    A context in which files may be open, and an iterable of `pieces` with their values, flat on the
    host as they are stored, until the next are asked for. What has a checksum is compared with it
    as it is read, at the latest behind the last piece: until then nothing is certain. Both raise
    CheckpointError.
    """

    shapes: Mapping[str, tuple[int, ...]]
    """Of the parameters."""
    pieces: Sequence[Piece]
    """Of at most PIECE elements of whole parameters; together they are every parameter once."""

    @abstractmethod
    def __iter__(self) -> Iterator[tuple[Piece, Tensor]]: ...

    @abstractmethod
    def dtypes(self) -> dict[str, torch.dtype]:
        """In which each parameter is stored; CheckpointError if one is in several."""

    def stretches(self) -> Iterator[tuple[str, int, Tensor]]:
        """The same as (name, first element, values) of the flattened whole parameters."""
        for piece, values in self:
            yield piece.name, piece.start, values


class FileWeights(Weights):
    """Weights in safetensors files, of a Hugging Face directory or under our names."""

    def __init__(self, config: ModelConfig, path: Path) -> None:
        """`path`: of a directory that `check_weights` has passed."""
        self._files = TensorFiles(path)
        manifest = read_manifest(path) if is_checkpoint(path) else None
        self._hashes = {one.name: one.xxh3 for one in manifest.files} if manifest else {}
        with torch.device("meta"):
            model = Transformer(config)
        self.shapes = {name: tuple(p.shape) for name, p in model.named_parameters()}
        boxes = {name: whole_box(shape) for name, shape in self.shapes.items()}
        own = ((name, name, parameter) for name, parameter in model.named_parameters())
        found = []
        for theirs, ours, part in (
            hf_tensors(config, self._files.names()) if is_hf_directory(path) else own
        ):
            file, stored = self._files.find(theirs)
            begun = int(part.storage_offset())
            stop = begun + part.numel()
            for start in range(begun, stop, PIECE):
                piece = Piece(ours, boxes[ours], start, min(start + PIECE, stop))
                at = stored.start + (start - begun) * DTYPES[stored.dtype].itemsize
                found.append((file, at, DTYPES[stored.dtype], piece))
        self._found = sorted(found, key=lambda one: (one[0].path, one[1]))
        for file, *_ in found:
            if manifest and file.path.name not in self._hashes:
                raise CheckpointError(f"{file.path}: its checkpoint's manifest does not know it")
        self.pieces = [one[-1] for one in self._found]

    def __iter__(self) -> Iterator[tuple[Piece, Tensor]]:
        memory = torch.empty(PIECE, dtype=torch.float64)  # the widest
        for file, found in itertools.groupby(self._found, lambda one: one[0]):
            reader = _Hashed(file, self._hashes[file.path.name]) if self._hashes else file
            for _, at, dtype, piece in found:
                values = memory.view(dtype)[: piece.stop - piece.start]
                reader.read(at, as_bytes(values))
                yield piece, values
            if isinstance(reader, _Hashed):
                reader.finish()

    def dtypes(self) -> dict[str, torch.dtype]:
        found: dict[str, torch.dtype] = {}
        for file, _, dtype, piece in self._found:
            if found.setdefault(piece.name, dtype) is not dtype:
                raise CheckpointError(
                    f"{file.path.parent}: parts of {piece.name} are of several types ({dtype} and "
                    f"{found[piece.name]}); bring them to one type first"
                )
        return found

    def close(self) -> None:
        self._files.close()


class _Hashed:
    """A file that is read from its beginning to its end, and what lies between too."""

    def __init__(self, file: TensorFile, expected: str) -> None:
        self._file, self._expected, self._at, self._digest = file, expected, 0, xxhash.xxh3_64()

    def read(self, start: int, into: memoryview) -> None:
        self._pass_to(start)
        self._file.read(start, into)
        self._digest.update(into)
        self._at = start + len(into)

    def finish(self) -> None:
        """Raises CheckpointError if the file does not have its checksum."""
        self._pass_to(self._file.size)
        if self._digest.hexdigest() != self._expected:
            raise CheckpointError(f"{self._file.path}: its content does not match its checksum")

    def _pass_to(self, start: int) -> None:
        while self._at < start:
            self.read(self._at, memoryview(bytearray(min(start - self._at, PIECE))))


class ShardWeights(Weights):
    """The masters of a full checkpoint, whole parameters one behind the other: what ranks held in
    parts is put together here."""

    def __init__(self, manifest: Manifest) -> None:
        self._path, self._index = manifest.path, manifest.index()
        # Every row is read: no two parameters may be read from the same bytes.
        manifest.check_rows(self._index)
        self.shapes = self._index.shapes
        self.pieces = [
            Piece(name, whole_box(shape), start, min(start + PIECE, math.prod(shape)))
            for name, shape in self.shapes.items()
            for start in range(0, math.prod(shape), PIECE)
        ]

    def __iter__(self) -> Iterator[tuple[Piece, Tensor]]:
        memory = torch.empty(PIECE)
        with Readers(self._path, self._index, _OPEN_FILES) as readers:
            for piece in self.pieces:
                values = memory[: piece.stop - piece.start]
                readers.read([Want("master", [(piece, 0)], as_bytes(values))])
                yield piece, values

    def dtypes(self) -> dict[str, torch.dtype]:
        return dict.fromkeys(self.shapes, torch.float32)


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
