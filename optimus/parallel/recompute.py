"""Selective activation checkpointing: what backward computes again instead of keeping.

Chosen for every block: `attention` and `moe` keep their input alone, `experts` keeps its own and no
pre-activation, `norm` keeps none of its output, `block` keeps its input alone; `moe` includes
`experts`, and `block` all others. A norm beside a chosen module is
computed again together with it. Communication inside what is chosen is repeated with it, in the
same order on all ranks. Nothing here draws random numbers, and the same operations on the same
values give the same bits, so gradients do not change by a bit.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from optimus.model.moe import Experts, FastSparseMoE
from optimus.model.transformer import Block

_switched_off: list[bool] = []
watching: list[Callable[[Tensor], None]] = []
"""Told of what is kept where hooks of this file hide it from hooks around them."""


def wire_recompute(model: nn.Module, modules: Collection[str]) -> None:
    """Let every block compute `modules` ("norm", "attention", "moe", "experts", "block") again in
    backward."""
    for block in model.modules():
        if not isinstance(block, Block):
            continue
        if "block" in modules:
            _compute_again(block)
            continue
        moe = isinstance(block.mlp, FastSparseMoE) and "moe" in modules
        if isinstance(block.mlp, FastSparseMoE) and "experts" in modules and not moe:
            block.mlp.experts.register_forward_pre_hook(_without_preactivation)
        norm = "norm" in modules
        attend = _half(block.attention_norm, block.attention, norm, "attention" in modules)
        block.attend = attend  # type: ignore[method-assign]  # replaced in this block only
        feed_forward = _half(block.mlp_norm, block.mlp, norm, moe)
        block.feed_forward = feed_forward  # type: ignore[method-assign]  # the same


def _compute_again(module: nn.Module) -> None:
    module.forward = _again(module.forward)


def _without_preactivation(experts: nn.Module, arguments: tuple[Any, ...]) -> None:
    assert isinstance(experts, Experts)
    experts.save_input_only = not _switched_off


def _half(
    norm: nn.Module, module: nn.Module, norm_again: bool, module_again: bool
) -> Callable[..., Any]:
    """module(norm(x), ...), of which some is computed again."""

    def both(x: Tensor, *rest: Any) -> Any:
        return module(norm(x), *rest)

    if norm_again and module_again:
        return _again(both)
    if module_again:
        alone = _again(module)
        return lambda x, *rest: alone(norm(x), *rest)
    return _without_norm_output(norm, module) if norm_again else both


def _again(function: Callable[..., Any]) -> Callable[..., Any]:
    """Keeps its arguments alone; the rest is computed again when backward first asks for it."""

    def run(*arguments: Any) -> Any:
        if _switched_off or not torch.is_grad_enabled():
            return function(*arguments)
        return checkpoint(function, *arguments, use_reentrant=False, preserve_rng_state=False)

    return run


def _without_norm_output(norm: nn.Module, module: nn.Module) -> Callable[..., Any]:
    """`module` keeps what it wants of its own, but of norm(x) only the way to compute it."""
    checkpointed = _again(norm)

    def run(x: Tensor, *rest: Any) -> Any:
        if _switched_off or not torch.is_grad_enabled():
            return module(norm(x), *rest)
        normed = checkpointed(x)
        output = _Output(norm, x, normed)
        with saved_tensors_hooks(output.pack, _unpack):
            return module(normed, *rest)

    return run


class _Output:
    """A norm's output that nobody keeps. Computed again once for all who saved it or a view."""

    def __init__(self, norm: nn.Module, x: Tensor, normed: Tensor) -> None:
        self._norm, self._x, self._memory = norm, x.detach(), normed.untyped_storage().data_ptr()
        self._value: Tensor | None = None

    def pack(self, saved: Tensor) -> Any:
        """The memory cannot belong to another tensor: its own lives as long as `module` runs."""
        if saved.untyped_storage().data_ptr() == self._memory:
            return self, saved.shape, saved.stride(), saved.storage_offset()
        for watch in watching:
            watch(saved)
        return saved

    def view(self, *geometry: Any) -> Tensor:
        if self._value is None:
            with torch.no_grad():
                self._value = self._norm(self._x)
        return self._value.as_strided(*geometry)


def _unpack(packed: Any) -> Tensor:
    if isinstance(packed, Tensor):
        return packed
    output, *geometry = packed
    return output.view(*geometry)


@contextlib.contextmanager
def switched_off() -> Iterator[None]:
    """Within, everything is kept."""
    _switched_off.append(True)
    try:
        yield
    finally:
        _switched_off.pop()
