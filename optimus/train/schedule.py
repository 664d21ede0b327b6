"""The learning rate at every update (CONTRACT.md, "Resuming")."""

from __future__ import annotations

import math

from optimus.config import OptimConfig


def learning_rate(step: int, optim: OptimConfig, max_steps: int) -> float:
    """Rate of update `step` = 1, 2, ...: a linear warm-up, then cosine, linear or constant."""
    assert step >= 1
    if step <= optim.warmup_steps:
        return optim.lr * step / optim.warmup_steps
    if optim.schedule == "constant":
        return optim.lr
    decay_steps = optim.decay_steps or max_steps
    if step >= decay_steps:
        return optim.min_lr
    progress = (step - optim.warmup_steps) / (decay_steps - optim.warmup_steps)
    left = 0.5 * (1 + math.cos(math.pi * progress)) if optim.schedule == "cosine" else 1 - progress
    return optim.min_lr + (optim.lr - optim.min_lr) * left


def clips_at(step: int, optim: OptimConfig) -> bool:
    """Whether the gradient norm is clipped at update `step`."""
    after_warmup = step > optim.warmup_steps
    return optim.clip_norm > 0 and (after_warmup or not optim.clip_after_warmup)
