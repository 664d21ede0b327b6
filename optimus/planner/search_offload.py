"""Time and memory of the layouts of a search with offload.mode = "auto".

The search for a placement of a layout takes seconds, a thousand times as long as the evaluation of
a layout whose states are on the device. A layout is therefore evaluated with offloading only under
three conditions: it does not fit on the device, lower bounds of its memory do not exclude a
placement, and the lower bound of its time is less than the time of the best layout so far. The
layout with the smallest lower bound of the time is evaluated first.
"""

from __future__ import annotations

from typing import NamedTuple

from optimus.config import Config
from optimus.config.hardware import BYTES
from optimus.config.machine import Machine
from optimus.distributed.mesh import Mesh
from optimus.planner.collectives import Operation
from optimus.planner.layouts import Layout, LayoutChecks
from optimus.planner.machine_rates import is_cpu
from optimus.planner.offload_time import decide_placements, machine_limits, time_offloaded
from optimus.planner.placement_search import reserve_of
from optimus.planner.search_memory import LayoutMemory
from optimus.planner.search_time import StepSeconds
from optimus.planner.workload import (
    Weights,
    largest_segment,
    microbatches_of,
    stage_weights,
    updated_parameters,
)

TOO_MANY_ACTIVATIONS = "the activations"
TOO_MANY_STATES = "the states"
_MASTER, _MOMENTS = 4, 8
"""Bytes of the fp32 master and of the two moments of AdamW for a parameter. If the training dtype
is fp32, a parameter has no master."""
_GRADIENT = 2
"""Smallest number of bytes that the gradient of a parameter can have on the device and in a copy to
the host."""


class _HostStates(NamedTuple):
    """For a rank with states on the host, lower bounds of the sizes that determine the time of a
    step."""

    updated: float = 0.0
    """Number of parameters that the host updates."""
    copied: float = 0.0
    """Bytes of the values of the parameters that the host updates. These values are copied to the
    device once in a step."""
    uncached: float = 0.0
    """Bytes of parameter values that are copied to the device for each use, because the cache has
    no space for them."""
    gradients: float = 0.0
    """Bytes of gradients that are copied to the host after each microbatch."""


class Candidate(NamedTuple):
    """A layout that does not fit on the device without offloading, but may fit with offloading."""

    least_s: float
    """Lower bound of the seconds of a step with offloading."""
    activations: int
    """Bytes of activations of the first or of the last pipeline rank: the larger number."""
    layout: Layout


