"""Placement of model states: the chunks in host memory, the size of the cache on the device, and
the chunks with states on disk.

Without an example batch, `choose_placement` applies a simple rule. With an example batch, a profile
of a training step computes the activations, and a search selects the placement.
"""

from __future__ import annotations

import copy
import inspect
import logging
import math
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from optimus import platform
from optimus.chunks.disk import staging_bytes
from optimus.chunks.engine import ChunkEngine
from optimus.chunks.groups import ParamProcessGroups
from optimus.chunks.layout import Parameter, lay_out
from optimus.chunks.memory import Tier
from optimus.chunks.optimizer import Optimizer
from optimus.chunks.placement import Early, NoPlacement, TierBytes, search, spread_evenly
from optimus.chunks.reductions import most_gradients
from optimus.chunks.residency import Residency, Use
from optimus.chunks.segments import ModelSegment, register_module
from optimus.chunks.state_file import free_bytes
from optimus.errors import ConfigError, counted, one_line, refuse_if
from optimus.offloading.checks import check_count, check_number
from optimus.offloading.guard import tensors_in
from optimus.offloading.segments import ModuleSegment, find_segments
from optimus.planner.placement_search import reserve_of
from optimus.planner.rates import find_links
from optimus.rank.profile import UseProfile, UseTracker

logger = logging.getLogger(__name__)

_TRIMMED_BYTES = 1 << 20
"""Smallest number of bytes of released parameters after which `platform.trim_heap` is called."""
PREFETCH = 3
"""Number of segments for which the cache has space by default: a segment that computes, and two
segments whose parameters are being copied."""


class OffloadPlacement(NamedTuple):
    """Settings of the chunk engine that `optimus.offload` selects."""

    host_share: float
    """As `Residency.host_share`."""
    slots: int
    """As `Residency.slots`."""
    disk_share: float = 0.0
    """As `Residency.disk_share`."""
    host_bytes: int = 0
    """Bytes of the states in host memory, including the spare buffers of `early_adam` = "on"."""
    device_bytes: float = math.inf
    """Largest sum of the bytes of the states on the device and of the cache."""

    def residency(self, directory: str) -> Residency:
        """Return the settings of the chunk engine. `directory` is that of the states on disk."""
        return Residency(
            divides_gradients=True,
            host_share=self.host_share,
            disk_share=self.disk_share,
            disk=directory,
            disk_key="disk",
            slots=self.slots,
        )


@dataclass(frozen=True)
class OffloadLimits:
    """Limits of the memory that `optimus.offload` uses, in bytes."""

    device: int | None
    """None if the user has set no limit."""
    host: int
    disk: int | None
    """None for all bytes that are free on the disk."""
    directory: str
    """Directory of the states on disk; "" to allow no states on disk."""


class ModelChunks(NamedTuple):
    """The chunks of a model."""

    named: dict[str, nn.Parameter]
    """All parameters by name."""
    segments: Sequence[ModuleSegment]
    keys: dict[str, ParamProcessGroups]
    """The result of `chunk_keys`."""
    length: int
    """Target length of a chunk, in elements."""
    rule: Optimizer
    """The optimizer, which updates the chunks."""

    def on_meta(self, placement: OffloadPlacement, with_spare: bool = False) -> ChunkEngine:
        """Return an engine for a placement, on the meta device and therefore without memory. With
        `with_spare`, all chunks that can be updated early have spare buffers."""
        engine = ChunkEngine(
            {name: _meta_parameter(self.named[name], False) for name in self.keys},
            self.keys.__getitem__,
            self.rule,
            dtype=torch.float32,
            chunk_length=self.length,
            deterministic=True,
            residency=Residency(
                divides_gradients=True,
                host_share=placement.host_share,
                disk_share=placement.disk_share,
            ),
        )
        engine.add_spare(math.inf if with_spare else 0.0)
        return engine


