"""Tensor parallelism: tp ranks divide attention heads, intermediate sizes and the vocabulary.

The scheme is described in the Megatron-LM paper (arXiv 1909.08053). In attention and feed-forward
networks, the first linear layers are column-parallel, and the last linear layer is row-parallel.
Sequence parallelism (arXiv 2205.05198) also divides the residual stream, along the sequence.

Dims: B batch, S sequence, D hidden, T tokens, K experts per token, N targets, V token ids in this
rank's share of the vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from optimus.config import ModelConfig
from optimus.distributed.collectives import Group, all_reduce_max, all_reduce_sum
from optimus.model.attention import Attention
from optimus.model.layers import MLP, CrossEntropy, Embedding, LayerNorm, RMSNorm, row_blocks
from optimus.model.moe import Experts, FastSparseMoE
from optimus.model.rope import Rotary
from optimus.model.router import Routing
from optimus.model.transformer import Transformer
from optimus.parallel.deferred_linear import DeferredLinear
from optimus.parallel.exchange import (
    gather_then_scatter_sum,
    gather_then_slice,
    identity_then_sum,
    scatter_sum_then_gather,
    sum_then_identity,
)
from optimus.parallel.placement import Intervals, share

_SEQUENCE = 1  # the dim of S in [B, S, D]


class TensorParallel:
    """`ParallelStyle` that divides attention, feed-forward networks, embedding and loss over tp
    ranks.

    Args:
        group: the tp ranks.
        sequence_parallel: True to also divide the residual stream along the sequence.
    """

    def __init__(self, group: Group, sequence_parallel: bool) -> None:
        self.group, self.sequence_parallel = group, sequence_parallel

    def apply(self, model: Transformer) -> None:
        config = model.config
        for block in model.each_block():
            block.register_module("attention", TensorParallelAttention(block.config, self))
            sparse = isinstance(block.mlp, FastSparseMoE)
            feed_forward = TensorParallelMoE if sparse else TensorParallelMLP
            block.register_module("mlp", feed_forward(block.config, self))
        first, _ = share(config.vocab_size, self.group.rank, self.group.size)
        if model.embed is not None:
            model.register_module("embed", VocabularyParallelEmbedding(config, self, first))
        if model.final_norm is not None:
            norm = FinalRMSNorm if isinstance(model.final_norm, RMSNorm) else FinalLayerNorm
            size, eps = config.hidden_size, config.norm_eps
            model.register_module("final_norm", norm(size, eps, self))
            model.register_module("cross_entropy", VocabularyParallelLoss(self.group, first))
        if self.sequence_parallel:
            model.register_module("rotary", DividedSequenceRotary(config, self.group.size))

    def enter(self, x: Tensor) -> Tensor:
        """Convert x to the input [B, S, D] of column-parallel layers.

        Without sequence parallelism, return x unchanged. With sequence parallelism, x is this
        rank's share of the sequence: return the whole sequence. Backward sums the gradients of all
        ranks.
        """
        if self.sequence_parallel:
            return gather_then_scatter_sum(x, self.group, _SEQUENCE)
        return identity_then_sum(x, self.group)

    def leave(self, x: Tensor) -> Tensor:
        """Return the sum of x over all ranks.

        x [B, S, D] is the result of a row-parallel layer on one rank. This result is only a summand
        of the layer's output. With sequence parallelism, return only this rank's share of the
        sequence.
        """
        if self.sequence_parallel:
            return scatter_sum_then_gather(x, self.group, _SEQUENCE)
        return sum_then_identity(x, self.group)


def slices(module: nn.Module, index: int, size: int) -> Iterator[tuple[str, int, Intervals]]:
    """Yield the slices of a module's parameters on one tp rank.

    Args:
        module: a module of the undivided model.
        index: the rank's index along tp.
        size: the number of tp ranks.

    Yields:
        (name, dim, intervals) for each parameter that tp divides. `name` is relative to `module`.
        `intervals` are the rank's index ranges along `dim`.
    """
    if size == 1:
        return

    def columns(count: int) -> Intervals:
        return (share(count, index, size),)

    if isinstance(module, Attention):
        for name in ("q_proj", "k_proj", "v_proj"):
            linear = getattr(module, name)
            yield (f"{name}.weight", 0, columns(linear.out_features))
            if linear.bias is not None:
                yield (f"{name}.bias", 0, columns(linear.out_features))
        yield ("o_proj.weight", 1, columns(module.o_proj.in_features))
        for name in ("q_norm", "k_norm"):
            for inner, parameter in getattr(module, name).named_parameters():
                yield (f"{name}.{inner}", 0, columns(len(parameter)))
    elif isinstance(module, MLP):
        for name in ("gate_proj", "up_proj"):
            yield (f"{name}.weight", 0, columns(getattr(module, name).out_features))
        yield ("down_proj.weight", 1, columns(module.down_proj.in_features))
    elif isinstance(module, Experts):
        inner = module.down.shape[2]
        start, stop = share(inner, index, size)
        # gate rows, then up rows
        yield ("gate_up", 1, ((start, stop), (inner + start, inner + stop)))
        yield ("down", 2, ((start, stop),))
    elif isinstance(module, Embedding):
        yield ("weight", 0, columns(module.weight.shape[0]))
    elif isinstance(module, Transformer) and module.head is not None:
        assert isinstance(module.head, nn.Linear)
        yield ("head.weight", 0, columns(module.head.out_features))


def sees_share_of_sequence(name: str) -> bool:
    """Return True if, with sequence parallelism, each tp rank applies the parameter `name` only to
    the rank's share of the sequence.

    The gradient of such a parameter is the sum of the gradients that the tp ranks compute.
    """
    module, _, leaf = name.rpartition(".")
    last = module.rpartition(".")[2]
    norm = last in ("attention_norm", "mlp_norm", "final_norm")
    return norm or (last, leaf) == ("o_proj", "bias")


class RowParallelLinear(DeferredLinear):
    """Linear layer whose weight is divided over the tp ranks along the input features.

    `forward` sums the outputs of all ranks before it adds the bias.
    """

    def __init__(self, in_size: int, out_size: int, bias: bool, style: TensorParallel) -> None:
        super().__init__(in_size, out_size, bias)
        self.style = style

    def forward(self, x: Tensor) -> Tensor:
        out = self.style.leave(self.multiply(x, None))
        return out if self.bias is None else out + self.bias


class TensorParallelAttention(Attention):
    """Attention with this rank's share of the heads."""

    def __init__(self, config: ModelConfig, style: TensorParallel) -> None:
        super().__init__(config)
        self.style = style
        size = self.o_proj.in_features
        self.o_proj = RowParallelLinear(size, config.hidden_size, config.attention_bias, style)
        if isinstance(self.q_norm, RMSNorm) and isinstance(self.k_norm, RMSNorm):
            self.q_norm = DividedRMSNorm(len(self.q_norm.weight), config.norm_eps, style.group)
            self.k_norm = DividedRMSNorm(len(self.k_norm.weight), config.norm_eps, style.group)

    def forward(
        self, x: Tensor, rope: tuple[Tensor, Tensor], documents: list[int] | None = None
    ) -> Tensor:
        return super().forward(self.style.enter(x), rope, documents)


