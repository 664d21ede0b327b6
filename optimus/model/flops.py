"""How many parameters a model has and how many operations a token takes, without building it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from optimus.config import ModelConfig

if TYPE_CHECKING:
    import torch


def count_parameters(config: ModelConfig) -> tuple[int, int]:
    """Parameters in all, and those a token passes through: K of E experts, everything else.

    Counted on the meta device, with one layer standing for all: milliseconds for the largest.
    """
    import torch  # here, so that a launcher can count operations without it

    from optimus.model.transformer import Transformer

    with torch.device("meta"):
        model = Transformer(config.model_copy(update={"num_layers": 1}))
    layer = _count(model.blocks)
    total = _count(model) + (config.num_layers - 1) * layer
    if not config.num_experts:
        return total, total
    expert = _count(model.blocks["0"].mlp.experts) // config.num_experts
    idle = config.num_experts - config.num_experts_per_tok
    return total, total - config.num_layers * idle * expert


def flops_per_token(config: ModelConfig, seq_len: int) -> float:
    """Forward and backward FLOPs of one token in a sequence of `seq_len` (CONTRACT.md, "Words").

    Two a multiply-add and three times forward; matrix products of active parameters, and attention
    scores over the whole square as PaLM counts them (arXiv 2204.02311, appendix B), since kernels
    differ in how much of the causal half they skip. Look-ups, norms and recomputation are left out.
    """
    layers = config.num_layers * layer_multiply_adds(config, seq_len)
    return 3.0 * 2.0 * (layers + head_multiply_adds(config))


def layer_multiply_adds(config: ModelConfig, seq_len: int) -> int:
    """Forward multiply-adds of one token in one layer, counted as `flops_per_token` does."""
    hidden = config.hidden_size
    head_dim = config.head_dim or hidden // config.num_attention_heads
    q_size = config.num_attention_heads * head_dim
    kv_size = (config.num_key_value_heads or config.num_attention_heads) * head_dim
    projections = 2 * hidden * (q_size + kv_size)
    scores = 2 * seq_len * q_size
    swiglu = 3 * hidden * config.intermediate_size * max(1, config.num_experts_per_tok)
    router = hidden * config.num_experts
    return projections + scores + swiglu + router


def head_multiply_adds(config: ModelConfig) -> int:
    """Forward multiply-adds of one token in the output head."""
    return config.hidden_size * config.vocab_size


def _count(module: torch.nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())
