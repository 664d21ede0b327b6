"""What a rank trains: its part of the model, wired by `optimus.parallel`, and what runs it."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial

import torch

from optimus.chunks.engine import ChunkEngine, Use
from optimus.chunks.optimizer import AdamW
from optimus.chunks.residency import Pass, Residency
from optimus.chunks.states import Home
from optimus.config import Config
from optimus.data.loader import Microbatch
from optimus.dist.collectives import ALONE
from optimus.dist.groups import Groups
from optimus.dist.rules import shard_axes, sum_axes
from optimus.model.moe import Experts
from optimus.model.transformer import Transformer
from optimus.parallel.apply import build_model
from optimus.parallel.layout import Layout, make_layout
from optimus.parallel.pipeline.actions import Kind
from optimus.parallel.pipeline.executor import Executor
from optimus.parallel.pipeline.stage import Objective, Stage
from optimus.platform import dtype_of
from optimus.train.batch import BatchPlan
from optimus.train.units import units_of
from optimus_kernels import WeightGrads


def uncompiled(config: Config) -> AbstractContextManager:
    """Within it compiled blocks run as written: only updates are worth code of their own, while an
    evaluation's last batch or a growing sample would be compiled anew for each shape."""
    return torch.compiler.set_stance("force_eager") if config.train.compile else nullcontext()


class Shard:
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
        tp = groups.mesh.tp if config.parallel.sequence_parallel else 1

        def boundary_shape(tokens: torch.Tensor) -> tuple[int, ...]:
            batch, length = tokens.shape
            return batch, length // tp, model.hidden_size

        dtype = dtype_of(config.train.dtype)
        self.executor = Executor(schedule, stages, groups.pp, boundary_shape, dtype)

    def make_states(self, poison: bool = False) -> ChunkEngine:
        """The model's states, from the values its parameters have now; they become views of
        chunks. `poison`: as in Residency. Raises ConfigError where optim.cache_chunks is too small.
        """
        config = self._config
        engine = ChunkEngine(
            dict(self.model.named_parameters()),
            self.home_of,
            AdamW(config.optim),
            dtype=dtype_of(config.train.dtype),
            chunk_length=config.optim.chunk_length,
            deterministic=config.train.deterministic,
            reduce_dtype=dtype_of(config.optim.grad_reduce_dtype),
            grad_dtype=dtype_of(config.optim.grad_dtype),
            everyone=self._groups.everyone,
            compiled=config.train.compile,
            overlap=config.optim.overlap,
            residency=self._residency(poison),
        )
        self.model.separate_tied_uses()
        for name, leaf in self.model.tied_uses().items():
            engine.add_use(Use(name, leaf, "embed.weight"))
        if config.optim.overlap:
            engine.wait_in(self.model.readers())
        schedule = self.layout.schedule
        backward = {Kind.F: False, Kind.B: True, Kind.I: True}
        passes = [
            Pass(action.stage, backward[action.kind])
            for action in schedule.ranks[self._groups.place.pp]
            if action.kind in backward
        ]
        early = not (schedule.splits_backward or config.train.compile)
        engine.follow(units_of(self.model, self.layout), passes, early)
        return engine

    def _residency(self, poison: bool) -> Residency:
        optim = self._config.optim
        return Residency(
            divides_gradients=optim.resident != "all",
            divides_parameters=optim.resident == "cache",
            slots=optim.cache_chunks,
            poison=poison,
        )

    def add_in_place(self, states: ChunkEngine) -> None:
        """From now on experts add their weights' gradients to the chunks themselves, without a
        buffer of their own and a pass to add it. Not to be undone: `torch.autograd.grad`, by which
        layers are measured, would get none."""
        for name, module in self.model.named_modules():
            if isinstance(module, Experts):
                module.weight_grads = partial(_chunk_gradients, states, name)

    def home_of(self, name: str) -> Home:
        """Whose the gradient of a parameter is, or of a further use of one."""
        owner = name if name in self.layout.placements else "embed.weight"
        kind = self.layout.placements[owner].kind
        place, groups = self._groups.place, self._groups
        adding = tuple(axis for axis in sum_axes(kind) if axis != "tp")
        sharding = shard_axes(kind, self._config.optim.sharding)
        spread = tuple(axis for axis in adding if axis not in sharding)
        other_end = owner == "embed.weight" and not self.layout.has_first
        # Of the ranks that hold the same, the first counts in the norm.
        same = {"dp", "ep", "tp"} - set(sharding)
        if kind.expert:
            same -= {"ep"}
        if kind.divided_by_tp:
            same -= {"tp"}
        copies = tuple(sorted(same))
        first = all(getattr(place, axis) == 0 for axis in copies)
        return Home(
            stage=self.layout.stage_of(name),
            adders=groups.over(adding),
            shards=groups.over(sharding),
            spread=groups.over(spread),
            partial_over=groups.tp if kind.partial_over_tp else ALONE,
            copies=copies,
            far_copy=other_end,
            first_copy=first,
        )

    def to_device(self, microbatches: Sequence[Microbatch]) -> list[Microbatch]:
        """Tokens where the model is; document ids stay on the host, whose lengths it wants."""
        return [one._replace(tokens=one.tokens.to(self._device)) for one in microbatches]

    def cross_entropies(self, microbatches: list[Microbatch]) -> list[torch.Tensor]:
        """Forward alone: cross-entropy sums in nats on the last stage, [] on the others and on
        copies of it. A collective of the ranks of one model."""
        terms = self.executor.evaluate(self.to_device(microbatches))
        if self._groups.place.tp > 0:
            return []
        return [one.ce_sum for one in terms.values() if one.ce_sum is not None]


def _chunk_gradients(states: ChunkEngine, name: str) -> WeightGrads:
    """Where the gradients of the experts of this name add up."""
    gate_up, down = (states.gradient(f"{name}.{weight}") for weight in ("gate_up", "down"))
    return WeightGrads(gate_up, down, add=True)
