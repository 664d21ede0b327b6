"""Placement of a model that is not ours, from a profile of a training step on an example batch."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_iter, tree_map

from optimus.chunks.engine import ChunkEngine
from optimus.chunks.groups import ParamProcessGroups
from optimus.chunks.placement import NoPlacement, search
from optimus.chunks.residency import Residency, Use
from optimus.chunks.segments import ModelSegment, register_module
from optimus.config.machine import Links
from optimus.errors import ConfigError, counted, one_line
from optimus.offloading.placement import Needs, Placement
from optimus.offloading.segments import ModuleSegment, find_segments
from optimus.offloading.update import GroupAdamW
from optimus.rank.profile import UseProfile, UseTracker


def profile_step(model: nn.Module, example: Mapping[str, Any]) -> list[UseProfile]:
    """Profile a forward and a backward of a model for one batch, on the meta device.

    Args:
        model: The model. It is not changed, and its parameters are not copied.
        example: Keyword arguments of the forward. If its result has a `loss`, the backward begins
            there, otherwise with the sum of all floating-point tensors of the result.

    Raises:
        ConfigError: The forward or the backward failed.
    """
    tensors = dict(model.named_parameters(remove_duplicate=True))
    memo: dict[int, Any] = {id(p): _meta_parameter(p) for p in tensors.values()}
    memo |= {id(b): torch.empty_like(b, device="meta") for b in model.buffers()}
    on_meta = copy.deepcopy(model, memo)
    segments = find_segments(on_meta)
    tracker = UseTracker()
    for number, segment in enumerate(segments):
        begin = (partial(tracker.use, number, backward) for backward in (False, True))
        register_module(segment.module, *begin)
    inputs = tree_map(lambda v: v.to("meta") if isinstance(v, Tensor) else v, dict(example))
    try:
        with tracker, torch.enable_grad():
            tracker.use(0, False)  # operations before the first segment
            out = on_meta(**inputs)
            loss = getattr(out, "loss", None)
            if loss is None:
                floats = (t for t in tree_iter(out) if isinstance(t, Tensor) and t.requires_grad)
                loss = torch.stack([tensor.float().sum() for tensor in floats]).sum()
            loss.backward()
            del out, loss
    except (NotImplementedError, RuntimeError, TypeError, ValueError) as error:
        raise ConfigError(
            "example: the model cannot be profiled with it on torch's meta device "
            f"({type(error).__name__}: {one_line(error)[:200]}); correct the example, or leave it "
            "out"
        ) from error
    return tracker.uses


def _meta_parameter(parameter: nn.Parameter) -> nn.Parameter:
    """Return a parameter without memory, with a gradient to which backward adds."""
    on_meta = nn.Parameter(torch.empty_like(parameter, device="meta"), parameter.requires_grad)
    if parameter.requires_grad:
        on_meta.grad = torch.empty_like(on_meta)
    return on_meta


def placement_for(
    uses: Sequence[UseProfile],
    named: Mapping[str, nn.Parameter],
    segments: Sequence[ModuleSegment],
    keys: Mapping[str, ParamProcessGroups],
    needs: Needs,
    chunk_length: int,
    device_memory: int,
    host_memory: int,
    links: Links,
) -> Placement:
    """Return the placement with the shortest simulated step for the profiled batch.

    Args:
        uses: Result of `profile_step`.
        named: Parameters of the model by name.
        segments, keys, needs, chunk_length: Segments of the model, and its chunks.
        device_memory: Bytes for states, activations and temporary tensors on the device.
        host_memory: Bytes for states on the host.
        links: Rates of the links and of the device.

    Raises:
        ConfigError: No placement fits.
    """
    before = accumulate((use.kept for use in uses), initial=0)
    activations = max(live + use.peak for live, use in zip(before, uses, strict=False))
    if needs.states + activations <= device_memory:
        return Placement(0.0, needs.num_chunks)
    forward, backward = [0.0] * len(segments), [0.0] * len(segments)
    for use in uses:
        times = backward if use.backward else forward
        times[use.segment] += use.flops / links.flops + use.moved / links.memory
    engine = ChunkEngine(
        {name: _meta_parameter(named[name]) for name in keys},
        keys.__getitem__,
        GroupAdamW(),
        dtype=torch.float32,
        chunk_length=chunk_length,
        deterministic=True,
        residency=Residency(divides_gradients=True, host_share=1.0),
    )
    of_engine = [
        ModelSegment(s.name, 0, s.parameters + s.inherited, lambda *hooks: None) for s in segments
    ]
    engine.attach(of_engine, passes=())
    in_chunks = engine.transient_needs(of_engine)
    engine.params.replan([Use(u.segment, u.backward, in_chunks[u.segment]) for u in uses])
    work = engine.workload(
        "microbatch", chunk_length, of_engine, forward, backward, activations, reductions=1
    )
    try:
        best = search([work], device_memory, host_memory, links)
    except NoPlacement as problem:
        name, missing = "device_memory", problem.device - device_memory
        if missing <= 0:
            name, missing = "the memory of the host", problem.host - host_memory
        raise ConfigError(
            f"{name} is too small by {counted(missing, 'byte')} for the example, whose activations "
            f"need {counted(activations, 'byte')}; use gradient checkpointing, a smaller batch, or "
            "more memory"
        ) from None
    return Placement((best.num_host - 0.5) / len(work.chunks), best.slots)


def sizes_of(arguments: Any) -> Iterator[int]:
    """Yield the number of elements of each tensor in the arguments of a forward."""
    yield from (value.numel() for value in tree_iter(arguments) if isinstance(value, Tensor))
