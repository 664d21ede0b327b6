"""Warnings about faults that the loss does not show: unbalanced experts and gradient-norm spikes.

The checks do not synchronize the device and do not call collectives. The checks compare an update
of the model with recent updates of the same process. After a resume, there are no recent updates at
first.
"""

from __future__ import annotations

import logging
import math
import statistics
from collections import deque
from typing import NamedTuple

import torch
from torch import Tensor

from optimus.config import ModelConfig
from optimus.observe.events import ExpertLoad, LayerLoad

_SPIKE = 10.0
"""A gradient norm above this multiple of the median of the last `_HISTORY` norms is a spike."""
_HISTORY = 20
_CALM = 2.0
"""A spike has ended when the gradient norm is at most this multiple of the median of the last
`_HISTORY` norms."""

_UPDATES = 10
"""Number of recent updates over which the expert loads of a layer are checked. After this number of
consecutive updates with balanced experts, the end of a fault is reported."""
_OVERLOAD = 4.0
_IDLE = 0.01
"""An expert is idle if its load (see `expert_loads`) is below this value."""
_MIN_ROWS = 32
"""Expert loads are checked only if, in each update and layer, the mean number of tokens per expert
is at least this value. With fewer tokens, loads are uneven by chance."""

_FIRST_PAUSE = 100
"""Minimum number of updates from a warning to the first repetition of the warning. The minimum
doubles with each repetition."""


def expert_loads(expert_rows: Tensor, model: ModelConfig) -> list[Tensor]:
    """Return the load of each expert in one update.

    The load of an expert is the number of tokens routed to it, divided by the mean number of tokens
    over all experts of the layer.

    Args:
        expert_rows: `UpdateResult.expert_rows` on the host, int64 [MoE layers, largest number of
            experts of a layer].
        model: Configuration of the model.

    Returns:
        The loads of each MoE layer, float64 [experts of the layer].
    """
    numbers = [number for number in model.experts_by_layer if number]
    layers = zip(expert_rows.double(), numbers, strict=True)
    return [rows[:experts] / rows[:experts].mean() for rows, experts in layers]


def measure_expert_load(step: int, expert_rows: Tensor, model: ModelConfig) -> ExpertLoad:
    """Return the ExpertLoad record of an update.

    Args:
        step: Number of the update.
        expert_rows: `UpdateResult.expert_rows` on the host, int64 [MoE layers, largest number of
            experts of a layer].
        model: Configuration of the model.
    """
    loads = zip(model.sparse_layers, expert_loads(expert_rows, model), strict=True)
    layers = (
        LayerLoad(layer, float(load.min()), float(load.max()), int((load == 0).sum()))
        for layer, load in loads
    )
    experts = (model.experts_by_layer[layer] for layer in model.sparse_layers)
    rows = (tuple(row[:n]) for row, n in zip(expert_rows.tolist(), experts, strict=True))
    return ExpertLoad(step, tuple(layers), tuple(rows))


class Notice(NamedTuple):
    """A message for the log, with its level."""

    level: int
    """Level of the module `logging`: WARNING for a fault, INFO for the end of a fault."""
    text: str


class TrainingHealth:
    """Detects the start and the end of two faults: unbalanced experts and gradient-norm spikes."""

    def __init__(self, model: ModelConfig) -> None:
        self._norm = _GradNorm()
        # With uniform routing, the numbers of rows of experts differ by at most 1 per microbatch.
        judged = model.sparse_layers and model.router != "uniform"
        self._experts = _ExpertBalance(model) if judged else None

    def after_update(self, step: int, expert_rows: Tensor, grad_norm: float) -> list[Notice]:
        """Check an update. Return messages about faults that start or end. The list is usually
        empty.

        Args:
            step: Number of the update.
            expert_rows: `UpdateResult.expert_rows` on the host, int64 [MoE layers, largest number
                of experts of a layer].
            grad_norm: Gradient norm before clipping; NaN if the update was skipped.
        """
        notices = self._norm.after_update(step, grad_norm)
        if self._experts is not None:
            notices += self._experts.after_update(step, expert_rows)
        return notices


class _Alarm:
    """Creates the messages about one kind of fault, and limits how often the warning is repeated.

    The first repetition is allowed 100 updates after the first warning, the second repetition 200
    updates after the first repetition, then 400 updates, and so on.
    """

    def __init__(self) -> None:
        self._next, self._pause, self._reported = 0, _FIRST_PAUSE, False

    def warn(self, step: int, text: str) -> list[Notice]:
        """Return a list with one warning, or [] if a repetition is not allowed yet at `step`."""
        if step < self._next:
            return []
        self._next, self._pause = step + self._pause, 2 * self._pause
        self._reported = True
        return [Notice(logging.WARNING, f"step {step}: {text}")]

    def end(self, step: int, text: str) -> list[Notice]:
        """Return a list with one message about the end of the fault, or [] if the fault was not
        reported before."""
        if not self._reported:
            return []
        self._reported = False
        return [Notice(logging.INFO, f"step {step}: {text}")]


