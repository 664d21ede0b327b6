"""Placement of model states: which share of the chunks is in host memory, and how many chunks the
cache on the device has.

This is a simple rule. A search over measured bandwidths can replace `choose_placement`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from torch import nn

from optimus.chunks.groups import ParamProcessGroups
from optimus.chunks.layout import ALIGNMENT, Parameter, lay_out
from optimus.chunks.options import ParamOptions
from optimus.chunks.reductions import MAX_COPYING
from optimus.config.sizes import parse_bytes
from optimus.errors import ConfigError, refuse_if
from optimus.offloading.segments import ModuleSegment

PREFETCH = 3
"""Number of segments for which the cache has space by default: that which computes, and two that
are being copied."""
_MAX_BYTES = 10**15


class Placement(NamedTuple):
    """Settings of the chunk engine that a placement determines."""

    host_share: float
    """As `Residency.host_share`."""
    slots: int
    """As `Residency.slots`."""


@dataclass(frozen=True)
class Needs:
    """Memory that a model needs on the device."""

    states: int
    """Bytes of all states, if they are on the device."""
    chunk: int
    """Bytes of the parameters of the largest chunk."""
    num_chunks: int
    chunks_per_use: int
    """Largest number of chunks that a segment needs at once."""
    gradients: int
    """Most bytes of gradients that are on the device at once, if the states are on the host."""
    largest: str
    """Name of the segment that needs `chunks_per_use` chunks."""


@dataclass(frozen=True)
class _ChunkOptions(ParamOptions):
    """Options that parameters of a chunk have in common."""

    segment: str = ""
    """The segment, unless it is a block. Large parameters, such as embeddings, then neither
    determine the chunk length of the blocks, nor share a chunk with a norm, which would need it on
    the device."""


def chunk_keys(
    named: dict[str, nn.Parameter], segments: Sequence[ModuleSegment]
) -> dict[str, ParamProcessGroups]:
    """Return the key of each parameter's chunk, in order of first use."""
    in_block = {name for segment in segments if segment.is_block for name in segment.parameters}
    ordered: dict[str, str] = {}
    for segment in segments:
        for name in segment.parameters:
            ordered.setdefault(name, "" if name in in_block else segment.name or "model")
    assert ordered.keys() == named.keys(), "a parameter is in no segment"
    return {
        name: ParamProcessGroups(
            options=_ChunkOptions(
                frozen=not named[name].requires_grad,
                dtype=named[name].dtype,
                segment=of_segment,
            )
        )
        for name, of_segment in ordered.items()
    }


