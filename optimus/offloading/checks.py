"""Checks of the model, the parameters and the other arguments of `optimus.offload`."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from operator import attrgetter, is_, methodcaller
from typing import Any

import torch
from torch import nn

from optimus.config.sizes import parse_bytes
from optimus.errors import ConfigError, counted, refuse_if

TRAINED = (torch.float32, torch.bfloat16, torch.float16)
"""Dtypes that are supported for trained parameters."""
MARK = "_optimus_offload"
"""Name of the attribute that marks an offloaded model and its parameters."""
DDP_IGNORED = "_ddp_params_and_buffers_to_ignore"
"""Name of a module attribute with the names of the parameters and buffers that torch's
DistributedDataParallel ignores. The constructor of DistributedDataParallel reads this attribute
before its C++ code reads the parameters."""
_MAX_BYTES = 10**15
MAX_CHUNK = 2**40
"""Largest number of elements of a chunk."""


class NotCopied:
    """Base class of the objects that belong to an offloaded model. An attempt to copy or pickle
    such an object raises ConfigError."""

    def __reduce__(self) -> Any:
        raise ConfigError("an offloaded model cannot be copied or pickled; use its state_dict()")


class RefuseDDP(NotCopied):
    """Value of the attribute `DDP_IGNORED` of an offloaded model. When DistributedDataParallel
    reads this value, the value raises ConfigError. Without this error, the C++ code of
    DistributedDataParallel, which calls no hooks, would read freed memory."""

    def __iter__(self) -> Any:
        raise ConfigError(
            "an offloaded model cannot be wrapped by DistributedDataParallel, because "
            "optimus.offload supports only one process; use `optimus train` for several processes"
        )


@torch.compiler.disable(  # type: ignore[untyped-decorator]  # torch has no types for it
    reason="an offloaded model does not support torch.compile; use the model without it"
)
def refuse_compiled() -> None:
    """Raise ConfigError. This function is called if torch.compile traces an offloaded model.
    The function itself is excluded from the trace, so the user sees this ConfigError instead of an
    error of torch."""
    raise ConfigError(
        "the model was compiled by torch.compile, which does not support the hooks of an offloaded "
        "model; use the model without torch.compile"
    )


def check_model(model: Any) -> None:
    """Check that a model can be offloaded.

    Raises:
        ConfigError: The model cannot be offloaded, for example because the model is compiled or
            quantized.
    """
    refuse_if(
        not isinstance(model, nn.Module),
        f"model is a {type(model).__name__}; use a torch.nn.Module",
    )
    modules = dict(model.named_modules())
    refuse_if(
        any(hasattr(owner, MARK) for owner in (*modules.values(), *model.parameters())),
        f"{type(model).__name__} is offloaded already; use the optimizer of the first call of "
        "optimus.offload",
    )
    refuse_if(
        any(
            hasattr(module, "_orig_mod") or getattr(module, "_compiled_call_impl", None)
            for module in modules.values()
        ),
        f"{type(model).__name__} is compiled, and compiled code calls no hooks; call "
        "optimus.offload with the model without torch.compile",
    )
    refuse_if(
        getattr(model, "is_quantized", False) or getattr(model, "hf_quantizer", None) is not None,
        f"{type(model).__name__} is quantized; load it without quantization_config",
    )
    placed = getattr(model, "hf_device_map", None)
    refuse_if(
        placed is not None or any(hasattr(module, "_hf_hook") for module in modules.values()),
        f"{type(model).__name__} is dispatched with device_map = {placed!r:.100}; load it without "
        "device_map",
    )
    wrappers = (nn.DataParallel, nn.parallel.DistributedDataParallel)
    refuse_if(
        isinstance(model, wrappers),
        f"model is a {type(model).__name__}, which replicates a module; call optimus.offload with "
        "model.module",
    )
    owners = _check_parameters(dict(model.named_parameters()))
    for name, buffer in model.named_buffers():
        refuse_if(
            buffer.is_meta,
            f"buffer {name} is on the meta device; set its values before optimus.offload",
        )
        owner = owners.get(buffer.data_ptr()) if buffer.layout is torch.strided else None
        if owner is not None:
            raise ConfigError(
                f"buffer {name} shares memory with parameter {owner}, and optimus.offload moves "
                "the parameter; make the buffer a copy (clone), or use the parameter instead of "
                "the buffer"
            )
    for name, module in modules.items():
        refuse_if(
            getattr(module, "sparse", False) is True and isinstance(module, nn.Embedding),
            f"{name} has sparse gradients; use nn.Embedding(..., sparse=False)",
        )
        refuse_if(
            isinstance(module, torch.jit.ScriptModule) and any(True for _ in module.parameters()),
            f"{name or type(model).__name__} is compiled by torch.jit and has parameters; use the "
            "module without torch.jit",
        )


def _check_parameters(named: Mapping[str, nn.Parameter]) -> dict[int, str]:
    """Check the parameters of a model. Return a dict from memory addresses to the names of the
    parameters at these addresses. Parameters without elements are left out. Raises ConfigError if a
    parameter cannot be offloaded."""
    refuse_if(
        not any(p.requires_grad for p in named.values()),
        "no parameter requires a gradient; set requires_grad of the parameters to train",
    )
    owners: dict[int, str] = {}
    for name, parameter in named.items():
        if type(parameter) is not nn.Parameter:
            raise ConfigError(
                f"parameter {name} is a {type(parameter).__name__}; use a model with plain "
                "parameters, neither quantized nor sharded"
            )
        refuse_if(
            parameter.is_meta,
            f"parameter {name} is on the meta device; load its values before optimus.offload",
        )
        refuse_if(
            not parameter.dtype.is_floating_point
            or (parameter.requires_grad and parameter.dtype not in TRAINED),
            f"parameter {name} has the dtype {parameter.dtype}; use fp32, bf16 or fp16",
        )
        refuse_if(
            parameter.grad is not None,
            f"parameter {name} has a gradient already; call model.zero_grad() before "
            "optimus.offload",
        )
        refuse_if(
            getattr(parameter, "_post_accumulate_grad_hooks", None) or parameter._backward_hooks,
            f"parameter {name} has gradient hooks, such as those of an optimizer that updates "
            "parameters during backward; remove the hooks before optimus.offload",
        )
        pointer = parameter.data_ptr()
        refuse_if(
            pointer in owners,
            f"parameters {owners.get(pointer)} and {name} share memory, but are two "
            "nn.Parameter objects; use the same nn.Parameter object under the two names",
        )
        if parameter.numel():
            owners[pointer] = name
    return owners


class Structure(NotCopied):
    """Record of the modules, the parameters and the storages of the parameters of an offloaded
    model. A later call of `check` compares the model with the record.

    Args:
        model: The model.
        named: Parameters of the model by name. They are views of chunks.
        mark: The value of the attribute `MARK` of the parameters.
    """

    def __init__(self, model: nn.Module, named: Mapping[str, nn.Parameter], mark: object) -> None:
        self._model, self._named, self._mark = model, named, mark
        self._storages = self._storages_now()
        self._modules = [*model.modules()]
        self._members = _members(self._modules)

    def check(self) -> None:
        """Raise ConfigError if a parameter was moved, converted, replaced or added after the call
        of `optimus.offload`. Call this method in a context in which functions on guarded tensors
        are not intercepted (`torch._C.DisableTorchFunctionSubclass`)."""
        storages, members = self._storages_now(), _members(self._modules)
        is_known = len(members) == len(self._members) and all(map(is_, members, self._members))
        if is_known and storages == self._storages:
            return
        modules = [*self._model.modules()]
        for module in modules:
            for name, parameter in module._parameters.items():
                refuse_if(
                    parameter is not None and getattr(parameter, MARK, None) is not self._mark,
                    f"parameter {name} of {type(module).__name__} was added or replaced after "
                    "optimus.offload; change the model before the call",
                )
        for name, storage, known in zip(self._named, storages, self._storages, strict=True):
            refuse_if(
                storage != known,
                f"parameter {name} was moved, converted or replaced after optimus.offload; "
                "convert the model before the call",
            )
        self._modules, self._members = modules, _members(modules)

    def _storages_now(self) -> list[int]:
        return [p.untyped_storage()._cdata for p in self._named.values()]


def _members(modules: Iterable[nn.Module]) -> list[Any]:
    """Return the children and the parameters of all modules."""
    # `map`, `attrgetter` and `methodcaller` are implemented in C, and fast. This code runs twice
    # per step.
    tables = chain.from_iterable(map(attrgetter("_modules", "_parameters"), modules))
    # In a module of torch.jit.script, `_modules` and `_parameters` are not dicts, but have
    # `values`.
    return [*chain.from_iterable(map(methodcaller("values"), tables))]


def make_groups(
    named: Mapping[str, nn.Parameter], params: Iterable[Any] | None
) -> list[dict[str, Any]]:
    """Return the parameter groups of the optimizer.

    Args:
        named: All parameters of the model by name.
        params: Parameters, or dicts of parameter groups as for torch.optim.AdamW; None for all
            parameters that require a gradient.

    Raises:
        ConfigError: A parameter that requires a gradient is in no group or in two groups, or a
            group has an element that is not such a parameter.
    """
    trained = {id(p): name for name, p in named.items() if p.requires_grad}
    elements: Sequence[Any] = (
        [p for p in named.values() if p.requires_grad] if params is None else list(params)
    )
    dicts = all(isinstance(element, dict) for element in elements)
    groups = [dict(g) for g in elements] if dicts else [{"params": list(elements)}]
    seen: set[int] = set()
    for index, group in enumerate(groups):
        members = group.get("params", ())
        group["params"] = [members] if isinstance(members, torch.Tensor) else list(members)
        for member in group["params"]:
            if isinstance(member, tuple):
                raise ConfigError(
                    f"group {index} has a tuple; use parameters without their names, not tuples "
                    "of a name and a parameter"
                )
            refuse_if(
                id(member) not in trained,
                f"group {index} has a tensor that is not a parameter of the model with "
                "requires_grad = True; remove it from the group",
            )
            refuse_if(
                id(member) in seen, f"parameter {trained[id(member)]} is in two groups; remove one"
            )
            seen.add(id(member))
    missing = [name for key, name in trained.items() if key not in seen]
    if missing:
        raise ConfigError(
            f"{counted(len(missing), 'parameter')}, such as {missing[0]}, require a gradient but "
            "are in no group; add them to a group, or call requires_grad_(False)"
        )
    return groups


def check_bytes(key: str, value: str | int) -> int:
    """Return a number of bytes, such as 20000000000 for "20GB".

    Raises:
        ConfigError: The value is not a size from 1 byte to 1000 TB.
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
    """Return `value` as a float, a finite number in [low, high].

    Raises:
        ConfigError: The value is not a finite number in this range.
    """
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ConfigError(f"{key} = {value!r} is not a number; use a number from {low:g}")
    limit = f" to {high:g}" if high < math.inf else ""
    refuse_if(
        not (low <= value <= high and value <= sys.float_info.max),
        f"{key} = {value!r} is out of range; use a finite number from {low:g}{limit}",
    )
    return float(value)