class _GradNorm:
    """Detects spikes of the gradient norm: norms far above the median of the preceding norms."""

    def __init__(self) -> None:
        self._history: deque[float] = deque(maxlen=_HISTORY)
        self._alarm = _Alarm()
        self._unprinted = 0

    def after_update(self, step: int, norm: float) -> list[Notice]:
        if not math.isfinite(norm):
            return []
        full = len(self._history) == _HISTORY
        median = statistics.median(self._history) if full else 0.0
        self._history.append(norm)
        if median == 0:  # the history is not full, or gradients were 0 until now
            return []
        if norm <= _CALM * median:
            return self._alarm.end(step, f"the gradient norm is {norm:.4g}, near its median again")
        if norm <= _SPIKE * median:
            return []
        earlier = (
            f" (unreported spikes since the last warning: {self._unprinted})"
            if self._unprinted
            else ""
        )
        notices = self._alarm.warn(
            step,
            f"gradient norm {norm:.4g} is {norm / median:.0f} times the median of the last "
            f"{_HISTORY} updates, {median:.4g}{earlier}; if this recurs, lower optim.lr or raise "
            "optim.warmup_steps, and keep optim.clip_norm above 0",
        )
        self._unprinted = 0 if notices else self._unprinted + 1
        return notices


class _ExpertBalance:
    """Detects MoE layers whose router sends most tokens to a few experts.

    A layer is unbalanced if one of two conditions is true for the last 10 updates:

    - Overload: in each of the updates, the expert with the most tokens got far more tokens than the
      mean over the layer. This expert can differ between updates.
    - Idleness: in all of the updates together, an expert got almost no tokens.
    """

    def __init__(self, model: ModelConfig) -> None:
        self._model = model
        # Largest possible load of an expert in each layer: the expert gets all tokens.
        self._most = [model.experts_by_layer[n] / model.num_experts_per_tok
                      for n in model.sparse_layers]  # fmt: skip
        self._limits = [min(_OVERLOAD, (1 + most) / 2) for most in self._most]
        self._recent: deque[Tensor] = deque(maxlen=_UPDATES)
        self._overloaded = [0] * len(self._most)
        self._balanced = 0
        self._alarm = _Alarm()

    def after_update(self, step: int, expert_rows: Tensor) -> list[Notice]:
        self._recent.append(expert_rows)
        # Overload is judged in each update: the sum over updates would look balanced if a collapsed
        # router preferred different experts in each update.
        fullest = [float(load.max()) for load in expert_loads(expert_rows, self._model)]
        over = [load > limit for load, limit in zip(fullest, self._limits, strict=True)]
        counts = zip(over, self._overloaded, strict=True)
        self._overloaded = [count + 1 if is_over else 0 for is_over, count in counts]
        fewest_rows = min(int(rows.sum(1).min()) for rows in self._recent)
        few_rows = fewest_rows < _MIN_ROWS * max(self._model.experts_by_layer)
        if few_rows or len(self._recent) < _UPDATES:
            return []
        together = expert_loads(torch.stack(list(self._recent)).sum(0), self._model)
        idle = [int((load < _IDLE).sum()) for load in together]
        bad = [layer for layer, count in enumerate(self._overloaded)
               if count >= _UPDATES or idle[layer]]  # fmt: skip
        self._balanced = 0 if bad or any(over) else self._balanced + 1
        if bad:
            return self._alarm.warn(step, self._explain(bad, fullest, idle))
        if self._balanced < _UPDATES:
            return []
        return self._alarm.end(
            step,
            f"expert load is balanced again: in the last {_UPDATES} updates no expert was "
            "overloaded or idle",
        )

    def _explain(self, bad: list[int], fullest: list[float], idle: list[int]) -> str:
        worst = max(bad, key=lambda layer: (fullest[layer] / self._most[layer], idle[layer]))
        layer = self._model.sparse_layers[worst]
        return (
            f"experts are unbalanced in {len(bad)} of {len(idle)} MoE layers, most in layer "
            f"{layer}: its fullest expert got {fullest[worst]:.2f} times an equal share of the "
            f"tokens (at most {self._most[worst]:g} is possible), and in the last {_UPDATES} "
            f"updates {idle[worst]} of {self._model.experts_by_layer[layer]} experts got less than "
            f"{_IDLE:.0%} of an equal share; lower optim.lr, or raise optim.warmup_steps, "
            "model.aux_loss_coef or model.embedding_init_std"
        )
