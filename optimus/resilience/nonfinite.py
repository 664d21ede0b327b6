"""Whose NaN: found on the rank and in the layer that made it, before masters change."""

from __future__ import annotations

import math
import socket
from pathlib import Path
from typing import NamedTuple, NoReturn

import numpy
import torch

from optimus.chunks.engine import ChunkEngine
from optimus.chunks.pieces import Buffer
from optimus.chunks.setting import setting_of
from optimus.config import OptimConfig
from optimus.config.sections import TrainConfig
from optimus.data.loader import Microbatch
from optimus.distributed.collectives import (
    Group,
    all_gather_objects,
    greatest,
    observing_contributions,
)
from optimus.distributed.groups import Groups
from optimus.errors import NonFiniteError, counted
from optimus.rank.model import RankModel, uncompiled
from optimus.resilience import guards

_HUGE = 1e18
"""Learning rates, and elements of masters, from which on an update can overflow fp32; and the norm
up to which a gradient's square cannot."""
_LABELS = {
    "exp_avg": "exp_avg (first moment) of",
    "exp_avg_sq": "exp_avg_sq (second moment) of",
    "master": "the fp32 master of",
}
"""The optimizer states; a moment comes first, since updates bring its NaN to the master."""


class BadState(NamedTuple):
    """The first non-finite value of an optimizer state in this rank's shard."""

    state: str
    parameter: str
    element: list[int]
    """Its index in the parameter as the rank holds it."""
    value: str
    largest: float
    """Magnitude of the finite values beside it in the parameter."""
    rank: int
    host: str


def find_bad_state(states: ChunkEngine, rank: int) -> BadState | None:
    """Look at every optimizer state of this rank, element by element where a sum is not finite."""
    for state in _LABELS:
        part = states.first_shard(state, lambda flat: not guards.is_finite(flat))
        if part is None:
            continue
        finite = torch.isfinite(part.values)
        number = int((~finite).nonzero()[0])
        element = [int(n) for n in numpy.unravel_index(part.start + number, part.shape)]
        largest = float(torch.where(finite, part.values, 0).abs().max())
        value = str(float(part.values[number]))
        host = socket.gethostname()
        return BadState(state, part.name, element, value, largest, rank, host)
    return None


def refuse_bad_states(
    train: TrainConfig,
    optim: OptimConfig,
    states: ChunkEngine,
    everyone: Group,
    step: int,
    updated: int,
) -> None:
    """Raise the same NonFiniteError on all ranks if an optimizer state of any is not finite. Its
    rank leaves a marker. `updated`: the step of the last update. A collective of all ranks."""
    bad = find_bad_state(states, everyone.rank)
    if not greatest(int(bad is not None), everyone, states.device):
        return
    of_ranks = all_gather_objects(bad, everyone, BadState | None)
    found = [state for state in of_ranks if state is not None]
    found.sort(key=lambda one: (list(_LABELS).index(one.state), one.rank))
    first = found[0]
    text, advice = _explanation(first, train.dtype, optim, updated)
    if first.rank == everyone.rank:
        log_dir = Path(train.run_dir) / "log"
        more = {"state": first.state, "parameter": first.parameter, "element": first.element}
        guards.write_marker(log_dir, first.rank, step, text, first.host, **more, value=first.value)
    others = len({one.rank for one in found}) - 1
    also = f" (and states of {counted(others, 'more rank')})" if others else ""
    where = f"non-finite values on rank {first.rank} ({first.host}) at step {step}: "
    if text.startswith("the update made "):
        where = f"step {updated}: "
    raise NonFiniteError(
        f"{where}{text}{also}; no checkpoint has them; {advice}",
    )


def _explanation(bad: BadState, dtype: str, optim: OptimConfig, step: int) -> tuple[str, str]:
    """What is wrong, and what to do about it."""
    is_wide = dtype == "fp32" or setting_of(bad.parameter, optim).frozen
    label = "parameter" if bad.state == "master" and is_wide else _LABELS[bad.state]
    text = f"{label} {bad.parameter} is {bad.value} at element {bad.element}"
    if bad.state == "master" and max(optim.lr, bad.largest) >= _HUGE:
        made = f"the update made {label} {bad.parameter} non-finite on rank {bad.rank} ({bad.host})"
        value = f"{bad.value} at element {bad.element}"
        return f"{made} although gradients were finite: {value}", "lower the learning rate"
    unclipped = not optim.clips_at(step) or optim.clip_norm >= _HUGE
    if bad.state == "exp_avg_sq" and bad.value == "inf" and unclipped:
        return (
            f"{text}: the square of a gradient overflowed, or the state is damaged",
            "set optim.clip_norm and give the same command again to resume from the newest one",
        )
    return (
        f"{text}: the state is damaged, since all gradients were finite",
        "give the same command again to resume from the last checkpoint; if it happens again, "
        f"suspect the device or the memory of {bad.host}",
    )


class Finding(NamedTuple):
    """What one rank knows. Ordered: the smallest of all ranks' is nearest to the cause."""

    distance: int
    """0 a parameter, 1 an output made of finite inputs, 2 a gradient, 3 nothing that can be seen
    again."""
    stage: int
    """Pipeline place, counted in the direction in which trouble spreads."""
    when: float
    """Ranks of a stage do the same in the same order: the number of what this one did first."""
    layer: int
    """Of gradients: how many layers' lie nearer to the loss."""
    rank: int
    what: str
    host: str


