"""Model of one rank, and the pipeline executor that runs the model."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
import torch.nn.functional as F

from optimus.chunks.engine import ChunkEngine
from optimus.config import Config
from optimus.data.batch import BatchPlan
from optimus.data.loader import Microbatch
from optimus.distributed.collectives import all_reduce_sum
from optimus.distributed.groups import Groups
from optimus.errors import refuse_if
from optimus.model.deferred_gradients import defer_whole_gradients
from optimus.model.transformer import Transformer
from optimus.parallel.apply import build_model, make_layout
from optimus.parallel.layout import Layout
from optimus.parallel.pipeline.executor import Executor
from optimus.parallel.pipeline.stage import Objective, Stage
from optimus.parallel.placement import share
from optimus.platform import dtype_of
from optimus.rank.segments import segments_of
from optimus.rank.states import attach, make_states, write_gradients_to

logger = logging.getLogger(__name__)


def uncompiled(is_compiled: bool) -> AbstractContextManager:
    """Return a context manager that makes compiled transformer blocks run eagerly.

    If `is_compiled` is False, the context manager has no effect. Evaluation and sampling run in
    this context, because otherwise torch would recompile the blocks for each new input shape.
    """
    return torch.compiler.set_stance("force_eager") if is_compiled else nullcontext()


class RankModel:
    """The layers of the model on one rank, their layout, and the executor that runs the pipeline
    schedule.

    Args:
        config: The run's configuration.
        groups: Process groups of this rank.
        plan: Batch sizes of an update.
        device: Device of parameters and activations.
    """

    def __init__(
        self, config: Config, groups: Groups, plan: BatchPlan, device: torch.device
    ) -> None:
        self._config, self._groups, self._device = config, groups, device
        self.layout: Layout = make_layout(
            config, groups.mesh, groups.coordinate, plan.microbatches_per_rank
        )
        self.model: Transformer = build_model(config, self.layout, groups, device)
        model = config.model
        objective = Objective(
            plan.targets,
            plan.num_microbatches,
            len(model.sparse_layers),
            model.aux_loss_coef,
            model.z_loss_coef,
        )
        schedule = self.layout.schedule
        stages = {
            number: Stage(
                self.model,
                self.layout.layers[number],
                number == 0,
                number == schedule.num_stages - 1,
                objective,
            )
            for number in self.layout.stages
        }

        def boundary_shape(tokens: torch.Tensor) -> tuple[int, ...]:
            batch, length = tokens.shape
            return self.layout.boundary_shape(batch, length, model.hidden_size)

        dtype = dtype_of(config.train.dtype)
        self.executor = Executor(
            schedule, stages, groups.channels, boundary_shape, dtype, groups.recorder
        )

    def make_states(self, initial: bool = True, poison: bool = False) -> ChunkEngine:
        """Create and return the model states of this rank: parameters, gradients and optimizer
        states.

        The parameters of `model` become views of these states. All ranks must call this method.

        Args:
            initial: True to set the parameters to the initial values that `train.seed` determines.
                False to leave the parameters NaN until a checkpoint or weights are loaded.
            poison: True to fill freed chunks with NaN, for tests.
        """
        config = self._config
        if config.offload.mode != "off" and self._device.type != "cpu":
            refuse_if(
                config.offload.links != "",
                f"offload.links = {config.offload.links!r} has an effect only on a CPU, not on "
                f"{self._device.type}; remove offload.links",
            )
            if self._groups.everyone.rank == 0:
                logger.warning(
                    "offloading is not tested on %s yet: first compare the metrics of a short run "
                    "with the metrics of offload.mode = 'off', both with train.deterministic = "
                    "true",
                    self._device.type,
                )
        engine = make_states(
            config.optim,
            config.train,
            config.offload,
            self.layout,
            self._groups,
            self.model,
            initial,
            poison,
        )
        attach(engine, segments_of(self.model, self.layout), self.layout, config)
        return engine

    def keep_microbatches_apart(self) -> None:
        """Make the pipeline action W accumulate all weight gradients, including the gradients of
        norm layers.

        Some pipeline schedules divide the backward pass of a microbatch into two actions: I
        computes the gradients of activations, and W computes the gradients of weights. With such a
        schedule, deterministic mode requires a call of this method. Without the call, the action I
        of the next microbatch could add to a gradient before the gradient is reduced. With other
        schedules, the method has no effect.
        """
        if self.layout.schedule.splits_backward:
            # By default, the action I accumulates the gradients of norms.
            leaves = [*self.model.parameters(), *self.model.separated_uses().values()]
            defer_whole_gradients(leaf for leaf in leaves if leaf.requires_grad)

    def write_gradients_to_chunks(self, states: ChunkEngine) -> None:
        """Make the backward pass of experts and embeddings add the weight gradients directly to the
        gradient memory of `states`.

        The direct addition avoids a separate pass over the gradients. The change cannot be undone:
        afterwards, `torch.autograd.grad` returns no gradient for these weights.
        """
        write_gradients_to(self.model, states)

    def to_device(self, microbatches: Sequence[Microbatch]) -> list[Microbatch]:
        """Return copies of the microbatches with the tokens on the device of the model. Document
        ids stay on the host."""
        # The host computes document lengths from the document ids.
        return [batch._replace(tokens=batch.tokens.to(self._device)) for batch in microbatches]

    def cross_entropies(self, microbatches: list[Microbatch]) -> list[torch.Tensor]:
        """Run forward passes and return the summed cross-entropy of each microbatch, in nats.

        All ranks of a model replica must call this method. The first tp rank of the last pipeline
        stage returns fp32 scalars. The other ranks return an empty list.
        """
        terms = self.executor.evaluate(self.to_device(microbatches))
        if not self._groups.counts:
            return []
        return [term.ce_sum for term in terms.values() if term.ce_sum is not None]

    def logits_after(self, tokens: torch.Tensor) -> torch.Tensor | None:
        """Return the logits for the token after `tokens`, fp32 [1, 1, vocab_size].

        All ranks of a model replica must call this method. Ranks outside the last pipeline stage
        return None.

        Args:
            tokens: Ids of the preceding tokens, int64 [1, number of tokens].
        """
        length = tokens.shape[1]
        # Sequence parallelism needs a length that tp divides. Attention is causal, so the appended
        # tokens do not change the logits of earlier tokens.
        padded = F.pad(tokens, (0, -length % self.layout.sequence_shares))
        logits = self.executor.logits(padded, length - 1)
        if logits is None:
            return None
        mesh, vocab_size = self.layout.mesh, self.model.config.vocab_size
        start, stop = share(vocab_size, self.layout.coordinate.tp, mesh.tp)
        whole = torch.zeros(1, 1, vocab_size, device=logits.device)
        whole[..., start:stop] = logits
        all_reduce_sum(whole, self._groups.over("tp"))
        return whole
