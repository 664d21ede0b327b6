"""One update: the pipeline's schedule, then clipping and AdamW."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from optimus.chunks.engine import ChunkEngine
from optimus.config import Config
from optimus.data.batch import BatchPlan
from optimus.data.loader import Microbatch
from optimus.distributed.collectives import all_reduce_sum
from optimus.distributed.exact import exact_sums
from optimus.distributed.groups import Groups
from optimus.errors import NonFiniteError
from optimus.parallel.pipeline.stage import Terms
from optimus.rank.model import RankModel
from optimus.resilience.nonfinite import Watch
from optimus.train.loss_scale import LossScale
from optimus.train.schedule import learning_rate


@dataclass(frozen=True)
class UpdateResult:
    """What one update was, over all ranks. Losses in nats, means over the global batch."""

    step: int
    loss: float
    aux_loss: float
    z_loss: float
    grad_norm: float
    """NaN where the update was skipped for an overflow under loss scaling (fp16)."""
    lr: float
    expert_rows: Tensor
    """int64 [MoE layers, E]: rows routed to each expert by all ranks; E is the largest of all
    layers, and a layer that has fewer experts ends in zeros."""
    loss_scale: float = 1.0
    """Of this update."""
    skipped_steps: int = 0
    """Since the run began, this one included."""


class Updater:
    """Carries a model from one update to the next."""

    def __init__(
        self,
        config: Config,
        groups: Groups,
        part: RankModel,
        states: ChunkEngine,
        plan: BatchPlan,
        device: torch.device,
        loss_scale: LossScale | None = None,
    ) -> None:
        """`loss_scale`: that of a run which goes on; None begins anew."""
        self._loss_scale = loss_scale or LossScale(
            config.optim, config.train.dtype, plan.num_microbatches
        )
        self._config, self._groups, self._plan, self._device = config, groups, plan, device
        self._part, self._states = part, states
        part.write_gradients_to_chunks(states)
        if config.train.deterministic:
            part.keep_microbatches_apart()
        self._watch = Watch(config, groups, part, states)
        states.gradients.before_sum = self._watch.look_at
        self._far_ends = {"embed.weight": groups.ends} if config.model.tie_embeddings else {}
        self._norm = 0.0

    def run(self, step: int, microbatches: list[Microbatch]) -> UpdateResult:
        """Do update `step` on this rank's `microbatches`.

        Raises NonFiniteError on every rank, before masters change, if any rank's loss or gradient
        is not finite; while the loss scale can still fall, the update is skipped instead.
        """
        self._part.executor.loss_scale = scale = self._loss_scale.scale
        own = self._part.to_device(microbatches)
        lr = learning_rate(step, self._config.optim, self._config.train.max_steps)
        self._watch.start(step)
        self._states.gradients.start()
        terms = self._part.executor.run(
            own,
            lambda stage, microbatch: self._states.gradients.reduce(stage),
            self._make_update(step, own, lr),
            self._states.gradients.before_backward,
            self._states.gradients.last_backward,
        )
        return self._result(step, terms, lr, scale)

    def _make_update(self, step: int, own: list[Microbatch], lr: float) -> Callable[[], None]:
        """OPT_STEP: agree that all is finite, complete the gradients, clip, update."""

        def opt_step() -> None:
            scaling = self._loss_scale
            overflow = self._watch.anyone_in_trouble()
            if overflow and not scaling.can_fall:
                self._watch.explain(own, scaling.at_its_least())
            if overflow:  # no smaller scale helps a damaged state
                self._watch.refuse_bad_states()
            self._states.gradients.finish(
                self._far_ends
            )  # of thrown away gradients too: all is received
            self._norm = math.nan if overflow else self._finite_norm(step)
            if math.isnan(self._norm):
                scaling.after_overflow()
                return
            limit = self._config.optim.clip_norm
            clips = self._config.optim.clips_at(step) and self._norm > limit
            self._states.update(lr, (limit / self._norm if clips else 1.0) / scaling.scale)
            scaling.after_update()

        return opt_step

    def _finite_norm(self, step: int) -> float:
        """The gradient norm, before clipping; NaN if their sum overflows under loss scaling."""
        norm = self._states.grad_norm() / self._loss_scale.scale
        if not math.isfinite(norm):
            if self._loss_scale.can_fall:
                return math.nan
            raise NonFiniteError(
                f"step {step}: the gradient norm over all ranks is {norm} although every rank's "
                "own gradients are finite; the sum overflows, lower the learning rate",
            )
        return norm

    def _result(
        self, step: int, terms: dict[tuple[int, int], Terms], lr: float, scale: float
    ) -> UpdateResult:
        """Means over the global batch, from every stage's and microbatch's own fp32 sums."""
        counted = list(terms.values()) if self._groups.counts else []
        empty = torch.zeros(0, device=self._device)

        def joined(values: list[Tensor]) -> Tensor:
            return torch.cat([value.reshape(-1) for value in values]) if values else empty

        values = [
            joined([one.ce_sum for one in counted if one.ce_sum is not None]),
            joined([one.aux for one in counted]),
            joined([one.z for one in counted]),
        ]
        ce_sum, aux, z = self._sums(values)
        count = self._plan.num_microbatches * max(1, len(self._config.model.sparse_layers))
        rows = self._expert_rows(terms)
        loss = ce_sum / self._plan.targets
        skipped = self._loss_scale.skipped
        return UpdateResult(
            step, loss, aux / count, z / count, self._norm, lr, rows, scale, skipped
        )

    def _sums(self, values: list[Tensor]) -> list[float]:
        """The sum over all ranks of each of three tensors; NaNs if any of a skipped update's is not
        finite."""
        if not math.isnan(self._norm):
            return exact_sums(values, self._groups.everyone)
        finite = [value.nan_to_num(0.0, 0.0, 0.0) for value in values]
        infinite = (~torch.cat(values).isfinite()).float()
        *sums, trouble = exact_sums([*finite, infinite], self._groups.everyone)
        return [math.nan if trouble else total for total in sums]

    def _expert_rows(self, terms: dict[tuple[int, int], Terms]) -> Tensor:
        model = self._config.model
        sparse = model.sparse_layers
        if not sparse:
            return torch.zeros(0, 0, dtype=torch.int64, device=self._device)
        shape = len(sparse), max(model.experts_by_layer)
        rows = torch.zeros(shape, dtype=torch.int64, device=self._device)
        if self._groups.counts:
            for (stage, _), one in terms.items():
                here = [layer for layer in self._part.layout.layers[stage] if layer in sparse]
                for layer, counts in zip(here, one.counts, strict=True):
                    rows[sparse.index(layer), : len(counts)] += counts
        all_reduce_sum(rows, self._groups.everyone)
        return rows