def check_count(key: str, value: object) -> int:
    """Return `value`, if it is an integer from 0 to MAX_CHUNK.

    Raises:
        ConfigError: The value is not an integer, or is out of range.
    """
    if isinstance(value, bool) or not isinstance(value, int):
        raise ConfigError(f"{key} = {value!r} is not an integer; use an integer from 0")
    return int(check_number(key, value, 0, MAX_CHUNK))


def check_betas(betas: Sequence[float]) -> tuple[float, float]:
    """Return AdamW's betas, two numbers in [0, 1).

    Raises:
        ConfigError: `betas` is not a pair of numbers in this range.
    """
    remedy = f"betas = {betas!r}: use two numbers from 0 to less than 1, such as (0.9, 0.999)"
    try:
        first, second = (float(beta) for beta in betas)
    except (TypeError, ValueError):
        raise ConfigError(remedy) from None
    refuse_if(not (0 <= first < 1 and 0 <= second < 1), remedy)
    return first, second


def check_device(
    named: Mapping[str, nn.Parameter], device: str | torch.device | None
) -> torch.device:
    """Return the device on which a model computes. If `device` is None, this is the accelerator or,
    without an accelerator, the device of the parameters.

    Args:
        named: The parameters of the model by name.
        device: As for `optimus.offload`.

    Raises:
        ConfigError: `device` does not exist or is neither a CPU nor an accelerator, the parameters
            are on several devices, or torch.distributed is initialized with several processes.
    """
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
        "optimus.offload trains on one device, but torch.distributed has several processes; start "
        "one process",
    )
    if device is not None:
        try:
            chosen = torch.empty(0, device=device).device
        except (RuntimeError, AssertionError, TypeError) as error:
            raise ConfigError(f"device = {device!r}: {str(error).splitlines()[0]}") from None
        accelerator = torch.accelerator.current_accelerator(check_available=True)
        types = ["cpu"] if accelerator is None else ["cpu", accelerator.type]
        refuse_if(
            chosen.type not in types,
            f"device = {device!r}: cannot train on this device; use "
            f"{' or '.join(map(repr, types))}",
        )
        return chosen
    if torch.accelerator.is_available():
        return torch.empty(0, device=torch.accelerator.current_accelerator()).device
    return next(iter(devices))


def check_clip_norm(clip_norm: float | None) -> float | None:
    """Return the argument `clip_norm` as a float, or None if the argument is None. Raises
    ConfigError if the argument is neither None nor a positive number."""
    if clip_norm is None:
        return None
    clip_norm = check_number("clip_norm", clip_norm, 0.0)
    refuse_if(clip_norm == 0, "clip_norm = 0 would train nothing; use a positive norm, or None")
    return clip_norm
