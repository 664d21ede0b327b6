"""gather: copy the token of each row r: out[r] = x[token[r]], or zeros if token[r] is -1.

The gradient of `gather` is `reduce_rows` without weights.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from optimus_kernels import library
from optimus_kernels.ops import check_index, check_operands, define


def gather(x: Tensor, token: Tensor, row: Tensor) -> Tensor:
    """Copy tokens to the rows of their experts.

    Args:
        x: [T, D], fp32, bf16, fp16 or fp64.
        token: int32 [R], the token of each row, from `route`. -1 gives a row of zeros. Other values
            must be in [0, T); OPTIMUS_KERNELS_DEBUG=1 checks this.
        row: int32 [T, K], the rows of each token, from `route`. Only the gradient uses it.

    Returns:
        [R, D] of x's dtype.

    Raises:
        ValueError: a tensor has the wrong number of dims.
        TypeError: dtypes or devices do not match.
    """
    return _gather(x, token, row)


def reference(x: Tensor, token: Tensor, row: Tensor) -> Tensor:
    """Reference implementation of `gather` in plain torch."""
    if not len(x):
        return x.new_zeros(len(token), x.shape[1])
    copies = x.index_select(0, token.clamp(min=0).long())
    return copies.masked_fill((token < 0).unsqueeze(1), 0)


def _check(x: Tensor, token: Tensor, row: Tensor) -> None:
    if (x.dim(), token.dim(), row.dim()) != (2, 1, 2):
        raise ValueError(
            f"gather: x {list(x.shape)}, token {list(token.shape)}, row {list(row.shape)}; they "
            "must be x [T, D], token [R], row [T, K]"
        )
    check_operands("gather", {"x": x}, {"token": token, "row": row})


def _run(x: Tensor, token: Tensor, row: Tensor) -> Tensor:
    check_index("gather", "token", token, x.shape[0])
    if library.native(x) is None:
        return reference(x, token, row)
    x, token = x.contiguous(), token.contiguous()
    return gather_into(x, token, 0, x.new_empty(token.shape[0], x.shape[1]))


def gather_into(x: Tensor, token: Tensor, start: int, out: Tensor, count: int = -1) -> Tensor:
    """Copy x[token[start : start + count]] to out[:count] and return `out`.

    `count` defaults to the number of rows of `out`. Operands must be contiguous; nothing is
    checked. Only compiled kernels accept a token of -1.
    """
    count = out.shape[0] if count < 0 else count
    kernels = library.native(x)
    if kernels is None:
        torch.index_select(x, 0, token[start : start + count], out=out[:count])
        return out
    # Slicing `token` would take as long as launching the kernel.
    code, tokens = library.DTYPES[x.dtype], token.data_ptr() + 4 * start
    kernels.call("gather", x, code, x.data_ptr(), tokens, count, x.shape[1], out.data_ptr())
    return out


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    token, row = ctx.saved_tensors
    return torch.ops.optimus.reduce_rows(grad, None, row, token * row.shape[1]), None, None


_gather = define(
    "gather(Tensor x, Tensor token, Tensor row) -> Tensor",
    _run,
    lambda x, token, row: x.new_empty(token.shape[0], x.shape[1]),
    _check,
    _backward,
    lambda ctx, inputs, output: ctx.save_for_backward(*inputs[1:]),
)
