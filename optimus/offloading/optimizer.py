"""`optimus.offload`: an AdamW optimizer that offloads the states of a model that is not ours."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from optimus import platform
from optimus.chunks.groups import ParamProcessGroups
from optimus.chunks.residency import Residency
from optimus.errors import ConfigError, NonFiniteError, counted, refuse_if
from optimus.launch.environment import usable_memory
from optimus.offloading.checks import check_model, make_groups
from optimus.offloading.example import check_batch, placement_for, profile_step, shapes_of
from optimus.offloading.offloaded_model import OffloadedModel
from optimus.offloading.placement import (
    Needs,
    Placement,
    check_betas,
    check_bytes,
    check_number,
    choose_placement,
    chunk_keys,
    default_chunk_length,
    needs_of,
)
from optimus.offloading.segments import ModuleSegment, find_segments
from optimus.offloading.update import GroupAdamW, Hyperparameters
from optimus.planner.rates import find_links

logger = logging.getLogger(__name__)

_MAX_CHUNK = 2**40


def offload(
    model: nn.Module,
    params: Iterable[Any] | None = None,
    *,
    lr: float = 1e-3,
    betas: Sequence[float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 1e-2,
    clip_norm: float | None = None,
    device_memory: str | int | None = None,
    host_share: float | None = None,
    cache_chunks: int = 0,
    chunk_length: int = 0,
    device: str | torch.device | None = None,
    example: Mapping[str, Any] | None = None,
) -> OffloadOptimizer:
    """Return an AdamW optimizer that keeps the states of a model in host memory, so that one device
    can train a model that is larger than its memory.

    The parameters of the model become views of chunks. Before a segment of the model, such as a
    transformer layer, computes, its parameters are copied to the device. After its backward, its
    gradients are copied to the host, where they are added over backward passes, and where the
    optimizer updates the parameters. All placements train the same bits.

    Args:
        model: The model, without torch.compile. Its parameters that require a gradient are trained.
        params: Parameters or dicts of parameter groups, as for torch.optim.AdamW; None for all
            parameters that require a gradient. The options of a group are lr, betas, eps and
            weight_decay.
        lr, betas, eps, weight_decay: Defaults of the groups, as for torch.optim.AdamW.
        clip_norm: Largest 2-norm of all gradients; None for no clipping.
        device_memory: Device memory that training may use, such as "20GB" or a number of bytes. On
            an accelerator, larger allocations then fail. None for the memory of the device or, on
            a CPU, for all states on the host.
        host_share: Share of the chunks in host memory, instead of `device_memory`.
        cache_chunks: Number of chunks of parameters that are on the device at once. 0 for as many
            as fit into `device_memory` or, with `host_share`, for those of three segments.
        chunk_length: Elements of a chunk; 0 for those of the largest block.
        device: Device on which the model computes; None for the accelerator, if there is one.
        example: Keyword arguments of the forward for the largest batch, such as `input_ids` and
            `labels`, on any device. The activations of a step are then computed from them on
            torch's meta device, and the placement is the one with the shortest simulated step that
            fits into `device_memory`. A larger batch is refused. None to leave half of
            `device_memory` to activations.

    Raises:
        ConfigError: The model or an argument is not supported.
    """
    check_model(model)
    named = dict(model.named_parameters())
    place_on = _device_of(named, device)
    segments = find_segments(model)
    keys = chunk_keys(named, segments)
    length = int(check_number("chunk_length", chunk_length, 0, _MAX_CHUNK))
    length = length or default_chunk_length(named, segments)
    needs = needs_of(named, segments, keys, length)
    limit = None if device_memory is None else check_bytes("device_memory", device_memory)
    chunks = _Chunks(named, segments, keys, needs, length)
    placement = _select_placement(model, chunks, place_on, limit, host_share, cache_chunks, example)
    residency = Residency(
        divides_gradients=True, host_share=placement.host_share, slots=placement.slots
    )
    numbers = {"lr": lr, "eps": eps, "weight_decay": weight_decay}
    defaults: dict[str, Any] = {
        key: check_number(key, value, 0.0) for key, value in numbers.items()
    }
    defaults |= {"betas": check_betas(betas)}
    groups = make_groups(named, params)
    if clip_norm is not None:
        clip_norm = check_number("clip_norm", clip_norm, 0.0)
        refuse_if(clip_norm == 0, "clip_norm = 0 would train nothing; use a positive norm, or None")
    optimizer = OffloadOptimizer(model, groups, defaults, clip_norm, residency, length, place_on)
    if limit is not None:
        platform.limit_device_memory(place_on, limit)
    if example is not None:
        # Before the hooks of segments, so that a refused batch begins no step.
        hook = partial(check_batch, shapes_of(example))
        model.register_forward_pre_hook(hook, prepend=True, with_kwargs=True)
    return optimizer


class _Chunks(NamedTuple):
    """The chunks of a model, as for `placement_for`."""

    named: dict[str, nn.Parameter]
    segments: Sequence[ModuleSegment]
    keys: dict[str, ParamProcessGroups]
    needs: Needs
    length: int


def _select_placement(
    model: nn.Module,
    chunks: _Chunks,
    device: torch.device,
    limit: int | None,
    host_share: float | None,
    cache_chunks: int,
    example: Mapping[str, Any] | None,
) -> Placement:
    """Return the placement that the arguments of `offload` select. `limit` is the value of
    `device_memory` in bytes."""
    refuse_if(
        host_share is not None and limit is not None,
        "device_memory and host_share both select the placement; use one of them",
    )
    total = None if device.type == "cpu" else platform.device_memory(device)
    if limit is not None and total is not None and limit > total:
        raise ConfigError(
            f"device_memory = {limit:,} bytes is more than the {total:,} bytes of {device}; use "
            "less"
        )
    if example is None:
        placement = _placement_of(chunks.needs, total, limit, host_share, cache_chunks)
        _check_memory(chunks.named, chunks.needs, device, placement, limit)
        return placement
    refuse_if(
        limit is None or bool(cache_chunks),
        "example needs device_memory, and selects the size of the cache; use it with "
        "device_memory and without host_share and cache_chunks",
    )
    assert limit is not None
    return _placement_for(model, example, chunks, limit, device)


def _placement_for(
    model: nn.Module,
    example: Mapping[str, Any],
    chunks: _Chunks,
    limit: int,
    device: torch.device,
) -> Placement:
    """Return the placement for an example batch and `limit` bytes of device memory."""
    refuse_if(
        not isinstance(example, Mapping),
        f"example is a {type(example).__name__}; use a dict of the arguments of the forward",
    )
    dtype = next(model.parameters()).dtype
    placement = placement_for(
        profile_step(model, example),
        *chunks,
        limit if device.type == "cpu" else limit - limit // 20,
        usable_memory(),
        find_links(device, dtype, logger.warning),
    )
    logger.info(
        "%.0f %% of the chunks are on the host, and the cache has %s",
        100 * placement.host_share,
        counted(placement.slots, "chunk"),
    )
    return placement


class OffloadOptimizer(torch.optim.Optimizer):
    """The optimizer that `offload` returns.

    It is used as torch.optim.AdamW: with the user's loop, learning-rate schedulers, `state_dict`
    and `load_state_dict`, and `transformers.Trainer(optimizers=(optimizer, None))`.

    Args:
        model: The model. `offload` has checked it.
        groups: Parameter groups.
        defaults: Defaults of the groups.
        clip_norm: As for `offload`.
        residency: Placement of the states.
        chunk_length: As for `ChunkEngine`.
        device: Device on which the model computes.
    """

    def __init__(
        self,
        model: nn.Module,
        groups: list[dict[str, Any]],
        defaults: dict[str, Any],
        clip_norm: float | None,
        residency: Residency,
        chunk_length: int,
        device: torch.device,
    ) -> None:
        self._model: OffloadedModel | None = None
        super().__init__(groups, defaults)
        for index in range(len(self.param_groups)):
            self._hyperparameters(index)
        segments = find_segments(model)
        keys = chunk_keys(dict(model.named_parameters()), segments)
        self._rule = GroupAdamW()
        self._model = OffloadedModel(
            model, segments, keys, self._rule, residency, chunk_length, device
        )
        self._clip_norm = clip_norm
        self._steps = dict.fromkeys(self._model.trained, 0)
        """Number of updates of each parameter."""
        names = {id(parameter): name for name, parameter in self._model.named.items()}
        self._names = [[names[id(p)] for p in group["params"]] for group in self.param_groups]
        self.grad_norm = math.nan
        """2-norm of the gradients of the last step, before clipping, if `clip_norm` is set."""
        for module in model.modules():
            for key, buffer in module._buffers.items():
                if buffer is not None:
                    module._buffers[key] = buffer.to(device)

    @property
    def _offloaded(self) -> OffloadedModel:
        assert self._model is not None
        return self._model

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update the parameters that have a gradient. The host updates its chunks in the
        background; the next forward of a segment waits for its parameters.

        Args:
            closure: Computes the loss and its gradients, and returns the loss.

        Raises:
            ConfigError: The model was changed, or `zero_grad` was not called after the last step.
            NonFiniteError: With `clip_norm`, the norm of the gradients is NaN or infinite. Nothing
                is updated.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        model = self._offloaded
        names = model.complete_gradients()
        if not names:
            return loss
        scale = 1.0
        if self._clip_norm is not None:
            self.grad_norm = model.engine.grad_norm()
            if not math.isfinite(self.grad_norm):
                raise NonFiniteError(
                    f"the norm of the gradients is {self.grad_norm}; nothing was updated: call "
                    "optimizer.zero_grad() to skip this step"
                )
            scale = min(1.0, self._clip_norm / (self.grad_norm + 1e-6))
        model.engine.wait()
        hyperparameters = {}
        for index, group_names in enumerate(self._names):
            values = self._hyperparameters(index)
            for name in group_names:
                if name in names:
                    self._steps[name] += 1
                    hyperparameters[name] = values._replace(step=self._steps[name])
        self._rule.set(model.engine.chunks, hyperparameters)
        model.engine.update(0.0, scale)
        model.end_step()
        return loss

    def _hyperparameters(self, index: int) -> Hyperparameters:
        """Return the present hyperparameters of a group.

        Raises:
            ConfigError: One of them is not a number in its range.
        """
        group, key = self.param_groups[index], f"param_groups[{index}]"
        lr, eps, decay = (
            check_number(f"{key}[{name!r}]", _number(group[name]), 0.0)
            for name in ("lr", "eps", "weight_decay")
        )
        for name in ("amsgrad", "maximize", "capturable", "differentiable"):
            refuse_if(group.get(name), f"{key}[{name!r}] is not supported; remove it")
        return Hyperparameters(lr, *check_betas(group["betas"]), eps, decay, 0)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients of all parameters."""
        self._offloaded.clear_gradients(set_to_none)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group while the optimizer is created.

        Raises:
            ConfigError: The optimizer exists already.
        """
        refuse_if(
            self._model is not None,
            "parameters cannot be added to an offloaded model; give optimus.offload all groups",
        )
        super().add_param_group(param_group)

    # -- states ----------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the states in the format of torch.optim.AdamW. The tensors are views of the
        states. Parameters in bf16 or fp16 also have the fp32 "master". Before the first step, there
        is no state."""
        model = self._offloaded
        model.engine.wait()
        state, groups, number = {}, [], 0
        for group, names in zip(self.param_groups, self._names, strict=True):
            options = {key: value for key, value in group.items() if key != "params"}
            groups.append({**options, "params": list(range(number, number + len(names)))})
            for name in names:
                if self._steps[name]:
                    step = torch.tensor(float(self._steps[name]))
                    state[number] = {"step": step, **model.state_of(name)}
                number += 1
        return {"state": state, "param_groups": groups}

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the result of `state_dict`, of this class or of torch.optim.AdamW.

        Load the weights of the model first. If the states have fp32 masters, the parameters are set
        from them.

        Raises:
            ValueError: The groups or shapes differ. Nothing is changed.
        """
        model, groups = self._offloaded, state_dict["param_groups"]
        sizes = [len(group["params"]) for group in groups]
        if sizes != [len(names) for names in self._names]:
            raise ValueError(
                f"the state dict has groups of {sizes} parameters, and the optimizer has groups of "
                f"{[len(names) for names in self._names]}; create the same groups"
            )
        states = {}
        for group, names in zip(groups, self._names, strict=True):
            for number, name in zip(group["params"], names, strict=True):
                states[name] = self._checked(name, state_dict["state"].get(number, {}))
        model.engine.wait()
        for group, loaded in zip(self.param_groups, groups, strict=True):
            group.update({key: value for key, value in loaded.items() if key != "params"})
        for name, state in states.items():
            self._steps[name] = int(state.get("step", 0))
            for key, values in model.state_of(name).items():
                if key in state:
                    values.copy_(state[key])
                elif key != "master":
                    values.zero_()
        if any("master" in state for state in states.values()):
            model.engine.sync_params()

    def _checked(self, name: str, state: dict[str, Any]) -> dict[str, Any]:
        """Return the states of a parameter. Raises ValueError if their shapes differ."""
        for key, values in self._offloaded.state_of(name).items():
            if key not in state and state and key != "master":
                raise ValueError(f"the state of parameter {name} has no {key}")
            if key in state and tuple(state[key].shape) != tuple(values.shape):
                raise ValueError(
                    f"{key} of parameter {name} has the shape {tuple(state[key].shape)} in the "
                    f"state dict, not {tuple(values.shape)}"
                )
        return state


def _number(value: Any) -> Any:
    return value.item() if isinstance(value, Tensor) and value.numel() == 1 else value


def _device_of(named: dict[str, nn.Parameter], device: str | torch.device | None) -> torch.device:
    devices = {parameter.device for parameter in named.values()}
    refuse_if(
        len(devices) > 1,
        f"the parameters are on several devices ({', '.join(sorted(map(str, devices)))}); load "
        "the model on the CPU",
    )
    refuse_if(
        torch.distributed.is_available()
        and torch.distributed.is_initialized()
        and torch.distributed.get_world_size() > 1,
        "optimus.offload trains on one device, but this process has peers; start one process",
    )
    if device is not None:
        try:
            return torch.empty(0, device=device).device
        except (RuntimeError, AssertionError, TypeError) as error:
            raise ConfigError(f"device = {device!r}: {str(error).splitlines()[0]}") from None
    if torch.accelerator.is_available():
        return torch.empty(0, device=torch.accelerator.current_accelerator()).device
    return next(iter(devices))


def _placement_of(
    needs: Needs,
    total: int | None,
    device_memory: int | None,
    host_share: float | None,
    cache_chunks: int,
) -> Placement:
    """Return the placement that the arguments of `offload` select. `total` is the memory of an
    accelerator."""
    if host_share is None:
        placement = choose_placement(needs, total if device_memory is None else device_memory)
    else:
        share = check_number("host_share", host_share, 0.0, 1.0)
        placement = choose_placement(needs, None)._replace(host_share=share)
    if slots := int(check_number("cache_chunks", cache_chunks, 0, _MAX_CHUNK)):
        refuse_if(
            slots < needs.chunks_per_use,
            f"cache_chunks = {slots}: the segment {needs.largest or 'model'!r} needs "
            f"{counted(needs.chunks_per_use, 'chunk')} at once; use {needs.chunks_per_use} or more",
        )
        refuse_if(
            not placement.host_share,
            f"cache_chunks = {slots} has no effect, because all states are on the device; leave it "
            "out",
        )
        needed = 2 * (slots * needs.chunk + needs.gradients)
        if device_memory is not None and needed > device_memory:
            raise ConfigError(
                f"cache_chunks = {slots} needs {needed:,} bytes, half of them for activations, and "
                f"device_memory has {device_memory:,}; use fewer chunks, or leave cache_chunks out"
            )
        placement = placement._replace(slots=slots)
    return placement


def _check_memory(
    named: dict[str, nn.Parameter],
    needs: Needs,
    device: torch.device,
    placement: Placement,
    device_memory: int | None,
) -> None:
    """Raise ConfigError if the host has too little memory, or if the whole model is on an
    accelerator that it must not fill."""
    if not placement.host_share:
        return
    usable = usable_memory()
    refuse_if(
        needs.states > usable,
        f"the states of the model need {needs.states:,} bytes of host memory, "
        f"{needs.states - usable:,} bytes more than this process can use; use a machine with more "
        "memory, or freeze parameters",
    )
    on_device = sum(p.nbytes for p in named.values() if p.device.type != "cpu")
    if device_memory is not None and on_device > device_memory:
        raise ConfigError(
            f"the model is on {device} already, with {on_device:,} bytes of parameters, more than "
            f"device_memory = {device_memory:,}; load the model on the CPU"
        )
