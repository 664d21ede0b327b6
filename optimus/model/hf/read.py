"""Weights of a Hugging Face directory into our model, tensor by tensor."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from optimus.config import ModelConfig
from optimus.errors import CheckpointError, one_line
from optimus.model.hf.config import read_hf_config
from optimus.model.hf.names import hf_name, is_expert, pieces
from optimus.model.identity import first_difference
from optimus.model.transformer import Transformer

# What a checkpoint may hold without a place in the model: angles that version 4 once saved.
_DERIVED = "rotary_emb.inv_freq"


_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "BF16": torch.bfloat16,
    "F16": torch.float16,
}


class _Source(Protocol):
    def __contains__(self, name: str) -> bool: ...
    def __getitem__(self, name: str) -> Tensor: ...


def load_hf_model(path: str | os.PathLike) -> Transformer:
    """The model of a Hugging Face directory, each parameter in its own dtype."""
    files = _TensorFiles(Path(path))
    with torch.device("meta"):
        model = Transformer(read_hf_config(path))
    for name, parameter in model.named_parameters():
        parameter.data = parameter.data.to(files.dtype(name, parameter))
    model.to_empty(device="cpu")
    load_hf_weights(model, path)
    return model


def check_hf_weights(config: ModelConfig, path: str | os.PathLike) -> None:
    """Refuse what `load_hf_weights` would refuse, from headers alone, before anything is built."""
    path = Path(path)
    _same_model(config, read_hf_config(path), path)
    files = _TensorFiles(path)
    _no_strangers(files.names(), config, path)
    with torch.device("meta"):
        model = Transformer(config)
    _fill(model, files.on_meta(), str(path))


def load_hf_weights(model: Transformer, path: str | os.PathLike) -> None:
    """Copy the directory's tensors into `model`, casting to its dtype.

    `model` may be a pipeline stage's part or hold some of the experts; only what it has is read.
    Raises CheckpointError if the directory holds another model, or a tensor is missing, of another
    shape, damaged, or without a place in the model.
    """
    path = Path(path)
    _same_model(model.config, read_hf_config(path), path)
    files = _TensorFiles(path)
    _no_strangers(files.names(), model.config, path)
    _fill(model, files, str(path))


def load_hf_state_dict(model: Transformer, state: Mapping[str, Tensor]) -> None:
    """Copy a transformers model's state_dict into `model`, its experts merged or not."""
    _no_strangers(set(state), model.config, "state_dict")
    _fill(model, state, "state_dict")


@torch.no_grad()
def _fill(model: Transformer, source: _Source, where: str) -> None:
    for name, parameter in model.named_parameters():
        if is_expert(name):
            first = model.get_submodule(name.rpartition(".")[0]).first_expert
            merged = hf_name(name)
            if merged in source:
                _copy(parameter, source[merged][first : first + len(parameter)], merged, where)
                continue
            parts = pieces(name, parameter, first)
        else:
            parts = pieces(name, parameter)
        for their_name, view in parts:
            if their_name not in source:
                raise CheckpointError(f"{where}: tensor {their_name} is missing")
            _copy(view, source[their_name], their_name, where)


def _copy(target: Tensor, value: Tensor, name: str, where: str) -> None:
    if value.shape != target.shape:
        raise CheckpointError(
            f"{where}: tensor {name} has shape {list(value.shape)}, the model {list(target.shape)}"
        )
    if not value.is_floating_point():
        raise CheckpointError(f"{where}: tensor {name} is of {value.dtype}, not floating point")
    target.copy_(value)


class _TensorFiles:
    """The tensors of model.safetensors, or of the shards its index names, read when asked for."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._open: dict[str, safe_open] = {}
        self._file_of = self._table()

    def names(self) -> set[str]:
        return set(self._file_of)

    def dtype(self, name: str, parameter: Tensor) -> torch.dtype:
        """The dtype of our parameter's tensors on disk; experts of a layer must share one."""
        theirs = [theirs for theirs, _ in pieces(name, parameter)]
        stored = [self.meta(t).dtype for t in ([hf_name(name), *theirs]) if t in self]
        if not stored:
            raise CheckpointError(f"{self.path}: tensor {theirs[0]} is missing")
        if len(set(stored)) > 1:
            raise CheckpointError(
                f"{self.path}: the experts of one layer are of several types "
                f"({', '.join(sorted({str(dtype) for dtype in stored}))}), such as {theirs[0]}; "
                "bring them to one type first"
            )
        return stored[0]

    def meta(self, name: str) -> Tensor:
        """A tensor's shape and dtype, from the file's header."""
        file = self._file_of[name]
        try:
            header = self._reader(file).get_slice(name)
        except SafetensorError as error:
            raise CheckpointError(f"{self.path / file}: {one_line(error)}") from None
        stored = header.get_dtype()
        if stored not in _DTYPES:
            raise CheckpointError(
                f"{self.path / file}: tensor {name} is of {stored}, not one of {', '.join(_DTYPES)}"
            )
        return torch.empty(header.get_shape(), dtype=_DTYPES[stored], device="meta")

    def on_meta(self) -> dict[str, Tensor]:
        return {name: self.meta(name) for name in self._file_of if not name.endswith(_DERIVED)}

    def __contains__(self, name: str) -> bool:
        return name in self._file_of

    def __getitem__(self, name: str) -> Tensor:
        if name not in self._file_of:
            raise CheckpointError(f"{self.path}: tensor {name} is missing")
        file = self._file_of[name]
        try:
            return self._reader(file).get_tensor(name)
        except SafetensorError as error:
            raise CheckpointError(f"{self.path / file}: {one_line(error)}") from None

    def _table(self) -> dict[str, str]:
        single, index = "model.safetensors", self.path / "model.safetensors.index.json"
        if (self.path / single).is_file():
            return dict.fromkeys(self._reader(single).keys(), single)
        try:
            return dict(json.loads(index.read_bytes())["weight_map"])
        except FileNotFoundError:
            raise CheckpointError(
                f"{self.path}: neither model.safetensors nor {index.name} is there; other formats "
                "of weights are not read"
            ) from None
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise CheckpointError(f"{index}: not readable: {one_line(error)}") from None

    def _reader(self, file: str) -> safe_open:
        if file not in self._open:
            try:
                self._open[file] = safe_open(self.path / file, framework="pt")
            except (OSError, SafetensorError) as error:
                raise CheckpointError(f"{self.path / file}: {one_line(error)}") from None
        return self._open[file]


def _no_strangers(names: set[str], config: ModelConfig, where: str | Path) -> None:
    """Refuse tensors the configuration has no place for, such as biases it does not mention."""
    with torch.device("meta"):
        whole = Transformer(config)
    expected = {"lm_head.weight"}  # may be there although tied: transformers then ignores it
    for name, parameter in whole.named_parameters():
        expected.add(hf_name(name))
        expected.update(theirs for theirs, _ in pieces(name, parameter))
    strangers = sorted(name for name in names - expected if not name.endswith(_DERIVED))
    if strangers:
        raise CheckpointError(
            f"{where}: tensor {strangers[0]} ({len(strangers)} in all) has no place in the model "
            "that its configuration describes"
        )


def _same_model(wanted: ModelConfig, found: ModelConfig, path: Path) -> None:
    """Refuse a directory whose model computes other logits than the configured one."""
    difference = first_difference(wanted, found)
    if difference is not None:
        key, ours, theirs = difference
        raise CheckpointError(
            f"model.{key} = {ours!r}, but {path} holds a model with {theirs!r}; change the "
            "configuration or load another directory"
        )
