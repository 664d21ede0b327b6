"""One update: forward and backward over the microbatches, reduction, clipping, AdamW."""

from __future__ import annotations

import math
import socket
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from optimus.config import Config
from optimus.data.loader import Microbatch
from optimus.dist.collectives import all_gather, all_gather_objects, all_reduce_max, all_reduce_sum
from optimus.dist.world import World
from optimus.errors import NonFiniteError
from optimus.resilience import guards
from optimus.train.batch import BatchPlan
from optimus.train.reduce import make_reduction
from optimus.train.schedule import clips_at, learning_rate
from optimus.train.states import ModelStates


@dataclass(frozen=True)
class UpdateResult:
    """What one update was, over all ranks. Losses in nats, means over the global batch."""

    step: int
    loss: float
    aux_loss: float
    z_loss: float
    grad_norm: float
    lr: float
    expert_rows: Tensor
    """int64 [MoE layers, E]: rows routed to each expert by all ranks, as in LossTerms."""


def uncompiled(config: Config) -> AbstractContextManager:
    """Within it compiled blocks run as written: only updates are worth code of their own, while an
    evaluation's last batch or a growing sample would be compiled anew for each shape."""
    return torch.compiler.set_stance("force_eager") if config.train.compile else nullcontext()


class Updater:
    """Carries a model from one update to the next."""

    def __init__(
        self, config: Config, world: World, model: nn.Module, states: ModelStates, plan: BatchPlan
    ) -> None:
        self._config, self._world, self._model, self._plan = config, world, model, plan
        self._states = states
        reduce_dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}
        self._reduction = make_reduction(
            states,
            world.everyone,
            config.train.deterministic,
            reduce_dtype[config.optim.grad_reduce_dtype],
            self._raise_if_nonfinite,
        )
        self._step = 0
        self._seen: list[Microbatch] = []
        self._losses: list[Tensor] = []

    def run(self, step: int, microbatches: list[Microbatch]) -> UpdateResult:
        """Do update `step` on this rank's `microbatches`.

        Raises NonFiniteError on every rank, before anything is reduced, if any rank's loss or
        gradient is not finite.
        """
        self._step, self._losses, self._seen = step, [], []
        self._reduction.start()
        expert_rows = []
        for microbatch in microbatches:
            expert_rows.append(self._forward_backward(microbatch))
            self._reduction.after_microbatch()
        self._reduction.finish()
        self._states.add_tied_uses()
        norm = self._clip(step)
        lr = learning_rate(step, self._config.optim, self._config.train.max_steps)
        self._states.update(lr)
        loss, aux_loss, z_loss = self._mean_losses()
        rows = torch.stack(expert_rows).sum(0)
        if rows.numel():
            all_reduce_sum(rows, self._world.everyone)
        return UpdateResult(step, loss, aux_loss, z_loss, norm, lr, rows)

    def _forward_backward(self, microbatch: Microbatch) -> Tensor:
        """Add this microbatch's gradients of the objective; return its expert rows [L, E]."""
        # Document ids stay on the host: the model wants their lengths there.
        microbatch = microbatch._replace(tokens=microbatch.tokens.to(self._world.device))
        self._seen.append(microbatch)
        terms = self._model.losses(*microbatch)
        model, count = self._config.model, self._plan.num_microbatches
        objective = terms.ce_sum / self._plan.targets
        if model.num_experts:
            objective = objective + (model.aux_loss_coef / count) * terms.aux
            objective = objective + (model.z_loss_coef / count) * terms.z
        objective.backward()
        self._losses.append(torch.stack([terms.ce_sum, terms.aux, terms.z]).detach().float())
        return terms.expert_counts

    def _clip(self, step: int) -> float:
        """The gradient norm before clipping; scales the gradients where it is too large."""
        norm = self._states.grad_norm()
        if not math.isfinite(norm):
            raise NonFiniteError(
                f"step {step}: the gradient norm over all ranks is {norm} although every rank's "
                "own gradients are finite; the sum overflows, lower the learning rate",
                on_every_rank=True,
            )
        limit = self._config.optim.clip_norm
        if clips_at(step, self._config.optim) and norm > limit:
            self._states.scale_grads(limit / norm)
        return norm

    def _mean_losses(self) -> tuple[float, float, float]:
        """Global means, from every microbatch's own fp32 sums joined exactly, in no order."""
        own = torch.stack(self._losses)
        every = own.new_empty(self._plan.num_microbatches, 3)
        all_gather(every, own, self._world.everyone)
        ce_sums, auxes, zs = every.T.tolist()
        count = self._plan.num_microbatches
        return (
            math.fsum(ce_sums) / self._plan.targets,
            math.fsum(auxes) / count,
            math.fsum(zs) / count,
        )

    def _raise_if_nonfinite(self) -> None:
        """Agree whether any rank has trouble; then every rank raises the same message."""
        losses_finite = math.isfinite(float(torch.stack(self._losses).sum()))
        trouble = not (losses_finite and guards.is_finite(self._states.target))
        flag = torch.tensor([int(trouble)], device=self._world.device)
        all_reduce_max(flag, self._world.everyone)
        if not flag.item():
            return
        clause = self._diagnose() if trouble else None
        clauses = [c for c in all_gather_objects(clause, self._world.everyone) if c]
        more = f" (and {len(clauses) - 1} more ranks)" if len(clauses) > 1 else ""
        raise NonFiniteError(clauses[0] + more, on_every_rank=True)

    def _diagnose(self) -> str:
        states, host = self._states, socket.gethostname()
        with uncompiled(self._config):
            what = guards.diagnose(
                self._model, states.named(states.params), states.named_gradients(), self._seen
            )
        clause = (
            f"non-finite values on rank {self._world.rank} ({host}) at step {self._step}: {what}"
        )
        log_dir = Path(self._config.train.run_dir) / "log"
        guards.write_marker(log_dir, self._world.rank, self._step, what, host)
        return clause
