"""Weights of a Hugging Face directory: whether they fit our model, and which is which."""

from __future__ import annotations

import os
from collections.abc import Iterator, Set
from pathlib import Path

import torch
from torch import Tensor

from optimus.config import ModelConfig
from optimus.errors import CheckpointError
from optimus.model.hf.names import hf_name, is_expert, pieces
from optimus.model.tensor_files import TensorFiles
from optimus.model.transformer import Transformer

# What a checkpoint may hold without a place in the model: angles that version 4 once saved.
_DERIVED = "rotary_emb.inv_freq"


def check_hf_weights(config: ModelConfig, path: str | os.PathLike) -> None:
    """Refuse, from headers alone, a directory that holds something else than the weights of this
    model: CheckpointError if a tensor is missing, of another shape, not a floating-point one, or
    without a place in the model, or a file cannot be read or is not complete."""
    files = TensorFiles(Path(path))
    with torch.device("meta"):
        model = Transformer(config)
    known = {name: files.meta(name) for name in files.names() if not name.endswith(_DERIVED)}
    files.close()
    _no_strangers(set(known), model, path)
    for name, parameter in model.named_parameters():
        merged = hf_name(name)
        if is_expert(name) and merged in known:
            _check(parameter, known[merged], merged, path)
            continue
        for theirs, view in pieces(name, parameter):
            if theirs not in known:
                raise CheckpointError(f"{path}: tensor {theirs} is missing")
            _check(view, known[theirs], theirs, path)


def _check(target: Tensor, value: Tensor, name: str, where: str | os.PathLike) -> None:
    if value.shape != target.shape:
        raise CheckpointError(
            f"{where}: tensor {name} has shape {list(value.shape)}, the model {list(target.shape)}"
        )
    if not value.is_floating_point():
        raise CheckpointError(f"{where}: tensor {name} is of {value.dtype}, not floating point")


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


def _no_strangers(names: Set[str], model: Transformer, where: str | os.PathLike) -> None:
    """Refuse tensors the configuration has no place for, such as biases it does not mention."""
    expected = {"lm_head.weight"}  # may be there although tied: transformers then ignores it
    for name, parameter in model.named_parameters():
        expected.add(hf_name(name))
        expected.update(theirs for theirs, _ in pieces(name, parameter))
    strangers = sorted(name for name in names - expected if not name.endswith(_DERIVED))
    if strangers:
        raise CheckpointError(
            f"{where}: tensor {strangers[0]} ({len(strangers)} in all) has no place in the model "
            "that its configuration describes"
        )
