"""What a rank trains: its part of the model, wired by `optimus.parallel`, and what runs it."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial

import torch
import torch.nn.functional as F

from optimus.chunks.engine import ChunkEngine
from optimus.chunks.residency import Pass
from optimus.config import Config
from optimus.data.batch import BatchPlan
from optimus.data.loader import Microbatch
from optimus.distributed.collectives import all_reduce_sum
from optimus.distributed.groups import Groups
from optimus.model.deferred_gradients import defer_whole_gradients
from optimus.model.layers import Embedding
from optimus.model.moe import Experts
from optimus.model.transformer import Transformer
from optimus.parallel.apply import build_model, make_layout
from optimus.parallel.layout import Layout
from optimus.parallel.pipeline.actions import Kind
from optimus.parallel.pipeline.executor import Executor
from optimus.parallel.pipeline.stage import Objective, Stage
from optimus.parallel.placement import share
from optimus.platform import dtype_of
from optimus.rank.segments import units_of
from optimus.rank.states import make_states
from optimus_kernels import WeightGrads


def uncompiled(config: Config) -> AbstractContextManager:
    """Within it compiled blocks run as written: only updates are worth code of their own, while an
    evaluation's last batch or a growing sample would be compiled anew for each shape."""
    return torch.compiler.set_stance("force_eager") if config.train.compile else nullcontext()


class RankModel:
    """One rank's model and what runs it."""

    def __init__(
        self, config: Config, groups: Groups, plan: BatchPlan, device: torch.device
    ) -> None:
        self._config, self._groups, self._device = config, groups, device
        self.layout: Layout = make_layout(
            config, groups.mesh, groups.place, plan.microbatches_per_rank
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
            return batch, length // self.layout.sequence_shares, model.hidden_size

        dtype = dtype_of(config.train.dtype)
        self.executor = Executor(
            schedule, stages, groups.channels, boundary_shape, dtype, groups.recorder
        )

    def make_states(self, poison: bool = False) -> ChunkEngine:
        """The model's states, from the values its parameters have now; they become views of
        chunks. `poison`: as in Residency. A collective of all ranks."""
        config, schedule = self._config, self.layout.schedule
        engine = make_states(config, self.layout, self._groups, self.model, poison)
        if config.optim.overlap:
            engine.wait_in(self.model.readers())
        backward = {Kind.F: False, Kind.B: True, Kind.I: True}
        passes = [
            Pass(action.stage, backward[action.kind])
            for action in schedule.ranks[self._groups.place.pp]
            if action.kind in backward
        ]
        early = not (schedule.splits_backward or config.train.compile)
        engine.follow(units_of(self.model, self.layout), passes, early)
        return engine

    def keep_microbatches_apart(self) -> None:
        """See to it that what is added up behind a microbatch's last action is its gradient alone,
        where its backward is split (deterministic mode)."""
        if self.layout.schedule.splits_backward:
            leaves = [*self.model.parameters(), *self.model.tied_uses().values()]
            defer_whole_gradients(leaf for leaf in leaves if leaf.requires_grad)

    def add_in_place(self, states: ChunkEngine) -> None:
        """From now on experts and embeddings add their weights' gradients to the chunks themselves,
        without a buffer of their own and a pass to add it. Not to be undone: `torch.autograd.grad`,
        by which layers are measured, would get none."""
        for name, module in self.model.named_modules():
            if isinstance(module, Experts):
                module.write_gradients_to(partial(_chunk_gradients, states, name))
            elif isinstance(module, Embedding):
                module.write_gradients_to(partial(states.gradient, f"{name}.weight"))

    def to_device(self, microbatches: Sequence[Microbatch]) -> list[Microbatch]:
        """Tokens where the model is; document ids stay on the host, whose lengths it wants."""
        return [one._replace(tokens=one.tokens.to(self._device)) for one in microbatches]

    def cross_entropies(self, microbatches: list[Microbatch]) -> list[torch.Tensor]:
        """Forward alone: cross-entropy sums in nats on the last stage, [] on the others and on
        copies of it. A collective of the ranks of one model."""
        terms = self.executor.evaluate(self.to_device(microbatches))
        if not self._groups.counts:
            return []
        return [one.ce_sum for one in terms.values() if one.ce_sum is not None]

    def logits_after(self, tokens: torch.Tensor) -> torch.Tensor | None:
        """tokens int64 [1, S] -> logits fp32 [1, 1, V] of the next token on the last stage, None on
        the others. A collective of the ranks of one model."""
        length = tokens.shape[1]
        # Sequence parallelism divides S evenly. What is appended is invisible to earlier tokens.
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


def _chunk_gradients(states: ChunkEngine, name: str) -> WeightGrads:
    """Where the gradients of the experts of this name add up."""
    gate_up, down = (states.gradient(f"{name}.{weight}") for weight in ("gate_up", "down"))
    return WeightGrads(gate_up, down, add=True)
