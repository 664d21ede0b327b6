"""Readers of the weights in checkpoints and Hugging Face directories, and model-only saves.

Weights are read in the order in which the files contain them, a few elements at a time. A
model-only save does not write shard files. Instead, all ranks convert their master weights to bf16
and write them to the same safetensors files. Each rank computes the positions in the files from the
model's shapes. Therefore ranks do not exchange weights, and no rank needs all weights. The first
rank creates the files before any rank writes. After all ranks have written, the first rank reads
the files once, to compute their hashes and to compare their content with the ranks' checksums.
"""

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
from optimus.checkpoint.load import Readers, ReadRequest
from optimus.checkpoint.save import Generation, RankStates, Saver, states_to_write
from optimus.checkpoint.shard_file import Stop, in_threads
from optimus.checkpoint.slices import (
    BATCH_ELEMENTS,
    ParamSlice,
    Scatter,
    StateSlice,
    intersect,
    whole_box,
)
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
from optimus.io.safetensors import (
    DTYPES,
    Checksum,
    FilePlan,
    TensorFiles,
    TensorWriter,
    as_bytes,
    check_shapes,
)
from optimus.io.tensor_file import MODEL, TensorFile
from optimus.model.transformer import Transformer

CONFIG = "config.toml"
DTYPE = torch.bfloat16
"""Dtype of the weights in the model-only checkpoints that runs save."""
_OPEN_FILES = 32
"""Maximum number of open shard files. For each open file, a block of 4 MiB may be in memory."""
_BLOCK_BYTES = 4 << 20


def model_config_of(path: Path, compare_counts: bool = True) -> ModelConfig:
    """Return the configuration (section `[model]`) of the model whose weights are in a directory.

    Args:
        path: A checkpoint or a Hugging Face directory.
        compare_counts: As for `read_hf_config`.

    Raises:
        CheckpointError: The directory is neither a checkpoint nor a Hugging Face directory.
    """
    if is_hf_directory(path):
        return read_hf_config(path, compare_counts)
    if is_checkpoint(path):
        return load_saved_config(path / CONFIG).model
    raise CheckpointError(f"{path}: neither a checkpoint nor a Hugging Face directory")


def check_weights(config: ModelConfig, path: Path) -> None:
    """Check that the model in a directory has the configuration `config`, and that the weights in
    the directory have the tensor names and shapes of this model. The function reads only the
    headers of the weight files.

    Args:
        config: Configuration of the model.
        path: A checkpoint or a Hugging Face directory.

    Raises:
        CheckpointError: A setting or a tensor does not match the model. The message names the first
            such setting or tensor.
    """
    # `compare_counts` would read the headers a second time: `check_hf_weights` reads them below.
    if difference := config.first_difference(model_config_of(path, compare_counts=False)):
        key, ours, theirs = difference
        raise CheckpointError(
            f"model.{key} = {ours!r}, but the model at {path} has {theirs!r}; set [model] to the "
            "configuration of that model"
        )
    if is_hf_directory(path):
        check_hf_weights(config, path)
        return
    shapes: Mapping[str, Sequence[int]]
    if full := _read_sharded(path):
        shapes = full.index().shapes
    else:
        file = TensorFile(path / MODEL)
        file.close()
        shapes, path = {name: entry.shape for name, entry in file.tensors.items()}, file.path
    # Compare the number of layers first, because a model with far more layers would need much
    # memory.
    layers = {name.split(".")[1] for name in shapes if name.startswith("blocks.")}
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
    check_shapes(path, shapes, expected)


def check_content(manifest: Manifest) -> None:
    """Check that a checkpoint can be loaded. The function does not read weights.

    The configuration files must be readable and describe the same model. The tensors must have the
    names and shapes of this model, and supported dtypes.

    Raises:
        CheckpointError, ConfigError: The checkpoint cannot be loaded. The message names the file,
            and the first setting or tensor that is wrong.
    """
    path, listed = manifest.path, {entry.name for entry in manifest.files}
    model = read_hf_config(path) if "config.json" in listed else model_config_of(path)
    if CONFIG in listed:
        config = load_saved_config(path / CONFIG)
        if difference := config.model.first_difference(model):
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
    if manifest.is_sharded:  # shard files have fp32 only
        check_weights(model, path)
    else:
        open_weights(model, path).close()


