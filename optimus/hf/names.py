"""One table between our parameters and transformers' tensors.

On disk an expert is three tensors; in our model (and in a loaded transformers 5 model) a layer's
experts are two. `pieces` gives the on-disk names of a parameter with views into it, which serve to
copy in as well as out.
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

# Endings within a block, ours and theirs; the rest of a name is common to both.
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
_ANGLES = "rotary_emb.inv_freq"  # which version 4 once saved


def is_expert(name: str) -> bool:
    """Whether a parameter of ours holds a layer's experts."""
    return name.endswith((_GATE_UP, _DOWN))


def hf_name(name: str) -> str:
    """transformers' name of a parameter of ours; the merged one (version 5) for experts."""
    if name in _OUTSIDE:
        return _OUTSIDE[name]
    _, layer, rest = name.split(".", 2)
    if is_expert(name):
        return f"model.layers.{layer}.{rest}_proj"
    for ours, theirs in _IN_BLOCK.items():
        if rest.startswith(ours):
            rest = theirs + rest.removeprefix(ours)
            break
    return f"model.layers.{layer}.{rest}"


def pieces(name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    """transformers' on-disk tensors of one parameter: their names, and views into `tensor`."""
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
    """Refuse, from headers alone, a directory that holds something else than the weights of this
    model: CheckpointError if a tensor is missing, of another shape, not a floating-point one, or
    without a place in the model, or a file cannot be read or is not complete."""
    files = TensorFiles(Path(path))
    try:
        expected = {theirs: tuple(view.shape) for theirs, _, view in places(config, files)}
    except (RuntimeError, TypeError, OverflowError):
        raise CheckpointError(
            f"{path}: config.json describes a tensor of more elements than torch can count"
        ) from None
    names = set(files.names())
    idle = {name for name in names if name.endswith(_ANGLES)} | {_OUTSIDE["head.weight"]}  # if tied
    found = {name: files.find(name)[1].shape for name in names - (idle - expected.keys())}
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
