"""Tensor parallelism: heads, intermediate sizes and the vocabulary divided over tp ranks.

Megatron's scheme (arXiv 1909.08053): what opens a block is divided by columns, what closes it by
rows, so that a block needs one sum of its outputs, and one of its inputs' gradients. With sequence
parallelism (arXiv 2205.05198) the residual stream between blocks is divided along the sequence, and
the sums become reduce-scatters and all-gathers.

Dims: B batch, S sequence, D hidden, N targets, V vocabulary of this rank.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from optimus.distributed.collectives import Group, all_reduce_max, all_reduce_sum
from optimus.model.attention import Attention
from optimus.model.layers import MLP, Embedding, RMSNorm
from optimus.model.loss import row_blocks
from optimus.model.moe import Experts, FastSparseMoE
from optimus.model.transformer import Transformer
from optimus.parallel.exchange import (
    gather_then_scatter_sum,
    gather_then_slice,
    identity_then_sum,
    scatter_sum_then_gather,
    sum_then_identity,
)
from optimus.parallel.pipeline.split import SplitLinear
from optimus.parallel.placement import Intervals, share

_SEQUENCE = 1  # the dim of S in [B, S, D]


class Wiring:
    """How activations enter a divided block and leave it."""

    def __init__(self, group: Group, sequence_parallel: bool) -> None:
        self.group, self.sequence_parallel = group, sequence_parallel

    def enter(self, x: Tensor) -> Tensor:
        """The whole x [B, S, D], of whose gradient every rank has a part."""
        if self.sequence_parallel:
            return gather_then_scatter_sum(x, self.group, _SEQUENCE)
        return identity_then_sum(x, self.group)

    def leave(self, x: Tensor) -> Tensor:
        """From partial sums [B, S, D] to the residual stream."""
        if self.sequence_parallel:
            return scatter_sum_then_gather(x, self.group, _SEQUENCE)
        return sum_then_identity(x, self.group)


def wire_tensor_parallel(model: Transformer, group: Group, sequence_parallel: bool) -> None:
    """Put the communication of tp into a model whose parameters are this rank's slices."""
    wiring = Wiring(group, sequence_parallel)
    if sequence_parallel:
        model.sequence_shards = group.size
    for module in model.modules():
        if isinstance(module, Attention):
            _wire_attention(module, wiring)
        elif isinstance(module, MLP):
            module.register_forward_pre_hook(partial(_enter_first, wiring))
            _make_row_linear(module.down_proj, wiring)
        elif isinstance(module, FastSparseMoE):
            _wire_moe(module, wiring)
    first, _ = share(model.config.vocab_size, group.rank, group.size)
    if model.embed is not None:
        model.embed.__class__ = VocabularyParallelEmbedding
        assert isinstance(model.embed, VocabularyParallelEmbedding)
        model.embed.wiring, model.embed.first = wiring, first
    if model.final_norm is not None:
        model.final_norm.register_forward_hook(lambda module, inputs, out: wiring.enter(out))
        model.cross_entropy = partial(vocabulary_parallel_cross_entropy, group=group, first=first)


def slices(module: nn.Module, index: int, size: int) -> Iterator[tuple[str, int, Intervals]]:
    """Name, dim and what rank `index` of `size` holds of it, of a module's own parameters: columns
    of what opens a block, rows of what closes it."""
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


def meets_a_part_of_the_sequence(name: str) -> bool:
    """Under sequence parallelism the norms of the residual stream and biases added behind a
    reduction see a share of the tokens on each tensor-parallel rank; the router sees all."""
    module, _, leaf = name.rpartition(".")
    last = module.rpartition(".")[2]
    norm = last in ("attention_norm", "mlp_norm", "final_norm")
    return norm or (last, leaf) == ("o_proj", "bias")


def _enter_first(wiring: Wiring, module: nn.Module, inputs: tuple) -> tuple:
    return (wiring.enter(inputs[0]), *inputs[1:])


