"""Checks of the operands of ops, with messages that name operand, shape and dtype.

Messages are formatted only after a check fails, because torch.compile cannot format dynamic sizes.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

import torch
from torch import Tensor

FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def debug() -> bool:
    """Return whether OPTIMUS_KERNELS_DEBUG=1 is set. Ops then check indices before use."""
    return os.environ.get("OPTIMUS_KERNELS_DEBUG") == "1"


def check_operands(
    op: str, values: Mapping[str, Tensor | None], indices: Mapping[str, Tensor]
) -> None:
    """Check dtypes and devices of an op's operands.

    Args:
        op: name of the op, for messages.
        values: floating-point operands by name; None values are skipped.
        indices: index tensors by name.

    Raises:
        TypeError: `values` have different dtypes or an unsupported dtype, `indices` are not int32,
            or operands are on different devices.
    """
    present = {name: value for name, value in values.items() if value is not None}
    dtypes = {value.dtype for value in present.values()}
    if len(dtypes) > 1:
        raise TypeError(f"{op}: {_dtypes(present)}; they must have the same dtype")
    if not dtypes <= set(FLOATS):
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
            f"{op}: {name} {list(index.shape)} has {len(wrong)} numbers outside -1 to {size - 1}; "
            f"the first is {int(index.flatten()[position])} at position {position}"
        )


def check_offsets(op: str, offsets: Tensor, rows: int) -> None:
    """Raise ValueError unless offsets start at 0, do not decrease, and end at `rows` or less.

    On accelerators, offsets are checked only in debug mode, because the host must wait for the
    device to read them.
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
