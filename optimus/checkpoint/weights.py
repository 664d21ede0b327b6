"""Weights of a model from whatever directory holds them: a checkpoint or a Hugging Face one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from optimus.checkpoint.manifest import FROZEN, Manifest, is_checkpoint, read_manifest
from optimus.checkpoint.stream import FileWeights, ShardWeights, Weights
from optimus.config import ModelConfig, load_saved_config
from optimus.errors import CheckpointError, counted
from optimus.hf import check_hf_weights, is_hf_directory, read_hf_config
from optimus.io.safetensors import check_shapes
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
