"""`optimus.offload`: an AdamW optimizer that offloads the states of any torch module."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from optimus import platform
from optimus.chunks.buffers import ChunkState, ShardBuffers
from optimus.chunks.placement import Early
from optimus.chunks.residency import Residency
from optimus.chunks.state_file import check_directory
from optimus.errors import NonFiniteError, refuse_if
from optimus.launch.environment import usable_memory
from optimus.offloading.checks import (
    check_betas,
    check_bytes,
    check_clip_norm,
    check_count,
    check_device,
    check_model,
    check_number,
    make_groups,
)
from optimus.offloading.offloaded_model import OffloadedModel
from optimus.offloading.placement import (
    ModelChunks,
    OffloadLimits,
    check_batch,
    select_placement,
    shapes_of,
)
from optimus.offloading.segments import chunk_keys, default_chunk_length, find_segments
from optimus.planner.offload import host_limit
from optimus_kernels import adamw_, adamw_into

_EARLY = "off", "on", "auto"
"""Values of the argument `early_adam`."""
_OF_TORCH = torch.optim.AdamW([torch.empty(0)], fused=True).defaults
"""Values that torch's AdamW has for options which the groups of `offload` do not have."""


def offload(
    model: nn.Module,
    params: Iterable[Any] | None = None,
    *,
    lr: float | Tensor = 1e-3,
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
    host_memory: str | int | None = None,
    disk: str | os.PathLike[str] = "",
    disk_memory: str | int | None = None,
    early_adam: Early = "off",
) -> OffloadOptimizer:
    """Return an AdamW optimizer that keeps the states of a model in host memory, so that a device
    can train a model that does not fit in the memory of the device.

    The parameters of the model become views of chunks. Before a segment of the model, such as a
    transformer layer, computes, its parameters are copied to the device. After the backward of the
    segment, its gradients are copied to the host, which adds them over backward passes and updates
    the parameters. Training gives the same bits with all placements.

    Args:
        model: The model, without torch.compile. The parameters that require a gradient are trained.
        params: Parameters or dicts of parameter groups, as for torch.optim.AdamW; None for all
            parameters that require a gradient. The options of a group are lr, betas, eps and
            weight_decay.
        lr, betas, eps, weight_decay: Defaults of the groups, as for torch.optim.AdamW.
        clip_norm: Largest 2-norm of all gradients; None for no clipping.
        device_memory: Device memory that training may use, such as "20GB" or a number of bytes. On
            an accelerator, allocations beyond this limit fail. If the value is None, an accelerator
            can use all of its memory, and a CPU keeps all states on the host.
        host_share: Fraction of the chunks in host memory, from 0 to 1. Replaces `device_memory`.
        cache_chunks: Number of chunks of parameters on the device at the same time. 0 for as many
            as fit into `device_memory`. With `host_share`, 0 for the chunks of three segments.
        chunk_length: Number of elements of a chunk; 0 for as many as the largest block has.
        device: Device on which the model computes; None for the accelerator, if there is one.
        example: Keyword arguments of the forward for the largest batch, such as `input_ids` and
            `labels`, on any device. The memory of activations is then computed from these arguments
            on torch's meta device. Of the placements that fit into `device_memory`, the placement
            with the shortest simulated step is selected. A larger batch is refused. None to leave
            half of `device_memory` to activations.
        host_memory: Host memory for states, such as "20GB" or a number of bytes. None for the
            memory of this process less a reserve for Python and its libraries. The reserve is 2 GiB
            and 5 %, but at most a quarter of the memory.
        disk: Directory on a local disk. If the states exceed the host memory, the masters and
            moments of as few chunks as possible are stored there. "" to refuse such a model.
        disk_memory: Bytes on disk that states may use; None for all free bytes.
        early_adam: Time at which the host begins to update a chunk. "off": in `step`. "on": after
            as many backward passes as in the last step, before the norm of all gradients is known.
            The host keeps the old states until `step` and needs memory for a second copy of the
            states. "auto": as "on", with two limits. The step after a step that was clipped has no
            early updates. The second copies use at most half of the free host memory.

    Raises:
        ConfigError: The model or an argument is not supported.
    """
    check_model(model)
    named = dict(model.named_parameters())
    on = check_device(named, device)
    chunks = _chunks_of(model, named, chunk_length)
    limits = _limits_of(device_memory, host_memory, disk, disk_memory)
    defaults = _checked_defaults(lr, betas, eps, weight_decay)
    groups = make_groups(named, params)
    clip_norm = check_clip_norm(clip_norm)
    refuse_if(early_adam not in _EARLY, f"early_adam = {early_adam!r}: use 'off', 'on' or 'auto'")
    placement = select_placement(
        model, chunks, on, limits, host_share, cache_chunks, example, early_adam
    )
    residency = placement.residency(limits.directory)
    spare = {"off": 0.0, "on": math.inf, "auto": (limits.host - placement.host_bytes) / 2}
    optimizer = OffloadOptimizer(model, chunks, groups, defaults, clip_norm, residency, on)
    optimizer.allow_early_updates(early_adam, spare[early_adam])
    if limits.device is not None:
        platform.limit_device_memory(on, limits.device)
        optimizer._offloaded.limit_states(placement.device_bytes, selects_cache=not cache_chunks)
    if example is not None:
        _refuse_larger_batches(optimizer._offloaded, model, example)
    return optimizer


