"""Functions that count the parameters and FLOPs of a model, given the model's configuration."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from optimus.config import ModelConfig

if TYPE_CHECKING:
    import torch


def count_parameters(config: ModelConfig) -> tuple[int, int]:
    """Return a model's number of parameters, and the number of parameters that one token uses.

    A token uses `num_experts_per_tok` experts in each layer with experts, and all parameters
    outside experts.
    """
    import torch  # not at the top, so that a launcher can count operations without torch

    from optimus.model.moe import FastSparseMoE
    from optimus.model.transformer import Block, Transformer

    with torch.device("meta"):
        outside = Transformer(config.model_copy(update={"num_layers": 0, "num_experts": 0}))
    total = active = _count(outside)
    # Layers with the same number of experts are built once, so that counting takes milliseconds.
    for experts, layers in Counter(config.experts_by_layer).items():
        with torch.device("meta"):
            block = Block(config.layer(config.experts_by_layer.index(experts)))
        total += layers * _count(block)
        idle = 0
        if experts:
            assert isinstance(block.mlp, FastSparseMoE)
            idle = _count(block.mlp.experts) // experts * (experts - config.num_experts_per_tok)
        active += layers * (_count(block) - idle)
    return total, active


def flops_per_token(config: ModelConfig, seq_len: int) -> float:
    """Return the FLOPs of forward and backward per token, for sequences of `seq_len` tokens.

    As in PaLM (arXiv 2204.02311, appendix B), the count includes all matrix products and all
    attention scores, even masked scores. The count does not include embedding look-ups, norms,
    recomputation, and experts that the token does not use. A multiply-add is 2 FLOPs.
    """
    layers = sum(layer_multiply_adds(config, seq_len, n) for n in range(config.num_layers))
    # Backward counts as twice forward.
    return 3.0 * 2.0 * (layers + head_multiply_adds(config))


def layer_multiply_adds(config: ModelConfig, seq_len: int, number: int) -> int:
    """Return the number of multiply-adds per token in the forward pass of one layer.

    The count includes the same operations as `flops_per_token`. `number` is the index of the layer,
    starting at 0.
    """
    hidden = config.hidden_size
    q_size = config.num_attention_heads * config.head_size
    kv_size = config.num_kv_heads * config.head_size
    projections = 2 * hidden * (q_size + kv_size)
    # Masked scores count too, because kernels differ in how many of them they skip.
    scores = 2 * seq_len * q_size
    experts = config.experts_by_layer[number]
    swiglu = 3 * hidden * config.layer(number).intermediate_size
    if experts:
        swiglu *= config.num_experts_per_tok
    return projections + scores + swiglu + hidden * experts


def head_multiply_adds(config: ModelConfig) -> int:
    """Return the number of multiply-adds per token in the forward pass of the output head."""
    return config.hidden_size * config.vocab_size


def _count(module: torch.nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())
