"""Embedding, norms, the dense feed-forward network and the cross-entropy.

Dims: V vocabulary, D hidden, F intermediate, N targets; `...` any leading dims (tokens).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from optimus.config import ModelConfig
from optimus.model import deferred_gradients

# Number of logits in a block. `cross_entropy_sum` converts logits to fp32 block by block. On a CPU,
# a block should fit into the cache. The time of the loss, divided by the time of torch's
# cross_entropy, is then 0.58 (fp32) and 0.37 (bf16) for 2048 x 4096 logits, and 0.7 (fp32) and 0.57
# (bf16) for 2048 x 50304 logits. On an accelerator, larger blocks are better, because they need
# fewer kernel launches.
_BLOCK_CPU = 1 << 18
_BLOCK_DEVICE = 1 << 26


def make_norm(config: ModelConfig) -> nn.Module:
    """Return a norm module for tensors [..., hidden_size]: LayerNorm without weights for OLMo,
    RMSNorm for OLMoE."""
    if config.architecture == "olmo":
        return LayerNorm(config.hidden_size, config.norm_eps)
    return RMSNorm(config.hidden_size, config.norm_eps)


class LayerNorm(nn.Module):
    """LayerNorm of OLMo, without weights: [..., D] -> [..., D], computed in fp32."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.size, self.eps = size, eps

    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(_at_least_fp32(x), (self.size,), eps=self.eps).to(x.dtype)


class RMSNorm(nn.Module):
    """RMSNorm of OLMoE: y = w * x / sqrt(mean(x^2) + eps), [..., D] -> [..., D]. The quotient is
    computed in fp32."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return _RMSNorm.apply(x, self.weight, self.eps)


class _RMSNorm(torch.autograd.Function):
    """Autograd function of RMSNorm. Forward saves x, the weight w and, for each row of x, the
    number 1 / sqrt(mean(x^2) + eps)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        wide = _at_least_fp32(x)
        norm = torch.linalg.vector_norm(wide, dim=-1, keepdim=True)
        scale = torch.rsqrt(norm.square_().div_(x.shape[-1]).add_(eps))
        ctx.save_for_backward(x, weight, scale)
        return (wide * scale).to(x.dtype) * weight

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        """Return the gradients dx of the input x and dw of the weight w.

        Let g be the gradient of the output, and s = 1 / sqrt(mean(x^2) + eps). Then
        dx = s * (g*w - x * s^2 * mean(g*w*x)), and dw is the sum of s*g*x over rows.
        """
        x, weight, scale = ctx.saved_tensors
        size = x.shape[-1]
        x_wide, grad_wide, scale = (
            _at_least_fp32(x).reshape(-1, size),
            _at_least_fp32(grad).reshape(-1, size),
            scale.reshape(-1, 1),
        )
        weight_wide = weight.to(x_wide.dtype)
        product = grad_wide * x_wide
        grad_weight = (scale.t() @ product).squeeze(0)
        slope = (product @ weight_wide).unsqueeze(-1).mul_(scale**3).div_(-size)
        grad_x = (grad_wide * weight_wide).mul_(scale).addcmul_(x_wide, slope)
        return grad_x.to(x.dtype).view_as(x), grad_weight.to(weight.dtype), None


