"""Gradients of weights that can wait: backward in two halves.

A layer's backward hands its weight gradient to `later_or_now`. With a `WeightGradients` in force it
becomes work to be done later, otherwise it is done at once. What is computed is the same either
way, to the bit.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

_in_force: list[WeightGradients] = []


class WeightGradients:
    """Weight gradients of one microbatch on one stage, put off. A context manager around the
    backward pass that leaves them."""

    def __init__(self) -> None:
        self._work: list[tuple[Tensor, Callable[[], Tensor]]] = []
        self.weights: list[Tensor] = []
        """Whose gradients are put off."""

    def __enter__(self) -> WeightGradients:
        _in_force.append(self)
        return self

    def __exit__(self, *_: object) -> None:
        _in_force.pop()

    @torch.no_grad()
    def compute(self) -> None:
        """Do the work and add the gradients, in the order in which backward left it."""
        for weight, gradient in self._work:
            _accumulate(weight, gradient())
        self._work.clear()

    def put_off(self, weight: Tensor, gradient: Callable[[], Tensor]) -> None:
        self._work.append((weight, gradient))
        self.weights.append(weight)


def later_or_now(weight: Tensor, gradient: Callable[[], Tensor]) -> Tensor | None:
    """For a backward: the gradient of `weight`, or None after putting it off."""
    if not _in_force:
        return gradient()
    _in_force[-1].put_off(weight, gradient)
    return None


def _accumulate(weight: Tensor, gradient: Tensor) -> None:
    """Add to `.grad` as autograd would, the post-accumulate hooks of older torch included."""
    if weight.grad is None:
        weight.grad = gradient
    else:
        weight.grad.add_(gradient)
    for hook in (weight._post_accumulate_grad_hooks or {}).values():
        hook(weight)
