"""Guarded tensors: parameters and gradients whose memory on the device is freed between uses.

Code of users, of transformers and of torch can use a parameter or its `.grad` at any time. A read
of freed memory crashes the process, and a write to the copy of a parameter on the device would be
lost. Therefore the Python class of such a tensor is changed while no segment (`ModuleSegment`) uses
the tensor. torch then passes each call of a torch function with this tensor to
`__torch_function__`:

- Functions that need no values, such as `shape`, run unchanged.
- Before a function reads a parameter, the parameter is gathered, that is, its chunk is copied to
  the device. The call is refused if autograd records the function, because the backward of the
  function would read the parameter again, at a time that no hook observes. If a function reads
  parameters of several chunks, only the chunk of the first parameter is kept on the device, because
  the cache can be too small for all chunks. The function gets copies of the other parameters.
- A write to a parameter is refused. A function that writes to another tensor, such as
  `average.lerp_(parameter, 0.1)`, only reads the parameter.
- During the backward of a segment, reads and writes of a gradient of the segment use the gradient
  on the device, and views of this gradient are guarded, too. At any other time, reads and writes of
  a gradient use the sum on the host. A function that uses this sum and also reads a parameter gets
  a copy of the parameter on the host.
- NumPy arrays of parameters are copies, because a storage that NumPy refers to cannot be freed.

While a segment computes, its parameters have their original class, so that guards cost no time in
the computation.

Code is allowed to change a parameter that stays on the device. The offloaded model detects the
change by torch's version counter of the parameter. A change through `data` of a plain parameter
does not increment this counter. `WatchedParameter` therefore replaces the attribute `data`.
"""

from __future__ import annotations

import copy
import dataclasses
import weakref
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch._C import _len_torch_dispatch_stack
from torch._C._functorch import is_functorch_wrapped_tensor
from torch.utils._python_dispatch import _disable_current_modes

from optimus.errors import ConfigError, one_line, refuse_if
from optimus.offloading.checks import NotCopied

_NEEDS_NO_VALUES = frozenset(
    (
        *("size", "dim", "ndimension", "numel", "nelement", "stride", "element_size", "__len__"),
        *("is_contiguous", "storage_offset", "untyped_storage", "get_device"),
        *("is_floating_point", "is_complex", "is_signed", "is_shared", "is_pinned", "__hash__"),
        *("is_inference", "is_same_size", "is_set_to", "_has_compatible_shallow_copy_type"),
        *("register_hook", "register_post_accumulate_grad_hook", "retain_grad", "requires_grad_"),
        *("empty_like", "zeros_like", "ones_like", "full_like", "rand_like", "randn_like"),
        *("new_empty", "new_zeros", "new_ones", "new_full"),
        *("backward", "grad"),  # functions of torch.autograd, which only find tensors in the graph
    )
)
_data: Any = torch._C.TensorBase.data
_ATTRIBUTE = "_optimus_guard"
_VALUES_OF_GET = frozenset(("data", "T", "mT", "H", "mH", "real", "imag"))
_WRITE = (
    "parameter {} is offloaded and cannot be changed by {}; use the optimizer of optimus.offload "
    "or model.load_state_dict, or change the parameter before the call of optimus.offload"
)
_ARRAYS = frozenset(("numpy", "__array__"))
_CONVERSIONS = frozenset(("to", "cpu", "cuda", "xpu", "float", "half", "bfloat16", "double"))


class Owner(Protocol):
    """The offloaded model (`OffloadedModel`) to which a guarded tensor belongs."""

    segment_of: dict[str, str]
    """A dict from the name of each parameter to the name of the first segment that has the
    parameter."""

    def read(self, name: str) -> None:
        """Gather the parameter `name` on the device. Its values stay there until the next forward
        or backward of a segment."""

    def restore(self, name: str) -> None:
        """Undo a write to the copy of the parameter `name` on the device."""

    def gradient_sum(self, name: str) -> Tensor:
        """Return the tensor that now has the gradient of the parameter `name`: during the backward
        of its segment, the buffer on the device; at any other time, the sum on the host."""


