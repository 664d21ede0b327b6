"""Registration of ops: schema, implementation, fake implementation and gradient of `optimus::NAME`.

Schemas are defined in Python, so the ops exist even if no kernels are compiled.
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
    """Define an op in the namespace `optimus` and return it.

    Args:
        schema: name and schema of the op, such as `gather(Tensor x) -> Tensor`.
        run: the implementation on all devices.
        fake: the fake implementation for tracing, which returns empty outputs of the right shapes.
        backward: `backward(ctx, *grads)`, as for torch.library.register_autograd. If it is None,
            backward through the op raises NotImplementedError.
        save: `save(ctx, inputs, output)`, the argument `setup_context` of
            torch.library.register_autograd.
    """
    name = schema.partition("(")[0]
    _LIBRARY.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
    _LIBRARY.impl(name, run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"optimus::{name}", fake, lib=_LIBRARY)
    if "!" not in schema:  # torch accepts no gradient for ops that write to operands
        # By default, torch would omit a missing gradient without an error.
        torch.library.register_autograd(
            f"optimus::{name}", backward or _refusing(name), setup_context=save, lib=_LIBRARY
        )
    return getattr(torch.ops.optimus, name).default


def refuse_gradient(name: str, *operands: Tensor) -> None:
    """Raise NotImplementedError if an operand requires a gradient."""
    # Ops that write to operands refuse in forward, because torch accepts no backward for them.
    if torch.is_grad_enabled() and any(operand.requires_grad for operand in operands):
        raise _no_gradient(name)


def _refusing(name: str) -> Callable:
    def backward(ctx: Any, *grads: Any) -> NoReturn:
        raise _no_gradient(name)

    return backward


def _no_gradient(name: str) -> NotImplementedError:
    return NotImplementedError(
        f"torch.ops.optimus.{name} has no gradient; call optimus_kernels.experts instead of this "
        "op, do not use create_graph, and compute second derivatives in plain torch"
    )


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which ops compute: fp64 for fp64 operands, fp32 for all others."""
    return torch.float64 if dtype is torch.float64 else torch.float32
