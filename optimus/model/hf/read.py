"""Weights of a Hugging Face directory: whether they fit our model, and which is which."""

from __future__ import annotations

import os
from collections.abc import Container, Iterator
from pathlib import Path

import torch
from torch import Tensor

from optimus.config import ModelConfig
from optimus.model.hf.names import hf_name, is_expert, pieces
from optimus.model.tensor_files import TensorFiles, check_shapes
from optimus.model.transformer import Transformer

# What a directory may hold without a place in the model: angles that version 4 once saved, and a
# head that is tied all the same.
_IDLE = ("rotary_emb.inv_freq", "lm_head.weight")


def check_hf_weights(config: ModelConfig, path: str | os.PathLike) -> None:
    """Refuse, from headers alone, a directory that holds something else than the weights of this
    model: CheckpointError if a tensor is missing, of another shape, not a floating-point one, or
    without a place in the model, or a file cannot be read or is not complete."""
    files = TensorFiles(Path(path))
    expected = {theirs: tuple(view.shape) for theirs, _, view in places(config, files)}
    wanted = (name for name in files.names() if name in expected or not name.endswith(_IDLE))
    found = {name: files.find(name)[1].shape for name in wanted}
    files.close()
    check_shapes(path, found, expected)


def places(config: ModelConfig, names: Container[str]) -> Iterator[tuple[str, str, Tensor]]:
    """(name there, our parameter, a view on meta of the part of it that it is) of every tensor that
    a directory of tensors with these names has for the model: experts may be merged there."""
    with torch.device("meta"):
        model = Transformer(config)
    for name, parameter in model.named_parameters():
        if is_expert(name) and hf_name(name) in names:
            yield hf_name(name), name, parameter
            continue
        for theirs, view in pieces(name, parameter):
            yield theirs, name, view
