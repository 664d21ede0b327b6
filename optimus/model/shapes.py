"""Names and shapes of a model's parameters, computed from the configuration. Does not import torch.

The order is the same as in `Transformer.named_parameters`: the embedding, the blocks, the final
norm, the head. Dims of the shapes: V vocabulary, D hidden, F intermediate, E experts, and the
widths of all query heads and of all key and value heads.
"""

from __future__ import annotations

from optimus.config import ModelConfig

Shapes = dict[str, tuple[int, ...]]
"""Shapes of parameters, by name in order of first use."""


def model_shapes(config: ModelConfig) -> Shapes:
    """Return the shapes of all parameters of a model. A tied head is not a parameter."""
    shapes: Shapes = {"embed.weight": (config.vocab_size, config.hidden_size)}
    for number in range(config.num_layers):
        of_block = block_shapes(config.layer(number))
        shapes |= {f"blocks.{number}.{name}": shape for name, shape in of_block.items()}
    return shapes | head_shapes(config)


def block_shapes(config: ModelConfig) -> Shapes:
    """Return the shapes of a block's parameters. The names are relative to the block. `config` is
    the result of `ModelConfig.layer`."""
    hidden, inner, experts = config.hidden_size, config.intermediate_size, config.experts
    query = config.num_attention_heads * config.head_size
    key = config.num_kv_heads * config.head_size
    has_norms = config.architecture == "olmoe"  # the norms of olmo have no weights
    shapes: Shapes = {"attention_norm.weight": (hidden,)} if has_norms else {}
    for name, shape in (
        ("q_proj", (query, hidden)),
        ("k_proj", (key, hidden)),
        ("v_proj", (key, hidden)),
        ("o_proj", (hidden, query)),
    ):
        shapes[f"attention.{name}.weight"] = shape
        if config.attention_bias:
            shapes[f"attention.{name}.bias"] = shape[:1]
    if has_norms:
        shapes["attention.q_norm.weight"], shapes["attention.k_norm.weight"] = (query,), (key,)
        shapes["mlp_norm.weight"] = (hidden,)
    if experts:
        shapes["mlp.router.weight"] = (experts, hidden)
        shapes["mlp.experts.gate_up"] = (experts, 2 * inner, hidden)
        shapes["mlp.experts.down"] = (experts, hidden, inner)
    else:
        for name in ("gate_proj", "up_proj"):
            shapes[f"mlp.{name}.weight"] = (inner, hidden)
        shapes["mlp.down_proj.weight"] = (hidden, inner)
    return shapes


def head_shapes(config: ModelConfig) -> Shapes:
    """Return the shapes of the final norm and the head."""
    shapes: Shapes = {}
    if config.architecture == "olmoe":
        shapes["final_norm.weight"] = (config.hidden_size,)
    if not config.tie_embeddings:
        shapes["head.weight"] = (config.vocab_size, config.hidden_size)
    return shapes
