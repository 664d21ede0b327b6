"""Seconds of the segments of a rank's model and of the gathers of its chunks on a machine."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from optimus.chunks.buffers import ParamChunk
from optimus.chunks.engine import ChunkEngine
from optimus.config import Config
from optimus.distributed.mesh import Mesh
from optimus.parallel.layout import Layout
from optimus.planner.collectives import Operation, collective_s
from optimus.planner.machine_rates import Rates
from optimus.planner.step_time import Layers, Reduction, pass_time
from optimus.planner.workload import Works, groups_of, segment_layers


class SegmentTimes:
    """Seconds of the segments of a model on a machine, for one microbatch.

    Args:
        config: The run.
        mesh: Sizes of the axes.
        rates: The rates of the machine.
        works, imbalances: As for `step_of`.
    """

    def __init__(
        self,
        config: Config,
        mesh: Mesh,
        rates: Rates,
        works: Works | None = None,
        imbalances: Mapping[int, float] | None = None,
    ) -> None:
        self._rates, self._groups = rates, groups_of(mesh)
        on_cpu = not rates.launches_queue
        self._layers = segment_layers(config, mesh, on_cpu, works, imbalances)
        self._forward = [self._sum(layers, "forward") for layers in self._layers]
        self._backward = [self._sum(layers, "backward") for layers in self._layers]

    def of_rank(
        self, layout: Layout, divides_backward: bool = False
    ) -> tuple[list[float], list[float]]:
        """Return the seconds of the forward and of the backward of each segment of a rank, with
        collectives.

        Args:
            layout: The layout of the rank.
            divides_backward: True to return the seconds of the action I instead of the backward.
        """
        numbers = [1 + layer for stage in layout.stages for layer in layout.layers[stage]]
        numbers = [0] * layout.has_first + numbers + [len(self._layers) - 1] * layout.has_last
        backward = [self._backward[number] for number in numbers]
        if divides_backward:
            backward = [min(self._input_s(n), s) for n, s in zip(numbers, backward, strict=True)]
        return [self._forward[number] for number in numbers], backward

    def gathers(self, engine: ChunkEngine) -> list[float]:
        """Return the seconds of the gather of each chunk, in order of first use."""
        return [
            self._collective_s("all_gather", chunk.params.nbytes, chunk.groups.shard_group.axes)
            if chunk.groups.shard_group.size > 1
            else 0.0
            for chunk in chunks_by_first_use(engine)
        ]

    def total_s(self, reductions: Iterable[Reduction]) -> float:
        """Return the seconds of all collectives, one after the other."""
        return sum(r.repeats * self._collective_s(r.name, r.size_bytes, r.axis) for r in reductions)

    def _collective_s(self, operation: Operation, num_bytes: float, axes: str) -> float:
        ranks = self._groups[axes]
        return collective_s(operation, num_bytes, ranks, self._rates.links, self._rates.algorithm)

    def _sum(self, layers: Sequence[Layers], name: str) -> float:
        return sum(self._pass_s(getattr(each, name), each.number) for each in layers)

    def _input_s(self, number: int) -> float:
        layers = self._layers[number]
        if any(each.input_backward is None for each in layers):
            return self._backward[number] / 2
        return sum(self._pass_s(each.input_backward or (), each.number) for each in layers)

    def _pass_s(self, operations: Iterable, number: float) -> float:
        return pass_time(operations, self._rates, self._groups, number).total_s


def chunks_by_first_use(engine: ChunkEngine) -> list[ParamChunk]:
    """Return the chunks of an engine, trained and frozen, in order of first use."""
    chunks: dict[int, ParamChunk] = {chunk.chunk.number: chunk for chunk in engine.chunks}
    chunks |= {chunk.chunk.number: chunk for chunk in engine.frozen.chunks}
    return [chunks[number] for number in engine.numbers_by_first_use]
