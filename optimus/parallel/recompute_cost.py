"""What recomputation saves and what it costs, measured on this rank's own blocks.

Dims: B batch, S sequence (a tensor-parallel rank's part of it), D hidden.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from optimus import platform
from optimus.model.transformer import Transformer
from optimus.parallel.recompute import switched_off, watching

_TIMED = 2


@dataclass(frozen=True)
class RecomputeCost:
    """One microbatch through the blocks of this rank, without recomputation and with it."""

    kept_bytes: tuple[int, int]
    """Held between forward and backward."""
    seconds: tuple[float, float]
    """Forward and backward."""

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
    """Run random x of `shape` [B, S, D] through the blocks one by one, so that nothing is held of
    more than one. A collective of the ranks that share blocks, over ep and tp; those of one tp
    group give the same `seed`. Gradients of parameters are not added to."""
    device = next(model.parameters()).device
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=generator).to(device, dtype).requires_grad_()
    rope = model.rotary(shape[1] * model.sequence_shards, device)
    kept, seconds = [0, 0], [0.0, 0.0]
    for number, block in enumerate(model.blocks.values()):
        with switched_off():
            kept[0] += _kept_bytes(block, x, rope)
        kept[1] += _kept_bytes(block, x, rope)
        if number == 0:
            _pass(block, x, rope)  # first calls are slow
        taken: tuple[list[float], list[float]] = ([], [])
        for _ in range(_TIMED):
            with switched_off():
                taken[0].append(_pass(block, x, rope))
            taken[1].append(_pass(block, x, rope))
        seconds = [total + min(times) for total, times in zip(seconds, taken, strict=True)]
    return RecomputeCost((kept[0], kept[1]), (seconds[0], seconds[1]))


def _kept_bytes(block: nn.Module, x: Tensor, rope: tuple[Tensor, Tensor]) -> int:
    with KeptBytes(block) as kept:
        block(x, rope)
    return kept.total


def _pass(block: nn.Module, x: Tensor, rope: tuple[Tensor, Tensor]) -> float:
    """Seconds of a forward and a backward pass."""
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
    """Counts what forward passes within keep for backward, each piece of memory once. A context
    manager; parameters do not count, nor do indices outside of autograd's keeping."""

    def __init__(self, model: torch.nn.Module) -> None:
        # By storage, since its memory may come only when the parameters are needed.
        self._skipped = {p.untyped_storage()._cdata for p in model.parameters()}
        self._kept: dict[int, int] = {}
        self._alive: list[Tensor] = []  # so that no memory is counted under a second owner
        self._hooks = saved_tensors_hooks(self._pack, lambda saved: saved)

    def __enter__(self) -> KeptBytes:
        self._hooks.__enter__()
        watching.append(self._note)
        return self

    def __exit__(self, *error: Any) -> None:
        watching.remove(self._note)
        self._hooks.__exit__(*error)

    @property
    def total(self) -> int:
        return sum(self._kept.values())

    def _pack(self, saved: Tensor) -> Tensor:
        self._note(saved)
        return saved

    def _note(self, saved: Tensor) -> None:
        memory = saved.untyped_storage()
        if memory._cdata not in self._skipped:
            self._kept[memory.data_ptr()] = memory.nbytes()
            self._alive.append(saved.detach())
