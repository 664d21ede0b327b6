"""Weights of a Hugging Face directory into our model, tensor by tensor."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from optimus.config import ModelConfig
from optimus.errors import CheckpointError
from optimus.model.hf.config import read_hf_config
from optimus.model.hf.names import hf_name, is_expert, pieces
from optimus.model.identity import first_difference
from optimus.model.tensor_files import TensorFiles
from optimus.model.transformer import Transformer

# What a checkpoint may hold without a place in the model: angles that version 4 once saved.
_DERIVED = "rotary_emb.inv_freq"


class _Source(Protocol):
    def __contains__(self, name: str) -> bool: ...
    def __getitem__(self, name: str) -> Tensor: ...


def load_hf_model(
    path: str | os.PathLike,
    dtype: torch.dtype | None = None,
    device: torch.device | str = "cpu",
) -> Transformer:
    """The model of a Hugging Face directory, in `dtype` or each parameter in its own."""
    files = TensorFiles(Path(path))
    with torch.device("meta"):
        model = Transformer(read_hf_config(path))
    for name, parameter in model.named_parameters():
        parameter.data = parameter.data.to(dtype or stored_dtype(files, name, parameter))
    model.to_empty(device=device)
    load_hf_weights(model, path)
    return model


def check_hf_weights(config: ModelConfig, path: str | os.PathLike) -> None:
    """Refuse what `load_hf_weights` would refuse, from headers alone, before anything is built."""
    path = Path(path)
    _same_model(config, read_hf_config(path), path)
    files = TensorFiles(path)
    _no_strangers(files.names(), config, path)
    with torch.device("meta"):
        model = Transformer(config)
    known = {name: files.meta(name) for name in files.names() if not name.endswith(_DERIVED)}
    _fill(model, known, str(path))


def load_hf_weights(model: Transformer, path: str | os.PathLike) -> None:
    """Copy the directory's tensors into `model`, casting to its dtype.

    `model` may be a pipeline stage's part or hold some of the experts; only what it has is read.
    Raises CheckpointError if the directory holds another model, or a tensor is missing, of another
    shape, damaged, or without a place in the model.
    """
    path = Path(path)
    _same_model(model.config, read_hf_config(path), path)
    files = TensorFiles(path)
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


def places(config: ModelConfig, files: TensorFiles) -> Iterator[tuple[str, str, int]]:
    """(name in `files`, our parameter, the element of it flattened with which that one begins) of
    every tensor that a directory which `check_hf_weights` has passed has for the model."""
    with torch.device("meta"):
        model = Transformer(config)
    for name, parameter in model.named_parameters():
        if is_expert(name) and hf_name(name) in files:
            yield hf_name(name), name, 0
            continue
        for theirs, view in pieces(name, parameter):
            yield theirs, name, view.storage_offset()


def stored_dtype(files: TensorFiles, name: str, parameter: Tensor) -> torch.dtype:
    """The dtype of our parameter's tensors on disk; experts of a layer must share one."""
    theirs = [theirs for theirs, _ in pieces(name, parameter)]
    stored = [files.meta(one).dtype for one in ([hf_name(name), *theirs]) if one in files]
    if not stored:
        raise CheckpointError(f"{files.path}: tensor {theirs[0]} is missing")
    if len(set(stored)) > 1:
        raise CheckpointError(
            f"{files.path}: the experts of one layer are of several types "
            f"({', '.join(sorted({str(dtype) for dtype in stored}))}), such as {theirs[0]}; "
            "bring them to one type first"
        )
    return stored[0]


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
