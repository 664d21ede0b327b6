"""Dynamic loss scaling: fp16 gradients kept between its smallest number and its largest.

Backward starts from the scale instead of 1, and the update divides by it. Scales are powers of two,
so that neither rounds anything that stays within fp16's range.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from optimus.config import OptimConfig

_FIRST = 2.0**16
"""Per microbatch: the objective of a microbatch carries 1 / their number."""
_LARGEST = 2.0**100


class LossScale:
    """The scale of the next update. The same on every rank, since ranks agree on overflows."""

    def __init__(self, optim: OptimConfig, dtype: str, num_microbatches: int) -> None:
        """`dtype` is train.dtype; `num_microbatches` are those of the global batch."""
        self._dynamic = dtype == "fp16"
        self._least, self._growth_steps = optim.min_loss_scale, optim.loss_scale_growth_steps
        first = optim.loss_scale or _FIRST * 2.0 ** math.ceil(math.log2(num_microbatches))
        self.scale = max(first, self._least) if self._dynamic else 1.0
        self.good_steps = 0
        """Updates since the last overflow or growth."""
        self.skipped = 0
        """Updates that were skipped since the run began."""

    @property
    def can_fall(self) -> bool:
        """Whether an overflow may still be the scale's fault, so that the update is skipped."""
        return self._dynamic and self.scale > self._least

    def at_its_least(self) -> str:
        """For a message of what happens once it can fall no more."""
        return f"; the loss scale is at its least, {self.scale:g}" if self._dynamic else ""

    def after_update(self) -> None:
        """All gradients were finite."""
        self.good_steps += 1
        if self._dynamic and self.good_steps >= self._growth_steps:
            self.scale, self.good_steps = min(2 * self.scale, _LARGEST), 0

    def after_overflow(self) -> None:
        """The update was skipped."""
        assert self.can_fall
        self.scale, self.good_steps = self.scale / 2, 0
        self.skipped += 1

    def state(self) -> dict[str, float] | None:
        """What a checkpoint keeps, ready for JSON; None where the scale is always 1."""
        if not self._dynamic:
            return None
        return {"scale": self.scale, "good_steps": self.good_steps, "skipped": self.skipped}

    def restore(self, state: Mapping[str, Any] | None) -> None:
        """Go on from a `state`; one below a least scale that was raised meanwhile is raised too."""
        if state is not None and self._dynamic:
            self.scale = max(float(state["scale"]), self._least)
            self.good_steps, self.skipped = int(state["good_steps"]), int(state["skipped"])