class Weights(files.Closing, ABC):
    """Base class of readers that return weights a few elements at a time. A reader is also a
    context manager.

    Iteration yields a pair (slice, values) for each slice in `slices`, in the order in which the
    files contain the slices. `values` is a 1-D tensor on the host in the stored dtype. The tensor
    is valid until the next pair is requested. The iterator also compares checksums, and raises
    CheckpointError if a checksum differs. Callers must iterate to the end, because the iterator
    compares the last checksum after the last pair.
    """

    shapes: Mapping[str, tuple[int, ...]]
    """Shapes of the parameters, by name."""
    slices: Sequence[ParamSlice]
    """The slices, each of at most BATCH_ELEMENTS elements. Together they contain every element of
    every parameter exactly once."""

    @abstractmethod
    def __iter__(self) -> Iterator[tuple[ParamSlice, Tensor]]: ...

    @abstractmethod
    def dtypes(self) -> dict[str, torch.dtype]:
        """Return the stored dtype of each parameter. Raises CheckpointError if a parameter is
        stored in several dtypes."""

    def ranges(self) -> Iterator[tuple[str, int, Tensor]]:
        """For each of `slices`, yield (name of the parameter, index of the first element in the
        flattened parameter, values)."""
        for param, values in self:
            yield param.name, param.start, values


class FileWeights(Weights):
    """Reader of weights in safetensors files. The tensors have the names that transformers or
    Optimus uses."""

    def __init__(self, config: ModelConfig, path: Path) -> None:
        """Open the files of a directory that `check_weights` has accepted."""
        self._files = TensorFiles(path)
        manifest = read_manifest(path) if is_checkpoint(path) else None
        self._hashes = {entry.name: entry.xxh3 for entry in manifest.files} if manifest else {}
        with torch.device("meta"):
            model = Transformer(config)
        self.shapes = {name: tuple(p.shape) for name, p in model.named_parameters()}
        boxes = {name: whole_box(shape) for name, shape in self.shapes.items()}
        unchanged = ((name, name, parameter) for name, parameter in model.named_parameters())
        located = []
        for theirs, ours, view in (
            hf_tensors(config, self._files.names()) if is_hf_directory(path) else unchanged
        ):
            file, entry = self._files.find(theirs)
            first = int(view.storage_offset())
            last = first + view.numel()
            for start in range(first, last, BATCH_ELEMENTS):
                param = ParamSlice(ours, boxes[ours], start, min(start + BATCH_ELEMENTS, last))
                offset = entry.start + (start - first) * DTYPES[entry.dtype].itemsize
                located.append((file, offset, DTYPES[entry.dtype], param))
        self._located = sorted(located, key=lambda entry: (entry[0].path, entry[1]))
        for file, *_ in located:
            if manifest and file.path.name not in self._hashes:
                raise CheckpointError(f"{file.path}: the manifest does not list this file")
        self.slices = [param for *_, param in self._located]

    def __iter__(self) -> Iterator[tuple[ParamSlice, Tensor]]:
        memory = torch.empty(BATCH_ELEMENTS, dtype=torch.float64)  # enough for the widest dtype
        for file, located in itertools.groupby(self._located, lambda entry: entry[0]):
            reader = _HashedFile(file, self._hashes[file.path.name]) if self._hashes else file
            for _, offset, dtype, param in located:
                values = memory.view(dtype)[: param.stop - param.start]
                reader.read(offset, as_bytes(values))
                yield param, values
            if isinstance(reader, _HashedFile):
                reader.finish()

    def dtypes(self) -> dict[str, torch.dtype]:
        dtypes: dict[str, torch.dtype] = {}
        for file, _, dtype, param in self._located:
            if dtypes.setdefault(param.name, dtype) is not dtype:
                raise CheckpointError(
                    f"{file.path.parent}: {param.name} is stored in several types ({dtype} and "
                    f"{dtypes[param.name]}); convert its tensors to the same type first"
                )
        return dtypes

    def close(self) -> None:
        self._files.close()


