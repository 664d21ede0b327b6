"""Registration of ops: schema, implementation, fake and gradient under one name, `optimus::NAME`.

Schemas are defined in Python, so the names exist whether or not anything is compiled. An
implementation uses the compiled kernels of `library.native` if there are any, and otherwise the
reference implementation, which defines the op.
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
    """Define an op and return it.

    Args:
        schema: such as `gather(Tensor x) -> Tensor`.
        run: the implementation.
        fake: returns empty outputs of the right shapes.
        backward: `backward(ctx, *grads)`, as for torch.library.register_autograd. Without it a
            request for a gradient raises NotImplementedError; autograd itself would skip the op
            without an error.
        save: `save(ctx, inputs, output)`, the setup_context of torch.library.register_autograd.
    """
    name = schema.partition("(")[0]
    _LIBRARY.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
    _LIBRARY.impl(name, run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"optimus::{name}", fake, lib=_LIBRARY)
    if "!" not in schema:  # torch accepts no gradient for ops that write to operands
        torch.library.register_autograd(
            f"optimus::{name}", backward or _refusing(name), setup_context=save, lib=_LIBRARY
        )
    return getattr(torch.ops.optimus, name).default


def refuse_gradient(name: str, *operands: Tensor) -> None:
    """Raise NotImplementedError if an operand requires a gradient. This is for an op that writes to
    its operands: torch registers no gradient function for it, which could raise the error in
    backward."""
    if torch.is_grad_enabled() and any(operand.requires_grad for operand in operands):
        raise _no_gradient(name)


def _refusing(name: str) -> Callable:
    def backward(ctx: Any, *grads: Any) -> NoReturn:
        raise _no_gradient(name)

    return backward


def _no_gradient(name: str) -> NotImplementedError:
    return NotImplementedError(
        f"torch.ops.optimus.{name} has no gradient: use optimus_kernels.experts instead of "
        "its ops, and no create_graph; for second derivatives, compute in plain torch"
    )


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which reference implementations compute: fp64 for fp64, else fp32 as in
    the kernels."""
    return torch.float64 if dtype is torch.float64 else torch.float32
