"""Segments of a model, and hooks that run before each forward and backward of a segment."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

Hook = Callable[[], None]


@dataclass(frozen=True)
class ModelSegment:
    """Modules whose parameters are needed at the same time: an embedding, a block, or a head."""

    name: str
    stage: int
    parameters: tuple[str, ...]
    """Names of the segment's parameters and of each `FurtherUse` in it."""
    register: Callable[[Hook, Hook | None], None]
    """Function that registers its two arguments as hooks. The first hook runs before each forward
    of the segment, the second hook before each backward. The second argument is None if no hook
    runs before a backward."""


def register_uses(
    segments: Sequence[ModelSegment], on_use: Callable[[int, bool], None], in_backward: bool
) -> None:
    """Register hooks that call `on_use(index, False)` before each forward of each segment and, if
    `in_backward`, `on_use(index, True)` before each backward."""
    for index, segment in enumerate(segments):
        before_backward = partial(on_use, index, True) if in_backward else None
        segment.register(partial(on_use, index, False), before_backward)


def register_module(module: nn.Module, before_forward: Hook, before_backward: Hook | None) -> None:
    """Register the hooks of a segment that consists of one module.

    `before_backward` runs when backward has computed the first gradient of the module's outputs. If
    backward recomputes only operations inside the module, no hook runs again. If backward
    recomputes several modules together, `before_forward` of each of these modules runs again.
    """
    module.register_forward_pre_hook(lambda *_: before_forward())
    if before_backward is not None:
        module.register_forward_hook(lambda module, inputs, out: on_gradient(out, before_backward))


def on_gradient(outputs: Any, hook: Hook) -> None:
    """Let autograd call `hook` once, before the backward of the operations that made `outputs`.

    Autograd runs operations in the reverse order of their creation. Therefore the backward of all
    later modules is complete when `hook` runs.
    """
    if not torch.is_grad_enabled():
        return
    waiting = [hook]

    def first(grad: Tensor) -> None:
        if waiting:
            waiting.pop()()

    for tensor in _tensors(outputs):
        if tensor.requires_grad:
            tensor.register_hook(first)


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for element in value:
            yield from _tensors(element)
    elif isinstance(value, dict):
        yield from _tensors(list(value.values()))