class TensorParallelMLP(MLP):
    """Feed-forward network with this rank's share of the intermediate size."""

    def __init__(self, config: ModelConfig, style: TensorParallel) -> None:
        super().__init__(config)
        self.style = style
        self.down_proj = RowParallelLinear(
            config.intermediate_size, config.hidden_size, False, style
        )

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.style.enter(x))


class TensorParallelMoE(FastSparseMoE):
    """Mixture of experts with this rank's share of each expert's intermediate size.

    Every rank routes all tokens. In backward, each rank computes only one summand of the experts'
    input gradient and of the routing weights' gradient. These two gradients are then summed over
    all ranks.
    """

    def __init__(self, config: ModelConfig, style: TensorParallel) -> None:
        super().__init__(config)
        self.style = style

    def forward(self, x: Tensor, save_input_only: bool = False) -> tuple[Tensor, Routing]:
        if not self.style.sequence_parallel:
            return super().forward(x, save_input_only)
        x = gather_then_slice(x, self.style.group, _SEQUENCE)
        out, routing = super().forward(x, save_input_only)
        return self.style.leave(out), routing

    def run_experts(
        self, x: Tensor, weights: Tensor, chosen: Tensor, save_input_only: bool = False
    ) -> Tensor:
        group = self.style.group
        x, weights = identity_then_sum(x, group), identity_then_sum(weights, group)
        out = super().run_experts(x, weights, chosen, save_input_only)
        return out if self.style.sequence_parallel else sum_then_identity(out, group)


class VocabularyParallelEmbedding(Embedding):
    """Embedding with this rank's share of the vocabulary. The share starts at token id `first`.

    `forward` uses zeros for token ids outside the share, and then sums the results of all ranks.
    """

    def __init__(self, config: ModelConfig, style: TensorParallel, first: int) -> None:
        super().__init__(config)
        self.style, self.first = style, first

    def forward(self, tokens: Tensor) -> Tensor:
        local = tokens - self.first
        absent = (local < 0) | (local >= self.weight.shape[0])
        rows = self.look_up(local.masked_fill(absent, 0), self.padding - self.first)
        return self.style.leave(rows.masked_fill(absent.unsqueeze(-1), 0))