class Embedding(nn.Module):
    """Token embedding: int64 [...] -> [..., D]. The row of the padding token does not receive a
    gradient."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(config.vocab_size, config.hidden_size))
        self.padding = config.pad_token_id
        self._weight_grad: Callable[[], Tensor] | None = None

    def write_gradients_to(self, weight_grad: Callable[[], Tensor]) -> None:
        """Make backward add the gradient of `weight` to the tensor that `weight_grad()` returns.

        Backward then does not allocate a gradient of shape [V, D], and leaves `weight.grad`
        unchanged. Autograd still runs the post-accumulate-grad hooks of `weight`. Backward
        accumulates into `weight.grad` as usual if `weight` is not on a CPU, or if backward runs
        inside a `DeferredGradients` context.

        Args:
            weight_grad: function that returns a tensor [V, D] of any dtype.
        """
        self._weight_grad = weight_grad

    def forward(self, tokens: Tensor) -> Tensor:
        return self.look_up(tokens, self.padding)

    def look_up(self, rows: Tensor, padding: int) -> Tensor:
        """Return the rows of `weight` [V, D] that have the given indices, as a tensor [..., D].

        Args:
            rows: int64 [...], indices of the rows.
            padding: index of the row of `weight` that does not receive a gradient. If the index is
                outside [0, V), all rows receive gradients.
        """
        writes = self._weight_grad is not None and self.weight.requires_grad
        if self.weight.is_cpu and (writes or self.weight.dtype in (torch.bfloat16, torch.float16)):
            return _LookUp.apply(self.weight, rows, padding, self._weight_grad)
        within = 0 <= padding < len(self.weight)
        return F.embedding(rows, self.weight, padding if within else None)


class _LookUp(torch.autograd.Function):
    """Autograd function of an embedding look-up. Backward sums the gradients of repeated tokens in
    fp32. On a CPU, F.embedding sums these gradients in the dtype of the weight instead."""

    @staticmethod
    def forward(
        ctx: Any, weight: Tensor, tokens: Tensor, padding: int, target: Callable[[], Tensor] | None
    ) -> Tensor:
        ctx.save_for_backward(tokens)
        ctx.shape, ctx.padding, ctx.target = weight.shape, padding, target
        return F.embedding(tokens, weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (tokens,) = ctx.saved_tensors
        rows, number = tokens.flatten().unique(return_inverse=True)
        sums = torch.zeros(len(rows), grad.shape[-1], dtype=torch.float32, device=grad.device)
        sums.index_add_(0, number, grad.reshape(-1, grad.shape[-1]).float())
        sums.masked_fill_((rows == ctx.padding).unsqueeze(1), 0)
        sums = sums.to(grad.dtype)
        if ctx.target is not None and deferred_gradients.active_deferral() is None:
            target = ctx.target()
            target.index_add_(0, rows, sums.to(target.dtype))
            return None, None, None, None
        grad_weight = grad.new_zeros(ctx.shape)
        grad_weight[rows] = sums
        return grad_weight, None, None, None


class MLP(nn.Module):
    """SwiGLU feed-forward network: down(silu(gate(x)) * up(x)), [..., D] -> [..., D]."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        hidden, inner = config.hidden_size, config.intermediate_size
        self.gate_proj = nn.Linear(hidden, inner, bias=False)
        self.up_proj = nn.Linear(hidden, inner, bias=False)
        self.down_proj = nn.Linear(inner, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class CrossEntropy(nn.Module):
    """Module that calls `cross_entropy_sum`: logits [N, V], targets int64 [N] -> fp32 scalar."""

    def forward(self, logits: Tensor, targets: Tensor) -> Tensor:
        return cross_entropy_sum(logits, targets)


def cross_entropy_sum(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the cross-entropy summed over targets, an fp32 scalar in nats.

    The logits are converted to fp32 block by block, so that an fp32 copy of all logits never
    exists. The gradient of the logits has the same dtype as the logits.

    Args:
        logits: [N, V] in any float dtype.
        targets: int64 [N].
    """
    return _CrossEntropySum.apply(logits, targets)


class _CrossEntropySum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor) -> Tensor:
        lse = logits.new_empty(len(logits), dtype=torch.float32)
        for rows in row_blocks(logits):
            lse[rows] = torch.logsumexp(logits[rows].float(), dim=-1)
        chosen = logits.gather(1, targets.unsqueeze(1)).squeeze(1).float()
        ctx.save_for_backward(logits, targets, lse)
        return (lse - chosen).sum()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        """Return the gradient of the logits, grad * (softmax(logits) - onehot(target))."""
        logits, targets, lse = ctx.saved_tensors
        grad_logits = torch.empty_like(logits)
        less_one = grad.new_full((1, 1), -1.0)
        for rows in row_blocks(logits):
            block = (logits[rows].float() - lse[rows].unsqueeze(1)).exp_()
            index = targets[rows].unsqueeze(1)
            block.scatter_add_(1, index, less_one.expand_as(index))
            grad_logits[rows] = block.mul_(grad)
        return grad_logits, None


def row_blocks(logits: Tensor) -> list[slice]:
    """Divide the rows of logits [N, V] into blocks, and return the slice of rows of each block.

    The caller converts one block at a time to fp32.
    """
    elements = _BLOCK_CPU if logits.device.type == "cpu" else _BLOCK_DEVICE
    step = max(1, elements // logits.shape[1])
    return [slice(start, start + step) for start in range(0, len(logits), step)]


def _at_least_fp32(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))
