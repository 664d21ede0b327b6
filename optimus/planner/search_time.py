"""Time of a step of each layout of a search, or a lower bound of this time.

The times are equal to the results of `step_time`, but are computed faster. The passes of the
microbatches are computed once for all layouts that differ only in `optim.sharding` and
`optim.resident`. The collectives of gradients and parameters are computed once for all layouts that
differ only in the recomputed modules.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from optimus.config import Config
from optimus.distributed.mesh import Mesh
from optimus.model.flops import (
    head_multiply_adds,
    layer_multiply_adds,
    recomputed_multiply_adds,
)
from optimus.parallel.pipeline.simulate import bubble_ratio
from optimus.planner.collectives import Operation, slowest_s
from optimus.planner.expert_loads import RunLoads
from optimus.planner.layouts import Layout, LayoutChecks
from optimus.planner.machine_rates import Rates
from optimus.planner.state_traffic import StateTraffic
from optimus.planner.step_time import (
    Overlap,
    PassTimes,
    PipelineTime,
    collective_times,
    pipeline_time,
)
from optimus.planner.workload import (
    Segments,
    Weights,
    fullest_rank,
    groups_of,
    microbatches_of,
    segment_layers,
    step_of,
    update_bytes,
)
from optimus.rank.profile import Profiled, profile_work


class ComputeBound:
    """FLOPs of a step on the busiest rank: the FLOPs that the rank computes, plus the FLOPs that it
    could compute while it waits in the pipeline. This number divided by the peak rate is a lower
    bound of the time of a step.

    Communication, memory traffic and the optimizer are not included. The FLOPs are those of
    `flops_per_token`, plus the FLOPs of recomputation. The idle time is computed as if all stages
    took equal times (`bubble_ratio`).
    """

    def __init__(self, config: Config, checks: LayoutChecks) -> None:
        self._config, self._checks = config, checks
        self._of_token: dict[Any, float] = {}
        self._of_layer: dict[Any, list[float]] = {}

    def __call__(self, layout: Layout) -> float:
        """Return the FLOPs of a layout whose batch can be divided."""
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
        """Return the FLOPs of each layer for a token. A multiply-add needs 2 FLOPs in forward, 4 in
        backward, and 2 more if backward recomputes it."""
        if recompute not in self._of_layer:
            model, seq_len = self._config.model, self._config.train.seq_len
            layers = range(model.num_layers)
            self._of_layer[recompute] = [
                6 * layer_multiply_adds(model, seq_len, layer)
                + 2 * recomputed_multiply_adds(model, seq_len, layer, recompute)
                for layer in layers
            ]
        return self._of_layer[recompute]


class _Update(NamedTuple):
    """Seconds of the collectives and of the optimizer in the update of a step."""

    collectives: list[tuple[str, float, Overlap]]
    """The result of `collective_times`."""
    optimizer_s: float


class StepSeconds:
    """Predicted seconds of a step of each layout of a run on a machine.

    Args:
        config: The configuration.
        checks: The checks of the layouts of `config`.
        rates: The rates of the machine.
        profiled: Known profiles of segments, to which this object adds the profiles that it
            computes. `LayoutMemory` can share the same dict.
        loads: Loads of the experts in a run. The time is computed for the update with the median
            load. None for uniform routing.
    """

    def __init__(
        self,
        config: Config,
        checks: LayoutChecks,
        rates: Rates,
        profiled: Profiled | None = None,
        loads: RunLoads | None = None,
    ) -> None:
        self._config, self._checks, self._rates, self._loads = config, checks, rates, loads
        self._profiled: Profiled = {} if profiled is None else profiled
        self._segments: dict[Any, tuple[Segments, PassTimes]] = {}
        self._traffic: dict[Any, StateTraffic] = {}
        self._weights: dict[Any, tuple[int, Weights]] = {}
        # Caches for the last mesh and for the last layout. A search evaluates all layouts of a mesh
        # in succession and, among these, all layouts that differ only in the settings of states.
        self._mesh: Any = None
        self._updates: dict[Any, _Update] = {}
        self._passes: Any = None
        self._pipeline: PipelineTime | None = None

    def __call__(self, layout: Layout) -> float:
        """Return the seconds of a step of a layout whose batch can be divided over its ranks."""
        # Without a limit of cache_chunks, "cache" takes the same time as "parameters".
        if layout.resident == "cache" and not self._config.optim.cache_chunks:
            layout = layout._replace(resident="parameters")
        if self._pipeline is None or self._passes != layout[:8]:
            self._passes, self._pipeline = layout[:8], self._pipeline_time(layout)
        update = self._update(layout)
        time = self._pipeline.with_update(*update, self._rates.missing)
        return time.total_s

    def of_passes(self, layout: Layout, by_layer: bool = False) -> float:
        """Return a lower bound of the seconds of a step, valid for any placement of the states. For
        each pipeline rank, take the time of the passes of all microbatches on this rank, plus the
        time of the passes of one microbatch on the previous ranks: forwards on the previous ranks
        precede the first forward of this rank, and backwards on the previous ranks follow its last
        backward. The bound is the largest of these sums.

        With `by_layer`, each layer is a stage (offload.order = "layer"), and the bound is the time
        of all passes divided by the number of pipeline ranks.
        """
        segments, times = self._segments_of(layout)
        p, stages = layout.pp, self._checks.stages(layout)
        microbatches = microbatches_of(layout.apply(self._config), layout.mesh)
        forward, backward = (
            [sum(times(getattr(each, name), each.number).total_s for each in s) for s in segments]
            for name in ("forward", "backward")
        )
        if by_layer:
            return microbatches * (sum(forward) + sum(backward)) / p
        of_stages = []
        for seconds in (forward, backward):
            of_stage = [sum(seconds[1 + stage.start : 1 + stage.stop]) for stage in stages]
            of_stage[0] += seconds[0]
            of_stage[-1] += seconds[-1]
            of_stages.append(of_stage)
        both = [sum(pair) for pair in zip(*of_stages, strict=True)]
        # With zb-h1, the gradients of weights can be computed last.
        others = of_stages[0] if layout.schedule == "zb-h1" else both
        return max(sum(others[:rank]) + microbatches * sum(both[rank::p]) for rank in range(p))

    def collective_s(self, operation: Operation, size: float, mesh: Mesh, axes: str) -> float:
        """Return the seconds of a collective with buffers of `size` bytes in the slowest process
        group of `axes`."""
        groups, rates = groups_of(mesh)[axes], self._rates
        return slowest_s(operation, size, groups, rates.links, rates.algorithm)

    def _pipeline_time(self, layout: Layout) -> PipelineTime:
        config = layout.apply(self._config)
        segments, times = self._segments_of(layout)
        stages = self._checks.stages(layout)
        traffic = self._traffic_of(layout, config)
        step = step_of(config, layout.mesh, stages, segments=segments, traffic=traffic)
        return pipeline_time(step, self._rates, times)

    def _segments_of(self, layout: Layout) -> tuple[Segments, PassTimes]:
        """Return a pair: the operations of the segments, and the times of their passes, which are
        cached."""
        divides = layout.schedule == "zb-h1"
        key = layout.ep, layout.tp, layout.microbatch_size, layout.recompute, divides
        if key not in self._segments:
            config, on_cpu = layout.apply(self._config), not self._rates.launches_queue
            rank = config, layout.mesh, on_cpu
            works, imbalances = {False: profile_work(*rank, profiled=self._profiled)}, None
            if self._loads is not None and layout.ep > 1:
                works[True] = profile_work(*rank, concentrated=True, profiled=self._profiled)
                imbalances = self._loads.at(layout.ep)["median"].fullest
            segments = segment_layers(*rank, works, imbalances)
            times = PassTimes(self._rates, groups_of(layout.mesh))
            self._segments[key] = segments, times
        return self._segments[key]

    def _update(self, layout: Layout) -> _Update:
        if self._mesh != layout[:4]:
            self._mesh = layout[:4]
            self._updates.clear()
        size, states = layout.microbatch_size, layout[8:]
        key = layout.virtual_stages, size, states
        if key not in self._updates:
            config, mesh = layout.apply(self._config), layout.mesh
            stages, microbatches = self._checks.stages(layout), microbatches_of(config, mesh)
            pp, weights = self._fullest(layout, config)
            traffic = self._traffic_of(layout, config)
            reductions = traffic.of_rank(config, mesh, stages, pp, microbatches)
            self._updates[key] = _Update(
                [*collective_times(reductions, groups_of(mesh), self._rates)],
                self._rates.update_s(update_bytes(config, mesh, weights, microbatches)),
            )
        return self._updates[key]

    def _traffic_of(self, layout: Layout, config: Config) -> StateTraffic:
        """Return the object that counts the collectives of gradients and parameters. Layouts with
        the same `sharding` and `resident` share the object."""
        key = layout.sharding, layout.resident, config.parallel.sequence_parallel
        if key not in self._traffic:
            self._traffic[key] = StateTraffic(config, extrapolates=True)
        return self._traffic[key]

    def _fullest(self, layout: Layout, config: Config) -> tuple[int, Weights]:
        """Return the result of `fullest_rank` for a layout."""
        key = layout.pp, layout.ep, layout.tp, layout.virtual_stages
        if key not in self._weights:
            self._weights[key] = fullest_rank(config, layout.mesh, self._checks.stages(layout))
        return self._weights[key]
