"""Numbers of parameters and of floating-point operations of a model, without building it."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from optimus.config import ModelConfig

if TYPE_CHECKING:
    import torch


def count_parameters(config: ModelConfig) -> tuple[int, int]:
    """Return the number of all parameters, and of those that are active for a token: of a layer's E
    experts only K are.

    One layer is built, on the meta device, for all layers with the same number of experts, so the
    largest models take milliseconds.
    """
    import torch  # not at the top, so that a launcher can count operations without torch

    from optimus.model.moe import FastSparseMoE
    from optimus.model.transformer import Block, Transformer

    with torch.device("meta"):
        outside = Transformer(config.model_copy(update={"num_layers": 0, "num_experts": 0}))
    total = active = _count(outside)
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
    """Return the forward and backward FLOPs of one token in a sequence of `seq_len` tokens
    (CONTRACT.md, "Words").

    A multiply-add counts as 2 FLOPs, and backward as twice forward. Matrix products of active
    parameters count, and attention scores over the whole square as PaLM counts them (arXiv
    2204.02311, appendix B), since kernels differ in how much of the causal half they skip.
    Look-ups, norms and recomputation do not count.
    """
    layers = sum(layer_multiply_adds(config, seq_len, n) for n in range(config.num_layers))
    return 3.0 * 2.0 * (layers + head_multiply_adds(config))


def layer_multiply_adds(config: ModelConfig, seq_len: int, number: int) -> int:
    """Return the forward multiply-adds of one token in layer `number`, counted as
    `flops_per_token` does."""
    hidden = config.hidden_size
    q_size = config.num_attention_heads * config.head_size
    kv_size = config.num_kv_heads * config.head_size
    projections = 2 * hidden * (q_size + kv_size)
    scores = 2 * seq_len * q_size
    experts = config.experts_by_layer[number]
    swiglu = 3 * hidden * config.layer(number).intermediate_size
    if experts:
        swiglu *= config.num_experts_per_tok
    return projections + scores + swiglu + hidden * experts


def head_multiply_adds(config: ModelConfig) -> int:
    """Return the forward multiply-adds of one token in the output head."""
    return config.hidden_size * config.vocab_size


def _count(module: torch.nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())