def _refuse_larger_batches(
    offloaded: OffloadedModel, model: nn.Module, example: Mapping[str, Any]
) -> None:
    """Let the model refuse batches that are larger than the example."""
    # This hook runs before the hooks of segments, so that a refused batch begins no step.
    hook = partial(check_batch, shapes_of(example))
    offloaded.keep(model.register_forward_pre_hook(hook, prepend=True, with_kwargs=True))


def _checked_defaults(
    lr: float | Tensor, betas: Sequence[float], eps: float, weight_decay: float
) -> dict[str, Any]:
    """Return the default options of parameter groups. Raises ConfigError for invalid ones."""
    numbers = {"lr": lr, "eps": eps, "weight_decay": weight_decay}
    checked = {key: check_number(key, _number(value), 0.0) for key, value in numbers.items()}
    return {**checked, "betas": check_betas(betas)}


def _chunks_of(model: nn.Module, named: dict[str, nn.Parameter], chunk_length: int) -> ModelChunks:
    """Return the chunks of a model. Raises ConfigError if `chunk_length` is invalid."""
    segments = find_segments(model)
    length = check_count("chunk_length", chunk_length) or default_chunk_length(named, segments)
    return ModelChunks(named, segments, chunk_keys(named, segments), length, GroupAdamW())


def _limits_of(
    device_memory: str | int | None,
    host_memory: str | int | None,
    disk: str | os.PathLike[str],
    disk_memory: str | int | None,
) -> OffloadLimits:
    """Return the limits of memory that these arguments of `offload` set."""
    usable = usable_memory()
    host = host_limit(usable, 1)
    if host_memory is not None:
        host = check_bytes("host_memory", host_memory)
        refuse_if(
            host > usable,
            f"host_memory = {host:,} bytes is {host - usable:,} bytes more than this process can "
            "use; use less",
        )
    refuse_if(
        not isinstance(disk, (str, os.PathLike)), f"disk = {disk!r}: use the path of a directory"
    )
    if disk:
        check_directory(os.fspath(disk), [0], "disk")
    return OffloadLimits(
        None if device_memory is None else check_bytes("device_memory", device_memory),
        host,
        None if disk_memory is None else check_bytes("disk_memory", disk_memory),
        os.fspath(disk),
    )


class Hyperparameters(NamedTuple):
    """Hyperparameters of AdamW for a parameter in one update."""

    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    step: int
    """Number of updates of the parameter, including this one, for the bias correction."""


class _Range(NamedTuple):
    """Elements [start, stop) of a chunk: adjacent parameters with equal hyperparameters."""

    start: int
    stop: int
    hyperparameters: Hyperparameters


