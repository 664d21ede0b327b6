"""Weights of a model from whatever directory holds them: a checkpoint or a Hugging Face one."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

from optimus.checkpoint.manifest import is_checkpoint
from optimus.checkpoint.tensors import MODEL, check_tensors, read_tensors
from optimus.config import ModelConfig, load_config
from optimus.errors import CheckpointError
from optimus.model.hf import (
    check_hf_weights,
    is_hf_directory,
    load_hf_weights,
    read_hf_config,
)
from optimus.model.identity import first_difference
from optimus.model.transformer import Transformer

CONFIG = "config.toml"


def model_config_of(path: Path) -> ModelConfig:
    """The `[model]` section that the weights at `path` belong to."""
    if is_hf_directory(path):
        return read_hf_config(path)
    if is_checkpoint(path):
        return load_config(path / CONFIG).model
    raise CheckpointError(f"{path}: neither a checkpoint nor a Hugging Face directory")


def check_weights(config: ModelConfig, path: Path) -> None:
    """Refuse weights that do not fit `config`, from their headers, before anything is built.

    Raises CheckpointError naming the first setting or tensor in which the stored model differs.
    """
    if difference := first_difference(config, model_config_of(path)):
        key, ours, theirs = difference
        raise CheckpointError(
            f"model.{key} = {ours!r}, but the model at {path} has {theirs!r}; load it into the "
            "configuration it was made with"
        )
    if is_hf_directory(path):
        check_hf_weights(config, path)
    else:
        with torch.device("meta"):
            check_tensors(path / MODEL, dict(Transformer(config).named_parameters()))


def load_weights(model: nn.Module, path: Path) -> None:
    """Fill the parameters of `model` from a directory that `check_weights` has passed."""
    if is_hf_directory(path):
        load_hf_weights(model, path)
    else:
        read_tensors(path / MODEL, dict(model.named_parameters()))