class OffloadedLayouts:
    """Layouts of a run with offload.mode = "auto" on a machine.

    Args:
        config: The configuration. Its section `[offload]` applies to all layouts, except
            `offload.mode`.
        machine: The machine.
        name: Name of the machine, for messages.
        seconds: The times of the layouts without offloading.
        memory: The memory of the layouts without offloading.
        checks: The checks of the layouts.

    Raises:
        ConfigError: The machine has no links.
    """

    def __init__(
        self,
        config: Config,
        machine: Machine,
        name: str,
        seconds: StepSeconds,
        memory: LayoutMemory,
        checks: LayoutChecks,
    ) -> None:
        self._config, self._machine, self._name = config, machine, name
        self._limits = machine_limits(config, machine, name)
        device = "cpu" if is_cpu(machine) else "cuda"
        self._allowed = self._limits.device - reserve_of(self._limits.device, device)
        self._seconds, self._memory, self._checks = seconds, memory, checks

    def candidate(self, layout: Layout) -> Candidate | str:
        """Return the bounds of a layout that does not fit on the device without offloading. If no
        placement can fit, return the reason: `TOO_MANY_ACTIVATIONS` or `TOO_MANY_STATES`.

        The lower bound of the time is the largest of four times: the sum of the passes and of the
        reductions of gradients, the copies to the device, the copies to the host, and the updates
        on the host. The copies and updates are those of the parameters whose states are on the
        host. As few states are on the host as the device memory of the first and of the last
        pipeline rank permits.
        """
        layout = layout._replace(offload="auto")
        activations = max(self._memory.activations(layout))
        if activations > self._allowed:
            return TOO_MANY_ACTIVATIONS
        orders = (self._least_s(layout, by_layer) for by_layer in (False, True))
        possible = [seconds for seconds in orders if seconds is not None]
        return Candidate(min(possible), activations, layout) if possible else TOO_MANY_STATES

    def evaluate(self, layout: Layout) -> tuple[float, int]:
        """Return the seconds of a step and the bytes on the device of the fullest rank. Raises
        ConfigError if no placement fits."""
        run = layout.apply(self._config), layout.mesh, self._machine, self._name
        placements = decide_placements(*run, compares_cache=False)
        time = time_offloaded(*run, placements=placements).time
        return time.total_s, max(decision.memory.device for decision in placements.decisions)

    def _least_s(self, layout: Layout, by_layer: bool) -> float | None:
        """Return the lower bound of the seconds of a step with offload.order = "layer" if
        `by_layer` is True, otherwise with "microbatch". Return None if no placement can fit."""
        config, mesh = layout.apply(self._config), layout.mesh
        stages, microbatches = self._checks.stages(layout), microbatches_of(config, mesh)
        kept, weights, ranks = 0, stage_weights(config, mesh, stages), list[_HostStates]()
        if by_layer:
            if microbatches == 1 or layout.virtual_stages > 1 or config.model.num_layers % mesh.pp:
                # This order is refused, or has the same result as the other order.
                return None
            kept = microbatches * self._bytes_of_inputs(config, mesh)
            if mesh.pp > 1 and len(set(config.model.experts_by_layer)) > 1:
                # With this order, the layers are on other ranks than `weights` assumes.
                return None if kept > self._allowed else self._seconds.of_passes(layout, by_layer)
        for pp, activations in zip((0, mesh.pp - 1), self._memory.activations(layout), strict=True):
            segment = largest_segment(config, mesh, stages, pp)
            states = self._states_on_host(
                config, mesh, weights[pp], self._allowed - max(activations, kept), segment
            )
            if states is None:
                return None
            ranks.append(states)
        uses = 2 if by_layer else 2 * microbatches if layout.virtual_stages == 1 else 1
        links = self._limits.links
        least_s = self._seconds.of_passes(layout, by_layer)
        least_s += max(self._reductions_s(config, mesh, w, by_layer) for w in weights)
        for states in ranks:
            least_s = max(
                least_s,
                (states.copied + (uses - 1) * states.uncached) / links.to_device,
                states.gradients * (1 if by_layer else microbatches) / links.to_host,
                states.updated / links.host_adam,
            )
        return least_s

    def _states_on_host(
        self, config: Config, mesh: Mesh, weights: Weights, memory: int, segment: float
    ) -> _HostStates | None:
        """Return the lower bounds for a pipeline rank that has as few states on the host as the
        device memory permits; None if no placement can fit.

        A parameter with states on the device needs device memory for its value, its states and the
        sum of its gradients. A parameter with states on the host needs device memory only for its
        value, if the value is in the cache. If the values of all parameters do not fit, all states
        are on the host, and some values are copied to the device for each use.

        Args:
            config, mesh: The run.
            weights: Numbers of parameters of the rank (`stage_weights`).
            memory: Bytes of device memory for states.
            segment: Number of parameters of the largest segment of the rank. The values and
                gradients of a segment are on the device at the same time.
        """
        value, optim = BYTES[config.train.dtype], config.optim
        if optim.frozen:  # frozen parameters have no states
            return _HostStates() if memory >= 0 else None
        state = _MOMENTS + BYTES[optim.grad_dtype] + (0 if value == _MASTER else _MASTER)
        memory -= int(_GRADIENT * segment)
        updated = updated_parameters(optim.sharding, mesh, weights)
        lacking = value * sum(weights) + state * updated - memory
        on_host = min(updated, max(0.0, lacking / state))
        host = self._limits.host + self._limits.disk
        if memory < value * segment or (value + state) * on_host > host:
            return None
        shards = _shards(optim.sharding, mesh)
        reduced = (1, 1) if config.train.deterministic else (mesh.dp, mesh.dp * mesh.ep)
        uncached = max(0.0, value * sum(weights) - memory)
        return _HostStates(
            on_host,
            value * on_host,
            uncached / max(shards),
            _GRADIENT * on_host * min(a / b for a, b in zip(shards, reduced, strict=True)),
        )

    def _reductions_s(self, config: Config, mesh: Mesh, weights: Weights, by_layer: bool) -> float:
        """Return a lower bound of the seconds of the reductions of gradients in a step."""
        is_ordered, microbatches = config.train.deterministic, microbatches_of(config, mesh)
        number = microbatches if is_ordered or not by_layer else 1
        operation: Operation = "all_to_all" if is_ordered else "reduce_scatter"
        size = _GRADIENT if is_ordered else BYTES[config.optim.grad_reduce_dtype]
        if config.optim.frozen:
            return 0.0
        return number * sum(
            self._seconds.collective_s(operation, size * count, mesh, axes)
            for axes, count in zip(("dp", "dp x ep"), weights, strict=True)
            if count
        )

    def _bytes_of_inputs(self, config: Config, mesh: Mesh) -> int:
        """Return the bytes of the inputs of all layers of a pipeline rank for one microbatch."""
        train = config.train
        rows = train.seq_len // (mesh.tp if config.parallel.sequence_parallel else 1)
        size = train.microbatch_size * rows * config.model.hidden_size * BYTES[train.dtype]
        return config.model.num_layers // mesh.pp * size


def _shards(sharding: str, mesh: Mesh) -> tuple[int, int]:
    """Return a pair: the number of ranks over which the states of experts are divided, and the
    number of ranks over which the states of all other parameters are divided. The function
    `updated_parameters` has the same numbers."""
    if sharding == "none":
        return 1, 1
    return mesh.dp, mesh.dp * (mesh.ep if sharding == "epso" else 1)
