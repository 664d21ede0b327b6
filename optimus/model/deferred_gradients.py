"""Deferred weight gradients: backward without weight gradients, which are computed later.

Inside a `DeferredGradients` context, the backward of a layer computes only the gradient of the
input, and `DeferredGradients.compute` computes the weight gradients later. Outside a context,
backward computes both. The gradients are bit-identical in the two cases.
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
    """Context manager for a backward pass. It collects the deferred weight gradients of one
    microbatch on one pipeline stage."""

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
        """Compute the deferred gradients in the order in which they were deferred. Each computation
        releases its saved tensors when it ends."""
        while self._work:
            self._work.popleft()()

    def defer(self, work: Callable[[], None], *weights: Tensor) -> None:
        """Store the function `work`, which `compute` will call. `work` must compute the gradients
        of `weights`, accumulate them and run the hooks of the weights."""
        self._work.append(work)
        self.weights += weights


def active_deferral() -> DeferredGradients | None:
    """Return the innermost active `DeferredGradients` context, or None."""
    return _active[-1] if _active else None


def compute_or_defer(weight: Tensor, gradient: Callable[[], Tensor]) -> Tensor | None:
    """Return `gradient()`, the gradient of `weight`. If a `DeferredGradients` context is active,
    defer this call and return None. A backward function passes the returned value to autograd."""
    deferred = active_deferral()
    if deferred is None:
        return gradient()
    deferred.defer(lambda: accumulate(weight, gradient()), weight)
    return None


def defer_whole_gradients(leaves: Iterable[Tensor]) -> None:
    """Register hooks that defer the accumulation of the gradients of `leaves`.

    A pipeline schedule computes the deferred weight gradients of a microbatch in an action W, some
    time after backward. Backward itself computes the gradients of norms, biases, routers and
    embeddings, and autograd would accumulate them before W. Deterministic mode adds gradients
    microbatch by microbatch, so all gradients of a microbatch must be accumulated in its W.

    The cost is memory: between backward and W, a microbatch keeps one gradient per leaf.
    """
    for leaf in leaves:
        leaf.register_hook(functools.partial(_defer_gradient, weakref.ref(leaf)))


def _defer_gradient(leaf: weakref.ref[Tensor], gradient: Tensor | None) -> Tensor | None:
    deferred = active_deferral()
    if deferred is None or gradient is None:  # None: the layer has deferred it
        return gradient
    deferred.defer(lambda: _accumulate_into(leaf, gradient))
    return gradient.new_zeros(()).expand_as(gradient)


def _accumulate_into(leaf: weakref.ref[Tensor], gradient: Tensor) -> None:
    weight = leaf()
    assert weight is not None
    accumulate(weight, gradient)


def accumulate(weight: Tensor, gradient: Tensor) -> None:
    """Add `gradient` to `weight.grad` as autograd does, and run the hooks of `weight`."""
    if weight.grad is None:
        weight.grad = gradient
    else:
        weight.grad.add_(gradient)
    run_hooks(weight)


def run_hooks(weight: Tensor) -> None:
    """Run the post-accumulate-grad hooks of `weight`, as autograd does. With older torch,
    `optimus.chunks` adds gradients to buffers of a wider dtype in such a hook."""
    for hook in (weight._post_accumulate_grad_hooks or {}).values():
        hook(weight)
