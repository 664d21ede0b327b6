"""Values of a machine's hardware, each with its source: FLOP/s and memory of devices, and bytes per
second of memory, network and storage.

The tables belong to the file of a machine, `configs/machine/NAME.toml`. A value that has no source
is left out of the file. `optimus.planner.step_time` then uses a default and reports the key.
"""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Annotated, Literal

from pydantic import AfterValidator, Field, model_validator

from optimus.config.section import Count, CountOrZero, Section

Dtype = Literal["fp32", "bf16", "fp16"]
BYTES: dict[str, int] = {"fp32": 4, "bf16": 2, "fp16": 2}
"""Bytes of an element of each dtype."""
MAX_PRODUCT_ERROR = 0.1
"""Largest permitted error of the modelled FLOP/s of matrix products: the geometric mean of
(modelled FLOP/s / measured FLOP/s) must differ from 1 by at most this value."""


_SMALLEST, _LARGEST = 1e-12, 1e30
"""Limits of a `Quantity`. With values outside these limits, planned times could be infinite."""
_COLLECTIVES = ("all_gather", "reduce_scatter", "all_to_all", "send")


def _check_source(text: str) -> str:
    if len(text.strip()) < 4:
        raise ValueError("must name the page, paper or command that gives the value")
    return text


def _check_quantity(value: float) -> float:
    if not _SMALLEST <= value <= _LARGEST:
        raise ValueError(f"must be from {_SMALLEST:.0e} to {_LARGEST:.0e}; correct the value")
    return value


Quantity = Annotated[float, AfterValidator(_check_quantity)]
"""A rate, duration, size or ratio of hardware."""


class Figure(Section):
    """A number with its source."""

    value: Quantity
    """The number, in the unit of the key."""
    source: Annotated[str, AfterValidator(_check_source)]
    """Page, paper or command that gives the number."""
    date: Annotated[str, Field(pattern=r"^\d{4}-\d{2}(-\d{2})?$")]
    """Date of the source as YYYY-MM or YYYY-MM-DD. If the source has no date, the date on which it
    was read."""
    fitted_on: str = ""
    """Published rows from which the number was fitted; empty if it was measured or specified. These
    rows cannot test a prediction that uses the number."""


def _refuse_above(name: str, achieved: float, limit: float) -> None:
    if achieved > limit:
        raise ValueError(
            f"{name} = {achieved:.6g} is above the peak {limit:.6g}; correct one of the values"
        )


def size_factor(half_size: float, *sizes: float) -> float:
    """Return the time of a matrix product, relative to its time at the FLOP/s of very large
    products. The factors (1 + half_size / size) of all `sizes` are multiplied. `Products` describes
    this model."""
    return math.prod(1 + half_size / size for size in sizes)


class MeasuredProduct(Section):
    """Measured FLOP/s of a matrix product [rows, inner] x [inner, columns]."""

    rows: Count
    inner: Count
    columns: Count
    flops: Figure
    """FLOP/s, where a multiply-add is 2 FLOPs."""


class MeasuredAttention(Section):
    """Measured FLOP/s of a kernel that computes causal attention."""

    seq_len: Count
    head_size: Count
    forward: Figure
    """FLOP/s of the forward pass, which has 2 matrix products. Masked scores are not counted."""
    backward: Figure
    """FLOP/s of the backward pass, which has 5 matrix products. Masked scores are not counted."""