class _HashedFile:
    """Reader that hashes a file while it reads tensors in ascending order. The hash also includes
    the bytes between the tensors, so that `finish` can compare it with the checksum of the file."""

    def __init__(self, file: TensorFile, expected: str) -> None:
        self._file, self._expected = file, expected
        self._position, self._digest = 0, xxhash.xxh3_64()

    def read(self, start: int, target: memoryview) -> None:
        self._skip_to(start)
        self._file.read(start, target)
        self._digest.update(target)
        self._position = start + len(target)

    def finish(self) -> None:
        """Raise CheckpointError if the file does not match its checksum."""
        self._skip_to(self._file.size)
        if self._digest.hexdigest() != self._expected:
            raise CheckpointError(f"{self._file.path}: its content does not match its checksum")

    def _skip_to(self, start: int) -> None:
        while self._position < start:
            size = min(start - self._position, BATCH_ELEMENTS)
            self.read(self._position, memoryview(bytearray(size)))


class ShardWeights(Weights):
    """Reader of the master weights in a full checkpoint, one parameter after the other."""

    def __init__(self, manifest: Manifest) -> None:
        self._path, self._index = manifest.path, manifest.index()
        # All rows will be read, so all rows are checked: two parameters must not refer to the same
        # bytes.
        manifest.check_rows(self._index)
        self.shapes = self._index.shapes
        self.slices = [
            ParamSlice(name, whole_box(shape), start, min(start + BATCH_ELEMENTS, math.prod(shape)))
            for name, shape in self.shapes.items()
            for start in range(0, math.prod(shape), BATCH_ELEMENTS)
        ]

    def __iter__(self) -> Iterator[tuple[ParamSlice, Tensor]]:
        memory = torch.empty(BATCH_ELEMENTS)
        with Readers(self._path, self._index, _OPEN_FILES) as readers:
            for param in self.slices:
                values = memory[: param.stop - param.start]
                readers.read([ReadRequest("master", [(param, 0)], as_bytes(values))])
                yield param, values

    def dtypes(self) -> dict[str, torch.dtype]:
        return dict.fromkeys(self.shapes, torch.float32)


def load_weights(model: Transformer, path: Path) -> None:
    """Load the weights in the directory `path` into the parameters of a model, and convert them to
    the dtypes of the parameters. Raises CheckpointError."""
    with open_weights(model.config, path) as weights:
        fill(model, weights)


def fill(model: Transformer, weights: Weights) -> None:
    """Copy all weights that the reader `weights` returns to the parameters of a model, and convert
    them to the dtypes of the parameters. Raises CheckpointError."""
    parameters = dict(model.named_parameters())
    for name, start, values in weights.ranges():
        parameters[name].data.view(-1)[start : start + len(values)].copy_(values)


def open_weights(config: ModelConfig, path: Path) -> Weights:
    """Check the weights in a directory, and return a reader of these weights.

    Args:
        config: Configuration of the model.
        path: A checkpoint or a Hugging Face directory.

    Raises:
        CheckpointError: The weights do not fit the model, or a file is damaged.
    """
    check_weights(config, path)
    full = _read_sharded(path)
    return ShardWeights(full) if full else FileWeights(config, path)


def _read_sharded(path: Path) -> Manifest | None:
    """Return the manifest of the checkpoint at `path` if the checkpoint has shard files, else
    None."""
    manifest = read_manifest(path) if is_checkpoint(path) else None
    return manifest if manifest is not None and manifest.is_sharded else None


# -- Model-only saves -----------------------------------------------------------------------------


def masters_to_write(states: RankStates, scatter: Scatter) -> list[tuple[str, StateSlice]]:
    """Return the (state, slice) pairs that this rank writes to a model-only checkpoint. The state
    is always "master"."""
    return [pair for pair in states_to_write(states, scatter) if pair[0] == "master"]


