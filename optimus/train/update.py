"""One update (optimizer step): forward and backward passes in the order of the pipeline schedule,
gradient clipping, and AdamW."""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from optimus.chunks.engine import ChunkEngine
from optimus.config import Config
from optimus.data.batch import BatchPlan
from optimus.data.dataset import InstanceSource
from optimus.data.loader import Microbatch
from optimus.distributed.collectives import all_reduce_sum, exact_sums
from optimus.distributed.groups import Groups
from optimus.errors import NonFiniteError
from optimus.io.workspace import Workspace
from optimus.parallel.pipeline.stage import Terms
from optimus.rank.model import RankModel
from optimus.resilience.nonfinite import Watch
from optimus.train.loss_scale import LossScale
from optimus.train.schedule import learning_rate


@dataclass(frozen=True)
class UpdateResult:
    """Losses, gradient norm and other results of one update (optimizer step), over all ranks.

    `loss` is the mean cross-entropy over the global batch, in nats. `aux_loss` and `z_loss` are
    means over the microbatches and the MoE layers.
    """

    step: int
    loss: float
    aux_loss: float
    z_loss: float
    grad_norm: float
    """Norm of the gradients before clipping; NaN if the update was skipped."""
    lr: float
    expert_rows: Tensor
    """int64 [MoE layers, E]: number of tokens that all ranks have routed to each expert of each MoE
    layer. E is the largest number of experts in a layer; layers with fewer experts are padded with
    zeros."""
    loss_scale: float = 1.0
    """Loss scale with which this update was computed."""
    skipped_steps: int = 0
    """`LossScale.skipped` after this update: the total number of skipped updates."""


