"""Whose NaN: found on the rank and in the layer that made it, before masters change."""

from __future__ import annotations

import math
import socket
from pathlib import Path
from typing import NamedTuple, NoReturn

import torch

from optimus.chunks.engine import ChunkEngine
from optimus.chunks.pieces import Buffer
from optimus.config import Config
from optimus.data.loader import Microbatch
from optimus.dist.collectives import all_gather_objects, all_reduce_max
from optimus.dist.groups import Groups
from optimus.errors import NonFiniteError
from optimus.resilience import guards
from optimus.train.shard import Shard, uncompiled


class Finding(NamedTuple):
    """What one rank knows. Ordered: the smallest of all ranks' is nearest to the cause."""

    distance: int
    """0 a parameter, 1 an output made of finite inputs, 2 a gradient, 3 nothing that can be seen
    again."""
    stage: int
    """Pipeline place, counted in the direction in which trouble spreads."""
    rank: int
    what: str
    host: str


class Watch:
    """Looks at one rank's gradients as they become ready; all ranks agree before the update.

    A rank that found something goes on with its schedule, since the others wait for what it sends.
    """

    def __init__(self, config: Config, groups: Groups, shard: Shard, states: ChunkEngine) -> None:
        self._config, self._groups, self._shard, self._states = config, groups, shard, states
        self._device = next(shard.model.parameters()).device
        self._step, self._bad_gradient = 0, ""

    def start(self, step: int) -> None:
        self._step, self._bad_gradient = step, ""

    def look_at(self, buffer: Buffer) -> None:
        """Before a sum over ranks hides whose they are; the last of the model come first."""
        if not self._bad_gradient and not guards.is_finite(buffer.grads):
            last_first = reversed(list(buffer.named_grads()))
            self._bad_gradient = guards.first_nonfinite(last_first) or ""

    def anyone_in_trouble(self) -> bool:
        """Whether any rank found anything: the same answer everywhere."""
        flag = torch.tensor([int(self._in_trouble())], device=self._device)
        all_reduce_max(flag, self._groups.everyone)
        return bool(flag.item())

    def _in_trouble(self) -> bool:
        return bool(self._bad_gradient) or not self._losses_are_finite()

    def explain(self, microbatches: list[Microbatch], circumstance: str = "") -> NoReturn:
        """Raise the same NonFiniteError everywhere, once `anyone_in_trouble`.

        All ranks run the step's microbatches forward once more, together.
        """
        everyone, trouble = self._groups.everyone, self._in_trouble()
        finding = self._find(microbatches, trouble)
        if finding is not None:
            log_dir = Path(self._config.train.run_dir) / "log"
            guards.write_marker(log_dir, finding.rank, self._step, finding.what, finding.host)
        found = sorted(one for one in all_gather_objects(finding, everyone) if one is not None)
        first = found[0]
        more = len({one.rank for one in found if one.distance == first.distance}) - 1
        also = f" (and {more} more ranks)" if more else ""
        raise NonFiniteError(
            f"non-finite values on rank {first.rank} ({first.host}) at step {self._step}: "
            f"{first.what}{also}{circumstance}",
            on_every_rank=True,
        )

    def _losses_are_finite(self) -> bool:
        values = [
            value.reshape(-1)
            for one in self._shard.executor.terms.values()
            for value in (one.ce_sum, one.aux, one.z)
            if value is not None and value.numel()
        ]
        return not values or math.isfinite(float(torch.cat(values).sum()))

    def _find(self, microbatches: list[Microbatch], trouble: bool) -> Finding | None:
        """This rank's part of the story; None where it has none."""
        place, rank = self._groups.place, self._groups.everyone.rank
        host, states = socket.gethostname(), self._states

        def finding(distance: int, stage: int, what: str) -> Finding:
            return Finding(distance, stage, rank, what, host)

        parameter = states.first_parameter(lambda values: not guards.is_finite(values))
        run = self._shard.executor.evaluate
        with uncompiled(self._config):
            layer = guards.first_nonfinite_module(self._shard.model, lambda: run(microbatches))
        if parameter:
            return finding(0, place.pp, f"parameter {parameter} is non-finite")
        if layer:
            return finding(1, place.pp, f"the output of layer {layer} is non-finite")
        if self._bad_gradient:
            what = f"the gradient of {self._bad_gradient} is non-finite, although the forward pass"
            return finding(2, -place.pp, f"{what} is finite")
        if not trouble:
            return None
        what = "the values are finite when computed again, which points to the hardware"
        return finding(3, place.pp, what)
