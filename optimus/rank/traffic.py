"""List of the collectives and messages of a rank in an update, in order, computed without process
groups.

`plan_traffic` builds a `ChunkEngine` with the model states of the rank on the meta device, and runs
the actions of the pipeline schedule with this engine. As in training, the engine decides when
gradients are reduced and parameters are gathered. Collectives of meta tensors send no data, and
only call the recorder. The model does not run. The profile of its segments (`optimus.rank.profile`)
contains the collectives of each forward and backward. For each gradient, the profile also contains
the number of collectives before the gradient is complete.

The collectives are in the order in which the rank starts them. Collectives of different process
groups, and those that overlap with computation, may run and end in another order.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from contextlib import nullcontext
from typing import NamedTuple

import torch

from optimus.chunks.norm import new_total
from optimus.config import Config
from optimus.data.batch import plan_batch
from optimus.distributed.collectives import all_reduce_max, all_reduce_sum
from optimus.distributed.mesh import Coordinate, Mesh
from optimus.model.deferred_gradients import run_hooks
from optimus.observe.events import Recorder
from optimus.parallel.pipeline.actions import SENDS, Action, Kind, last_actions
from optimus.platform import dtype_of
from optimus.rank.profile import (
    Profiled,
    StageProfile,
    UseProfile,
    profile_stages,
    within_block,
)
from optimus.rank.states import PlannedRank, attach, plan_rank

_NUM_LOSSES = 3
"""Number of sums in the all-reduce of the losses: cross-entropy, load-balancing loss, z-loss."""
_META = torch.device("meta")


class Collective(NamedTuple):
    """A collective, or a message that a rank sends. The fields are as for `Recorder.collective`."""

    axes: str
    """Mesh axes of the process group, such as "dp x ep"; "all ranks"; or "the end stages", which
    have copies of tied embeddings."""
    operation: str
    """Operation, such as all_gather. A message is listed only on the rank that sends it."""
    num_bytes: int
    """Payload in bytes, such as the size of the unsharded tensor of an all-gather."""


class TrafficRecorder(Recorder):
    """Recorder that keeps the collectives of a rank in a list."""

    def __init__(self) -> None:
        self.collectives: list[Collective] = []

    def collective(self, axes: str, operation: str, num_bytes: int) -> None:
        self.collectives.append(Collective(axes, operation, num_bytes))


def plan_traffic(
    config: Config, mesh: Mesh, coordinate: Coordinate, profiled: Profiled | None = None
) -> list[Collective]:
    """Return the collectives and messages of the rank at `coordinate` in an update, in the order in
    which the rank starts them.

    All updates of a run have the same list if all gradients are finite, no update is skipped, and
    tokens are routed uniformly to experts. The list depends on routing only with
    `parallel.ep_dispatch` = "alltoall".

    Args:
        config: The run's configuration, with `train.seq_len`.
        mesh: Sizes of all axes.
        coordinate: Coordinate of the rank in the mesh.
        profiled: As for `profile_stages`.

    Raises:
        ConfigError: The batch is not a multiple of the microbatches of all data ranks.
    """
    batch = plan_batch(config.train, mesh.num_data_ranks)
    recorder = TrafficRecorder()
    rank = plan_rank(config, mesh, coordinate, batch.microbatches_per_rank, recorder)
    attach(rank.engine, rank.segments, rank.layout, config)
    recorder.collectives.clear()
    _Update(config, rank, profile_stages(config, mesh, coordinate, profiled), recorder).run()
    return recorder.collectives


class _Update:
    """An update of a rank on the meta device, as `optimus.train.update.Updater` and the pipeline
    executor run it."""

    def __init__(
        self,
        config: Config,
        rank: PlannedRank,
        profiles: dict[int, StageProfile],
        recorder: TrafficRecorder,
    ) -> None:
        self._config, self._rank, self._profiles = config, rank, profiles
        self._recorder, self._engine = recorder, rank.engine
        schedule = rank.layout.schedule
        self._actions = schedule.ranks[rank.layout.coordinate.pp]
        self._last = last_actions(self._actions)
        leaves = dict(rank.model.named_parameters()) | rank.model.separated_uses()
        self._leaves = {
            (number, within_block(name)): leaves[name]
            for number, segment in enumerate(rank.segments)
            for name in segment.parameters
        }
        train = config.train
        shape = rank.layout.boundary_shape(
            train.microbatch_size, train.seq_len, config.model.hidden_size
        )
        self._boundary_bytes = math.prod(shape) * dtype_of(train.dtype).itemsize

    def run(self) -> None:
        self._engine.start_step()
        for action in self._actions:
            kind = action.kind
            if kind is Kind.F:
                self._use(self._profiles[action.stage].forward)
            elif kind in (Kind.B, Kind.I, Kind.W):
                self._backward(action)
            elif kind in SENDS:
                self._recorder.collective("pp", "send", self._boundary_bytes)
            elif kind is Kind.REDUCE_GRAD:
                self._engine.gradients.reduce(action.stage)
            elif kind is Kind.OPT_STEP:
                self._update()
        # Add up the losses, and the tokens that each expert of each layer receives.
        everyone, model = self._rank.groups.everyone, self._config.model
        all_reduce_sum(torch.empty(_NUM_LOSSES, dtype=torch.int64, device=_META), everyone)
        if sparse := model.sparse_layers:
            shape = len(sparse), max(model.experts_by_layer)
            all_reduce_sum(torch.empty(shape, dtype=torch.int64, device=_META), everyone)

    def _backward(self, action: Action) -> None:
        profile, gradients = self._profiles[action.stage], self._engine.gradients
        uses, expected = profile.backward, None
        if action.kind is Kind.W:
            assert profile.weights is not None
            uses = (profile.weights,)
            expected = [self._leaves[g.segment, g.name] for g in profile.weights.gradients]
        gradients.before_backward(action.stage)
        is_last = action.kind is not Kind.I and self._last[action.kind, action.stage] == action
        with gradients.last_backward(action.stage, expected) if is_last else nullcontext():
            self._use(uses, hooks=action.kind is not Kind.W)

    def _use(self, uses: Iterable[UseProfile], hooks: bool = True) -> None:
        """Record the collectives of `uses`, and run the hooks of gradients. With `hooks`, first run
        the hooks that precede the use of a segment."""
        for use in uses:
            if hooks:
                self._engine.use(use.segment, use.backward)
            number = 0
            for gradient in use.gradients:
                self._record(use.traffic[number : gradient.position])
                number = gradient.position
                run_hooks(self._leaves[gradient.segment, gradient.name])
            self._record(use.traffic[number:])

    def _record(self, traffic: Iterable[tuple[str, str, int]]) -> None:
        for collective in traffic:
            self._recorder.collective(*collective)

    def _update(self) -> None:
        """Execute OPT_STEP: the check for non-finite values, the norm and the update."""
        everyone = self._rank.groups.everyone
        all_reduce_max(torch.empty(1, dtype=torch.int64, device=_META), everyone)
        self._engine.gradients.finish()
        all_reduce_sum(new_total(self._config.train.deterministic, _META), everyone)
        self._engine.update(0.0)
