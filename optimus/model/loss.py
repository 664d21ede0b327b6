"""Cross-entropy that needs no fp32 copy of all logits.

Dims: N targets, V vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

# Elements of an fp32 block. On a CPU a block should fit into the cache. The loss then takes 0.58
# (fp32) and 0.37 (bf16) of the time of torch's cross_entropy for logits of 2048 x 4096, and 0.7 and
# 0.57 for 2048 x 50304. On an accelerator, fewer launches with larger blocks are better.
_BLOCK_CPU = 1 << 18
_BLOCK_DEVICE = 1 << 26


class CrossEntropy(nn.Module):
    """Module that calls `cross_entropy_sum`: logits [N, V], targets int64 [N] -> fp32 scalar."""

    def forward(self, logits: Tensor, targets: Tensor) -> Tensor:
        return cross_entropy_sum(logits, targets)


def cross_entropy_sum(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the cross-entropy summed over targets, an fp32 scalar in nats.

    The logits are converted to fp32 block by block, to save memory. The gradient has the dtype of
    the logits.

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
    """Return slices that divide the rows of logits [N, V] into blocks for conversion to fp32."""
    elements = _BLOCK_CPU if logits.device.type == "cpu" else _BLOCK_DEVICE
    step = max(1, elements // logits.shape[1])
    return [slice(start, start + step) for start in range(0, len(logits), step)]
