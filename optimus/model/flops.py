"""Number of parameters and FLOPs of a model, computed from the model's configuration."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection

from optimus.config import ModelConfig
from optimus.model.shapes import Shapes, block_shapes, head_shapes


def count_parameters(config: ModelConfig) -> tuple[int, int]:
    """Return a model's number of parameters, and the number of parameters that one token uses.

    A token uses `num_experts_per_tok` experts in each layer with experts, and all parameters
    outside experts.
    """
    embedding = config.vocab_size * config.hidden_size
    total = active = embedding + _count(head_shapes(config))
    for experts, layers in Counter(config.experts_by_layer).items():
        shapes = block_shapes(config.layer(config.experts_by_layer.index(experts)))
        total += layers * _count(shapes)
        in_experts = _count({n: shape for n, shape in shapes.items() if ".experts." in n})
        idle = in_experts // experts * (experts - config.num_experts_per_tok) if experts else 0
        active += layers * (_count(shapes) - idle)
    return total, active


def flops_per_token(config: ModelConfig, seq_len: int) -> float:
    """Return the FLOPs of forward and backward per token, for sequences of `seq_len` tokens.

    As in PaLM (arXiv 2204.02311, appendix B), the count includes all matrix products and all
    attention scores, even masked scores. The count does not include embedding look-ups, norms,
    recomputation, or experts that the token does not use. A multiply-add is 2 FLOPs.
    """
    layers = sum(layer_multiply_adds(config, seq_len, n) for n in range(config.num_layers))
    # Backward counts as twice forward.
    return 3.0 * 2.0 * (layers + head_multiply_adds(config))


def layer_multiply_adds(config: ModelConfig, seq_len: int, number: int) -> int:
    """Return the number of multiply-adds per token in the forward pass of one layer.

    The count includes the same operations as `flops_per_token`. `number` is the index of the layer,
    starting at 0.
    """
    hidden, experts = config.hidden_size, config.experts_by_layer[number]
    swiglu = _swiglu_multiply_adds(config, number)
    return _attention_multiply_adds(config, seq_len) + swiglu + hidden * experts


def recomputed_multiply_adds(
    config: ModelConfig, seq_len: int, number: int, modules: Collection[str]
) -> int:
    """Return the number of multiply-adds per token that backward repeats in one layer.

    `modules` is the setting `recompute.modules`. The other arguments are as for
    `layer_multiply_adds`.
    """
    whole = layer_multiply_adds(config, seq_len, number)
    if "block" in modules:
        return whole
    attention = _attention_multiply_adds(config, seq_len)
    repeated = attention if "attention" in modules else 0
    if config.experts_by_layer[number]:
        if "moe" in modules:
            repeated += whole - attention
        elif "experts" in modules:  # the products with the gate and up weights
            repeated += _swiglu_multiply_adds(config, number) * 2 // 3
    return repeated


def _attention_multiply_adds(config: ModelConfig, seq_len: int) -> int:
    q_size = config.num_attention_heads * config.head_size
    kv_size = config.num_kv_heads * config.head_size
    projections = 2 * config.hidden_size * (q_size + kv_size)
    # Masked scores are counted, too, because the number of masked scores that a kernel skips
    # depends on the kernel.
    scores = 2 * seq_len * q_size
    return projections + scores


def _swiglu_multiply_adds(config: ModelConfig, number: int) -> int:
    swiglu = 3 * config.hidden_size * config.layer(number).intermediate_size
    return swiglu * (config.num_experts_per_tok if config.experts_by_layer[number] else 1)


def head_multiply_adds(config: ModelConfig) -> int:
    """Return the number of multiply-adds per token in the forward pass of the output head."""
    return config.hidden_size * config.vocab_size


def _count(shapes: Shapes) -> int:
    return sum(map(math.prod, shapes.values()))
