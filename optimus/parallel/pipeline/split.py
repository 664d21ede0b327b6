"""Linear layers whose weight gradient can be put off, for schedules with I and W."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from optimus.model.late_gradients import later_or_now


class SplitLinear(nn.Linear):
    """nn.Linear whose weight gradient can be put off. The bias's is cheap and comes at once."""

    def forward(self, x: Tensor) -> Tensor:
        return self.multiply(x, self.bias)

    def multiply(self, x: Tensor, bias: Tensor | None) -> Tensor:
        return _Linear.apply(x, self.weight, bias)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x)
        # The leaf itself, since its gradient is put there: where tensors are packed for
        # recomputation, saved ones come back as others over the same memory.
        ctx.weight = weight
        ctx.has_bias = bias is not None
        return F.linear(x, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (x,), weight = ctx.saved_tensors, ctx.weight
        flat = grad.reshape(-1, grad.shape[-1])

        def weight_gradient() -> Tensor:
            return flat.t() @ x.reshape(-1, x.shape[-1])

        grad_x = (flat @ weight).view_as(x) if ctx.needs_input_grad[0] else None
        grad_weight = later_or_now(weight, weight_gradient) if ctx.needs_input_grad[1] else None
        grad_bias = flat.sum(0) if ctx.has_bias else None
        return grad_x, grad_weight, grad_bias


def split_linears(model: nn.Module) -> None:
    """Make every nn.Linear of `model` put off its weight gradient where it is asked to."""
    for module in model.modules():
        if type(module) is nn.Linear:
            module.__class__ = SplitLinear
