"""What ops say of operands that do not go together.

Messages are made only to be raised: torch.compile cannot print sizes that vary.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

import torch
from torch import Tensor

FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def debug() -> bool:
    """Whether indices are looked at before they are used (OPTIMUS_KERNELS_DEBUG=1): on an
    accelerator the host waits for each look."""
    return os.environ.get("OPTIMUS_KERNELS_DEBUG") == "1"


def check_operands(
    op: str, values: Mapping[str, Tensor | None], indices: Mapping[str, Tensor]
) -> None:
    """TypeError unless `values` have one dtype, a floating one, `indices` are int32 and all lie on
    one device."""
    given = {name: value for name, value in values.items() if value is not None}
    dtypes = {value.dtype for value in given.values()}
    if len(dtypes) > 1:
        raise TypeError(f"{op}: {_dtypes(given)}; they must be of one dtype")
    if not dtypes <= set(FLOATS):
        raise TypeError(f"{op}: {_dtypes(given)}; it computes in fp32, bf16, fp16 and fp64")
    if any(index.dtype is not torch.int32 for index in indices.values()):
        raise TypeError(f"{op}: {_dtypes(indices)}; indices must be int32, as route gives them")
    every = {**given, **indices}
    if len({value.device for value in every.values()}) > 1:
        places = ", ".join(f"{name} on {value.device}" for name, value in every.items())
        raise TypeError(f"{op}: {places}; all must be on one device")


def check_index(op: str, name: str, index: Tensor, size: int) -> None:
    """In debug mode, ValueError for an index that is neither -1 nor below `size`."""
    if not debug():
        return
    wrong = ((index < -1) | (index >= size)).flatten().nonzero().flatten()
    if len(wrong):
        at = int(wrong[0])
        raise ValueError(
            f"{op}: {name} {list(index.shape)} has {len(wrong)} numbers out of -1 to {size - 1}, "
            f"the first {int(index.flatten()[at])} in place {at}"
        )


def check_offsets(op: str, offsets: Tensor, rows: int) -> None:
    """ValueError unless offsets rise from 0 to at most `rows`: on a CPU always, elsewhere in debug
    mode, since the host waits for them."""
    if not (offsets.is_cpu or debug()):
        return
    bounds = offsets.tolist()
    if bounds[0] != 0 or bounds[-1] > rows or sorted(bounds) != bounds:
        raise ValueError(
            f"{op}: offsets must rise from 0 to at most the {rows} rows there are; these are "
            f"{bounds if len(bounds) <= 8 else [*bounds[:4], '...', *bounds[-4:]]}"
        )


def shapes(named: Mapping[str, Tensor]) -> str:
    """For messages."""
    return ", ".join(f"{name} {list(value.shape)}" for name, value in named.items())


def _dtypes(named: Mapping[str, Tensor]) -> str:
    return ", ".join(f"{name} {value.dtype}" for name, value in named.items())
