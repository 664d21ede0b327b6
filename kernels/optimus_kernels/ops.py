"""How an op is made: schema, implementation, fake and gradient under one name, `optimus::NAME`.

Schemas are Python's, so the names exist whatever is compiled. An implementation asks
`library.native` for compiled kernels and otherwise computes its twin, which defines the op.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

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
    `save(ctx, inputs, output)` are register_autograd's. Without them there is no gradient, and
    asking for one is a NotImplementedError: autograd by itself would leave it out unsaid.
    """
    name = schema.partition("(")[0]
    _LIBRARY.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
    _LIBRARY.impl(name, run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"optimus::{name}", fake, lib=_LIBRARY)
    if "!" not in schema:  # what writes to its operands cannot have one registered
        torch.library.register_autograd(
            f"optimus::{name}", backward or _refusing(name), setup_context=save, lib=_LIBRARY
        )
    return getattr(torch.ops.optimus, name).default


def refuse_gradient(name: str, *operands: Tensor) -> None:
    """For ops that write to their operands, where autograd has nowhere to refuse later."""
    if torch.is_grad_enabled() and any(operand.requires_grad for operand in operands):
        raise _no_gradient(name)


def _refusing(name: str) -> Callable:
    def backward(ctx: Any, *grads: Any) -> NoReturn:
        raise _no_gradient(name)

    return backward


def _no_gradient(name: str) -> NotImplementedError:
    return NotImplementedError(
        f"torch.ops.optimus.{name} has no gradient: it is a part of optimus_kernels.experts, "
        "or itself a gradient; leave out create_graph, or compute in plain torch"
    )


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """What twins compute in: fp32, as the kernels do, and fp64 for fp64."""
    return torch.float64 if dtype is torch.float64 else torch.float32