class GroupAdamW:
    """`optimus.chunks.optimizer.Optimizer` whose hyperparameters may differ between parameters.

    As in torch, a parameter without a gradient is not updated. The updates of each parameter are
    therefore counted separately.
    """

    moments: Mapping[str, torch.dtype] = {"exp_avg": torch.float32, "exp_avg_sq": torch.float32}

    def __init__(self) -> None:
        self.num_updates = 0
        self._ranges: _Ranges = {}
        self._expected: dict[int, _Ranges] = {}
        """The ranges and hyperparameters of early updates, by the number of the update."""

    def expect(
        self, chunks: Sequence[ChunkState], hyperparameters: Mapping[str, Hyperparameters]
    ) -> None:
        """Set the hyperparameters of early updates of the next step. The arguments are those of
        `set`."""
        number = self.num_updates + 1
        self._expected[number] = _ranges_of(chunks, hyperparameters)
        self._expected.pop(number - 2, None)  # update `number - 1` may be in progress

    def set(
        self, chunks: Sequence[ChunkState], hyperparameters: Mapping[str, Hyperparameters]
    ) -> bool:
        """Set the hyperparameters of the next update of all chunks. All earlier updates must be
        complete.

        Args:
            chunks: All chunks.
            hyperparameters: The hyperparameters by name of the parameter to update.

        Returns:
            True if the last call of `expect` had the same hyperparameters.
        """
        self._ranges = _ranges_of(chunks, hyperparameters)
        return self._expected.get(self.num_updates + 1) == self._ranges

    def update(self, state: ChunkState, lr: float, grad_scale: float) -> None:
        """As `Optimizer.update`; `lr` is not used."""
        shard = state.shard
        for start, stop, hyperparameters in self._ranges[state.chunk.number]:
            master, exp_avg, exp_avg_sq = _states_in(state.buffers, start, stop)
            adamw_(
                master,
                exp_avg,
                exp_avg_sq,
                state.grad[start:stop],
                None if state.master is shard else shard[start:stop],
                *hyperparameters,
                grad_scale,
            )

    def update_into(
        self, into: ShardBuffers, state: ChunkState, lr: float, grad_scale: float, number: int
    ) -> None:
        """As `Optimizer.update_into`, with the hyperparameters of `expect`; `lr` is not used."""
        ranges, end = self._expected[number][state.chunk.number], 0
        for start, stop, hyperparameters in ranges:
            _copy_range(into, state.buffers, end, start)
            end = stop
            master, exp_avg, exp_avg_sq = _states_in(state.buffers, start, stop)
            adamw_into(
                _states_in(into, start, stop),
                master,
                exp_avg,
                exp_avg_sq,
                state.grad[start:stop],
                None if into.master is into.shard else into.shard[start:stop],
                *hyperparameters,
                grad_scale,
            )
        _copy_range(into, state.buffers, end, len(state.shard))


_Ranges = dict[int, list[_Range]]
"""The ranges of elements to update, by the number of the chunk."""


def _ranges_of(
    chunks: Sequence[ChunkState], hyperparameters: Mapping[str, Hyperparameters]
) -> _Ranges:
    """Return the ranges to update, by chunk number: the parameters that have hyperparameters."""
    of_chunks: _Ranges = {}
    for chunk in chunks:
        ranges = of_chunks[chunk.chunk.number] = []
        ends = [slot.start for slot in chunk.chunk.slots[1:]] + [chunk.chunk.length]
        for slot, end in zip(chunk.chunk.slots, ends, strict=True):
            if (of_slot := hyperparameters.get(slot.name)) is None:
                continue
            # A range also contains the padding after a parameter, which is zero and stays zero.
            last = ranges[-1] if ranges else None
            if last and last.stop == slot.start and last.hyperparameters == of_slot:
                ranges[-1] = _Range(last.start, end, of_slot)
            else:
                ranges.append(_Range(slot.start, end, of_slot))
    return of_chunks