class Guard(NotCopied):
    """Attributes of a guarded tensor: the name of the parameter, the offloaded model that owns the
    parameter, and the storage (`UntypedStorage._cdata`) of the tensor.

    Python cannot collect a reference cycle through the attributes of a tensor that autograd also
    uses. Therefore this object has a weak reference to the owner.
    """

    __slots__ = ("_owner", "name", "storage")

    def __init__(self, name: str, owner: Owner, flat: Tensor) -> None:
        self.name, self._owner = name, weakref.ref(owner)
        self.storage = flat.untyped_storage()._cdata

    @property
    def owner(self) -> Owner:
        """The offloaded model to which the tensor belongs. Raises ConfigError if this model was
        deleted."""
        owner = self._owner()
        if owner is None:
            raise ConfigError(
                f"the offloaded model that has parameter {self.name} was deleted; keep a reference "
                "to the model"
            )
        return owner


class GuardedParameter(nn.Parameter):
    """An offloaded parameter while its segment does not compute."""

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return _run(func, args, kwargs or {})


class WatchedParameter(nn.Parameter):
    """A parameter that stays on the device. An in-place change of `data` increments the version
    counter of the parameter."""

    @property
    def data(self) -> Tensor:
        """The values, as a tensor that has the version counter of the parameter."""
        return self.detach()

    @data.setter
    def data(self, value: Tensor) -> None:
        _data.__set__(self, value)


class GuardedView(Tensor):
    """A view of a parameter, made while no segment with the parameter computed."""

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return _run(func, args, kwargs or {})


class GuardedGradient(Tensor):
    """The `.grad` of a parameter whose states are on the host."""

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return _run(func, args, kwargs or {})


class GuardedGradientView(Tensor):
    """A view of a gradient on the device, made during backward."""

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return _run(func, args, kwargs or {})


_PARAMETERS = (GuardedParameter, GuardedView)
_GRADIENTS = (GuardedGradient, GuardedGradientView)


def guard(tensor: Tensor, kind: type, name: str, owner: Owner) -> None:
    """Set the attribute with the `Guard` of a tensor. Unless `kind` is `GuardedParameter`, also
    change the class of the tensor to `kind`. The class of a parameter is changed later, by
    `close`."""
    setattr(tensor, _ATTRIBUTE, Guard(name, owner, tensor))
    if kind is not GuardedParameter:
        tensor.__class__ = kind


def watch(parameter: Tensor) -> None:
    """Make a plain parameter a watched parameter. `open_` undoes this."""
    parameter.__class__ = WatchedParameter


def close(parameter: Tensor) -> None:
    """Make a parameter with the attributes of `guard` a guarded parameter."""
    parameter.__class__ = GuardedParameter


def open_(parameter: Tensor) -> None:
    """Make a guarded or watched parameter a plain parameter. Call this function when the values of
    the parameter are on the device."""
    parameter.__class__ = nn.Parameter


def remove(parameter: Tensor) -> None:
    """Make a guarded parameter a plain parameter without the attributes of `guard`."""
    open_(parameter)
    delattr(parameter, _ATTRIBUTE)


def name_of(tensor: Tensor) -> str:
    """Return the name of the parameter to which a tensor with the attributes of `guard` belongs."""
    return _guard_of(tensor).name


def _guard_of(tensor: Tensor) -> Guard:
    of_tensor = getattr(tensor, _ATTRIBUTE, None)
    if of_tensor is None:
        raise ConfigError(
            "a parameter was replaced by torch.utils.swap_tensors after optimus.offload; change "
            "the model before the call"
        )
    return of_tensor