class Products(Section):
    """FLOP/s of matrix products in a dtype on one device, while all devices of the node compute.

    The modelled FLOP/s of a product are efficiency * peak, divided by (1 + half_size / size) for
    each of the sizes `rows`, `inner` and `columns` of the product.
    """

    peak: Figure
    """Peak FLOP/s of the device, which no product exceeds."""
    efficiency: Figure | None = None
    """Share of `peak` that very large products reach, below 1. Default: the share for which the
    geometric means of the modelled FLOP/s and of the FLOP/s in `measured` are equal."""
    half_size: Figure | None = None
    """Size of a dimension, in elements, that halves the FLOP/s of a product, compared with a very
    large dimension. Default: the FLOP/s do not depend on the sizes."""
    measured: Annotated[tuple[MeasuredProduct, ...], Field(strict=False)] = ()
    """Measured FLOP/s of products of various shapes. The geometric mean of (modelled FLOP/s /
    measured FLOP/s) must differ from 1 by at most 10 %."""
    attention: Annotated[tuple[MeasuredAttention, ...], Field(strict=False)] = ()
    """FLOP/s of attention by the length of sequences, in ascending order. Between two lengths, the
    FLOP/s are linear in the logarithm of the length. Default: the FLOP/s of products."""

    @model_validator(mode="after")
    def _check(self) -> Products:
        if self.efficiency is not None and self.efficiency.value >= 1:
            raise ValueError(
                f"efficiency = {self.efficiency.value} must be below 1, since products do not "
                "exceed the peak"
            )
        for product in self.measured:
            _refuse_above("measured.flops", product.flops.value, self.peak.value)
        for attention in self.attention:
            for name in ("forward", "backward"):
                rate = getattr(attention, name).value
                _refuse_above(f"attention.{name}", rate, self.peak.value)
        share = self._measured_share()
        if share is not None and self.best_share is not None:
            ratio = self.best_share / share
            if abs(ratio - 1) > MAX_PRODUCT_ERROR:
                raise ValueError(
                    f"efficiency and half_size give {ratio:.2f} times the FLOP/s in measured; "
                    f"correct the values, so that the difference is at most {MAX_PRODUCT_ERROR:.0%}"
                )
        return self

    def _measured_share(self) -> float | None:
        """Return the share of the peak for which the geometric means of the modelled and of the
        measured FLOP/s are equal; None without measured FLOP/s."""
        if not self.measured:
            return None
        half = 0.0 if self.half_size is None else self.half_size.value
        logs = [
            math.log(p.flops.value * size_factor(half, p.rows, p.inner, p.columns))
            for p in self.measured
        ]
        return math.exp(sum(logs) / len(logs)) / self.peak.value

    @property
    def best_share(self) -> float | None:
        """Share of the peak that very large products reach; None if it is unknown."""
        if self.efficiency is not None:
            return self.efficiency.value
        share = self._measured_share()
        return None if share is None else min(share, 1.0)


class Device(Section):
    """The device of one rank: a GPU, a tile of a GPU, or the cores of a rank on a CPU."""

    name: str
    """Name of the device in messages: a substring of the name that the driver reports."""
    memory_bytes: Figure
    """Capacity of the device's memory."""
    memory_peak: Figure | None = None
    """Maximum number of bytes per second that the memory transfers."""
    memory_achieved: Figure | None = None
    """Bytes per second that large copies and sums transfer. Default: `memory_peak`."""
    activations_achieved: Figure | None = None
    """Bytes per second that element-wise operations and norms transfer when they process
    activations. Unlike copies, these operations also compute. Each of them writes a new tensor.
    Default: `memory_achieved`."""
    gradients_achieved: Figure | None = None
    """Bytes per second that the device reads or writes while it computes the norm of gradients,
    searches gradients for values that are not finite, or fills gradients with zeros. Default:
    `memory_achieved`."""
    new_memory_achieved: Figure | None = None
    """Bytes per second at which the operating system provides the pages of newly allocated memory
    when a program first writes to them. The time of the write itself is not included. Default: new
    memory takes no additional time, as with the caching allocators of accelerators."""
    product_code_bytes: Figure | None = None
    """Bytes of code that the library generates and keeps for each shape of a product, as oneDNN
    does on a CPU. Default: 0."""
    launch_s: Figure | None = None
    """Seconds that the host needs to launch one operation. During a launch, the device runs
    earlier operations, so that launches make a step longer only if operations take less time than
    their launches."""
    threads: CountOrZero = 0
    """Number of threads of a rank while the values of this table were measured; 0 for
    accelerators."""
    products: Annotated[dict[Dtype, Products], Field(default_factory=dict)]
    """FLOP/s of matrix products, by dtype."""

    @model_validator(mode="after")
    def _check(self) -> Device:
        for name in ("memory_achieved", "activations_achieved", "gradients_achieved"):
            achieved = getattr(self, name)
            if achieved is not None and self.memory_peak is not None:
                _refuse_above(name, achieved.value, self.memory_peak.value)
        return self

    @property
    def memory_rate(self) -> float | None:
        """Bytes per second of the device's memory: `memory_achieved` or, if this value is absent,
        `memory_peak`; None if both values are absent."""
        figure = self.memory_achieved or self.memory_peak
        return None if figure is None else figure.value


