"""Gradients of weights that can wait: backward in two halves.

With a `WeightGradients` in force, a layer's backward leaves the work for its weight gradient there;
otherwise it is done at once. What is computed is the same either way, to the bit.
"""

from __future__ import annotations

import functools
import weakref
from collections import deque
from collections.abc import Callable, Iterable

import torch
from torch import Tensor

_in_force: list[WeightGradients] = []


class WeightGradients:
    """Weight gradients of one microbatch on one stage, put off. A context manager around the
    backward pass that leaves them."""

    def __init__(self) -> None:
        self._work: deque[Callable[[], None]] = deque()
        self.weights: list[Tensor] = []
        """Whose gradients are put off."""

    def __enter__(self) -> WeightGradients:
        _in_force.append(self)
        return self

    def __exit__(self, *_: object) -> None:
        _in_force.pop()

    @torch.no_grad()
    def compute(self) -> None:
        """Do the work, in the order in which backward left it; what a piece held is let go with
        it."""
        while self._work:
            self._work.popleft()()

    def put_off(self, work: Callable[[], None], *weights: Tensor) -> None:
        """`work` computes the gradients of `weights`, adds them and runs their hooks."""
        self._work.append(work)
        self.weights += weights


def in_force() -> WeightGradients | None:
    """What takes the work, if anything does."""
    return _in_force[-1] if _in_force else None


def later_or_now(weight: Tensor, gradient: Callable[[], Tensor]) -> Tensor | None:
    """For a backward: the gradient of `weight`, or None after putting it off."""
    late = in_force()
    if late is None:
        return gradient()
    late.put_off(lambda: accumulate(weight, gradient()), weight)
    return None


def put_off_whole(leaves: Iterable[Tensor]) -> None:
    """From now on these leaves' gradients wait whole, also those that are made beside the inputs'
    (norms, biases, routers, embeddings): a buffer to which W has not added holds nothing of its
    microbatch. Deterministic mode needs that, as buffers are added up microbatch by microbatch; it
    costs a gradient of each such leaf for every microbatch that waits."""
    for leaf in leaves:
        leaf.register_hook(functools.partial(_put_off, weakref.ref(leaf)))


def _put_off(leaf: weakref.ref[Tensor], gradient: Tensor | None) -> Tensor | None:
    late = in_force()
    if late is None or gradient is None:  # None: put off by its layer
        return gradient
    late.put_off(lambda: _accumulate_into(leaf, gradient))
    return gradient.new_zeros(()).expand_as(gradient)


def _accumulate_into(leaf: weakref.ref[Tensor], gradient: Tensor) -> None:
    weight = leaf()
    assert weight is not None
    accumulate(weight, gradient)


def accumulate(weight: Tensor, gradient: Tensor) -> None:
    """Add to `.grad` as autograd would, hooks included."""
    if weight.grad is None:
        weight.grad = gradient
    else:
        weight.grad.add_(gradient)
    run_hooks(weight)


def run_hooks(weight: Tensor) -> None:
    """What autograd runs behind an accumulation; on older torch chunks widen gradients there."""
    for hook in (weight._post_accumulate_grad_hooks or {}).values():
        hook(weight)
