"""Parts of a model that compute at a stretch, and how one learns that they are about to."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

Notice = Callable[[], None]


@dataclass(frozen=True)
class Unit:
    """Some parameters that are needed together: an embedding, a block, a head."""

    name: str
    stage: int
    parameters: tuple[str, ...]
    """By name, further uses of others' (tied embeddings) among them."""
    watch: Callable[[Notice, Notice], None]
    """Asked once, with what is to be called before every forward and before every backward."""


def watch_module(module: nn.Module, before_forward: Notice, before_backward: Notice) -> None:
    """Notice the passes of a module: calls of it, and the first gradient of its outputs.

    A recomputation inside it happens within its backward and needs no notice of its own; modules
    that are recomputed together are noticed one by one, as in any forward.
    """
    module.register_forward_pre_hook(lambda *_: before_forward())
    module.register_forward_hook(lambda module, inputs, out: on_gradient(out, before_backward))


def on_gradient(outputs: Any, notice: Notice) -> None:
    """Call `notice` once, before the backward of what made `outputs`.

    Nodes run in reverse order of their making, so all work of the modules behind is done by then,
    and none of it comes between.
    """
    if not torch.is_grad_enabled():
        return
    waiting = [notice]

    def hook(grad: Tensor) -> None:
        if waiting:
            waiting.pop()()

    for tensor in _tensors(outputs):
        if tensor.requires_grad:
            tensor.register_hook(hook)


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from _tensors(item)
    elif isinstance(value, dict):
        yield from _tensors(list(value.values()))
