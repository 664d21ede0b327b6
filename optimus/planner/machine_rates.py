"""Rates of the operations of a step on a machine, from its machine file."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

from optimus.config.hardware import BYTES, Device, Dtype, size_factor
from optimus.config.machine import Machine
from optimus.errors import ConfigError
from optimus.planner.collectives import Algorithm, Links, links_of


class ProductRates(NamedTuple):
    """Rates of matrix products, from the machine file (`Products`)."""

    peak: float
    """Peak FLOP/s of the device."""
    share: float
    """Share of `peak` that very large products reach."""
    half_size: float
    """Value of `Products.half_size`; 0 if the rate does not depend on the sizes of a product."""
    attention: tuple[tuple[float, float, float], ...] = ()
    """Tuples (length of a sequence, FLOP/s of fused attention in forward, FLOP/s in backward), in
    ascending order of length. If empty, the rates of matrix products apply to attention."""

    def attention_rate(self, seq_len: float, head_size: float, backward: bool) -> float:
        """Return the FLOP/s of fused attention in forward, or in backward if `backward` is True."""
        if not self.attention:
            return self.rate(seq_len, head_size, seq_len)
        column = 2 if backward else 1
        first, last = self.attention[0], self.attention[-1]
        if seq_len <= first[0] or seq_len >= last[0]:
            return (first if seq_len <= first[0] else last)[column]
        for low, high in pairwise(self.attention):
            if seq_len <= high[0]:
                share = math.log(seq_len / low[0]) / math.log(high[0] / low[0])
                return low[column] + share * (high[column] - low[column])
        raise AssertionError(seq_len)

    def rate(self, rows: float, inner: float, columns: float) -> float:
        """Return the FLOP/s of a product [rows, inner] x [inner, columns]."""
        return self.peak * self.share / size_factor(self.half_size, rows, inner, columns)


class UpdateBytes(NamedTuple):
    """Bytes that a rank transfers in the update of a step."""

    optimizer: float = 0.0
    """Bytes that the optimizer reads and writes."""
    norm: float = 0.0
    """Bytes of reduced gradients that are read to compute their norm."""
    gradients: float = 0.0
    """Sum of two numbers: bytes of gradients that are read before each reduction, to find values
    that are not finite; and bytes of gradients that are set to zero."""
    new: float = 0.0
    """Bytes of gradients and parameters that a rank frees within a step and therefore allocates
    again in each step."""

    def share(self, updated: float, on_device: float, on_host: float) -> UpdateBytes:
        """Return the bytes that the device of a rank transfers if it updates only the share
        `updated` (0 to 1) of the rank's states. The host updates the other states and computes the
        norm of their gradients. The device still checks all gradients and sets them to zero. If
        `updated` is less than 1, the bytes of these two operations are multiplied by `on_device`
        for gradients whose states are on the device, and by `on_host` for the other gradients."""
        repeats = updated * on_device + (1 - updated) * on_host
        return self._replace(
            optimizer=updated * self.optimizer,
            norm=updated * self.norm,
            gradients=(repeats if updated < 1 else 1.0) * self.gradients,
        )


@dataclass(frozen=True)
class Rates:
    """The rates of a machine for steps in one dtype."""

    products: ProductRates
    memory: float
    """Bytes per second of large copies and sums."""
    launch_s: float
    """Seconds that the host needs to start an operation."""
    launches_queue: bool
    """True if the device runs operations while the host starts later operations, as with an
    accelerator. False for a CPU, which first starts an operation and then computes it, so that the
    two times add up."""
    element_bytes: int
    links: Links
    algorithm: Algorithm
    missing: tuple[str, ...]
    """Keys of rates that the machine file lacks."""
    fitted_on: tuple[str, ...] = ()
    """Published measurements (rows of tables) to which rates were fitted."""
    activations: float | None = None
    """Bytes per second of element-wise operations and norms of activations; None for the rate
    `memory`."""
    runs_ahead: bool = False
    """True if the host can start operations of later passes while the device computes. False if the
    host starts the operations of a pass only when the pass begins, as the closed formulas of
    `step_time` assume. If `launch_s` was fitted with these formulas, `runs_ahead` must be False."""
    new_memory: float = math.inf
    """Bytes per second at which the operating system maps new memory."""

    gradients: float | None = None
    """Bytes per second at which `UpdateBytes.norm` and `UpdateBytes.gradients` are transferred;
    None for the rate `memory`."""

    def update_s(self, update: UpdateBytes) -> float:
        """Return the seconds of the update of a rank."""
        gradients_s = (update.norm + update.gradients) / (self.gradients or self.memory)
        return update.optimizer / self.memory + gradients_s + update.new / self.new_memory


def is_cpu(machine: Machine) -> bool:
    """Return True if the device of a machine is a CPU. Only machine files for CPUs have a number of
    threads."""
    return machine.device is not None and machine.device.threads > 0


def rates_of(machine: Machine, dtype: Dtype, name: str = "the machine file") -> Rates:
    """Return the rates of a machine in a dtype.

    Args:
        machine: The machine.
        dtype: Dtype of the products.
        name: Name of the machine, for messages.

    Raises:
        ConfigError: The machine file has no rate of products in this dtype, or no rate of the
            memory.
    """
    device: Device | None = machine.device
    remedy = "add it with its source, or measure it with optimus bench machine --out FILE"
    if device is None or dtype not in device.products:
        raise ConfigError(f"{name}: device.products.{dtype} is missing; {remedy}")
    memory, products = device.memory_rate, device.products[dtype]
    if memory is None:
        raise ConfigError(f"{name}: device.memory_peak is missing; {remedy}")
    missing = []
    if products.best_share is None:
        missing.append(f"device.products.{dtype}.efficiency")
    if products.half_size is None:
        missing.append(f"device.products.{dtype}.half_size")
    if device.memory_achieved is None:
        missing.append("device.memory_achieved")
    if device.launch_s is None:
        missing.append("device.launch_s")
    for index, level in enumerate(machine.levels):
        if level.achieved is None:
            missing.append(f"levels.{index}.achieved")
        if level.latency_s is None:
            missing.append(f"levels.{index}.latency_s")
    launch_s = 0.0 if device.launch_s is None else device.launch_s.value
    return Rates(
        ProductRates(
            products.peak.value,
            1.0 if products.best_share is None else products.best_share,
            0.0 if products.half_size is None else products.half_size.value,
            tuple(
                (float(a.seq_len), a.forward.value, a.backward.value) for a in products.attention
            ),
        ),
        memory,
        launch_s,
        not is_cpu(machine),
        BYTES[dtype],
        links_of(machine.levels),
        machine.algorithm,
        tuple(missing),
        _fitted_on(machine, dtype),
        None if device.activations_achieved is None else device.activations_achieved.value,
        device.launch_s is not None and not device.launch_s.fitted_on and not is_cpu(machine),
        math.inf if device.new_memory_achieved is None else device.new_memory_achieved.value,
        None if device.gradients_achieved is None else device.gradients_achieved.value,
    )


def _fitted_on(machine: Machine, dtype: Dtype) -> tuple[str, ...]:
    """Return the published measurements to which rates of a machine were fitted, without
    duplicates."""
    assert machine.device is not None
    products = machine.device.products[dtype]
    figures = [products.efficiency, products.half_size]
    figures += [machine.device.memory_achieved, machine.device.launch_s]
    figures += [level.achieved for level in machine.levels]
    rows = (figure.fitted_on for figure in figures if figure is not None and figure.fitted_on)
    return tuple(dict.fromkeys(rows))
