"""Deferred weight gradients, for a backward pass in two halves.

Within a `DeferredGradients` context, a layer's backward does not compute its weight gradient but
adds the work to the context, whose `compute` does it later. Outside such a context, backward does
the work at once. The results have the same bits.
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
    """Context manager that collects the deferred weight gradients of one microbatch on one stage,
    during the backward pass that defers them."""

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
        """Compute the gradients in the order in which they were deferred, and release the tensors
        that each computation needs as soon as it is done."""
        while self._work:
            self._work.popleft()()

    def defer(self, work: Callable[[], None], *weights: Tensor) -> None:
        """Keep `work`, which computes the gradients of `weights`, adds them and runs their
        hooks."""
        self._work.append(work)
        self.weights += weights


def active_deferral() -> DeferredGradients | None:
    """Return the context to which gradients are deferred now; None outside of any context."""
    return _active[-1] if _active else None


def compute_or_defer(weight: Tensor, gradient: Callable[[], Tensor]) -> Tensor | None:
    """Return the gradient of `weight` for a backward function, or None after deferring it."""
    deferred = active_deferral()
    if deferred is None:
        return gradient()
    deferred.defer(lambda: accumulate(weight, gradient()), weight)
    return None


def defer_whole_gradients(leaves: Iterable[Tensor]) -> None:
    """Make autograd defer the gradients of these leaves as well, from now on. For norms, biases,
    routers and embeddings, backward computes them together with the gradient of the input.

    Without this, such gradients are added before W runs. Deterministic mode must not add anything
    of a microbatch before its W, since it adds gradient buffers microbatch by microbatch. The cost
    is memory for one gradient of each such leaf for every microbatch that waits for its W.
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
    """Run the hooks that autograd would run after it has added to `weight.grad`. With older torch,
    `optimus.chunks` widens gradients in such a hook."""
    for hook in (weight._post_accumulate_grad_hooks or {}).values():
        hook(weight)