def _run(func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
    """Return the result of a torch function that has guarded tensors in its arguments. Raise
    ConfigError if guarded tensors do not support the call."""
    if not _needs_values(func, args, kwargs):
        return _call(func, args, kwargs)
    name = _name_of(func)
    if name in _CONVERSIONS and _is_same(func, args, kwargs):
        return args[0]
    tensors = list(tensors_in((args, kwargs)))
    if name == "data_ptr":
        return _pointer(func, args)
    written = next((t for t in _written(name, args, kwargs) if isinstance(t, _PARAMETERS)), None)
    if written is not None:
        raise ConfigError(_WRITE.format(_guard_of(written).name, name))
    refuse_if(
        name == "__dlpack__",
        "an offloaded tensor cannot be exported by __dlpack__; export a copy (tensor.clone())",
    )
    if any(isinstance(tensor, _GRADIENTS) for tensor in tensors):
        return _run_on_gradients(func, args, kwargs, tensors)
    parameters = [tensor for tensor in tensors if isinstance(tensor, _PARAMETERS)]
    return _run_on_parameters(func, args, kwargs, parameters)


def _pointer(func: Any, args: tuple) -> int:
    """Return the memory address of a guarded tensor. The memory can be freed at any later time, but
    callers such as safetensors read the memory immediately. Raise ConfigError if the memory is
    freed now."""
    with torch._C.DisableTorchFunctionSubclass():
        is_freed = not args[0].untyped_storage().nbytes() and args[0].numel()
    refuse_if(
        is_freed,
        f"data_ptr cannot be called now: parameter {_guard_of(args[0]).name} is offloaded, and its "
        "memory is freed; use a copy (parameter.detach().clone()) or the tensors of "
        "model.state_dict()",
    )
    return _call(func, args, {})


def _run_on_gradients(
    func: Any, args: tuple, kwargs: dict[str, Any], tensors: Sequence[Tensor]
) -> Any:
    """Return the result of a function that has gradients in its arguments. Call the function with
    the tensors that have the values of the gradients (`Owner.gradient_sum`).

    Parameters in the arguments are replaced by copies on the device of the gradients, and
    ConfigError is raised if the function changes such a copy. Other tensors that are on another
    device than the gradients are replaced by copies, too. If the function changes such a copy, the
    new values are copied to the original tensor.

    Args:
        func, args, kwargs: The function and its arguments.
        tensors: The tensors in the arguments.
    """
    name = _name_of(func)
    gradients = [tensor for tensor in tensors if isinstance(tensor, _GRADIENTS)]
    of_first = _guard_of(gradients[0])
    refuse_if(
        name == "data.set",
        f"the gradient of parameter {of_first.name} cannot be replaced; use grad.copy_",
    )
    sums = {id(gradient): _values_of(gradient) for gradient in gradients}
    device = sums[id(gradients[0])].device
    read: list[tuple[Tensor, Tensor, int]] = []
    moved: list[tuple[Tensor, Tensor, Tensor]] = []
    for tensor in tensors if name not in _CONVERSIONS else [args[0]]:
        if isinstance(tensor, _PARAMETERS):
            copy = _copy(tensor, device)
            read.append((tensor, copy, copy._version))
        elif not isinstance(tensor, _GRADIENTS) and tensor.device != device:
            copy = tensor.to(device)
            moved.append((tensor, copy, copy.detach().clone()))
    replaced = sums | {id(tensor): copy for tensor, copy, _ in [*read, *moved]}
    on_device = {of.storage: of for of in map(_guard_of, gradients)}
    if name in _ARRAYS and sums[id(gradients[0])].untyped_storage()._cdata in on_device:
        return _array_of(func, args, kwargs, {id(g): sums[id(g)].clone() for g in gradients})
    result = _call(func, _replace(args, replaced), _replace(kwargs, replaced))
    for tensor, copy, before in moved:
        if not torch.equal(copy, before):  # changed by the function, as GradScaler does
            tensor.copy_(copy)
    for tensor, copy, version in read:
        parameter = _guard_of(tensor)
        refuse_if(copy._version != version, _WRITE.format(parameter.name, name))
        _refuse_recorded(result, parameter, name)
    # An in-place function returns its first argument. Return the original tensor instead of its
    # replacement, because `p.grad *= 2` sets `p.grad` to the result.
    originals = {id(replaced[id(tensor)]): tensor for tensor in tensors if id(tensor) in replaced}
    result = originals.get(id(result), result)
    _guard_views(result, GuardedGradientView, on_device)
    return result


def _values_of(gradient: Tensor) -> Tensor:
    """Return the tensor that now has the values of a gradient or of a view of a gradient."""
    of_gradient = _guard_of(gradient)
    total = of_gradient.owner.gradient_sum(of_gradient.name)
    if isinstance(gradient, GuardedGradient):
        return total
    refuse_if(
        total.untyped_storage()._cdata != of_gradient.storage,
        f"a view of the gradient of parameter {of_gradient.name}, made during backward, is used "
        "after backward, when the memory is freed; copy the gradient in backward (grad.clone())",
    )
    with torch._C.DisableTorchFunctionSubclass():
        return gradient.view_as(gradient)


def _array_of(func: Any, args: tuple, kwargs: dict[str, Any], copies: dict[int, Tensor]) -> Any:
    """Return the NumPy array that a function makes from copies of guarded tensors. The array is
    read-only, because a change of the array would not change the guarded tensors."""
    array = _call(func, _replace(args, copies), _replace(kwargs, copies))
    array.setflags(write=False)
    return array


def _run_on_parameters(
    func: Any, args: tuple, kwargs: dict[str, Any], parameters: Sequence[Tensor]
) -> Any:
    """Return the result of a function that has guarded `parameters`, but no guarded gradients, in
    its arguments. Raise ConfigError if the function writes to a parameter or if autograd records
    the function."""
    name, first = _name_of(func), _guard_of(parameters[0])
    refuse_if(name == "__deepcopy__", "an offloaded model cannot be copied; copy its state_dict()")
    if name in _ARRAYS:  # a storage that NumPy refers to cannot be freed
        return _array_of(func, args, kwargs, {id(p): _copy(p, p.device) for p in parameters})
    copies = _gather(parameters)
    used = [copies.get(id(parameter), parameter) for parameter in parameters]
    versions = [tensor._version for tensor in used]
    result = _call(func, _replace(args, copies), _replace(kwargs, copies))
    for parameter, tensor, version in zip(parameters, used, versions, strict=True):
        if tensor._version != version:  # for example by F.dropout(inplace=True)
            of_parameter = _guard_of(parameter)
            of_parameter.owner.restore(of_parameter.name)
            raise ConfigError(_WRITE.format(of_parameter.name, name))
    _refuse_recorded(result, first, name)
    copied = {copy.untyped_storage()._cdata for copy in copies.values()}
    storages = {_guard_of(parameter).storage: _guard_of(parameter) for parameter in parameters}
    refuse_if(
        any(_storage_of(tensor) in copied for tensor in tensors_in(result)),
        f"{name} returns views of several offloaded parameters, such as {first.name}; "
        "call it with their copies (parameter.detach().clone())",
    )
    _guard_views(result, GuardedView, storages)
    return result


def _guard_views(result: Any, kind: type, storages: dict[int, Guard]) -> None:
    """If tensors in a result are views of `storages`, change the class of these tensors to
    `kind`."""
    for tensor in tensors_in(result):
        of_view = storages.get(_storage_of(tensor))
        if of_view is not None:
            guard(tensor, kind, of_view.name, of_view.owner)


def storages_of(parameters: Sequence[Tensor]) -> dict[int, Guard]:
    """Return a dict from each storage of guarded parameters to the `Guard` of a parameter in this
    storage."""
    return {_guard_of(parameter).storage: _guard_of(parameter) for parameter in parameters}


def views_of(storages: Collection[int], tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return the elements of `tensors` that are guarded parameters or views of guarded parameters.
    `storages` contains the storages of these parameters, as values of `Guard.storage`."""
    return [
        tensor
        for tensor in tensors
        if _storage_of(tensor) in storages
        or (isinstance(tensor, GuardedParameter) and _guard_of(tensor).storage in storages)
    ]


def keep_views(outputs: Any, views: Sequence[Tensor], storages: dict[int, Guard]) -> Any:
    """Return the outputs of a module after its forward. The tensors in `views` are replaced by
    copies, because their memory is freed after the forward. If gradients are disabled, guard these
    tensors instead of replacing them.

    Args:
        outputs: The outputs of the module.
        views: The result of `views_of` for the tensors in `outputs`.
        storages: The result of `storages_of` for the parameters of the module.
    """
    if not torch.is_grad_enabled():
        _guard_views(views, GuardedView, storages)
        return outputs
    with torch._C.DisableTorchFunctionSubclass():
        copies = {id(view): view.clone() for view in views}
    return _replace(outputs, copies)


def _storage_of(tensor: Tensor) -> int:
    """Return `UntypedStorage._cdata` of a plain strided tensor; 0 for other tensors."""
    is_plain = type(tensor) is Tensor and tensor.layout is torch.strided
    is_plain = is_plain and not is_functorch_wrapped_tensor(tensor)
    return tensor.untyped_storage()._cdata if is_plain else 0


def _refuse_recorded(result: Any, parameter: Guard, function: str) -> None:
    """Raise ConfigError if autograd has recorded a call of a function with a parameter.

    Args:
        result: Result of the call.
        parameter: The guard of the parameter.
        function: Name of the function, for the message.
    """
    name, segment = parameter.name, parameter.owner.segment_of[parameter.name]
    refuse_if(
        torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors_in(result)),
        f"offloaded parameter {name} is used with gradients outside of the forward of {segment}, "
        f"or after a backward in this forward. The backward of {function} could not read the "
        f"parameter; call {segment}, or a module that shares the parameter (such as another "
        "nn.Linear), or read the parameter in torch.no_grad()",
    )


def _written(name: str, args: tuple, kwargs: dict[str, Any]) -> Iterator[Tensor]:
    """Yield the tensors that a function writes: the tensors in `out`, and the first argument if
    `name` is the name of an in-place function or of the setter of `data`."""
    yield from tensors_in(kwargs.get("out"))
    is_in_place = name.endswith("_") and not name.endswith("__")
    is_in_place = is_in_place or (name.startswith("__i") and name != "__invert__")
    if is_in_place or name in ("__setitem__", "data.set"):
        yield from tensors_in([*args, *kwargs.values()][:1])


def _gather(parameters: Sequence[Tensor]) -> dict[int, Tensor]:
    """Gather the chunk of the first parameter. Return copies of the parameters in other chunks: a
    dict from `id(parameter)` to the copy."""
    first = _guard_of(parameters[0])
    others = {id(p): p for p in parameters if _guard_of(p).storage != first.storage}
    copies = {}
    # In the order of chunks, so that each chunk is gathered once.
    for parameter in sorted(others.values(), key=lambda p: _guard_of(p).storage):
        copies[id(parameter)] = _copy(parameter, parameter.device)
    first.owner.read(first.name)
    return copies


def _copy(parameter: Tensor, device: torch.device) -> Tensor:
    """Gather a parameter and return a copy of it on a device."""
    of_parameter = _guard_of(parameter)
    of_parameter.owner.read(of_parameter.name)
    with torch._C.DisableTorchFunctionSubclass(), torch.inference_mode(False):
        copy = parameter.detach().to(device, copy=True)
    return copy.requires_grad_(parameter.requires_grad)


def _replace(value: Any, copies: dict[int, Tensor]) -> Any:
    """Return a copy of `value` in which tensors are replaced. `value` can be any argument of
    `tensors_in`. `copies` is a dict from `id(tensor)` to the replacement of this tensor. If
    `copies` is empty, return `value` itself."""
    if not copies:
        return value
    if isinstance(value, Tensor):
        return copies.get(id(value), value)
    if isinstance(value, dict):
        replaced = _copied(value)  # has the same class, such as ModelOutput of transformers
        for key, element in value.items():
            replaced[key] = _replace(element, copies)
        return replaced
    if isinstance(value, list):
        replaced = _copied(value)  # has the same class and attributes
        list.__setitem__(replaced, slice(None), [_replace(element, copies) for element in value])
        return replaced
    if isinstance(value, tuple):
        elements = [_replace(element, copies) for element in value]
        if hasattr(value, "n_sequence_fields"):  # a class of torch.return_types, in C
            return type(value)(elements)
        replaced = tuple.__new__(type(value), elements)
        if hasattr(value, "__dict__"):
            vars(replaced).update(vars(value))
        return replaced
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        replaced = _copied(value)
        for field in dataclasses.fields(value):
            element = _replace(getattr(value, field.name), copies)
            object.__setattr__(replaced, field.name, element)  # also works for frozen classes
        return replaced
    return value


def _copied(value: Any) -> Any:
    """Return a shallow copy of a collection. Raise ConfigError if the class of the collection does
    not support copies."""
    try:
        return copy.copy(value)
    except Exception as error:  # the code of the class can raise any error
        kind, reason = type(value).__name__, one_line(error)[:200]
        raise ConfigError(
            f"an offloaded parameter in a {kind} must be replaced, but the {kind} cannot be copied "
            f"({type(error).__name__}: {reason}); use a list, a tuple or a dict"
        ) from error


def _needs_values(func: Any, args: tuple, kwargs: dict[str, Any]) -> bool:
    """Return True if a function can read or write the values of the tensors in its arguments."""
    name = func.__name__
    if name == "__get__":
        return func.__self__.__name__ in _VALUES_OF_GET
    if name in ("__set__", "__delete__"):
        return func.__self__.__name__ == "data" and not _is_alias(args[0], args[1])
    return name not in _NEEDS_NO_VALUES and not (name == "type" and len(args) == 1 and not kwargs)


def _is_alias(tensor: Tensor, value: Tensor) -> bool:
    """Return True if two tensors are views of the same elements."""
    with torch._C.DisableTorchFunctionSubclass():
        return (
            tensor.untyped_storage()._cdata == value.untyped_storage()._cdata
            and tensor.storage_offset() == value.storage_offset()
            and tensor.shape == value.shape
            and tensor.dtype is value.dtype
        )


def _is_same(func: Callable[..., Any], args: tuple, kwargs: dict[str, Any]) -> bool:
    """Return True if a conversion, such as `to`, would return the tensor `args[0]` itself."""
    with torch._C.DisableTorchFunctionSubclass():
        tensor = args[0]
        if kwargs.get("copy"):
            return False
        device, dtype = tensor.device, tensor.dtype
        if _name_of(func) == "to":
            target = {k: v for k, v in kwargs.items() if k in ("device", "dtype")}
            for value in args[1:]:
                if isinstance(value, Tensor):
                    target |= {"device": value.device, "dtype": value.dtype}
                elif isinstance(value, torch.dtype):
                    target["dtype"] = value
                elif value is True:  # a positional `copy` or `non_blocking`; assume `copy`
                    return False
                elif value is not None and not isinstance(value, bool):
                    target["device"] = value
            dtype = target.get("dtype") or dtype
            device = torch.empty(0, device=target.get("device") or device).device
        else:
            small = getattr(torch.empty(0, device=device, dtype=dtype), _name_of(func))
            converted = small(*args[1:], **kwargs)
            device, dtype = converted.device, converted.dtype
        return device == tensor.device and dtype is tensor.dtype


def _name_of(func: Any) -> str:
    """Return the name of a torch function. The name of an access to an attribute is, for example,
    "data.get", "data.set" or "data.delete"."""
    if func.__name__ in ("__get__", "__set__", "__delete__"):
        return f"{func.__self__.__name__}.{func.__name__.strip('_')}"
    return func.__name__


def _call(func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
    with torch._C.DisableTorchFunctionSubclass():
        return func(*args, **kwargs)


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Yield the tensors in a value of nested tuples, lists, dicts and dataclasses."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for element in value:
            yield from tensors_in(element)
    elif isinstance(value, dict):
        yield from tensors_in(list(value.values()))
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        yield from tensors_in([getattr(value, f.name) for f in dataclasses.fields(value)])


def without_modes() -> AbstractContextManager:
    """Return a context manager in which the user's TorchDispatchModes are not called. The modes of
    selective checkpointing count the operations of a forward and of its recomputation. The forward
    and the recomputation can copy different chunks, so these copies must not be counted."""
    return _disable_current_modes() if _len_torch_dispatch_stack() else nullcontext()
