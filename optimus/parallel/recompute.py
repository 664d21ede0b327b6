"""Selective activation checkpointing: backward recomputes chosen modules of each block.

The setting `recompute.modules` lists the modules. For each listed module, forward keeps only the
following tensors for backward:

- `attention`, `moe` and `block`: only the module's input.
- `experts`: all tensors except the pre-activation.
- `norm`: the input, but not the output.

Recomputation does not change the bits of the gradients. Backward also repeats the communication of
a recomputed module.

Dims: B batch, S sequence (with sequence parallelism, the share of one tp rank), D hidden.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from optimus import platform
from optimus.config import ModelConfig
from optimus.model.moe import FastSparseMoE
from optimus.model.transformer import Block, Transformer

_TIMED = 2


class Recompute:
    """`ParallelStyle` that makes every block recompute some of its modules in backward.

    Args:
        modules: any of "norm", "attention", "moe", "experts" and "block".
    """

    def __init__(self, modules: Collection[str]) -> None:
        self._modules = modules

    def apply(self, model: Transformer) -> None:
        for number, block in zip(list(model.blocks), model.each_block(), strict=True):
            model.blocks.register_module(number, RecomputeBlock(block.config, self._modules))


class RecomputeBlock(Block):
    """Decoder block that recomputes some of its modules in backward."""

    def __init__(self, config: ModelConfig, modules: Collection[str]) -> None:
        super().__init__(config)
        sparse = isinstance(self.mlp, FastSparseMoE)
        self._whole = "block" in modules
        self._norm = "norm" in modules and not self._whole
        self._attention = "attention" in modules and not self._whole
        self._moe = sparse and "moe" in modules and not self._whole
        self._experts = sparse and "experts" in modules and not (self._moe or self._whole)
        self._enabled = True
        # torch calls only the innermost saved-tensor hooks. While the hooks of `_NormOutput` are
        # active, torch does not call the hooks of `KeptBytes`. `_NormOutput` then calls these
        # functions instead.
        self.observers: list[Callable[[Tensor], object]] = []
        """Functions that are called with each tensor that `_NormOutput.pack` keeps for backward."""

    def run(
        self, x: Tensor, rope: tuple[Tensor, Tensor], documents: list[int] | None = None
    ) -> Any:
        if self._whole and self._recomputes():
            return _checkpoint(super().run, x, rope, documents)
        return super().run(x, rope, documents)

    def attend(self, x: Tensor, *rest: Any) -> Any:
        return self._run_half(self.attention_norm, self.attention, self._attention, x, *rest)

    def feed_forward(self, x: Tensor) -> Any:
        save_input_only = (True,) if self._experts and self._enabled else ()
        return self._run_half(self.mlp_norm, self.mlp, self._moe, x, *save_input_only)

    def set_enabled(self, enabled: bool) -> None:
        """Turn recomputation on or off. While it is off, the block keeps all activations."""
        self._enabled = enabled

    def _recomputes(self) -> bool:
        return self._enabled and torch.is_grad_enabled()

    def _run_half(
        self, norm: nn.Module, module: nn.Module, module_again: bool, x: Tensor, *rest: Any
    ) -> Any:
        """Return module(norm(x), *rest).

        If `module_again` is true, backward recomputes `module`.
        """
        if not self._recomputes():
            return module(norm(x), *rest)
        if self._norm and module_again:
            return _checkpoint(lambda x, *rest: module(norm(x), *rest), x, *rest)
        if module_again:
            return _checkpoint(module, norm(x), *rest)
        if self._norm:
            normed = _checkpoint(norm, x)
            output = _NormOutput(norm, x, normed, self.observers)
            with saved_tensors_hooks(output.pack, output.unpack):
                return module(normed, *rest)
        return module(norm(x), *rest)


def _checkpoint(function: Callable[..., Any], *arguments: Any) -> Any:
    return checkpoint(function, *arguments, use_reentrant=False, preserve_rng_state=False)


class _NormOutput:
    """Saved-tensor hooks for the output of a norm. The hooks keep only the input of the norm for
    backward.

    Backward recomputes the output only once, even if autograd has saved several views of the
    output.
    """

    def __init__(
        self,
        norm: nn.Module,
        x: Tensor,
        normed: Tensor,
        observers: Iterable[Callable[[Tensor], object]],
    ) -> None:
        self._norm, self._x, self._observers = norm, x.detach(), observers
        self._memory = normed.untyped_storage()._cdata
        self._value: Tensor | None = None

    def pack(self, saved: Tensor) -> Any:
        # No other storage can have this address, because the output exists until the module has
        # run. On the meta device, data has no address.
        if saved.untyped_storage()._cdata == self._memory:
            return self, saved.shape, saved.stride(), saved.storage_offset()
        for observe in self._observers:
            observe(saved)
        return saved

    @staticmethod
    def unpack(packed: Any) -> Tensor:
        if isinstance(packed, Tensor):
            return packed
        output, *geometry = packed
        return output._recomputed().as_strided(*geometry)

    def _recomputed(self) -> Tensor:
        if self._value is None:
            with torch.no_grad():
                self._value = self._norm(self._x)
        return self._value


@contextlib.contextmanager
def recompute_disabled(model: nn.Module) -> Iterator[None]:
    """Context manager that turns recomputation off in `model`.

    `model` may be a whole model or a single block.
    """
    blocks = [module for module in model.modules() if isinstance(module, RecomputeBlock)]
    for block in blocks:
        block.set_enabled(False)
    try:
        yield
    finally:
        for block in blocks:
            block.set_enabled(True)


@dataclass(frozen=True)
class RecomputeCost:
    """Measured memory and time of one microbatch in all blocks of this rank.

    Each field is a pair: (value without recomputation, value with recomputation).
    """

    kept_bytes: tuple[int, int]
    """Bytes that forward keeps for backward."""
    seconds: tuple[float, float]
    """Duration of one forward and backward pass in seconds."""

    def __str__(self) -> str:
        (before, after), (fast, slow) = self.kept_bytes, self.seconds
        saved = 1 - after / before
        return (
            f"{after / 1e6:.2f} MB kept for backward instead of {before / 1e6:.2f} ({saved:.0%} "
            f"less), {slow * 1e3:.1f} ms forward and backward instead of {fast * 1e3:.1f} "
            f"({slow / fast - 1:+.0%})"
        )


def measure_recompute(
    model: Transformer, shape: tuple[int, int, int], dtype: torch.dtype, seed: int
) -> RecomputeCost:
    """Return the memory and the time of one microbatch, measured with and without recomputation.

    The `.grad` of parameters does not change. All ep and tp ranks that share blocks must call this
    function.

    Args:
        model: this rank's model.
        shape: the shape [B, S, D] of a random input.
        dtype: the dtype of activations.
        seed: the seed of the input. All ranks of a tp group must pass the same seed.
    """
    device = next(model.parameters()).device
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=generator).to(device, dtype).requires_grad_()
    rope = model.rotary(shape[1], device)
    kept, seconds = [0, 0], [0.0, 0.0]
    # Blocks run one after another, so that only the saved tensors of one block are in memory.
    for number, block in enumerate(model.blocks.values()):
        with recompute_disabled(block):
            kept[0] += _kept_bytes(block, x, rope)
        kept[1] += _kept_bytes(block, x, rope)
        if number == 0:
            _time_pass(block, x, rope)  # warm-up, because the first call is slow
        times: tuple[list[float], list[float]] = ([], [])
        for _ in range(_TIMED):
            with recompute_disabled(block):
                times[0].append(_time_pass(block, x, rope))
            times[1].append(_time_pass(block, x, rope))
        seconds = [total + min(passes) for total, passes in zip(seconds, times, strict=True)]
    return RecomputeCost((kept[0], kept[1]), (seconds[0], seconds[1]))


def _kept_bytes(block: nn.Module, x: Tensor, rope: tuple[Tensor, Tensor]) -> int:
    with KeptBytes(block) as kept:
        block(x, rope)
    return kept.total


def _time_pass(block: nn.Module, x: Tensor, rope: tuple[Tensor, Tensor]) -> float:
    """Run forward and backward of `block` once, and return the duration in seconds."""
    platform.synchronize(x.device)
    start = time.perf_counter()
    out, routing = block(x, rope)
    roots = [out] if routing is None else [out, routing.z]
    gradients = [torch.ones_like(root) for root in roots]
    inputs = [x, *(p for p in block.parameters() if p.requires_grad)]
    torch.autograd.grad(roots, inputs, gradients)
    platform.synchronize(x.device)
    return time.perf_counter() - start


class KeptBytes:
    """Context manager that counts the bytes that forward passes of a model keep for backward.

    The count includes all tensors that autograd saves, except parameters. A storage that several
    tensors share is counted once.
    """

    def __init__(self, model: nn.Module) -> None:
        # The set contains storage objects instead of addresses: the storage of a sharded parameter
        # may have no memory, and hence no address, until the parameter is gathered.
        self._skipped = {p.untyped_storage()._cdata for p in model.parameters()}
        self._blocks = [block for block in model.modules() if isinstance(block, RecomputeBlock)]
        self._kept: dict[int, int] = {}
        self._alive: list[Tensor] = []  # keeps storages, so that addresses are unique
        self._hooks = saved_tensors_hooks(self._count, lambda saved: saved)

    def __enter__(self) -> KeptBytes:
        self._hooks.__enter__()
        for block in self._blocks:
            block.observers.append(self._count)
        return self

    def __exit__(self, *error: Any) -> None:
        for block in self._blocks:
            block.observers.remove(self._count)
        self._hooks.__exit__(*error)

    @property
    def total(self) -> int:
        return sum(self._kept.values())

    def _count(self, saved: Tensor) -> Tensor:
        """Pack hook of autograd: add the storage of a saved tensor to the count, and return the
        tensor."""
        memory = saved.untyped_storage()
        if memory._cdata not in self._skipped:
            self._kept[memory.data_ptr()] = memory.nbytes()
            self._alive.append(saved.detach())
        return saved
