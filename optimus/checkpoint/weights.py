"""Weights of a model from whatever directory holds them: a checkpoint or a Hugging Face one."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from optimus.checkpoint.load import check_shapes
from optimus.checkpoint.manifest import Manifest, is_checkpoint, read_manifest
from optimus.checkpoint.stream import FileWeights, ShardWeights, Weights
from optimus.config import ModelConfig, load_config
from optimus.errors import CheckpointError
from optimus.model.hf import check_hf_weights, is_hf_directory, read_hf_config
from optimus.model.identity import first_difference
from optimus.model.tensor_files import MODEL, TensorFile
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
        _check_tensors(path / MODEL, expected)


def _check_tensors(path: Path, expected: Mapping[str, Tensor]) -> None:
    """Compare the names and shapes in the header of a file under our names with `expected`.

    Raises CheckpointError naming the first tensor that is missing, superfluous or of another shape.
    """
    file = TensorFile(path)
    file.close()
    if odd := sorted(file.tensors.keys() ^ expected.keys()):
        where = (
            "is missing in"
            if odd[0] not in file.tensors
            else "has no place in this model, but is in"
        )
        raise CheckpointError(f"tensor {odd[0]} {where} {path}")
    for name, tensor in expected.items():
        shape = file.tensors[name].shape
        if shape != tuple(tensor.shape):
            raise CheckpointError(
                f"{path}: tensor {name} has shape {list(shape)}, this model's has "
                f"{list(tensor.shape)}"
            )


def load_weights(model: Transformer, path: Path) -> None:
    """Fill the parameters of `model` from a directory, casting; raises CheckpointError."""
    parameters = dict(model.named_parameters())
    with open_weights(model.config, path) as weights:
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
