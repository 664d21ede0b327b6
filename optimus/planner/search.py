"""Search for the fastest layout of a run on a number of ranks.

A search evaluates all layouts of a space. Layouts that the checks of the configuration refuse, or
that need more memory than a rank has, are counted by reason. Each check and each number of bytes is
computed once for all layouts that share it.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import multiprocessing
import re
import signal
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

from optimus.config import Config
from optimus.config.checks import check
from optimus.data.batch import plan_batch
from optimus.distributed.mesh import Mesh
from optimus.errors import ConfigError, refuse_if
from optimus.model.flops import (
    head_multiply_adds,
    layer_multiply_adds,
    recomputed_multiply_adds,
)
from optimus.parallel.divisible import check_divisible
from optimus.parallel.pipeline.plan import plan_stages
from optimus.parallel.pipeline.schedules import check_virtual_stages
from optimus.parallel.pipeline.simulate import bubble_ratio
from optimus.planner.states import StateSizes, check_names
from optimus.planner.step_time import Rates, step_time
from optimus.planner.workload import step_of

STATES = (
    ("none", "all"),
    ("none", "parameters"),
    *itertools.product(("so", "epso"), ("all", "parameters", "cache")),
)
"""Pairs of `optim.sharding` and `optim.resident`."""
SCHEDULES = (
    ("1f1b", 1),
    ("zb-h1", 1),
    ("gpipe", 1),
    *(("interleaved", v) for v in (2, 3, 4, 6, 8)),
)
"""Pairs of `parallel.schedule` and `parallel.virtual_stages`."""
MICROBATCH_SIZES = (1, 2, 4, 8)
RECOMPUTE = ((), ("norm",), ("attention",), ("norm", "attention"), ("block",))
RECOMPUTE_EXPERTS = (("experts",), ("moe",), ("norm", "attention", "moe"))
"""Values of `recompute.modules` for all models, and further ones for models with experts."""


class Layout(NamedTuple):
    """Values of the settings that a search chooses."""

    pp: int
    dp: int
    ep: int
    tp: int
    schedule: str
    virtual_stages: int
    microbatch_size: int
    recompute: tuple[str, ...]
    sharding: str
    resident: str

    @property
    def mesh(self) -> Mesh:
        """The sizes of the axes."""
        return Mesh(*self[:4])

    def apply(self, config: Config) -> Config:
        """Return the configuration with the values of the layout. A setting that the layout makes
        meaningless gets its default."""
        parallel = config.parallel
        return config.model_copy(
            update={
                "parallel": parallel.model_copy(
                    update={
                        **self.mesh._asdict(),
                        "schedule": self.schedule,
                        "virtual_stages": self.virtual_stages,
                        "stage_layers": (),
                        "sequence_parallel": parallel.sequence_parallel and self.tp > 1,
                    }
                ),
                "train": config.train.model_copy(update={"microbatch_size": self.microbatch_size}),
                "recompute": config.recompute.model_copy(update={"modules": self.recompute}),
                "optim": config.optim.model_copy(
                    update={
                        "sharding": self.sharding,
                        "resident": self.resident,
                        "cache_chunks": config.optim.cache_chunks
                        if self.resident == "cache" or config.offload.host_share
                        else 0,
                    }
                ),
            }
        )

    def describe(self) -> str:
        """Return the layout as overrides of a command."""
        recompute = "[" + ",".join(f'"{name}"' for name in self.recompute) + "]"
        return (
            f"parallel.pp={self.pp} parallel.dp={self.dp} parallel.ep={self.ep} "
            f"parallel.tp={self.tp} parallel.schedule={self.schedule} "
            f"parallel.virtual_stages={self.virtual_stages} "
            f"train.microbatch_size={self.microbatch_size} recompute.modules={recompute} "
            f"optim.sharding={self.sharding} optim.resident={self.resident}"
        )


@dataclass(frozen=True)
class Space:
    """The values that a search combines."""

    pp: Sequence[int]
    ep: Sequence[int]
    tp: Sequence[int]
    schedules: Sequence[tuple[str, int]] = SCHEDULES
    microbatch_sizes: Sequence[int] = MICROBATCH_SIZES
    recompute: Sequence[tuple[str, ...]] = RECOMPUTE
    states: Sequence[tuple[str, str]] = STATES

    def layouts(self, world_size: int) -> Iterator[Layout]:
        """Yield all layouts of the space whose mesh has `world_size` ranks."""
        for pp, ep, tp in itertools.product(self.pp, self.ep, self.tp):
            if world_size % (pp * ep * tp):
                continue
            mesh = (pp, world_size // (pp * ep * tp), ep, tp)
            for (schedule, virtual), size, modules, states in itertools.product(
                self.schedules, self.microbatch_sizes, self.recompute, self.states
            ):
                yield Layout(*mesh, schedule, virtual, size, modules, *states)


def space_of(config: Config, world_size: int) -> Space:
    """Return the space of a model: all divisors of the number of ranks up to the number of layers
    (pp), experts (ep) and attention heads (tp)."""
    model = config.model
    divisors = [n for n in range(1, world_size + 1) if world_size % n == 0]
    most_experts = max(1, *model.experts_by_layer)
    return Space(
        pp=[n for n in divisors if n <= model.num_layers],
        ep=[n for n in divisors if n <= most_experts],
        tp=[n for n in divisors if n <= model.num_attention_heads],
        recompute=RECOMPUTE + (RECOMPUTE_EXPERTS if most_experts > 1 else ()),
    )


class Evaluation(NamedTuple):
    """A layout that the search has evaluated."""

    time: float
    """Predicted time of a step, or another figure that grows with it."""
    memory: int
    """Predicted bytes on the fullest rank."""
    layout: Layout


class Ranking(NamedTuple):
    """Result of a search."""

    evaluations: list[Evaluation]
    """The layouts that fit, the fastest first. Of equally fast layouts, those that divide a replica
    over fewer ranks come first, then those that keep more states on each rank, then those that need
    less memory."""
    rejected: Counter[str]
    """Number of rejected layouts by reason."""

    @property
    def pareto(self) -> list[Evaluation]:
        """The layouts of which no other layout is faster and needs less memory, the fastest
        first."""
        front: list[Evaluation] = []
        for evaluation in sorted(self.evaluations, key=lambda e: e[:2]):
            if not front or evaluation.memory < front[-1].memory:
                front.append(evaluation)
        return front


class LayoutChecks:
    """Checks of the layouts of a run, each made once for all layouts that share its settings.

    Args:
        config: The configuration, whose other settings all layouts have.
    """

    def __init__(self, config: Config) -> None:
        self._config = config
        self._base = Layout(
            1, 1, 1, 1, "1f1b", 1, 1, (), config.optim.sharding, config.optim.resident
        )
        self._verdicts: dict[Any, str] = {}
        self._stages: dict[int, tuple[range, ...]] = {}

    def stages(self, layout: Layout) -> tuple[range, ...]:
        """Return the layers of each stage. Raises ConfigError as `plan_stages`."""
        number = layout.pp * layout.virtual_stages
        if number not in self._stages:
            self._stages[number] = plan_stages(layout.apply(self._config), layout.pp)
        return self._stages[number]

    def refusal_of_mesh(self, layout: Layout) -> str:
        """Return the reason why the sizes of the axes and the schedule are impossible; "" if they
        are possible."""
        mesh = self._verdict(layout[:4], lambda: self._check_mesh(layout))
        return mesh or self._verdict(layout[:6], lambda: self._check_parallel(layout))

    def refusal(self, layout: Layout) -> str:
        """Return the reason why a layout whose mesh and schedule are possible is refused, or ""."""
        ranks, size = layout.dp * layout.ep, layout.microbatch_size
        train = self._config.train
        return (
            self._verdict(
                ("batch", ranks, size),
                lambda: plan_batch(train.model_copy(update={"microbatch_size": size}), ranks),
            )
            or self._verdict(
                ("recompute", layout.recompute),
                lambda: self._check(self._base._replace(recompute=layout.recompute)),
            )
            or self._verdict(
                layout[8:],
                lambda: self._check(
                    self._base._replace(sharding=layout.sharding, resident=layout.resident)
                ),
            )
        )

    def _verdict(self, key: Any, make: Callable[[], object]) -> str:
        if key not in self._verdicts:
            try:
                make()
                self._verdicts[key] = ""
            except ConfigError as error:
                self._verdicts[key] = reason_of(error)
        return self._verdicts[key]

    def _check(self, layout: Layout) -> None:
        check(layout.apply(self._config))

    def _check_mesh(self, layout: Layout) -> None:
        check_divisible(layout.apply(self._config), layout.mesh)

    def _check_parallel(self, layout: Layout) -> None:
        refuse_if(
            layout.pp == 1 and (layout.schedule, layout.virtual_stages) != ("1f1b", 1),
            "a single pipeline rank has no bubble, and needs no other schedule than 1f1b",
        )
        self._check(Layout(*layout[:6], *self._base[6:]))
        check_virtual_stages(layout.schedule, layout.virtual_stages)
        self.stages(layout)


def reason_of(error: ConfigError) -> str:
    """Return the cause of an error without its numbers and without the remedy, so that equal causes
    are counted together."""
    cause = re.sub(r" \(.*?\)", "", str(error).split("; ")[0])
    return re.sub(r"(?<![\w.])\d[\d,]*(?!\w)", "N", cause)


class StateMemory:
    """Bytes of the model states on the fullest rank of each layout of a run."""

    def __init__(self, config: Config, checks: LayoutChecks) -> None:
        self._config, self._checks = config, checks
        self._states: dict[tuple[str, str], StateSizes] = {}
        self._bytes: dict[Any, int] = {}

    def __call__(self, layout: Layout) -> int:
        """Return the bytes. Raises ConfigError if optim.cache_chunks is too small."""
        key = layout[:4], layout.virtual_stages, layout[8:]
        if key not in self._bytes:
            self._bytes[key] = self._of_rank(layout)
        return self._bytes[key]

    def _of_rank(self, layout: Layout) -> int:
        pair = layout.sharding, layout.resident
        config = self._config
        if pair not in self._states:
            self._states[pair] = StateSizes(layout.apply(config))
        rank = self._states[pair].fullest(layout.mesh, self._checks.stages(layout))
        slots = layout.apply(config).optim.cache_chunks
        refuse_if(
            0 < slots < rank.fewest_slots,
            f"optim.cache_chunks = {slots} is too small for a block",
        )
        return rank.sizes["total"]


class ComputeBound:
    """FLOPs of the busiest rank in a step, and those that it could compute while the pipeline makes
    it wait. Divided by the peak rate, they are a bound of the time of a step.

    Communication, memory traffic and the optimizer are not included. The FLOPs are those of
    `flops_per_token` and of recomputation. The bubble is that of equal stages (`bubble_ratio`).
    """

    def __init__(self, config: Config, checks: LayoutChecks) -> None:
        self._config, self._checks = config, checks
        self._of_token: dict[Any, float] = {}
        self._of_layer: dict[Any, list[float]] = {}

    def __call__(self, layout: Layout) -> float:
        """Return the FLOPs of a layout with a possible batch."""
        train = self._config.train
        tokens = layout.microbatch_size * train.seq_len
        microbatches = train.global_batch_tokens // (tokens * layout.dp * layout.ep)
        bubble = bubble_ratio(layout.schedule, layout.pp, layout.virtual_stages, microbatches)
        return microbatches * tokens * self._busiest(layout) / layout.tp * (1 + bubble)

    def _busiest(self, layout: Layout) -> float:
        """Return the FLOPs of the busiest pipeline rank for a token, over all tp ranks."""
        key = layout.pp, layout.virtual_stages, layout.recompute
        if key not in self._of_token:
            layers, stages = self._layers(layout.recompute), self._checks.stages(layout)
            costs = [sum(layers[stage.start : stage.stop]) for stage in stages]
            costs[-1] += 6 * head_multiply_adds(self._config.model)
            self._of_token[key] = max(sum(costs[rank :: layout.pp]) for rank in range(layout.pp))
        return self._of_token[key]

    def _layers(self, recompute: tuple[str, ...]) -> list[float]:
        """Return the FLOPs of each layer for a token: 2 for a multiply-add in forward, 4 in
        backward, and 2 if backward repeats it."""
        if recompute not in self._of_layer:
            model, seq_len = self._config.model, self._config.train.seq_len
            layers = range(model.num_layers)
            self._of_layer[recompute] = [
                6 * layer_multiply_adds(model, seq_len, layer)
                + 2 * recomputed_multiply_adds(model, seq_len, layer, recompute)
                for layer in layers
            ]
        return self._of_layer[recompute]


class StepSeconds:
    """Predicted seconds of a step of each layout of a run on a machine, with uniform routing."""

    def __init__(self, config: Config, checks: LayoutChecks, rates: Rates) -> None:
        self._config, self._checks, self._rates = config, checks, rates
        self._last: Layout | None = None
        self._seconds = 0.0

    def __call__(self, layout: Layout) -> float:
        """Return the seconds of a layout with a possible batch."""
        # A cache without a limit takes the same time as whole parameters. A search asks for layouts
        # that differ only in optim.resident one after the other.
        if layout.resident == "cache" and not self._config.optim.cache_chunks:
            layout = layout._replace(resident="parameters")
        if layout != self._last:
            stages = self._checks.stages(layout)
            step = step_of(layout.apply(self._config), layout.mesh, stages)
            self._last, self._seconds = layout, step_time(step, self._rates).total_s
        return self._seconds


def search(
    config: Config,
    world_size: int,
    space: Space,
    memory: Callable[[Layout], int],
    time: Callable[[Layout], float],
    checks: LayoutChecks,
    limit_bytes: int | None = None,
    processes: int = 1,
) -> Ranking:
    """Evaluate all layouts of a space.

    Args:
        config: The configuration. Its settings that are not in `Layout` apply to all layouts.
        world_size: Number of ranks.
        space: The values to combine.
        memory: Returns the bytes on the fullest rank. It may raise ConfigError to reject a layout.
        time: Returns the time of a step. It may raise ConfigError to reject a layout.
        checks: Checks of the layouts of `config`.
        limit_bytes: Memory of a rank; None for no limit.
        processes: Number of processes that evaluate the layouts. They do not change the result.

    Raises:
        ConfigError: `config` has no global batch, or a pattern of optim.groups or optim.frozen
            matches no parameter.
    """
    for key in ("seq_len", "global_batch_tokens"):
        refuse_if(
            not getattr(config.train, key),
            f"train.{key} = 0: a search compares steps with the same tokens; set train.{key}",
        )
    check_names(config.optim, config.model)
    meshes = [
        (pp, world_size // (pp * ep * tp), ep, tp)
        for pp, ep, tp in itertools.product(space.pp, space.ep, space.tp)
        if world_size % (pp * ep * tp) == 0
    ]
    inner = math.prod(map(len, (space.microbatch_sizes, space.recompute, space.states)))
    ranking = Ranking([], Counter())
    if others := len(space.pp) * len(space.ep) * len(space.tp) - len(meshes):
        reason = "parallel.pp * ep * tp does not divide the number of ranks"
        ranking.rejected[reason] = others * len(space.schedules) * inner
    evaluate = partial(_evaluate, space, memory, time, checks, limit_bytes)
    shares = [meshes[index::processes] for index in range(processes)]
    for result in map(evaluate, shares) if processes == 1 else _in_processes(evaluate, shares):
        ranking.evaluations.extend(result.evaluations)
        ranking.rejected.update(result.rejected)
    ranking.evaluations.sort(key=_rank_key)
    return ranking


def _rank_key(evaluation: Evaluation) -> tuple:
    layout = evaluation.layout
    resident = ("all", "parameters", "cache").index(layout.resident)
    return evaluation.time, layout.pp * layout.ep * layout.tp, resident, *evaluation[1:]


def _evaluate(
    space: Space,
    memory: Callable[[Layout], int],
    time: Callable[[Layout], float],
    checks: LayoutChecks,
    limit_bytes: int | None,
    meshes: Sequence[tuple[int, int, int, int]],
) -> Ranking:
    """Evaluate the layouts of some meshes. The result is not sorted."""
    rejected: Counter[str] = Counter()
    evaluations: list[Evaluation] = []
    inner = list(itertools.product(space.microbatch_sizes, space.recompute, space.states))
    for mesh, schedule in itertools.product(meshes, space.schedules):
        if refusal := checks.refusal_of_mesh(Layout(*mesh, *schedule, 1, (), "none", "all")):
            rejected[refusal] += len(inner)
            continue
        for size, modules, states in inner:
            layout = Layout(*mesh, *schedule, size, modules, *states)
            if refusal := checks.refusal(layout):
                rejected[refusal] += 1
                continue
            try:
                used = memory(layout)
                if limit_bytes is None or used <= limit_bytes:
                    evaluations.append(Evaluation(time(layout), used, layout))
                else:
                    rejected["more memory than a rank has"] += 1
            except ConfigError as error:
                rejected[reason_of(error)] += 1
    return Ranking(evaluations, rejected)


Evaluate = Callable[[Sequence[tuple[int, int, int, int]]], Ranking]


def _in_processes(
    evaluate: Evaluate, shares: Sequence[Sequence[tuple[int, int, int, int]]]
) -> Iterator[Ranking]:
    """Yield the results of `evaluate` for each share, from one process for each."""
    context = multiprocessing.get_context("fork")  # `evaluate` cannot be pickled
    receivers = []
    for share in shares:
        receiver, sender = context.Pipe(duplex=False)
        context.Process(target=_send, args=(evaluate, share, sender), daemon=True).start()
        sender.close()
        receivers.append(receiver)
    for receiver in receivers:
        yield receiver.recv()


def _send(
    evaluate: Evaluate, share: Sequence[tuple[int, int, int, int]], sender: Connection
) -> None:
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # the first process prints the message
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    with contextlib.suppress(BrokenPipeError):  # the first process has ended
        sender.send(evaluate(share))
