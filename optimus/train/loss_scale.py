"""Dynamic loss scaling: keeps fp16 gradients between the smallest and the largest fp16 number.

Backward starts from a gradient equal to the scale instead of 1, and the update divides all
gradients by the scale. Scales are powers of two, so that neither operation rounds a value that
stays within the range of fp16.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from optimus.config import OptimConfig

_FIRST = 2.0**16
"""Initial scale of an update with one microbatch. With n microbatches the objective of each has the
factor 1 / n, so the initial scale is n times as large, rounded up to a power of two."""
_LARGEST = 2.0**100


class LossScale:
    """The loss scale of the next update, the same on all ranks, since they agree on overflows."""

    def __init__(self, optim: OptimConfig, dtype: str, num_microbatches: int) -> None:
        """Make the scale of a new run.

        Args:
            optim: `[optim]`.
            dtype: `train.dtype`; unless it is "fp16", the scale is always 1.
            num_microbatches: Number of microbatches of the global batch.
        """
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
        """True if the scale can become smaller: an overflow then skips the update."""
        return self._dynamic and self.scale > self._least

    def at_its_least(self) -> str:
        """Return the end of an error message: in fp16, that the scale cannot become smaller."""
        return f"; the loss scale is at its least, {self.scale:g}" if self._dynamic else ""

    def after_update(self) -> None:
        """Count an update whose gradients were all finite."""
        self.good_steps += 1
        if self._dynamic and self.good_steps >= self._growth_steps:
            self.scale, self.good_steps = min(2 * self.scale, _LARGEST), 0

    def after_overflow(self) -> None:
        """Count a skipped update and halve the scale."""
        assert self.can_fall
        self.scale, self.good_steps = self.scale / 2, 0
        self.skipped += 1

    def state(self) -> dict[str, float] | None:
        """Return the state for checkpoints, as values of JSON; None if the scale is always 1."""
        if not self._dynamic:
            return None
        return {"scale": self.scale, "good_steps": self.good_steps, "skipped": self.skipped}

    def restore(self, state: Mapping[str, Any] | None) -> None:
        """Restore the `state` of a checkpoint; a scale below `optim.min_loss_scale` is raised to
        that value."""
        if state is not None and self._dynamic:
            self.scale = max(float(state["scale"]), self._least)
            self.good_steps, self.skipped = int(state["good_steps"]), int(state["skipped"])
