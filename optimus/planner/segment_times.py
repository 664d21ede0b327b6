"""Seconds of the segments of a rank's model, and of the collectives of the rank's chunks, on a
machine."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from optimus.chunks.buffers import ChunkState, ParamChunk
from optimus.chunks.engine import ChunkEngine
from optimus.config import Config
from optimus.config.hardware import BYTES
from optimus.config.machine import Machine
from optimus.distributed.collectives import Group
from optimus.distributed.mesh import Mesh
from optimus.errors import ConfigError
from optimus.parallel.layout import Layout
from optimus.parallel.pipeline.actions import Schedule
from optimus.parallel.pipeline.plan import plan_stages
from optimus.planner.collectives import Operation, slowest_s
from optimus.planner.machine_rates import Rates, rates_of
from optimus.planner.step_time import Layers, Overlap, Reduction, pass_time
from optimus.planner.topology import Topology
from optimus.planner.workload import (
    Works,
    fullest_rank,
    groups_of,
    offloaded_repeats,
    segment_layers,
    update_bytes,
)


class SegmentTimes:
    """Seconds of the segments of a model on a machine, for one microbatch.

    Args:
        config: The run.
        mesh: Sizes of the axes.
        rates: The rates of the machine.
        works, imbalances, topology: As for `step_of`.
    """

    def __init__(
        self,
        config: Config,
        mesh: Mesh,
        rates: Rates,
        works: Works | None = None,
        imbalances: Mapping[int, float] | None = None,
        topology: Topology | None = None,
    ) -> None:
        self._rates, self._mesh, self._groups = rates, mesh, groups_of(mesh, topology)
        on_cpu = not rates.launches_queue
        self._layers = segment_layers(config, mesh, on_cpu, works, imbalances)
        self._forward = [self._sum(layers, "forward") for layers in self._layers]
        self._backward = [self._sum(layers, "backward") for layers in self._layers]

    def of_rank(
        self, layout: Layout, divides_backward: bool = False
    ) -> tuple[list[float], list[float]]:
        """Return two lists: the seconds of the forward and of the backward of each segment of a
        rank, including the collectives within the segment.

        Args:
            layout: The layout of the rank.
            divides_backward: True to return the seconds of the action I (gradient of the input)
                instead of the backward.
        """
        numbers = [1 + layer for stage in layout.stages for layer in layout.layers[stage]]
        numbers = [0] * layout.has_first + numbers + [len(self._layers) - 1] * layout.has_last
        backward = [self._backward[number] for number in numbers]
        if divides_backward:
            backward = [min(self._input_s(n), s) for n, s in zip(numbers, backward, strict=True)]
        return [self._forward[number] for number in numbers], backward

    def gathers(self, engine: ChunkEngine) -> list[float]:
        """Return the seconds of the all_gather of each chunk, in order of first use; 0 for a chunk
        that is not divided over ranks."""
        return [
            self._collective_s("all_gather", chunk.params.nbytes, chunk.groups.shard_group.axes)
            if chunk.groups.shard_group.size > 1
            else 0.0
            for chunk in chunks_by_first_use(engine)
        ]

    def end_s(
        self,
        config: Config,
        schedule: Schedule,
        engine: ChunkEngine,
        elements: Sequence[int],
        forward_s: float,
    ) -> list[float]:
        """Return `Workload.end_s` of a rank: a list with an element for each number of chunks on
        the host, from 0 to all chunks.

        An element is the sum of three times in seconds: the collectives of all gradients, the
        update of the chunks on the device, and the gathers of the chunks on the device. With
        optim.overlap on an accelerator, these gathers overlap with the first forward and with the
        gathers of other chunks.

        Args:
            config: The run.
            schedule: The schedule of the pipeline.
            engine: The chunks of the rank.
            elements: Number of elements of each chunk that the rank updates, in order of first use.
            forward_s: Seconds of the forward of all segments for one microbatch.
        """
        mesh, chunks = self._mesh, chunks_by_first_use(engine)
        gradients_s = self.total_s(chunk_reductions(config, schedule, chunks, 0))
        overlaps = config.optim.overlap and self._rates.launches_queue
        gathers = self.gathers(engine)
        all_gathers_s, all_updated = sum(gathers), max(1, sum(elements))
        _, weights = fullest_rank(config, mesh, plan_stages(config, mesh.pp))
        update = update_bytes(config, mesh, weights, schedule.num_microbatches)
        repeats = offloaded_repeats(config, mesh, schedule.num_microbatches)
        gathered_s, updated, by_number = 0.0, 0, list[float]()
        for count, seconds in zip((0, *elements), (0.0, *gathers), strict=True):
            gathered_s += seconds if count else 0.0  # frozen chunks do not change
            updated += count
            update_s = self._rates.update_s(update.share(updated / all_updated, *repeats))
            hidden_s = forward_s + all_gathers_s - gathered_s if overlaps else 0.0
            by_number.append(gradients_s + update_s + max(0.0, gathered_s - hidden_s))
        return by_number[::-1]

    def total_s(self, reductions: Iterable[Reduction]) -> float:
        """Return the seconds that `reductions` take if they run one after the other."""
        return sum(r.repeats * self._collective_s(r.name, r.size_bytes, r.axis) for r in reductions)

    def _collective_s(self, operation: Operation, num_bytes: float, axes: str) -> float:
        groups, rates = self._groups[axes], self._rates
        return slowest_s(operation, num_bytes, groups, rates.links, rates.algorithm)

    def _sum(self, layers: Sequence[Layers], name: str) -> float:
        return sum(self._pass_s(getattr(each, name), each.number) for each in layers)

    def _input_s(self, number: int) -> float:
        layers = self._layers[number]
        if any(each.input_backward is None for each in layers):
            return self._backward[number] / 2
        return sum(self._pass_s(each.input_backward or (), each.number) for each in layers)

    def _pass_s(self, operations: Iterable, number: float) -> float:
        return pass_time(operations, self._rates, self._groups, number).total_s


def segment_times(
    config: Config,
    mesh: Mesh,
    machine: Machine,
    name: str,
    works: Works | None = None,
    topology: Topology | None = None,
) -> SegmentTimes | None:
    """Return the times of the segments of a run on a machine, or None if the machine file lacks
    rates for the run. Both a plan and a run use these times to decide on the placement of the
    states.

    Args:
        config, mesh, works, topology: As for `SegmentTimes`.
        machine: The machine.
        name: Name of the machine.
    """
    with contextlib.suppress(ConfigError):  # the plan reports the missing rate
        rates = rates_of(machine, config.train.dtype, name)
        return SegmentTimes(config, mesh, rates, works, topology=topology)
    return None


def chunks_by_first_use(engine: ChunkEngine) -> list[ParamChunk]:
    """Return the chunks of an engine, trained and frozen, in order of first use."""
    chunks: dict[int, ParamChunk] = {chunk.chunk.number: chunk for chunk in engine.chunks}
    chunks |= {chunk.chunk.number: chunk for chunk in engine.frozen.chunks}
    return [chunks[number] for number in engine.numbers_by_first_use]


def chunk_reductions(
    config: Config, schedule: Schedule, chunks: Sequence[ParamChunk], first: int
) -> tuple[Reduction, ...]:
    """Return the collectives of a step: the collectives that `ReducePerMicrobatch` runs for the
    gradients of all `chunks`, and the gathers of parameters for the chunks on the device,
    `chunks[:first]`."""
    optim, numbers = config.optim, Counter[Reduction]()

    def add(
        operation: Operation, group: Group, size: int, count: int = 1, overlap: Overlap = "nothing"
    ) -> None:
        if group.size > 1:
            numbers[Reduction(group.axes, operation, size, overlap)] += count

    times = schedule.num_microbatches if schedule.reduce_each else 1
    for number, chunk in enumerate(chunks):
        if not isinstance(chunk, ChunkState):
            continue
        groups, length = chunk.groups, len(chunk.grads)
        if config.train.deterministic:
            add("all_to_all", groups.reduce_group, chunk.grads.nbytes, times)
        else:
            size = BYTES[optim.grad_reduce_dtype] * length
            add("reduce_scatter", groups.reduce_group, size, times)
        add("all_gather", groups.replica_group, chunk.grad.nbytes)
        add("all_reduce", groups.partial_group, chunk.grad.nbytes)
        if number < first:
            overlap: Overlap = "forward" if optim.overlap else "nothing"
            add("all_gather", groups.shard_group, chunk.params.nbytes, 1, overlap)
    return tuple(reduction._replace(repeats=count) for reduction, count in numbers.items())
