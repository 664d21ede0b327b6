"""gather: a copy of each row's token, out[r] = x[token[r]], zeros where token[r] is -1.

Its gradient is the reduction without weights: sums in order of k, no atomics.
"""

from __future__ import annotations

import torch
from torch import Tensor

from optimus_kernels import library
from optimus_kernels.ops import define


def gather(x: Tensor, token: Tensor, row: Tensor) -> Tensor:
    """x [T, D], token int32 [R] and row int32 [T, K] of `route` -> [R, D]."""
    return _gather(x, token, row)


def reference(x: Tensor, token: Tensor, row: Tensor) -> Tensor:
    """The twin in plain torch."""
    if not len(x):
        return x.new_zeros(len(token), x.shape[1])
    copies = x.index_select(0, token.clamp(min=0).long())
    return copies.masked_fill((token < 0).unsqueeze(1), 0)


def _check(x: Tensor, token: Tensor) -> None:
    if x.dim() != 2 or token.dim() != 1 or token.dtype is not torch.int32:
        raise ValueError(
            f"gather: x {list(x.shape)} must be [T, D], token {token.dtype} {list(token.shape)} "
            "int32 [R]"
        )
    if x.device != token.device:
        raise ValueError(f"gather: x is on {x.device}, token on {token.device}")


def _run(x: Tensor, token: Tensor, row: Tensor) -> Tensor:
    _check(x, token)
    if library.native(x) is None:
        return reference(x, token, row)
    return gather_into(x, token, x.new_empty(len(token), x.shape[1]))


def gather_into(x: Tensor, token: Tensor, out: Tensor) -> Tensor:
    """The same into dense memory that is there, without a check; compiled kernels where built."""
    kernels = library.native(x)
    if kernels is None:
        return out.copy_(reference(x, token, token))
    x = x.contiguous()
    code, sizes = library.DTYPES[x.dtype], (len(token), x.shape[1])
    kernels.call("gather", x, code, x.data_ptr(), token.data_ptr(), *sizes, out.data_ptr())
    return out


def _fake(x: Tensor, token: Tensor, row: Tensor) -> Tensor:
    _check(x, token)
    return x.new_empty(token.shape[0], x.shape[1])


def _save(ctx, inputs: tuple[Tensor, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[1:])


def _backward(ctx, grad: Tensor) -> tuple[Tensor | None, ...]:
    token, row = ctx.saved_tensors
    return torch.ops.optimus.reduce_rows(grad, None, row, token * row.shape[1]), None, None


_gather = define("gather(Tensor x, Tensor token, Tensor row) -> Tensor", _run, _fake, _backward, _save)