class _FinalNorm(nn.Module):
    """Mixin for the norm before the column-parallel output head. After the norm, `forward` calls
    `TensorParallel.enter`, so that the result is the input of the head."""

    def __init__(self, size: int, eps: float, style: TensorParallel) -> None:
        super().__init__(size, eps)
        self.style = style

    def forward(self, x: Tensor) -> Tensor:
        return self.style.enter(super().forward(x))


class FinalRMSNorm(_FinalNorm, RMSNorm):
    """RMSNorm before an output head with a divided vocabulary."""


class FinalLayerNorm(_FinalNorm, LayerNorm):
    """LayerNorm before an output head with a divided vocabulary."""


class DividedSequenceRotary(Rotary):
    """Rotary embedding under sequence parallelism.

    `forward` takes the length of one rank's share of the sequence, and returns the cosines and
    sines for the whole sequence.
    """

    def __init__(self, config: ModelConfig, shares: int) -> None:
        super().__init__(config)
        self.shares = shares

    def forward(self, seq_len: int, device: torch.device) -> tuple[Tensor, Tensor]:
        return super().forward(seq_len * self.shares, device)


class DividedRMSNorm(RMSNorm):
    """RMSNorm of q or k over the heads of all tp ranks. The input has only this rank's heads."""

    def __init__(self, size: int, eps: float, group: Group) -> None:
        super().__init__(size, eps)
        self.group = group

    def forward(self, x: Tensor) -> Tensor:
        return _DividedRMSNorm.apply(x, self.weight, self.eps, self.group)


class _DividedRMSNorm(torch.autograd.Function):
    """Autograd function of DividedRMSNorm. Forward and backward each run an all-reduce of one
    number per row."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float, group: Group) -> Tensor:
        wide = x.float() if x.dtype != torch.float64 else x
        square = wide.square().sum(-1, keepdim=True)
        all_reduce_sum(square, group)
        size = x.shape[-1] * group.size
        scale = torch.rsqrt(square.div_(size).add_(eps))
        ctx.save_for_backward(x, weight, scale)
        ctx.group, ctx.size = group, size
        return (wide * scale).to(x.dtype) * weight

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, scale = ctx.saved_tensors
        wide, grad_wide = x.to(scale.dtype), grad.to(scale.dtype)
        product = grad_wide * wide
        grad_weight = (product * scale).reshape(-1, x.shape[-1]).sum(0)
        slope = (product * weight).sum(-1, keepdim=True)
        all_reduce_sum(slope, ctx.group)
        slope = slope * scale.pow(3) / -ctx.size
        grad_x = (grad_wide * weight).mul_(scale).addcmul_(wide, slope)
        return grad_x.to(x.dtype), grad_weight.to(weight.dtype), None, None


class VocabularyParallelLoss(CrossEntropy):
    """Cross-entropy over a divided vocabulary. Every rank returns the same sum over all targets.

    This rank's logits [N, V] are for V token ids, which start at `first`. The N targets are token
    ids of the whole vocabulary.
    """

    def __init__(self, group: Group, first: int) -> None:
        super().__init__()
        self.group, self.first = group, first

    def forward(self, logits: Tensor, targets: Tensor) -> Tensor:
        return _VocabularyParallelLoss.apply(logits, targets, self.group, self.first)


class _VocabularyParallelLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, group: Group, first: int) -> Tensor:
        local = targets - first
        absent = (local < 0) | (local >= logits.shape[1])
        local = local.masked_fill(absent, 0)
        local_lse = logits.new_empty(len(logits), dtype=torch.float32)
        for rows in row_blocks(logits):
            local_lse[rows] = torch.logsumexp(logits[rows].float(), dim=-1)
        largest = local_lse.clone()
        all_reduce_max(largest, group)
        chosen = logits.gather(1, local.unsqueeze(1)).squeeze(1).float().masked_fill_(absent, 0)
        sums = torch.stack([(local_lse - largest).exp_(), chosen])
        all_reduce_sum(sums, group)
        lse = sums[0].log() + largest
        ctx.save_for_backward(logits, local, absent, lse)
        return (lse - sums[1]).sum()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        logits, local, absent, lse = ctx.saved_tensors
        grad_logits = torch.empty_like(logits)
        hit = torch.where(absent, 0.0, -1.0).unsqueeze(1)
        for rows in row_blocks(logits):
            block = (logits[rows].float() - lse[rows].unsqueeze(1)).exp_()
            block.scatter_add_(1, local[rows].unsqueeze(1), hit[rows])
            grad_logits[rows] = block.mul_(grad)
        return grad_logits, None, None, None
