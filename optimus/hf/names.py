"""Mapping between the names of our parameters and of transformers' tensors.

On disk an expert has three tensors. In our model, and in a model that transformers 5 has loaded,
all experts of a layer together have two. `pieces` yields, for one of our parameters, the names on
disk with views into the parameter, which serve both for loading and for saving.
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

# Prefixes of names within a block: our name, transformers' name. The rest of a name is the same.
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
    """Return whether `name`, a parameter of ours, contains the experts of a layer."""
    return name.endswith((_GATE_UP, _DOWN))


def hf_name(name: str) -> str:
    """Return transformers' name of one of our parameters; for experts, the name of the merged
    tensor of transformers 5."""
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
    """Yield the on-disk tensors of one of our parameters: transformers' name and a view into
    `tensor`."""
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
    """Check the weights of a directory from file headers alone.

    Args:
        config: the model that the weights must fit.
        path: Hugging Face directory.

    Raises:
        CheckpointError: a tensor is missing, superfluous, of another shape or not floating-point,
            or a file is incomplete or cannot be read.
    """
    files = TensorFiles(Path(path))
    try:
        expected = {theirs: tuple(view.shape) for theirs, _, view in hf_tensors(config, files)}
    except (RuntimeError, TypeError, OverflowError):
        raise CheckpointError(
            f"{path}: config.json describes a tensor of more elements than torch can count"
        ) from None
    names = set(files.names())
    # A directory may have tensors that are not used: saved angles, and the head if it is tied.
    unused = {name for name in names if name.endswith(_ANGLES)} | {_OUTSIDE["head.weight"]}
    shapes = {name: files.find(name)[1].shape for name in names - (unused - expected.keys())}
    files.close()
    check_shapes(path, shapes, expected)


def hf_tensors(config: ModelConfig, names: Container[str]) -> Iterator[tuple[str, str, Tensor]]:
    """Yield the tensors of a model in a Hugging Face directory.

    Args:
        config: the model.
        names: names of the tensors in the directory, which may have merged or separate experts.

    Yields:
        Name of the tensor in the directory, name of our parameter, and the view of that parameter
        (on meta) whose values the tensor has.
    """
    with torch.device("meta"):
        model = Transformer(config)
    for name, parameter in model.named_parameters():
        if is_expert(name) and hf_name(name) in names:
            yield hf_name(name), name, parameter
            continue
        for theirs, view in pieces(name, parameter):
            yield theirs, name, view
