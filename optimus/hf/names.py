"""Mapping between names of Optimus parameters and names of transformers' tensors.

Optimus has two merged parameters for all experts of a layer. A Hugging Face directory usually has
three tensors per expert: gate, up and down. `pieces` splits a merged parameter into these tensors.
"""

from __future__ import annotations

import os
from collections.abc import Container, Iterator
from pathlib import Path

import torch
from torch import Tensor

from optimus.config import ModelConfig
from optimus.errors import CheckpointError
from optimus.io.safetensors import TensorFiles, check_shapes
from optimus.model.transformer import Transformer

# Prefixes of names within a block: Optimus prefix to transformers prefix. The rest is the same.
_IN_BLOCK = {
    "attention_norm.": "input_layernorm.",
    "mlp_norm.": "post_attention_layernorm.",
    "attention.": "self_attn.",
    "mlp.router.": "mlp.gate.",
}
_OUTSIDE = {
    "embed.weight": "model.embed_tokens.weight",
    "final_norm.weight": "model.norm.weight",
    "head.weight": "lm_head.weight",
}
_GATE_UP = "mlp.experts.gate_up"
_DOWN = "mlp.experts.down"
_ANGLES = "rotary_emb.inv_freq"  # tensors that early releases of transformers 4 saved


def is_expert(name: str) -> bool:
    """Return whether the Optimus parameter `name` contains the merged experts of a layer."""
    return name.endswith((_GATE_UP, _DOWN))


def hf_name(name: str) -> str:
    """Return the name that transformers 5 gives to the Optimus parameter `name`. Like Optimus,
    transformers 5 merges the experts of a layer."""
    if name in _OUTSIDE:
        return _OUTSIDE[name]
    _, layer, rest = name.split(".", 2)
    if is_expert(name):
        return f"model.layers.{layer}.{rest}_proj"
    for prefix, hf_prefix in _IN_BLOCK.items():
        if rest.startswith(prefix):
            rest = hf_prefix + rest.removeprefix(prefix)
            break
    return f"model.layers.{layer}.{rest}"


def pieces(name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Split `tensor`, the Optimus parameter `name`, into the tensors of a Hugging Face directory.
    Yield the name of each tensor and a view of `tensor`."""
    if not is_expert(name):
        yield hf_name(name), tensor
        return
    prefix = f"model.layers.{name.split('.')[1]}.mlp.experts"
    for number, expert in enumerate(tensor):
        if name.endswith(_DOWN):
            yield f"{prefix}.{number}.down_proj.weight", expert
        else:
            gate, up = expert.chunk(2)
            yield f"{prefix}.{number}.gate_proj.weight", gate
            yield f"{prefix}.{number}.up_proj.weight", up


def check_hf_weights(config: ModelConfig, path: str | os.PathLike) -> None:
    """Check the names, shapes and dtypes of the weights in a directory. Only file headers are read.

    Args:
        config: the model that the weights must fit.
        path: Hugging Face directory.

    Raises:
        CheckpointError: a tensor is missing, not in the model, of another shape or not
            floating-point, or a file cannot be read.
    """
    files = TensorFiles(Path(path))
    try:
        expected = {theirs: tuple(view.shape) for theirs, _, view in hf_tensors(config, files)}
    except (RuntimeError, TypeError, OverflowError):
        raise CheckpointError(
            f"{path}: config.json describes a tensor with more elements than torch can count; "
            "fix the sizes in config.json"
        ) from None
    names = set(files.names())
    # Ignored tensors: rotary angles, and the output head of a model with tied embeddings.
    unused = {name for name in names if name.endswith(_ANGLES)} | {_OUTSIDE["head.weight"]}
    shapes = {name: files.find(name)[1].shape for name in names - (unused - expected.keys())}
    files.close()
    check_shapes(path, shapes, expected)


def hf_tensors(config: ModelConfig, names: Container[str]) -> Iterator[tuple[str, str, Tensor]]:
    """Yield the tensors that a Hugging Face directory must have for a model.

    Args:
        config: the model.
        names: names of the tensors in the directory, which show whether the experts are merged.

    Yields:
        (name of the tensor in the directory, name of the Optimus parameter, view of the parameter
        on the meta device).
    """
    with torch.device("meta"):
        model = Transformer(config)
    for name, parameter in model.named_parameters():
        if is_expert(name) and hf_name(name) in names:
            yield hf_name(name), name, parameter
            continue
        for theirs, view in pieces(name, parameter):
            yield theirs, name, view