class Updater:
    """Runs the updates of the model on this rank: forward and backward passes, and the optimizer
    step."""

    def __init__(
        self,
        config: Config,
        groups: Groups,
        rank_model: RankModel,
        states: ChunkEngine,
        plan: BatchPlan,
        device: torch.device,
        loss_scale: LossScale | None = None,
        workspace: Workspace | None = None,
        skipped_steps: Collection[int] = (),
        data: InstanceSource | None = None,
    ) -> None:
        """Make the backward pass of `rank_model` write the gradients to `states`.

        Args:
            config: The run's configuration.
            groups: This rank's groups.
            rank_model: This rank's model.
            states: The parameters, gradients and optimizer states of this rank's model.
            plan: The batch sizes of an update.
            device: The device of the model.
            loss_scale: The loss scale of the run; None creates the loss scale of a new run.
            workspace: The workspace of the run, through which files about non-finite values are
                written; None: these files are not written.
            skipped_steps: Steps whose update is skipped, because their data gives non-finite
                values.
            data: The training data, to name instances in files about non-finite values; None: these
                files name no instances.
        """
        self._skipped_steps = skipped_steps
        self._loss_scale = loss_scale or LossScale(
            config.optim, config.train.dtype, plan.num_microbatches
        )
        self._config, self._groups, self._plan, self._device = config, groups, plan, device
        self._rank_model, self._states = rank_model, states
        rank_model.write_gradients_to_chunks(states)
        if config.train.deterministic:
            rank_model.keep_microbatches_apart()
        self._watch = Watch(
            config.train, config.optim, groups, rank_model, states, workspace, plan, data
        )
        states.gradients.before_reduce = self._watch.look_at
        self._norm = 0.0
        self._has_clipped = True
        """True if the last update clipped the gradients. Initially True, because the first updates
        of a run probably clip."""

    def run(self, step: int, microbatches: list[Microbatch]) -> UpdateResult:
        """Run one update (optimizer step) and return its results.

        Args:
            step: Number of the update, from 1.
            microbatches: This rank's microbatches.

        Raises:
            NonFiniteError: A loss or gradient of some rank is not finite. Raised on every rank,
                before any master weight changes. In fp16, if the loss scale can be halved, the
                update is skipped instead. Updates in `skipped_steps` are skipped without an error.
        """
        self._rank_model.executor.loss_scale = scale = self._loss_scale.scale
        on_device = self._rank_model.to_device(microbatches)
        lr = learning_rate(step, self._config.optim, self._config.train.max_steps)
        self._watch.start(step)
        # With early updates, the host updates chunks during backward as if the gradients were not
        # clipped. None: the host starts no such update in this step.
        is_skipped = step in self._skipped_steps
        clips = self._config.optim.clips_at(step) and self._has_clipped
        is_off = clips and self._config.offload.early_adam == "auto"
        self._states.start_step(None if is_skipped or is_off else (lr, 1.0 / scale))
        terms = self._rank_model.executor.run(
            on_device,
            lambda stage, microbatch: self._states.gradients.reduce(stage),
            partial(self._opt_step, step, on_device, lr),
            self._states.gradients.before_backward,
            self._states.gradients.last_backward,
        )
        return self._result(step, terms, lr, scale)

    def _opt_step(self, step: int, microbatches: list[Microbatch], lr: float) -> None:
        """Execute OPT_STEP, the last action of the pipeline schedule. Update the weights. Skip
        the update if gradients overflow in fp16, or if `step` is a step that the run must skip."""
        scaling = self._loss_scale
        if step in self._skipped_steps:
            self._states.gradients.finish()
            self._norm = math.nan
            scaling.after_skip()
            return
        overflow = self._watch.any_rank_is_nonfinite()
        if overflow and not scaling.can_fall:
            self._watch.explain(microbatches, scaling.at_its_least())
        if overflow:  # if a state is damaged, a smaller loss scale would not help
            self._watch.refuse_bad_states()
        # Complete the reductions even if the gradients are then discarded, since other ranks have
        # started them.
        self._states.gradients.finish()
        self._norm = math.nan if overflow else self._finite_norm(step)
        if math.isnan(self._norm):
            scaling.after_overflow()
            return
        limit = self._config.optim.clip_norm
        clips = self._config.optim.clips_at(step) and self._norm > limit
        self._has_clipped = clips
        self._states.update(lr, (limit / self._norm if clips else 1.0) / scaling.scale)
        scaling.after_update()

    def _finite_norm(self, step: int) -> float:
        """Return the gradient norm before clipping.

        If the norm is not finite but the loss scale can be halved, return NaN; the update is then
        skipped. If the loss scale cannot be halved, raise NonFiniteError.
        """
        norm = self._states.grad_norm() / self._loss_scale.scale
        if not math.isfinite(norm):
            if self._loss_scale.can_fall:
                return math.nan
            raise NonFiniteError(
                f"step {step}: the gradient norm over all ranks is {norm}, because the sum of the "
                "ranks' finite gradients overflows; lower the learning rate",
            )
        return norm

    def _result(
        self, step: int, terms: dict[tuple[int, int], Terms], lr: float, scale: float
    ) -> UpdateResult:
        """Combine the loss terms of all ranks and return the results of the update. All ranks must
        call this method.

        Args:
            step: Number of the update.
            terms: Loss terms of this rank by (stage, microbatch).
            lr: Learning rate of the update.
            scale: Loss scale of the update.
        """
        counted = list(terms.values()) if self._groups.counts else []
        empty = torch.zeros(0, device=self._device)

        def joined(values: list[Tensor]) -> Tensor:
            return torch.cat([value.reshape(-1) for value in values]) if values else empty

        values = [
            joined([term.ce_sum for term in counted if term.ce_sum is not None]),
            joined([term.aux for term in counted]),
            joined([term.z for term in counted]),
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
        """Return, for each tensor, the sum of its elements over all ranks. In a skipped update, all
        sums are NaN if a tensor of any rank contains a non-finite value."""
        if not math.isnan(self._norm):
            return exact_sums(values, self._groups.everyone)
        finite = [value.nan_to_num(0.0, 0.0, 0.0) for value in values]
        infinite = (~torch.cat(values).isfinite()).float()
        *sums, trouble = exact_sums([*finite, infinite], self._groups.everyone)
        return [math.nan if trouble else total for total in sums]

    def _expert_rows(self, terms: dict[tuple[int, int], Terms]) -> Tensor:
        """Return the number of tokens that all ranks have routed to each expert, in the format of
        `UpdateResult.expert_rows`. All ranks must call this method."""
        model = self._config.model
        sparse = model.sparse_layers
        if not sparse:
            return torch.zeros(0, 0, dtype=torch.int64, device=self._device)
        shape = len(sparse), max(model.experts_by_layer)
        rows = torch.zeros(shape, dtype=torch.int64, device=self._device)
        if self._groups.counts:
            for (stage, _), term in terms.items():
                layers = [n for n in self._rank_model.layout.layers[stage] if n in sparse]
                for layer, counts in zip(layers, term.counts, strict=True):
                    rows[sparse.index(layer), : len(counts)] += counts
        all_reduce_sum(rows, self._groups.everyone)
        return rows