class MeasuredMessage(Section):
    """Duration of a step of a ring collective. In a step, each rank sends a message to the next
    rank. With n ranks, each message of a collective has 1/n of the buffer. An all_reduce has
    2 (n - 1) steps. An all_gather, reduce_scatter or all_to_all has n - 1 steps. A send has a
    single step, whose message is the whole buffer."""

    operation: Literal["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send"]
    num_bytes: Count
    """Bytes of the message."""
    seconds: Figure


class Level(Section):
    """A level of the network, with domains of ranks, such as nodes. Two ranks send to each other
    with the bandwidth of the first level that has both ranks in the same domain.

    The domains of a level consist of domains of the previous level. The ranks of a domain have
    consecutive numbers.
    """

    name: str
    """Name of the domains, such as node or group."""
    ranks: CountOrZero = 0
    """Number of ranks in a domain; 0: all ranks of the machine."""
    peak: Figure
    """Bytes per second that each rank sends to ranks outside its domain of the previous level,
    while all ranks of that domain send. `taper` can reduce this rate."""
    achieved: Figure | None = None
    """Measured number of bytes per second for which `peak` is the maximum. Default: `peak`."""
    taper: Figure | None = None
    """Factor by which the bytes per second of this level are multiplied if the ranks of all domains
    send at the same time. The factor is at most 1, and below 1 if few links connect the domains.
    Default: 1."""
    latency_s: Figure | None = None
    """Seconds that a step of a collective takes in addition to the transfer. Default: 0."""
    operations: Annotated[dict[str, Figure], Field(default_factory=dict)]
    """Maps a collective to the measured number of bytes per second that one rank sends in the
    collective. The value is below `achieved` if the collective waits, or transfers more bytes than
    its algorithm needs. Default for a collective without a value: `achieved`."""

    messages: Annotated[tuple[MeasuredMessage, ...], Field(strict=False)] = ()
    """Durations of the steps of collectives, by operation and size of the message, in ascending
    order of the sizes. Between two sizes, the logarithm of the duration is linear in the logarithm
    of the size. Default: `latency_s` plus the time of the message at the rate of the operation."""

    @model_validator(mode="after")
    def _check(self) -> Level:
        if self.achieved is not None:
            _refuse_above("achieved", self.achieved.value, self.peak.value)
        for name, figure in self.operations.items():
            if name not in _COLLECTIVES:
                known = ", ".join(_COLLECTIVES)
                raise ValueError(f"operations.{name}: no such collective; use one of {known}")
            _refuse_above(f"operations.{name}", figure.value, self.peak.value)
        for message in self.messages:
            rate = message.num_bytes / message.seconds.value
            _refuse_above(f"messages of {message.operation}: rate", rate, self.peak.value)
        if self.taper is not None and self.taper.value > 1:
            raise ValueError(f"taper = {self.taper.value} must be at most 1")
        return self

    @property
    def rate(self) -> float:
        """`achieved` (default: `peak`) times `taper`: the bytes per second that one rank sends if
        the ranks of all domains send."""
        rate = (self.achieved or self.peak).value
        return rate if self.taper is None else rate * self.taper.value

    @property
    def step_s(self) -> float:
        """Latency of a step of a collective in seconds."""
        return 0.0 if self.latency_s is None else self.latency_s.value


class Storage(Section):
    """A file system."""

    name: str
    """Name of the file system."""
    write: Figure
    """Maximum number of bytes per second that all nodes together write."""
    read: Figure | None = None
    """Maximum number of bytes per second that all nodes together read."""


def check_levels(levels: tuple[Level, ...]) -> tuple[Level, ...]:
    """Return `levels`. Raises ValueError unless the domains of each level consist of domains of the
    previous level."""
    for inner, outer in pairwise(levels):
        if inner.ranks == 0 or (outer.ranks and outer.ranks % inner.ranks):
            raise ValueError(
                f"ranks = {outer.ranks} of {outer.name} must be a multiple of "
                f"ranks = {inner.ranks} of {inner.name}; only the last level may have 0"
            )
    return levels
