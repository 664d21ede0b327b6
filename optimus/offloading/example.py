"""Placement of a model that is not ours, from a profile of a training step on an example batch."""

from __future__ import annotations

import copy
import inspect
import operator
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from optimus.chunks.engine import ChunkEngine
from optimus.chunks.groups import ParamProcessGroups
from optimus.chunks.placement import Capacity, NoPlacement, search
from optimus.chunks.residency import Residency, Use
from optimus.chunks.segments import ModelSegment, register_module
from optimus.config.machine import Links
from optimus.errors import ConfigError, counted, one_line, refuse_if
from optimus.offloading.guard import tensors_in
from optimus.offloading.placement import Needs, Placement
from optimus.offloading.segments import ModuleSegment, find_segments
from optimus.offloading.update import GroupAdamW
from optimus.rank.profile import UseProfile, UseTracker


def profile_step(model: nn.Module, example: Mapping[str, Any]) -> list[UseProfile]:
    """Profile a forward and a backward of a model for one batch, on the meta device.

    Args:
        model: The model. It is not changed, and its parameters are not copied.
        example: Keyword arguments of the forward, in training mode. The backward begins with the
            `loss` of the result. Without it, a cross-entropy of each output is assumed.

    Raises:
        ConfigError: The forward or the backward failed.
    """
    tracker = UseTracker()
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
    except Exception as error:  # of code that is not ours
        raise ConfigError(
            "example: the model cannot be profiled with it on torch's meta device "
            f"({type(error).__name__}: {one_line(error)[:200]}); correct the example, or leave it "
            "out"
        ) from error
    return tracker.uses


def _loss_of(out: Any) -> Tensor:
    """Return the loss in the result of a forward or, without a loss, a value with the memory of a
    cross-entropy of each output."""
    loss = out.get("loss") if isinstance(out, Mapping) else getattr(out, "loss", None)
    if loss is not None:
        return loss
    outputs = (tensor for tensor in tensors_in(out) if tensor.requires_grad)
    return torch.stack([tensor.float().log_softmax(-1).sum() for tensor in outputs]).sum()


def _meta_parameter(parameter: Tensor, with_gradient: bool) -> nn.Parameter:
    """Return a parameter without memory. With `with_gradient`, it has an fp32 gradient, to which
    backward adds."""
    on_meta = nn.Parameter(torch.empty_like(parameter, device="meta"), parameter.requires_grad)
    if with_gradient and parameter.requires_grad:
        if parameter.dtype is not torch.float32:
            on_meta.grad_dtype = torch.float32
        on_meta.grad = torch.empty_like(on_meta, dtype=torch.float32)
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
        {name: _meta_parameter(named[name], False) for name in keys},
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
        best = search([work], Capacity(device_memory, host_memory), links)
    except NoPlacement as problem:
        name, missing = "device_memory", problem.needs.device - device_memory
        if missing <= 0:
            name, missing = "the memory of the host", problem.needs.host - host_memory
        raise ConfigError(
            f"{name} is too small by {counted(missing, 'byte')} for the example, whose activations "
            f"need {counted(activations, 'byte')}; use gradient checkpointing, a smaller batch, or "
            "more memory"
        ) from None
    return Placement((best.num_host - 0.5) / len(work.chunks), best.slots)


def shapes_of(arguments: Mapping[str, Any]) -> dict[str, torch.Size]:
    """Return the shapes of the tensors in the arguments of a forward, by name of the argument."""
    return {name: value.shape for name, value in arguments.items() if isinstance(value, Tensor)}


def check_batch(
    planned: Mapping[str, torch.Size], module: nn.Module, args: Any, kwargs: Any
) -> None:
    """Refuse a batch of training with a tensor that is longer in a dim than in the example. This is
    a forward pre-hook."""
    if not torch.is_grad_enabled():
        return
    arguments = inspect.signature(module.forward).bind_partial(*args, **kwargs).arguments
    for name, shape in shapes_of({**arguments, **arguments.get("kwargs", {})}).items():
        limit = planned.get(name)
        refuse_if(
            limit is not None and (len(shape) != len(limit) or any(map(operator.gt, shape, limit))),
            f"the batch has {name} of the shape {list(shape)}, but the example of optimus.offload "
            f"had {list(limit or ())}; give offload an example of the largest batch",
        )
