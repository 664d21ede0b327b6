"""Dynamic loss scaling, which keeps gradients within the range of fp16.

The backward pass computes gradients that are multiplied by the loss scale, and the optimizer step
divides the gradients by the same loss scale. The scale is a power of two, so that the
multiplication does not round gradients within the range of fp16.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from optimus.config import OptimConfig

_FIRST = 2.0**16
"""Initial scale of a run with one microbatch per update. With n microbatches, the initial scale is
n times as large, rounded up to a power of two."""
_LARGEST = 2.0**100


class LossScale:
    """Loss scale of the next update: the factor by which the gradients of the backward pass are
    multiplied. All ranks have the same scale."""

    def __init__(self, optim: OptimConfig, dtype: str, num_microbatches: int) -> None:
        """Create the loss scale of a new run.

        Args:
            optim: The section `[optim]`.
            dtype: Value of `train.dtype`. If the dtype is not "fp16", the scale is always 1.
            num_microbatches: Number of microbatches of the global batch.
        """
        self._dynamic = dtype == "fp16"
        self._least, self._growth_steps = optim.min_loss_scale, optim.loss_scale_growth_steps
        # With n microbatches per update, each loss has the factor 1 / n.
        first = optim.loss_scale or _FIRST * 2.0 ** math.ceil(math.log2(num_microbatches))
        self.scale = max(first, self._least) if self._dynamic else 1.0
        self.good_steps = 0
        """Number of updates without overflow since the scale was last halved or doubled."""
        self.skipped = 0
        """Number of skipped updates since the start of the run or, if the dtype is not fp16, since
        the last resume of the run."""

    @property
    def can_fall(self) -> bool:
        """True if the dtype is fp16 and the scale is above its minimum, so that the scale can be
        halved. If False, an overflow ends the run."""
        return self._dynamic and self.scale > self._least

    def at_its_least(self) -> str:
        """Return a text to append to the error message about an overflow at the minimum loss scale;
        "" if the dtype is not fp16."""
        return f"; the loss scale is at its minimum, {self.scale:g}" if self._dynamic else ""

    def after_update(self) -> None:
        """Count an update without overflow. After `optim.loss_scale_growth_steps` such updates in a
        row, double the scale."""
        self.good_steps += 1
        if self._dynamic and self.good_steps >= self._growth_steps:
            self.scale, self.good_steps = min(2 * self.scale, _LARGEST), 0

    def after_overflow(self) -> None:
        """Count an update that is skipped because of an overflow, and halve the scale."""
        assert self.can_fall
        self.scale, self.good_steps = self.scale / 2, 0
        self.skipped += 1

    def after_skip(self) -> None:
        """Count an update that is skipped because of its data, not because of an overflow."""
        self.skipped += 1

    def state(self) -> dict[str, float] | None:
        """Return the state of the loss scale for a checkpoint, as a dict for JSON. Return None if
        the dtype is not fp16, because the scale is then always 1."""
        if not self._dynamic:
            return None
        return {"scale": self.scale, "good_steps": self.good_steps, "skipped": self.skipped}

    def restore(self, state: Mapping[str, Any] | None) -> None:
        """Restore `state`, which `LossScale.state` returned for a checkpoint. Do nothing if `state`
        is None or the dtype is not fp16. A scale below `optim.min_loss_scale` is raised to this
        minimum."""
        if state is not None and self._dynamic:
            self.scale = max(float(state["scale"]), self._least)
            self.good_steps, self.skipped = int(state["good_steps"]), int(state["skipped"])