class ModelSaver(Saver):
    """Saver of model-only checkpoints, which are Hugging Face directories."""

    _report = dict[str, Checksum]
    _plan: FilePlan

    def __init__(
        self, states: RankStates, config: ModelConfig, scatter: Scatter, **limits: Any
    ) -> None:
        """Determine the files of the checkpoint and the elements that this rank writes to the
        files.

        Args:
            states: The states of this rank.
            config: Configuration of the model.
            scatter: `checkpoint.scatter`.
            limits: `staged`, `limit_s` and `begin_s` of Saver.

        Raises:
            ConfigError: transformers cannot represent the model.
        """
        output = f"weights of rank {states.groups.everyone.rank}"
        super().__init__(states, masters_to_write(states, scatter), DTYPE, output, **limits)
        self._config, self._plan = config, plan_hf(config, dict.fromkeys(states.shapes, DTYPE))
        self.bytes = sum(self._plan.sizes.values())

    def _write(
        self, states: RankStates, generation: Generation, step: int, stop: Stop
    ) -> dict[str, Checksum]:
        memory = torch.empty(BATCH_ELEMENTS, dtype=DTYPE) if self._staging is None else None
        with TensorWriter(generation.directory, self._plan, checksums=True) as writer:
            for state, state_slice in self._slices:
                for param, offset in _params_of(state_slice):
                    if stop.is_set():
                        raise OptimusError(f"model of step {step}: the save was stopped")
                    selected = slice(offset, offset + param.stop - param.start)
                    if memory is None:
                        assert self._staging is not None
                        values = states.read(self._staging.copy_of(state, state_slice)[selected])
                    else:
                        values = memory[: param.stop - param.start]
                        values.copy_(states.read(states.view(state, state_slice)[selected]))
                    data = as_bytes(values)
                    box = whole_box(states.shapes[param.name])
                    for start, source, length in (2 * intersect(box, param)).tolist():
                        writer.write_bytes(param.name, start // 2, data[source : source + length])
            writer.finish()
        return writer.written

    def _describe(
        self, states: RankStates, generation: Generation, step: int, stop: Stop, reports: list[Any]
    ) -> dict[str, Any]:
        directory = generation.directory
        write_hf_json(directory, self._config, self._plan)

        def check(name: str) -> FileEntry:
            checksums = [report[name] for report in reports if report and name in report]
            header, size = self._plan.headers[name], self._plan.sizes[name]
            return _check_file(directory / name, header, size, checksums, stop)

        return {"kind": "model", "entries": list(in_threads(check, list(self._plan.sizes)))}


def _params_of(state_slice: StateSlice) -> Iterator[tuple[ParamSlice, int]]:
    """Yield (slice, offset in `state_slice`) for each parameter slice in `state_slice`. Slices of
    more than BATCH_ELEMENTS elements are divided."""
    for param, offset in state_slice.params:
        for start in range(param.start, param.stop, BATCH_ELEMENTS):
            batch = param._replace(start=start, stop=min(start + BATCH_ELEMENTS, param.stop))
            yield batch, offset + start - param.start


def _check_file(
    path: Path, header: bytes, size: int, checksums: Sequence[Checksum], stop: Stop
) -> FileEntry:
    """Check a safetensors file that all ranks have written, and return its manifest entry.

    Raises OptimusError if the file does not have the given `header` and `size`, or if its content
    does not match `checksums`, which the ranks have computed from the bytes that they have written.
    """
    digest, content = xxhash.xxh3_64(header), Checksum()
    with open(path, "rb") as file:
        files.sync_to_disk(file.fileno())  # the writes of all ranks of this node
        if (actual := os.fstat(file.fileno()).st_size) != size:
            raise OptimusError(
                f"{path.name}: the file has {actual} bytes, but the save planned {size} bytes"
            )
        has_header = file.read(len(header)) == header
        while block := file.read(_BLOCK_BYTES):
            if stop.is_set():
                raise OptimusError(f"{path.name}: the save was stopped")
            digest.update(block)
            content = content.plus(memoryview(block), len(header) + content.nbytes)
    written = Checksum(size - len(header), sum(entry.weighted_sum for entry in checksums))
    if (
        not has_header
        or content != written
        or sum(entry.nbytes for entry in checksums) != written.nbytes
    ):
        raise OptimusError(f"{path.name} does not contain the bytes that the ranks wrote")
    return FileEntry(path.name, size, digest.hexdigest())
