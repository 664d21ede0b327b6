"""Weights of a model from whatever directory holds them: a checkpoint or a Hugging Face one."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor, nn

from optimus.checkpoint.load import check_shapes, read_whole
from optimus.checkpoint.manifest import Manifest, is_checkpoint, read_manifest
from optimus.checkpoint.tensors import MODEL, check_tensors, read_all_tensors, read_tensors
from optimus.config import ModelConfig, load_config
from optimus.errors import CheckpointError
from optimus.model.hf import (
    check_hf_weights,
    is_hf_directory,
    load_hf_model,
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
        return
    with torch.device("meta"):
        expected = dict(Transformer(config).named_parameters())
    if full := _sharded(path):
        check_shapes(path, full.index(), {name: p.shape for name, p in expected.items()})
    else:
        check_tensors(path / MODEL, expected)


def load_weights(model: nn.Module, path: Path) -> None:
    """Fill the parameters of `model` from a directory that `check_weights` has passed."""
    parameters = dict(model.named_parameters())
    if is_hf_directory(path):
        load_hf_weights(model, path)
    elif full := _sharded(path):
        whole = {name: torch.empty(p.shape) for name, p in parameters.items()}
        read_whole(full, whole)
        for name, parameter in parameters.items():
            parameter.data.copy_(whole.pop(name))
    else:
        read_tensors(path / MODEL, parameters)


def weights_of(path: Path) -> dict[str, Tensor]:
    """Every weight of a directory, in its own dtype, masters of a full checkpoint in fp32."""
    if is_hf_directory(path):
        return load_hf_model(path).state_dict()
    if full := _sharded(path):
        whole = {name: torch.empty(shape) for name, shape in full.index().shapes.items()}
        read_whole(full, whole)
        return whole
    return read_all_tensors(path / MODEL)


def _sharded(path: Path) -> Manifest | None:
    """The manifest of a checkpoint whose weights lie in shard files."""
    manifest = read_manifest(path) if is_checkpoint(path) else None
    return manifest if manifest is not None and manifest.is_sharded else None