class Watch:
    """Looks at one rank's gradients as they become ready; all ranks agree before the update.

    A rank that found something goes on with its schedule, since the others wait for what it sends.
    """

    def __init__(
        self,
        train: TrainConfig,
        optim: OptimConfig,
        groups: Groups,
        part: RankModel,
        states: ChunkEngine,
    ) -> None:
        self._train, self._optim = train, optim
        self._groups, self._part, self._states = groups, part, states
        self._device = next(part.model.parameters()).device
        self.start(0)

    def start(self, step: int) -> None:
        self._step, self._bad_gradient, self._depth = step, "", 0

    def look_at(self, buffer: Buffer) -> None:
        """Before a sum over ranks hides whose they are; the last of the model come first."""
        if not self._bad_gradient and not guards.is_finite(buffer.grads):
            last_first = list(buffer.named_grads())[::-1]
            self._bad_gradient = guards.first_nonfinite(last_first) or ""
            self._depth = [name for name, _ in last_first].index(self._bad_gradient)

    def anyone_in_trouble(self) -> bool:
        """Whether any rank found anything: the same answer everywhere."""
        return bool(greatest(int(self._in_trouble()), self._groups.everyone, self._device))

    def refuse_bad_states(self) -> None:
        """Raise the same NonFiniteError everywhere if an optimizer state is not finite."""
        everyone = self._groups.everyone
        refuse_bad_states(
            self._train, self._optim, self._states, everyone, self._step, self._step - 1
        )

    def _in_trouble(self) -> bool:
        return bool(self._bad_gradient) or not self._losses_are_finite()

    def explain(self, microbatches: list[Microbatch], circumstance: str = "") -> NoReturn:
        """Raise the same NonFiniteError everywhere, once `anyone_in_trouble`.

        A bad optimizer state is the cause of all else. Without one all ranks run the step's
        microbatches forward once more, together.
        """
        everyone = self._groups.everyone
        self.refuse_bad_states()
        found = self._findings(microbatches, self._in_trouble())
        first = found[0]
        if first.rank == everyone.rank:
            log_dir = Path(self._train.run_dir) / "log"
            guards.write_marker(log_dir, first.rank, self._step, first.what, first.host)
        more = len([one for one in found if one[:4] == first[:4]]) - 1
        also = f" (and {counted(more, 'more rank')})" if more else ""
        raise NonFiniteError(
            f"non-finite values on rank {first.rank} ({first.host}) at step {self._step}: "
            f"{first.what}{also}{circumstance}",
        )

    def _losses_are_finite(self) -> bool:
        values = [
            value.reshape(-1)
            for one in self._part.executor.terms.values()
            for value in (one.ce_sum, one.aux, one.z)
            if value is not None and value.numel()
        ]
        return not values or math.isfinite(float(torch.cat(values).sum()))

    def _findings(self, microbatches: list[Microbatch], trouble: bool) -> list[Finding]:
        """What all ranks know, the nearest to the cause first. A collective of all ranks."""
        everyone = self._groups.everyone
        finding = self._find_in_forward(microbatches)
        found = all_gather_objects(finding, everyone, Finding | None)
        if not any(found):
            finding = self._find_in_backward(microbatches, trouble)
            found = all_gather_objects(finding, everyone, Finding | None)
        return sorted(one for one in found if one is not None)

    def _finding(self, distance: int, stage: int, when: float, layer: int, what: str) -> Finding:
        rank, host = self._groups.everyone.rank, socket.gethostname()
        return Finding(distance, stage, when, layer, rank, what, host)

    def _find_in_forward(self, microbatches: list[Microbatch]) -> Finding | None:
        """This rank's part of the story; None where it has none."""
        watch, stage = guards.ForwardWatch(), self._groups.coordinate.pp
        parameter = self._states.first_parameter(lambda values: not guards.is_finite(values))
        looking = observing_contributions(watch.look)
        with uncompiled(self._train.compile), looking, watch.over(self._part.model):
            self._part.executor.evaluate(microbatches)
        if parameter:
            return self._finding(0, stage, 0, 0, f"parameter {parameter} is non-finite")
        if watch.module:
            what = f"the output of layer {watch.module} is non-finite"
            return self._finding(1, stage, watch.when, 0, what)
        return None

    def _find_in_backward(self, microbatches: list[Microbatch], trouble: bool) -> Finding | None:
        """Once forward has shown nothing on any rank. A gradient that tp or ep has spread was made
        on the rank that put it into a collective first: backward runs once more to see that."""
        states, sent = self._states, []
        states.gradients.finish()  # what is under way
        states.gradients.start()
        looking = observing_contributions(lambda tensor: sent.append(guards.is_finite(tensor)))
        with uncompiled(self._train.compile), looking:
            self._part.executor.run(
                microbatches,
                lambda stage, _: states.gradients.reduce(stage),
                lambda: None,
                states.gradients.before_backward,
            )
        if self._bad_gradient:
            when = sent.index(False) if False in sent else math.inf
            what = f"the gradient of {self._bad_gradient} is non-finite, although the forward pass"
            return self._finding(
                2, -self._groups.coordinate.pp, when, self._depth, f"{what} is finite"
            )
        if not trouble:
            return None
        what = "the values are finite when computed again, which points to the hardware"
        return self._finding(3, self._groups.coordinate.pp, 0, 0, what)