def _wire_attention(module: Attention, wiring: Wiring) -> None:
    module.register_forward_pre_hook(partial(_enter_first, wiring))
    _make_row_linear(module.o_proj, wiring)
    for norm in (module.q_norm, module.k_norm):
        if isinstance(norm, RMSNorm):
            norm.__class__ = DividedRMSNorm
            assert isinstance(norm, DividedRMSNorm)
            norm.group = wiring.group


def _wire_moe(module: FastSparseMoE, wiring: Wiring) -> None:
    """Every rank routes all tokens alike; the experts' intermediate size is divided.

    The gradients of the experts' inputs and of the routing weights are partial and summed here, so
    that the router's gradient is complete on every rank (CONTRACT.md, "Ranks").
    """
    group = wiring.group

    def enter_experts(experts: nn.Module, inputs: tuple) -> tuple:
        x, weights, *rest = inputs
        return (identity_then_sum(x, group), identity_then_sum(weights, group), *rest)

    module.experts.register_forward_pre_hook(enter_experts)
    if not wiring.sequence_parallel:
        module.experts.register_forward_hook(
            lambda experts, inputs, out: sum_then_identity(out, group)
        )
        return
    module.register_forward_pre_hook(
        lambda moe, inputs: (gather_then_slice(inputs[0], group, _SEQUENCE), *inputs[1:])
    )
    module.register_forward_hook(lambda moe, inputs, out: (wiring.leave(out[0]), *out[1:]))


def _make_row_linear(linear: nn.Linear, wiring: Wiring) -> None:
    linear.__class__ = RowLinear
    assert isinstance(linear, RowLinear)
    linear.wiring = wiring


class RowLinear(SplitLinear):
    """A linear layer of which each rank holds some columns of the weight and of the input; the bias
    is added once, behind the sum."""

    wiring: Wiring

    def forward(self, x: Tensor) -> Tensor:
        out = self.wiring.leave(self.multiply(x, None))
        return out if self.bias is None else out + self.bias


class VocabularyParallelEmbedding(Embedding):
    """Looks up the tokens whose rows are here; the others come with the sum over ranks."""

    wiring: Wiring
    first: int

    def forward(self, tokens: Tensor) -> Tensor:
        local = tokens - self.first
        absent = (local < 0) | (local >= self.weight.shape[0])
        rows = self.look_up(local.masked_fill(absent, 0), self.padding - self.first)
        return self.wiring.leave(rows.masked_fill(absent.unsqueeze(-1), 0))


class DividedRMSNorm(RMSNorm):
    """An RMSNorm over all heads of which each rank holds some: the sum of squares is summed."""

    group: Group

    def forward(self, x: Tensor) -> Tensor:
        return _DividedRMSNorm.apply(x, self.weight, self.eps, self.group)


class _DividedRMSNorm(torch.autograd.Function):
    """As RMSNorm's own, with the two sums over a row summed over ranks."""

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


def vocabulary_parallel_cross_entropy(
    logits: Tensor, targets: Tensor, group: Group, first: int
) -> Tensor:
    """Sum over targets of logsumexp(logits) - logits[target], fp32, in nats; alike on every rank.

    logits [N, V] are those of the tokens from `first` on, targets [N] numbers of the whole
    vocabulary. Two numbers a row travel, never logits.
    """
    return _VocabularyParallelCrossEntropy.apply(logits, targets, group, first)


class _VocabularyParallelCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, group: Group, first: int) -> Tensor:
        local = targets - first
        absent = (local < 0) | (local >= logits.shape[1])
        local = local.masked_fill(absent, 0)
        own = logits.new_empty(len(logits), dtype=torch.float32)
        for rows in row_blocks(logits):
            own[rows] = torch.logsumexp(logits[rows].float(), dim=-1)
        largest = own.clone()
        all_reduce_max(largest, group)
        chosen = logits.gather(1, local.unsqueeze(1)).squeeze(1).float().masked_fill_(absent, 0)
        sums = torch.stack([(own - largest).exp_(), chosen])
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
