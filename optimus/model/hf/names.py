"""One table between our parameters and transformers' tensors.

On disk an expert is three tensors; in our model (and in a loaded transformers 5 model) a layer's
experts are two. `pieces` gives the on-disk names of a parameter with views into it, which serve to
copy in as well as out.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

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