def _states_in(buffers: ShardBuffers, start: int, stop: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return the elements [start, stop) of the masters and of both moments."""
    _, master, moments = buffers
    exp_avg, exp_avg_sq = moments["exp_avg"], moments["exp_avg_sq"]
    return master[start:stop], exp_avg[start:stop], exp_avg_sq[start:stop]


def _copy_range(into: ShardBuffers, values: ShardBuffers, start: int, stop: int) -> None:
    """Copy the elements [start, stop), which an update does not change, to the buffers `into`."""
    for new, present in zip(into.tensors, values.tensors, strict=True):
        new[start:stop].copy_(present[start:stop])


class OffloadOptimizer(torch.optim.Optimizer):
    """The optimizer that `offload` returns.

    It is used like torch.optim.AdamW: with the user's loop, learning-rate schedulers, `state_dict`
    and `load_state_dict`, and `transformers.Trainer(optimizers=(optimizer, None))`.

    Args:
        model: The model. `offload` has checked it.
        chunks: Chunks of the model.
        groups: Parameter groups.
        defaults: Defaults of the groups.
        clip_norm: As for `offload`.
        residency: Placement of the states.
        device: Device on which the model computes.
    """

    def __init__(
        self,
        model: nn.Module,
        chunks: ModelChunks,
        groups: list[dict[str, Any]],
        defaults: dict[str, Any],
        clip_norm: float | None,
        residency: Residency,
        device: torch.device,
    ) -> None:
        self._model: OffloadedModel | None = None
        super().__init__(groups, defaults)
        for index in range(len(self.param_groups)):
            self._hyperparameters(index)
        assert isinstance(chunks.rule, GroupAdamW)
        self._rule = chunks.rule
        self._model = OffloadedModel(model, chunks, residency, device, self._expected_update)
        self._clip_norm = clip_norm
        self._early_adam, self._has_clipped = "off", True
        self._last_updated = set(self._model.trained)
        """Parameters of the last update."""
        self._steps = dict.fromkeys(self._model.trained, 0)
        """Number of updates of each parameter."""
        names = {id(parameter): name for name, parameter in self._model.named.items()}
        # torch.distributed.checkpoint calls step() with zero gradients if there is no state.
        self.state.update({parameter: {} for parameter in self._model.named.values()})
        self._names = [[names[id(p)] for p in group["params"]] for group in self.param_groups]
        self.grad_norm = math.nan
        """2-norm of the gradients of the last step, before clipping, if `clip_norm` is set."""
        for module in model.modules():
            for key, buffer in module._buffers.items():
                if buffer is not None:
                    module._buffers[key] = buffer.to(device)

    def allow_early_updates(self, early_adam: str, limit: float) -> None:
        """Allocate spare buffers of at most `limit` bytes for early updates. `early_adam` is as for
        `offload`."""
        self._early_adam = early_adam
        self._offloaded.engine.add_spare(limit)

    def close(self) -> None:
        """Complete all updates, free the states of the optimizer, remove the file of the states on
        disk, and remove all hooks from the model. May be called more than once.

        The model then has its weights and no gradients, and can be evaluated, saved, or offloaded
        again. Parameters whose states were in host memory are on the CPU. If `close` is not called,
        the states exist until the model and the optimizer are deleted, and page-locked memory is
        kept until the end of the process. If an update has failed, a warning is logged, and uses of
        the model raise the error of the update.
        """
        assert self._model is not None
        self._model.release()

    @property
    def _offloaded(self) -> OffloadedModel:
        assert self._model is not None
        self._model.check_open()
        return self._model

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update the parameters that have a gradient. The host updates the chunks on the host in
        the background; the next forward of a segment waits for the parameters of this segment.

        Args:
            closure: Function that computes the loss and its gradients, and returns the loss.

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
        names = model.complete_gradients()  # waits for all updates of the last step
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
        self._has_clipped = scale < 1.0
        hyperparameters = self._next_hyperparameters(names)
        if not self._rule.set(model.engine.chunks, hyperparameters):
            model.engine.expect_update(None)
        for name in hyperparameters:
            self._steps[name] += 1
        self._last_updated = names
        model.engine.update(0.0, scale)
        model.end_step()
        return loss

    def _expected_update(self) -> tuple[float, float] | None:
        """Return the arguments (`lr`, `grad_scale`) that the next update of the engine will
        probably have; None if no update may begin early."""
        clips = self._clip_norm is not None and self._has_clipped
        if self._early_adam == "off" or (self._early_adam == "auto" and clips):
            return None
        expected = self._next_hyperparameters(self._last_updated)
        self._rule.expect(self._offloaded.engine.chunks, expected)
        return 0.0, 1.0

    def _next_hyperparameters(self, updated: Collection[str]) -> dict[str, Hyperparameters]:
        """Return the hyperparameters for the next update of the parameters `updated`, by name."""
        hyperparameters = {}
        for index, group_names in enumerate(self._names):
            values = self._hyperparameters(index)
            for name in filter(updated.__contains__, group_names):
                if values.step != (step := self._steps[name] + 1):
                    values = values._replace(step=step)
                hyperparameters[name] = values
        return hyperparameters

    def _hyperparameters(self, index: int) -> Hyperparameters:
        """Return the present hyperparameters of a group.

        Raises:
            ConfigError: One of them is not a number in its range.
        """
        return _checked_hyperparameters(self.param_groups[index], index)

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
            "parameters cannot be added to an offloaded model; pass all groups to optimus.offload",
        )
        super().add_param_group(param_group)

    # -- states ----------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the states in the format of torch.optim.AdamW. The tensors are views of memory, or
        of the file of the states on disk. They are valid until the next step. Parameters in bf16 or
        fp16 also have the fp32 "master". Before the first step, there is no state."""
        model = self._offloaded
        model.engine.wait()
        model.adopt_changes()
        state, groups, number = {}, [], 0
        for group, names in zip(self.param_groups, self._names, strict=True):
            numbers = list(range(number, number + len(names)))
            groups.append({**_OF_TORCH, **group, "params": numbers})
            for name in names:
                if self._steps[name]:
                    step = torch.tensor(float(self._steps[name]), dtype=torch.float32)
                    state[number] = {"step": step, **model.state_of(name)}
                number += 1
        return {"state": state, "param_groups": groups}

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the result of the method `state_dict` of this class or of torch.optim.AdamW.

        Load the weights of the model first. If the states have fp32 masters, the parameters are set
        from them.

        Raises:
            ValueError: The groups or shapes differ, or a value is missing. Nothing is changed.
            ConfigError: A hyperparameter is not a number in its range. Nothing is changed.
        """
        for key in ("state", "param_groups"):
            if key not in state_dict:
                raise ValueError(f"the state dict has no {key!r}; use the result of state_dict()")
        model, groups = self._offloaded, state_dict["param_groups"]
        sizes = [len(group.get("params", ())) for group in groups]
        if sizes != [len(names) for names in self._names]:
            raise ValueError(
                f"the state dict has groups of {sizes} parameters, and the optimizer has groups of "
                f"{[len(names) for names in self._names]}; create the same groups"
            )
        for index, loaded in enumerate(groups):
            _checked_hyperparameters({**self.param_groups[index], **loaded}, index)
        states = {}
        for group, names in zip(groups, self._names, strict=True):
            for number, name in zip(group["params"], names, strict=True):
                states[name] = self._checked(name, state_dict["state"].get(number))
        model.engine.expect_update(None)
        for group, loaded in zip(self.param_groups, groups, strict=True):
            group.update({key: value for key, value in loaded.items() if key != "params"})
        for name, state in states.items():
            self._steps[name] = int(state.get("step", 0))
            for key in model.state_names(name):
                if key in state:
                    model.engine.put(key, name, state[key])
                elif key != "master":
                    model.engine.put(key, name, torch.zeros(model.named[name].shape))
        if any("master" in state for state in states.values()):
            model.engine.sync_params()

    def _checked(self, name: str, state: dict[str, Any] | None) -> dict[str, Any]:
        """Check and return the loaded states of a parameter. If the parameter had no update,
        `state` is None and the result is {}. Raises ValueError if a state is missing or has another
        shape."""
        if state is None:
            return {}
        if "step" not in state:
            raise ValueError(
                f"the state of parameter {name} has no step; use the result of state_dict()"
            )
        try:
            is_count = int(state["step"]) >= 0
        except (TypeError, ValueError, OverflowError, RuntimeError):
            is_count = False
        if not is_count:
            raise ValueError(
                f"the state of parameter {name} has step = {state['step']!r}; use a number of "
                "updates"
            )
        shape = tuple(self._offloaded.named[name].shape)
        for key in self._offloaded.state_names(name):
            if key not in state and key != "master":
                raise ValueError(
                    f"the state of parameter {name} has no {key}; use the state of an AdamW"
                )
            if key in state and not isinstance(state[key], Tensor):
                raise ValueError(f"{key} of parameter {name} in the state dict is not a tensor")
            if key in state and tuple(state[key].shape) != shape:
                raise ValueError(
                    f"{key} of parameter {name} has the shape {tuple(state[key].shape)} in the "
                    f"state dict, not {shape}"
                )
        return state


def _number(value: Any) -> Any:
    return value.item() if isinstance(value, Tensor) and value.numel() == 1 else value


def _checked_hyperparameters(group: Mapping[str, Any], index: int) -> Hyperparameters:
    """Return the hyperparameters of a group.

    Raises:
        ConfigError: One of them is not a number in its range.
    """
    key = f"param_groups[{index}]"
    lr, eps, decay = (
        check_number(f"{key}[{name!r}]", _number(group[name]), 0.0)
        for name in ("lr", "eps", "weight_decay")
    )
    for name in ("amsgrad", "maximize", "capturable", "differentiable"):
        refuse_if(group.get(name), f"{key}[{name!r}] is not supported; remove it")
    return Hyperparameters(lr, *check_betas(group["betas"]), eps, decay, 0)
