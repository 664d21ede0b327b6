"""Time and memory of the layouts of a search with offload.mode = "auto".

The search for a placement of a layout takes seconds, a thousand times as long as the evaluation of
a layout whose states are on the device. Therefore only layouts that do not fit on the device are
evaluated with offloading, and none whose lower bound of the time is at least the time of the best
layout. Until a layout fits, those with the fewest activations are evaluated first, then those that
are expected to be fast.
"""

from __future__ import annotations

from typing import NamedTuple

from optimus.config import Config
from optimus.config.machine import Machine
from optimus.planner.layouts import Layout
from optimus.planner.machine_rates import is_cpu
from optimus.planner.offload_time import decide_placements, machine_limits, time_offloaded
from optimus.planner.placement_search import reserve_of
from optimus.planner.search_memory import LayoutMemory
from optimus.planner.search_time import StepSeconds


class Candidate(NamedTuple):
    """A layout that does not fit on the device without offloading."""

    estimate_s: float
    """Estimated seconds of a step with offloading."""
    least_s: float
    """Lower bound of the seconds of a step with offloading."""
    activations: int
    """Bytes of the activations of the pipeline rank that has fewest of them."""
    layout: Layout


class OffloadedLayouts:
    """Layouts of a run with offload.mode = "auto" on a machine.

    Args:
        config: The configuration, whose section `[offload]` the layouts have.
        machine: The machine.
        name: Name of the machine, for messages.
        seconds: The times of the layouts without offloading.
        memory: The memory of the layouts without offloading.

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
    ) -> None:
        self._config, self._machine, self._name = config, machine, name
        self._limits = machine_limits(config, machine, name)
        device = "cpu" if is_cpu(machine) else "cuda"
        self._allowed = self._limits.device - reserve_of(self._limits.device, device)
        self._seconds, self._memory = seconds, memory

    def candidate(self, layout: Layout, needed: int) -> Candidate | None:
        """Return a layout that needs `needed` bytes of device memory without offloading; None if
        its activations alone do not fit.

        The estimate assumes that this share of the states is on the host: the bytes that the device
        lacks, relative to those that it needs. Each pass of a microbatch copies their parameters to
        the device, each backward their gradients to the host, and the host updates them.
        """
        activations = self._memory.activations(layout)
        if activations > self._allowed:
            return None
        links, layout = self._limits.links, layout._replace(offload="auto")
        least_s = self._seconds.of_passes(layout)
        size, updated, microbatches = self._seconds.work_of_states(layout)
        share = max(0.0, 1 - self._limits.device / needed)
        to_device_s = 2 * microbatches * share * size / links.to_device
        to_host_s = microbatches * share * size / links.to_host
        estimate_s = max(least_s, to_device_s, to_host_s, share * updated / links.host_adam)
        return Candidate(estimate_s, least_s, activations, layout)

    def evaluate(self, layout: Layout) -> tuple[float, int]:
        """Return the seconds of a step and the bytes on the device of the fullest rank. Raises
        ConfigError if no placement fits."""
        run = layout.apply(self._config), layout.mesh, self._machine, self._name
        placements = decide_placements(*run)
        time = time_offloaded(*run, placements=placements).time
        return time.total_s, max(decision.memory.device for decision in placements.decisions)
