"""Registration of ops as `optimus::NAME`, and checks of their operands.

Schemas are defined in Python, so that the ops exist even if kernels are not compiled. An error
message names the operand, its shape and its dtype. Messages are formatted only after a check has
failed, because torch.compile cannot format dynamic sizes.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Mapping
from typing import Any, NoReturn, ParamSpec, TypeVar

import torch
from torch import Tensor

_LIBRARY = torch.library.Library("optimus", "FRAGMENT")
_FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")


def define(
    schema: str,
    fake: Callable,
    check: Callable,
    backward: Callable | None = None,
    save: Callable | None = None,
) -> Callable[[Callable[_Arguments, _Result]], Callable[_Arguments, _Result]]:
    """Return a decorator that registers a function as a torch op in the namespace `optimus`.

    The decorated function implements the op on all devices. The decorator returns a function that
    calls the op. `fake` and `check` are called with the arguments of the op.

    Args:
        schema: name and schema of the op, such as `gather(Tensor x) -> Tensor`.
        fake: the fake implementation for tracing, which returns empty outputs of the right shapes.
        check: function that raises an error if operands are invalid. It is called before the
            decorated function and before `fake`.
        backward: `backward(ctx, *grads)`, as for torch.library.register_autograd. If it is None,
            backward through the op raises NotImplementedError.
        save: `save(ctx, inputs, output)`, the argument `setup_context` of
            torch.library.register_autograd. By default, all inputs are saved for `backward`.
    """
    name = schema.partition("(")[0]

    def checked(function: Callable) -> Callable:
        @functools.wraps(function)
        def call(*arguments: Any) -> Any:
            check(*arguments)
            return function(*arguments)

        return call

    def refuse(ctx: Any, *grads: Any) -> NoReturn:
        raise _no_gradient(name)

    def register(run: Callable[_Arguments, _Result]) -> Callable[_Arguments, _Result]:
        _LIBRARY.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
        _LIBRARY.impl(name, checked(run), "CompositeExplicitAutograd")
        torch.library.register_fake(f"optimus::{name}", checked(fake), lib=_LIBRARY)
        if "!" not in schema:  # ops that write to operands cannot have a gradient
            # Without `refuse`, torch would return no gradient, without an error.
            setup = save or (_save_inputs if backward else None)
            torch.library.register_autograd(
                f"optimus::{name}", backward or refuse, setup_context=setup, lib=_LIBRARY
            )
        op = getattr(torch.ops.optimus, name).default

        @functools.wraps(run)
        def call_op(*args: _Arguments.args, **kwargs: _Arguments.kwargs) -> _Result:
            return op(*args, **kwargs)

        return call_op

    return register


def _save_inputs(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def refuse_gradient(name: str, *operands: Tensor) -> None:
    """Raise NotImplementedError if gradients are enabled and an operand requires a gradient."""
    # For an op that writes to operands, torch does not accept a backward function, which could
    # raise this error.
    if torch.is_grad_enabled() and any(operand.requires_grad for operand in operands):
        raise _no_gradient(name)


def _no_gradient(name: str) -> NotImplementedError:
    return NotImplementedError(
        f"torch.ops.optimus.{name} has no gradient; call optimus_kernels.experts instead of this "
        "op, and for second derivatives (create_graph=True) use plain torch"
    )


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which ops compute: fp64 for fp64 operands, else fp32."""
    return torch.float64 if dtype is torch.float64 else torch.float32


def debug() -> bool:
    """Return True if OPTIMUS_KERNELS_DEBUG=1 is set (debug mode). In debug mode, ops check all
    indices before they use them."""
    return os.environ.get("OPTIMUS_KERNELS_DEBUG") == "1"


def check_operands(
    op: str, values: Mapping[str, Tensor | None], indices: Mapping[str, Tensor]
) -> None:
    """Check the dtypes and devices of an op's operands.

    Args:
        op: name of the op, for error messages.
        values: floating-point operands by name; None values are skipped.
        indices: index tensors by name.

    Raises:
        TypeError: the tensors in `values` have different dtypes or an unsupported dtype, a tensor
            in `indices` is not int32, or operands are on different devices.
    """
    present = {name: value for name, value in values.items() if value is not None}
    dtypes = {value.dtype for value in present.values()}
    if len(dtypes) > 1:
        raise TypeError(f"{op}: {_dtypes(present)}; they must have the same dtype")
    if not dtypes <= set(_FLOATS):
        raise TypeError(f"{op}: {_dtypes(present)}; use fp32, bf16, fp16 or fp64")
    if any(index.dtype is not torch.int32 for index in indices.values()):
        raise TypeError(f"{op}: {_dtypes(indices)}; indices must be int32, as route returns them")
    operands = {**present, **indices}
    if len({value.device for value in operands.values()}) > 1:
        devices = ", ".join(f"{name} on {value.device}" for name, value in operands.items())
        raise TypeError(f"{op}: {devices}; move all to one device")


def check_index(op: str, name: str, index: Tensor, size: int) -> None:
    """Raise ValueError in debug mode if an element of `index` is neither -1 nor in [0, size)."""
    if not debug():
        return
    wrong = ((index < -1) | (index >= size)).flatten().nonzero().flatten()
    if len(wrong):
        position = int(wrong[0])
        raise ValueError(
            f"{op}: {name} {list(index.shape)} has {len(wrong)} indices outside -1 to {size - 1}; "
            f"the first is {int(index.flatten()[position])} at position {position}"
        )


def check_offsets(op: str, offsets: Tensor, rows: int) -> None:
    """Raise ValueError unless `offsets` starts with 0, does not decrease, and ends with at most
    `rows`. `rows` is the number of rows.

    On accelerators, the offsets are checked only in debug mode, because the host must wait for the
    device before it can read the offsets.
    """
    if not (offsets.is_cpu or debug()):
        return
    bounds = offsets.tolist()
    if bounds[0] != 0 or bounds[-1] > rows or sorted(bounds) != bounds:
        raise ValueError(
            f"{op}: offsets must start at 0, must not decrease, and must end at {rows} or less for "
            f"{rows} rows; they are "
            f"{bounds if len(bounds) <= 8 else [*bounds[:4], '...', *bounds[-4:]]}"
        )


def shapes(named: Mapping[str, Tensor]) -> str:
    """Return the names and shapes of tensors as text for an error message."""
    return ", ".join(f"{name} {list(value.shape)}" for name, value in named.items())


def _dtypes(named: Mapping[str, Tensor]) -> str:
    return ", ".join(f"{name} {value.dtype}" for name, value in named.items())