class ReleasedValues:
    """Function that returns the initial values of a parameter. The engine copies these values to a
    chunk, and then their memory is released.

    glibc keeps the memory of released tensors of less than 32 MB. Therefore this class returns free
    memory of the heap to the operating system after each release of about `chunk_bytes` of values.

    Args:
        named: The parameters by name.
        chunk_bytes: Bytes of a chunk of fp32 parameters.
    """

    def __init__(self, named: dict[str, nn.Parameter], chunk_bytes: int) -> None:
        self._named, self._limit = named, max(chunk_bytes, _TRIMMED_BYTES)
        self._released = 0
        """Bytes of the values that were returned since the last call of `platform.trim_heap`."""

    def __call__(self, name: str) -> Tensor:
        """Return the values of a parameter. The caller must have released all earlier results."""
        if self._released >= self._limit:
            platform.trim_heap()
            self._released = 0
        self._released += self._named[name].nbytes
        return self._named[name].data


@dataclass(frozen=True)
class Needs:
    """Memory that a model needs on the device, without activations."""

    states: int
    """Bytes of all states, if all of them are on the device."""
    chunk: int
    """Bytes of the parameters of the largest chunk."""
    num_chunks: int
    chunks_per_use: int
    """Largest number of chunks that a segment needs at the same time."""
    gradients: int
    """Largest number of bytes of gradients on the device at the same time, if all states are on the
    host."""
    largest: str
    """Name of the segment that needs `chunks_per_use` chunks."""


def _check_embeddings(model: nn.Module, chunks: ModelChunks, placement: OffloadPlacement) -> None:
    """Raise ConfigError if an embedding whose forward writes to the weight (`max_norm`) is
    offloaded."""
    kinds = (nn.Embedding, nn.EmbeddingBag)
    limited = {
        id(module.weight): (name, module.max_norm)
        for name, module in model.named_modules()
        if isinstance(module, kinds) and module.max_norm is not None
    }
    if not (limited and placement.host_share):
        return
    engine = chunks.on_meta(placement)
    states = [state for state in (*engine.chunks, *engine.frozen.chunks) if state.is_transient]
    for slot in (slot for state in states for slot in state.chunk.slots):
        if embedding := limited.get(id(chunks.named[slot.name])):
            raise ConfigError(
                f"{embedding[0]} has max_norm = {embedding[1]} and changes its offloaded weight in "
                "forward; use max_norm=None, or host_share=0.0"
            )


def select_placement(
    model: nn.Module,
    chunks: ModelChunks,
    device: torch.device,
    limits: OffloadLimits,
    host_share: float | None,
    cache_chunks: int,
    example: Mapping[str, Any] | None,
    early: Early,
) -> OffloadPlacement:
    """Return the placement that the arguments of `optimus.offload` select.

    Args:
        model: The model.
        chunks: Chunks of the model.
        device: Device on which the model computes.
        limits: Limits of the memory that training uses.
        host_share, cache_chunks, example: As for `optimus.offload`.
        early: The value of `early_adam`.

    Raises:
        ConfigError: The arguments contradict each other, or no placement fits.
    """
    refuse_if(
        host_share is not None and limits.device is not None,
        "device_memory and host_share each select the placement; use only one of these arguments",
    )
    total = None if device.type == "cpu" else platform.device_memory(device)
    if limits.device is not None and total is not None and limits.device > total:
        raise ConfigError(
            f"device_memory = {limits.device:,} bytes is more than the {total:,} bytes of "
            f"{device}; use less"
        )
    refuse_if(
        limits.disk is not None and not limits.directory,
        f"disk_memory = {limits.disk} has no effect without disk; set disk to a directory, or "
        "leave disk_memory out",
    )
    if example is None:
        needs = needs_of(chunks.named, chunks.segments, chunks.keys, chunks.length)
        placement = _by_rule(needs, total, limits.device, host_share, cache_chunks)
    else:
        refuse_if(
            limits.device is None or bool(cache_chunks),
            "example needs device_memory and selects the size of the cache; set device_memory, and "
            "leave out host_share and cache_chunks",
        )
        placement = _by_search(model, chunks, device, limits, example, early)
    refuse_if(
        early == "on" and not placement.host_share,
        "early_adam = 'on' has no effect, because all states are on the device; use 'off'",
    )
    _check_embeddings(model, chunks, placement)
    placement = _with_disk(chunks, placement, limits, early == "on")
    on_device = sum(p.nbytes for p in chunks.named.values() if p.device.type != "cpu")
    if placement.host_share and limits.device is not None and on_device > limits.device:
        raise ConfigError(
            f"the model is on {device} already, with {on_device:,} bytes of parameters, more than "
            f"device_memory = {limits.device:,}; load the model on the CPU"
        )
    return placement


