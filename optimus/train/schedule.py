"""Learning rate of each update, and comparison of a learning-rate schedule with the schedule that a
checkpoint records."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from optimus.config import OptimConfig


def learning_rate(step: int, optim: OptimConfig, max_steps: int) -> float:
    """Return the learning rate of the update number `step`, counted from 1. A linear warm-up is
    followed by the schedule that `optim.schedule` selects."""
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


def rate_change(step: int, optim: OptimConfig, max_steps: int, stored: Mapping[str, Any]) -> str:
    """Compare the learning-rate schedule of the configuration with the schedule of a checkpoint.
    Return a log line about a difference; "" if there is none.

    The line contains the learning rates of both schedules, and the settings with which the run
    keeps the schedule of the checkpoint. The comparison covers `step` and all later updates up to
    the smaller of the two values of `train.max_steps`.

    Args:
        step: Number of the next update, from 1.
        optim: The section `[optim]`.
        max_steps: `train.max_steps`.
        stored: The checkpoint's settings.
    """
    keys = ("lr", "min_lr", "warmup_steps", "decay_steps", "schedule")
    kept = {key: stored.get(f"optim.{key}", getattr(optim, key)) for key in keys}
    before, steps_before = optim.model_copy(update=kept), stored.get("train.max_steps", max_steps)
    # Both schedules are smooth between these updates. If the schedules differ anywhere, they
    # therefore differ at one of these updates. Close to a bend, the difference may be too small to
    # change the digits that the log line prints.
    bends = [warm + after for warm in (before.warmup_steps, optim.warmup_steps) for after in (0, 1)]
    ends = [before.decay_steps or steps_before, optim.decay_steps or max_steps]
    last = min(steps_before, max_steps)
    bends += [step + 1, (step + last) // 2, *ends, last]
    steps = [step, *sorted(s for s in bends if step < s <= last)]
    rates = (
        (s, learning_rate(s, before, steps_before), learning_rate(s, optim, max_steps))
        for s in steps
    )
    step, old, new = next((r for r in rates if f"{r[1]:.6g}" != f"{r[2]:.6g}"), (0, 0.0, 0.0))
    if not step:
        return ""
    end = before.decay_steps or steps_before  # decay_steps = 0 means max_steps
    if before.schedule == "constant":
        kept["decay_steps"] = 0
    elif end == (optim.decay_steps or max_steps):
        kept["decay_steps"] = optim.decay_steps
    else:
        kept["decay_steps"] = end
    keep = " ".join(f"optim.{k}={v}" for k, v in kept.items() if v != getattr(optim, k))
    return (
        f"learning rate of step {step}: {old:.6g} before, {new:.6g} now; to keep the old rate, "
        f"set {keep}"
    )
