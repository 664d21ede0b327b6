"""Deferred weight gradients, for a backward pass in two halves.

Within a `DeferredGradients` context a layer's backward leaves the work for its weight gradient in
it; otherwise the work is done at once. The results have the same bits.
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
    """Deferred weight gradients of one microbatch on one stage. A context manager around the
    backward pass whose weight gradients it takes."""

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
        """Do the work in the order in which backward left it, and release the memory of each entry
        after it."""
        while self._work:
            self._work.popleft()()

    def defer(self, work: Callable[[], None], *weights: Tensor) -> None:
        """Keep `work`, which computes the gradients of `weights`, adds them and runs their
        hooks."""
        self._work.append(work)
        self.weights += weights


def active_deferral() -> DeferredGradients | None:
    """Return the context that takes deferred gradients now, if there is one."""
    return _active[-1] if _active else None


def compute_or_defer(weight: Tensor, gradient: Callable[[], Tensor]) -> Tensor | None:
    """Return the gradient of `weight` for a backward function, or None after deferring it."""
    deferred = active_deferral()
    if deferred is None:
        return gradient()
    deferred.defer(lambda: accumulate(weight, gradient()), weight)
    return None


def defer_whole_gradients(leaves: Iterable[Tensor]) -> None:
    """Let the gradients of these leaves wait whole from now on, also those that are computed
    together with the inputs' (norms, biases, routers, embeddings).

    A buffer to which W has not added then has nothing of its microbatch, which deterministic mode
    needs, since it adds buffers microbatch by microbatch. It costs one gradient of each such leaf
    for every microbatch that waits.
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
    """Add to `.grad` as autograd does, and run the hooks."""
    if weight.grad is None:
        weight.grad = gradient
    else:
        weight.grad.add_(gradient)
    run_hooks(weight)


def run_hooks(weight: Tensor) -> None:
    """Run the hooks that autograd runs after an accumulation; with older torch, chunks widen
    gradients in one."""
    for hook in (weight._post_accumulate_grad_hooks or {}).values():
        hook(weight)