def _by_rule(
    needs: Needs,
    total: int | None,
    device_memory: int | None,
    host_share: float | None,
    cache_chunks: int,
) -> OffloadPlacement:
    """Return the placement without an example batch. `total` is the memory of the accelerator in
    bytes; None on a CPU."""
    if host_share is None:
        placement = choose_placement(needs, total if device_memory is None else device_memory)
    else:
        share = check_number("host_share", host_share, 0.0, 1.0)
        placement = choose_placement(needs, None)._replace(host_share=share)
    if slots := check_count("cache_chunks", cache_chunks):
        refuse_if(
            slots < needs.chunks_per_use,
            f"cache_chunks = {slots}: the segment {needs.largest or 'model'!r} needs "
            f"{counted(needs.chunks_per_use, 'chunk')} at once; use {needs.chunks_per_use} or more",
        )
        refuse_if(
            not placement.host_share,
            f"cache_chunks = {slots} has no effect, because all states are on the device; leave "
            "cache_chunks out",
        )
        needed = 2 * (slots * needs.chunk + needs.gradients)
        if device_memory is not None and needed > device_memory:
            raise ConfigError(
                f"cache_chunks = {slots} needs {needed:,} bytes (half of them for activations), "
                f"but device_memory is {device_memory:,}; use fewer chunks, or leave "
                "cache_chunks out"
            )
        placement = placement._replace(slots=slots)
    return placement


