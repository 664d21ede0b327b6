"""Deferral of weight gradients until after backward, for zero-bubble pipeline schedules.

Inside a `DeferredGradients` context, backward computes only the gradients of layer inputs.
`DeferredGradients.compute` computes the weight gradients later. Deferred weight gradients have the
same bits as weight gradients that are not deferred.
"""

from __future__ import annotations

import functools
import weakref
from collections import deque
from collections.abc import Callable, Iterable

import torch
from torch import Tensor

_active: list[DeferredGradients] = []


class DeferredGradients:
    """Context manager that makes backward store the computations of weight gradients.

    Run the backward pass of one microbatch on one pipeline stage inside the context. `compute` then
    runs the stored computations.
    """

    def __init__(self) -> None:
        self._work: deque[Callable[[], None]] = deque()
        self.weights: list[Tensor] = []
        """Weights whose gradients are deferred."""

    def __enter__(self) -> DeferredGradients:
        _active.append(self)
        return self

    def __exit__(self, *_: object) -> None:
        _active.pop()

    @torch.no_grad()
    def compute(self) -> None:
        """Compute and accumulate the deferred gradients, in the order of the calls of `defer`."""
        while self._work:
            self._work.popleft()()  # each call releases its saved tensors at its end

    def defer(self, work: Callable[[], None], *weights: Tensor) -> None:
        """Store the function `work`. `compute` calls it later.

        Args:
            work: function that computes the gradients of `weights`, accumulates the gradients and
                runs the post-accumulate-grad hooks of `weights`.
            weights: the weights whose gradients `work` computes.
        """
        self._work.append(work)
        self.weights += weights


def active_deferral() -> DeferredGradients | None:
    """Return the innermost active `DeferredGradients` context, or None."""
    return _active[-1] if _active else None


def compute_or_defer(weight: Tensor, gradient: Callable[[], Tensor]) -> Tensor | None:
    """Compute the gradient of a weight. Inside a `DeferredGradients` context, defer the
    computation.

    Args:
        weight: the weight.
        gradient: function that computes and returns the gradient of `weight`.

    Returns:
        The value that the backward function of an operation must return for `weight`: the gradient,
        or None if the computation is deferred.
    """
    deferred = active_deferral()
    if deferred is None:
        return gradient()
    deferred.defer(lambda: accumulate(weight, gradient()), weight)
    return None


def defer_whole_gradients(leaves: Iterable[Tensor]) -> None:
    """Register a hook on each leaf tensor. The hook defers the accumulation of the leaf's gradient.

    Inside a `DeferredGradients` context, backward still computes the gradient of the leaf and keeps
    the gradient in memory. `DeferredGradients.compute` adds the gradient to `.grad`. Deterministic
    mode uses these hooks, so that all gradients are accumulated in the order of the microbatches.
    """
    for leaf in leaves:
        leaf.register_hook(functools.partial(_defer_gradient, weakref.ref(leaf)))


def _defer_gradient(leaf: weakref.ref[Tensor], gradient: Tensor | None) -> Tensor | None:
    deferred = active_deferral()
    if deferred is None or gradient is None:  # no gradient: the layer has deferred it
        return gradient
    weight = leaf()
    assert weight is not None
    deferred.defer(lambda: accumulate(weight, gradient))
    return gradient.new_zeros(()).expand_as(gradient)


def accumulate(weight: Tensor, gradient: Tensor) -> None:
    """Add `gradient` to `weight.grad`, and run the post-accumulate-grad hooks of `weight`."""
    if weight.grad is None:
        weight.grad = gradient
    else:
        weight.grad.add_(gradient)
    run_hooks(weight)


def run_hooks(weight: Tensor) -> None:
    """Run the post-accumulate-grad hooks of `weight`, as autograd does."""
    # With older torch, `optimus.chunks` adds gradients to buffers of a wider dtype in such a hook.
    for hook in (weight._post_accumulate_grad_hooks or {}).values():
        hook(weight)
