"""Linear layers that can defer their weight gradients, for zero-bubble pipeline schedules.

A zero-bubble schedule divides the backward pass of a stage into two actions. The action I computes
the gradient of the stage's input. The action W later computes the gradients of the stage's weights.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from optimus.model.deferred_gradients import compute_or_defer
from optimus.model.transformer import Transformer


class DeferredLinears:
    """`ParallelStyle` that replaces each plain `nn.Linear` of a model by a `DeferredLinear`."""

    def apply(self, model: Transformer) -> None:
        for parent in list(model.modules()):
            for name, child in list(parent.named_children()):
                if type(child) is nn.Linear:
                    bias = child.bias is not None
                    linear = DeferredLinear(child.in_features, child.out_features, bias)
                    parent.register_module(name, linear)


class DeferredLinear(nn.Linear):
    """nn.Linear whose weight gradient is deferred inside a `DeferredGradients` context. The bias
    gradient is not deferred."""

    def forward(self, x: Tensor) -> Tensor:
        return self.multiply(x, self.bias)

    def multiply(self, x: Tensor, bias: Tensor | None) -> Tensor:
        return _Linear.apply(x, self.weight, bias)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x)
        # The weight is not passed to save_for_backward, because a deferred gradient is written to
        # the weight's `.grad`. With saved-tensor hooks, `saved_tensors` may return a different
        # tensor object that shares the weight's memory.
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
        grad_weight = compute_or_defer(weight, weight_gradient) if ctx.needs_input_grad[1] else None
        grad_bias = flat.sum(0) if ctx.has_bias else None
        return grad_x, grad_weight, grad_bias