def choose_placement(needs: Needs, device_memory: int | None) -> OffloadPlacement:
    """Return the placement for an amount of device memory.

    Half of the device memory is left to activations, because their size is not known. If all states
    fit into the other half, all states are on the device. Otherwise all states are on the host, and
    the cache of parameters has as many chunks as fit into this half.

    Args:
        needs: Memory that the model needs.
        device_memory: Device memory in bytes. If it is None, all states are on the host.

    Raises:
        ConfigError: The device memory is too small for the segment that needs the most memory.
    """
    wanted = min(needs.num_chunks, PREFETCH * needs.chunks_per_use)
    if device_memory is None:
        return OffloadPlacement(1.0, wanted)
    available = device_memory // 2
    if needs.states <= available:
        return OffloadPlacement(0.0, wanted)
    slots = min(needs.num_chunks, (available - needs.gradients) // max(1, needs.chunk))
    if slots < needs.chunks_per_use:
        least = 2 * (needs.gradients + needs.chunks_per_use * needs.chunk)
        raise ConfigError(
            f"device_memory = {device_memory:,} bytes is too small by "
            f"{least - device_memory:,} bytes for the segment {needs.largest or 'model'!r}: half "
            f"is left to activations; use {least:,} bytes or more"
        )
    return OffloadPlacement(1.0, slots, device_bytes=available)


def _by_search(
    model: nn.Module,
    chunks: ModelChunks,
    device: torch.device,
    limits: OffloadLimits,
    example: Mapping[str, Any],
    early: Early,
) -> OffloadPlacement:
    """Return the placement with the shortest simulated step for an example batch. Raises
    ConfigError if no placement fits."""
    refuse_if(
        not isinstance(example, Mapping),
        f"example is a {type(example).__name__}; use a dict of the arguments of the forward",
    )
    uses = profile_step(model, example, device.type == "cpu")
    before = accumulate((use.kept for use in uses), initial=0)
    activations = max(live + use.peak for live, use in zip(before, uses, strict=False))
    needs = needs_of(chunks.named, chunks.segments, chunks.keys, chunks.length)
    assert limits.device is not None
    memory = limits.device - reserve_of(limits.device, device.type)
    if needs.states + activations <= memory:
        return OffloadPlacement(0.0, needs.num_chunks)
    disk = Path(limits.directory) if limits.directory else None
    dtype = next(model.parameters()).dtype
    links = find_links(device, dtype, logger.warning, 1, disk)
    flops = links.flops_of("fp32" if dtype is torch.float32 else "bf16")
    forward, backward = [0.0] * len(chunks.segments), [0.0] * len(chunks.segments)
    for use in uses:
        times = backward if use.backward else forward
        times[use.segment] += use.flops / flops + use.moved / links.memory
    engine = chunks.on_meta(OffloadPlacement(1.0, 0))
    of_engine = [
        ModelSegment(s.name, 0, s.parameters + s.inherited, lambda *hooks: None)
        for s in chunks.segments
    ]
    engine.attach(of_engine, passes=())
    in_chunks = engine.transient_needs(of_engine)
    engine.params.replan([Use(u.segment, u.backward, in_chunks[u.segment]) for u in uses])
    work = engine.workload(
        "microbatch", chunks.length, of_engine, forward, backward, activations, reductions=1
    )
    on_disk = (
        min(free_bytes(Path(limits.directory), "disk"), limits.disk or _UNLIMITED) if disk else 0
    )
    try:
        best = search([work], TierBytes(memory, limits.host, on_disk), links, early)
    except NoPlacement as problem:
        missing = {
            "device_memory": problem.needs.device - memory,
            "the memory of the host": problem.needs.host - limits.host,
            "disk_memory": problem.needs.disk - on_disk,
        }
        name = next(name for name, size in missing.items() if size > 0)
        raise ConfigError(
            f"{name} is too small by {counted(missing[name], 'byte')} for the example, whose "
            f"activations need {counted(activations, 'byte')}; use gradient checkpointing, a "
            "smaller batch, or more memory"
        ) from None
    logger.info(
        "%.0f %% of the chunks are on the host, and the cache has %s",
        100 * (best.num_host - 0.5) / len(work.chunks),
        counted(best.slots, "chunk"),
    )
    return OffloadPlacement(
        (best.num_host - 0.5) / len(work.chunks),
        best.slots,
        max(0.0, best.num_disk - 0.5) / max(1, work.num_trained(best.num_host)),
        device_bytes=memory - activations,
    )


_UNLIMITED = 1 << 62


def _with_disk(
    chunks: ModelChunks, placement: OffloadPlacement, limits: OffloadLimits, with_spare: bool
) -> OffloadPlacement:
    """Return a copy of a placement with as few states on disk as the host memory allows, and with
    the resulting `host_bytes`. If `with_spare`, `host_bytes` includes the spare buffers for early
    updates of all chunks without states on disk.

    Raises:
        ConfigError: The host memory or the space on disk is too small.
    """
    host = chunks.on_meta(placement, with_spare).state_bytes()["host"]
    if host <= limits.host or not placement.host_share:
        return placement._replace(host_bytes=host)
    sizes = _bytes_with_disk(chunks.on_meta(placement._replace(disk_share=0.0), with_spare))
    count = len(sizes) - 1
    least_bytes = min(sizes)
    if not limits.directory or least_bytes > limits.host:
        missing = (least_bytes if limits.directory else host) - limits.host
        where = " even with masters and moments on disk" if limits.directory else ""
        remedy = "" if limits.directory else "set disk to a directory on a local disk, "
        if with_spare and not limits.directory:
            where, remedy = " with early_adam = 'on'", f"use early_adam = 'auto', {remedy}"
        raise ConfigError(
            f"the states of the model need {counted(limits.host + missing, 'byte')} of host memory"
            f"{where}, {counted(missing, 'byte')} more than the limit of {limits.host:,}; "
            f"{remedy}use a machine with more memory, or freeze parameters"
        )
    number = next(number for number, size in enumerate(sizes) if size <= limits.host)
    # ChunkEngine rounds disk_share * count up, so that `number` chunks are on disk.
    share = max(0.0, number - 0.5) / count
    least = placement._replace(disk_share=share, host_bytes=sizes[number])
    of_tiers = chunks.on_meta(least, with_spare).state_bytes()
    assert of_tiers["host"] == least.host_bytes, "the engine needs other bytes than the placement"
    on_disk = of_tiers["disk"]
    if limits.disk is not None and on_disk > limits.disk:
        raise ConfigError(
            f"disk_memory = {limits.disk:,} bytes: the states that do not fit into host memory "
            f"need {on_disk:,} bytes on disk, {on_disk - limits.disk:,} more; use a larger "
            "disk_memory, or a machine with more memory"
        )
    logger.info(
        "the masters and moments of %d of %s are on disk (%.3g GB), because the states exceed the "
        "host memory",
        number,
        counted(count, "trained chunk"),
        on_disk / 1e9,
    )
    return least


def _bytes_with_disk(engine: ChunkEngine) -> list[int]:
    """Return the bytes in host memory if the states of n chunks are on disk, for n from 0 to the
    number of trained chunks on the host. A larger n can need more bytes, because the states on disk
    are updated in host buffers that have the size of the largest of these chunks.

    Args:
        engine: An engine without states on disk.
    """
    trained = {c.chunk.number: c for c in engine.chunks if c.home is Tier.HOST}
    in_order = [trained[n] for n in engine.numbers_by_first_use if n in trained]
    costs = [engine.cost_of(chunk) for chunk in in_order]
    host, sizes = engine.state_bytes()["host"], []
    for number in range(len(costs) + 1):
        on_disk = [costs[index] for index in spread_evenly(number, len(costs))]
        moved, staging = sum(c.moved for c in on_disk), staging_bytes([c.file for c in on_disk])
        sizes.append(host - moved + staging)
    return sizes


def needs_of(
    named: dict[str, nn.Parameter],
    segments: Sequence[ModuleSegment],
    keys: dict[str, ParamProcessGroups],
    chunk_length: int,
) -> Needs:
    """Return the memory that a model needs on the device, computed from the layout of its chunks.

    Args:
        named: All parameters by name.
        segments: Segments in order of first use.
        keys: The result of `chunk_keys`.
        chunk_length: Target length of a chunk, in elements.
    """
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
    # The gradient of a chunk has memory from the backward of the last segment with the chunk to the
    # backward of the first segment with the chunk.
    positions = {chunk: position for position, chunk in enumerate(gradients)}
    numbers, sizes = range(len(segments)), list(gradients.values())
    together = [
        [
            position
            for chunk, position in positions.items()
            if any(chunk in need for need in used[: number + 1])
            and any(chunk in need for need in used[number:])
        ]
        for number in numbers
    ]
    largest = max(numbers, key=lambda number: len(used[number]))
    return Needs(
        states=states,
        chunk=largest_params,
        num_chunks=len(layout.chunks),
        chunks_per_use=len(used[largest]),
        gradients=int(most_gradients(together, sizes, sizes, 0)[-1]),
        largest=segments[largest].name,
    )


def profile_step(model: nn.Module, example: Mapping, on_cpu: bool = False) -> list[UseProfile]:
    """Profile a forward and a backward of a model for one batch, on the meta device.

    Args:
        model: The model. This function does not change the model, and does not copy its parameters.
        example: Keyword arguments of the forward, which runs in training mode. The backward begins
            with the `loss` of the result. If the result has no loss, the profile assumes the memory
            of a cross-entropy of each output.
        on_cpu: True if the model computes on a CPU.

    Returns:
        The profile of each use (the forward or the backward of a segment), in order.

    Raises:
        ConfigError: The forward or the backward failed.
    """
    tracker = UseTracker(on_cpu)
    try:
        memo: dict[int, Any] = {id(p): _meta_parameter(p, True) for p in model.parameters()}
        memo |= {id(b): torch.empty_like(b, device="meta") for b in model.buffers()}
        on_meta = copy.deepcopy(model, memo).train()
        for number, segment in enumerate(find_segments(on_meta)):
            begin = (partial(tracker.use, number, backward) for backward in (False, True))
            register_module(segment.module, *begin)
        inputs = tree_map(lambda v: v.to("meta") if isinstance(v, Tensor) else v, dict(example))
        with tracker, torch.enable_grad():
            tracker.use(0, False)  # operations before the first segment
            out = on_meta(**inputs)
            loss = _loss_of(out)
            loss.backward()
            del out, loss
    except Exception as error:  # the code of the model can raise any error
        hooked = any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
        hooks = ", or call optimus.offload before you register hooks" if hooked else ""
        raise ConfigError(
            "example: the model cannot be profiled with these arguments on torch's meta device "
            f"({type(error).__name__}: {one_line(error)[:200]}); correct the example, or leave it "
            f"out{hooks}"
        ) from error
    return tracker.uses


def _loss_of(out: Any) -> Tensor:
    """Return the loss in the result of a forward. If there is none, return a scalar whose
    computation needs the memory of a cross-entropy of each output."""
    loss = out.get("loss") if isinstance(out, Mapping) else getattr(out, "loss", None)
    if loss is not None:
        return loss
    outputs = (tensor for tensor in tensors_in(out) if tensor.requires_grad)
    return torch.stack([tensor.float().log_softmax(-1).sum() for tensor in outputs]).sum()


def _meta_parameter(parameter: Tensor, with_gradient: bool) -> nn.Parameter:
    """Return a parameter on the meta device with the shape and dtype of `parameter`. With
    `with_gradient`, it has an fp32 gradient, to which backward adds."""
    on_meta = nn.Parameter(torch.empty_like(parameter, device="meta"), parameter.requires_grad)
    if with_gradient and parameter.requires_grad:
        if parameter.dtype is not torch.float32:
            on_meta.grad_dtype = torch.float32
        on_meta.grad = torch.empty_like(on_meta, dtype=torch.float32)
    return on_meta


def shapes_of(arguments: Mapping[str, Any]) -> dict[str, torch.Size]:
    """Return the shapes of the tensors in the arguments of a forward, by name of the argument."""
    return {name: value.shape for name, value in arguments.items() if isinstance(value, Tensor)}


def check_batch(
    planned: Mapping[str, torch.Size], module: nn.Module, args: Any, kwargs: Any
) -> None:
    """Forward pre-hook. Raise ConfigError if a tensor of a training batch is larger in a dim than
    the tensor of the same name in the example. `planned` has the shapes of the example by name."""
    if not torch.is_grad_enabled():
        return
    arguments = inspect.signature(module.forward).bind_partial(*args, **kwargs).arguments
    for name, shape in shapes_of({**arguments, **arguments.get("kwargs", {})}).items():
        limit = planned.get(name)
        refuse_if(
            limit is not None and (len(shape) != len(limit) or any(map(operator.gt, shape, limit))),
            f"the batch has {name} of the shape {list(shape)}, but the example of optimus.offload "
            f"had {list(limit or ())}; pass the largest batch as the example",
        )