def default_chunk_length(named: dict[str, nn.Parameter], segments: Sequence[ModuleSegment]) -> int:
    """Return the number of elements of the largest block."""

    def length(segment: ModuleSegment) -> int:
        return sum(-(-named[name].numel() // ALIGNMENT) * ALIGNMENT for name in segment.parameters)

    blocks = [segment for segment in segments if segment.is_block] or list(segments)
    return max(ALIGNMENT, max(map(length, blocks)))


def needs_of(
    named: dict[str, nn.Parameter],
    segments: Sequence[ModuleSegment],
    keys: dict[str, ParamProcessGroups],
    chunk_length: int,
) -> Needs:
    """Return the memory that a model needs on the device, from the layout of its chunks."""
    parameters = [Parameter(name, tuple(named[name].shape), key) for name, key in keys.items()]
    layout = lay_out(parameters, chunk_length)
    chunk_of = {slot.name: slot.chunk for slot in layout.slots}
    states = largest_params = 0
    gradients: dict[int, int] = {}
    for chunk in layout.chunks:
        options = keys[chunk.slots[0].name].options
        assert options.dtype is not None
        params, fp32 = chunk.length * options.dtype.itemsize, chunk.length * 4
        states += params
        largest_params = max(largest_params, params)
        if not options.frozen:
            gradients[chunk.number] = fp32
            states += 3 * fp32 + (fp32 if params < fp32 else 0)
    used = [{chunk_of[name] for name in s.parameters + s.inherited} for s in segments]
    numbers = range(len(segments))
    largest = max(numbers, key=lambda number: len(used[number]))
    return Needs(
        states=states,
        chunk=largest_params,
        num_chunks=len(layout.chunks),
        chunks_per_use=len(used[largest]),
        gradients=_most_gradients(used, gradients),
        largest=segments[largest].name,
    )


def _most_gradients(used: Sequence[set[int]], sizes: dict[int, int]) -> int:
    """Return the most bytes of gradients that are on the device during a backward.

    A chunk has a gradient from the backward of its last segment to that of its first one. Then it
    is copied to the host, at the same time as at most one other.

    Args:
        used: Chunks of each segment.
        sizes: Bytes of the gradients of each trained chunk.
    """
    most = 0
    for now in range(len(used)):
        earlier = set().union(*used[: now + 1])
        later = set().union(*used[now:])
        most = max(most, sum(sizes.get(number, 0) for number in earlier & later))
    return most + sum(sorted(sizes.values())[-MAX_COPYING:])


def choose_placement(needs: Needs, device_memory: int | None) -> Placement:
    """Return the placement for an amount of device memory.

    Half of the device memory is left to activations, because they are not known. If all states fit
    into the other half, they are on the device. Otherwise all states are on the host, and the
    cache of parameters has as many chunks as fit.

    Args:
        needs: Memory that the model needs.
        device_memory: Bytes; None if it is not known, for all states on the host.

    Raises:
        ConfigError: The memory is too small for the segment that needs the most.
    """
    wanted = min(needs.num_chunks, PREFETCH * needs.chunks_per_use)
    if device_memory is None:
        return Placement(1.0, wanted)
    available = device_memory // 2
    if needs.states <= available:
        return Placement(0.0, wanted)
    slots = min(needs.num_chunks, (available - needs.gradients) // max(1, needs.chunk))
    if slots < needs.chunks_per_use:
        least = 2 * (needs.gradients + needs.chunks_per_use * needs.chunk)
        raise ConfigError(
            f"device_memory = {device_memory:,} bytes is too small by "
            f"{least - device_memory:,} bytes for the segment {needs.largest or 'model'!r}: half "
            f"is left to activations; use {least:,} bytes or more"
        )
    return Placement(1.0, slots)


def check_bytes(key: str, value: str | int) -> int:
    """Return a number of bytes, such as 20000000000 for "20GB".

    Raises:
        ConfigError: The value is not a positive size, or is absurdly large.
    """
    remedy = f"{key} = {value!r}: use a size such as '20GB', '16GiB' or a number of bytes"
    if isinstance(value, bool) or not isinstance(value, (str, int)):
        raise ConfigError(remedy)
    try:
        size = value if isinstance(value, int) else parse_bytes(value)
    except ValueError:
        raise ConfigError(remedy) from None
    refuse_if(not 0 < size <= _MAX_BYTES, f"{remedy}, from 1 byte to 1000 TB")
    return size


def check_number(key: str, value: object, low: float, high: float = math.inf) -> float:
    """Return a finite number in [low, high].

    Raises:
        ConfigError: The value is not such a number.
    """
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ConfigError(f"{key} = {value!r} is not a number; use a number from {low:g}")
    limit = f" to {high:g}" if high < math.inf else ""
    refuse_if(
        not (math.isfinite(value) and low <= value <= high),
        f"{key} = {value!r} is out of range; use a finite number from {low:g}{limit}",
    )
    return float(value)


def check_betas(betas: Sequence[float]) -> tuple[float, float]:
    """Return AdamW's betas, two numbers in [0, 1).

    Raises:
        ConfigError: They are not such numbers.
    """
    remedy = f"betas = {betas!r}: use two numbers from 0 to less than 1, such as (0.9, 0.999)"
    try:
        first, second = (float(beta) for beta in betas)
    except (TypeError, ValueError):
        raise ConfigError(remedy) from None
    refuse_if(not (0 <= first < 1 and 0 <= second < 1), remedy)
    return first, second
