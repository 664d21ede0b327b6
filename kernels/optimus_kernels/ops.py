"""How an op is made: schema, implementation, fake and gradient under one name, `optimus::NAME`.

Schemas are Python's, so the names exist whatever is compiled. An implementation asks
`library.native` for compiled kernels and otherwise computes its twin, which defines the op.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

_LIBRARY = torch.library.Library("optimus", "FRAGMENT")


def define(
    schema: str,
    run: Callable,
    fake: Callable,
    backward: Callable | None = None,
    save: Callable | None = None,
) -> Any:
    """The op of a schema such as `gather(Tensor x) -> Tensor`.

    `fake` gives empty outputs of the right shape; `backward(ctx, *grads)` and
    `save(ctx, inputs, output)` are register_autograd's. Without them there is no gradient.
    """
    name = schema.partition("(")[0]
    _LIBRARY.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
    _LIBRARY.impl(name, run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"optimus::{name}", fake, lib=_LIBRARY)
    if backward is not None:
        torch.library.register_autograd(
            f"optimus::{name}", backward, setup_context=save, lib=_LIBRARY
        )
    return getattr(torch.ops.optimus, name).default


def debug() -> bool:
    """Whether indices are looked at before they are used (OPTIMUS_KERNELS_DEBUG=1): on an
    accelerator the host waits for each look."""
    return os.environ.get("OPTIMUS_KERNELS_DEBUG") == "1"


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


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """What twins compute in: fp32, as the kernels do, and fp64 for fp64."""
    return torch.float64 if dtype is torch.float64 else torch.float32
