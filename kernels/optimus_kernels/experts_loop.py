"""Forward and backward of the experts, computed in a loop over experts.

On CPUs, this implementation is faster than experts_grouped. All experts use the same scratch
memory, so that the working set stays in the CPU's cache.

oneDNN compiles a kernel for each new shape, and the compilation takes longer than a small product.
Row counts of oneDNN products are therefore rounded up (padded), so that few shapes occur. The
product of an expert also writes its padding rows, which are the first output rows of the next
expert. The product of the next expert, computed afterwards, overwrites these rows with the correct
values.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, TypeVar, cast

from torch import Tensor

from optimus_kernels import memory
from optimus_kernels.experts_operands import Operands, WeightGrads
from optimus_kernels.ops import compute_dtype
from optimus_kernels.product import amx_kernel, by_onednn, fastest_library, needs_scratch, product
from optimus_kernels.rows import Rows, gather_into, reduce_rows
from optimus_kernels.swiglu import swiglu_backward_into, swiglu_into

_MAX_PADDING = 32
_Pass = TypeVar("_Pass", bound=Callable[..., Any])


def extra_rows(x: Tensor) -> int:
    """Return the number of rows to append to a buffer for the rows of all experts. The appended
    rows contain the padding of the last expert."""
    return _MAX_PADDING - 1 if by_onednn(x) else 0


class DeferredInputs(NamedTuple):
    """Tensors of the backward pass from which `weight_grads` computes the deferred weight
    gradients."""

    dh: Tensor
    """[P, 2F], gradient of the pre-activation, for P rows including padding."""
    scaled: Tensor
    """[P, F], activation multiplied by the routing weight, for P rows including padding."""


def _with_fastest_library(run: _Pass) -> _Pass:
    """Decorator that runs a forward or backward pass in the context `fastest_library`, which
    selects MKL or oneDNN."""

    @functools.wraps(run)
    def call(first: Tensor | Operands, *rest: Any, **more: Any) -> Any:
        with fastest_library(first.x if isinstance(first, Operands) else first):
            return run(first, *rest, **more)

    return cast(_Pass, call)


def fresh_grads(parameters: Iterable[Tensor]) -> WeightGrads:
    """Return uninitialized tensors for weight gradients. `parameters` are gate_up and down."""
    gate_up, down = (memory.empty(parameter.shape, parameter) for parameter in parameters)
    return WeightGrads(gate_up, down, add=False)


@_with_fastest_library
def forward(operands: Operands, save_h: bool) -> tuple[Tensor, Tensor]:
    """Return the output [T, D] of the experts and the pre-activation h [R + extra_rows(x), 2F]. R
    is the number of rows of all experts. If `save_h` is False, h is an empty tensor."""
    (x, weights, gate_up, down, *_), rows = operands, operands.rows
    hidden, inner = x.shape[1], down.shape[2]
    blocks, longest = _expert_blocks(rows, x)
    total = rows.token.shape[0] + extra_rows(x)
    h = memory.empty((total if save_h else longest, 2 * inner), x)
    y = memory.empty((total, hidden), x)
    copies, a = memory.empty((longest, hidden), x), memory.empty((longest, inner), x)
    to_h, to_y = gate_up.mT.unbind(0), down.mT.unbind(0)
    for e, start, count, padded in blocks:
        h_start = start if save_h else 0
        gather_into(x, rows.token, start, copies, count)
        product(copies.narrow(0, 0, padded), to_h[e], h.narrow(0, h_start, padded))
        swiglu_into(h, h_start, a, count)
        product(a.narrow(0, 0, padded), to_y[e], y.narrow(0, start, padded))
    out = reduce_rows(y, weights, rows.row, rows.slot)
    if not save_h:
        return out, x.new_empty(0)
    last = blocks[-1][1] + blocks[-1][2] if blocks else 0
    h[last:] = 0  # unused, but results must be deterministic
    return out, h


@_with_fastest_library
def backward(
    grad: Tensor,
    operands: Operands,
    h: Tensor | None,
    into: WeightGrads | None,
    defer: bool = False,
) -> tuple[Tensor, Tensor, DeferredInputs | None]:
    """Compute the gradients of the experts. If `into` is not None, write the weight gradients to
    its tensors.

    Returns:
        dx [T, D], the gradient of the inputs; dweights [T, K] (fp32 or fp64), the gradient of the
        routing weights; and the inputs for `weight_grads` (None unless `defer`).
    """
    (x, weights, gate_up, down, *_), rows = operands, operands.rows
    hidden, inner = x.shape[1], down.shape[2]
    blocks, longest = _expert_blocks(rows, x)
    starts, end = _padded_starts(blocks) if defer else ([0] * len(blocks), longest)
    dweights = weights.new_zeros(weights.shape, dtype=compute_dtype(x.dtype))
    dx = memory.empty((rows.token.shape[0] + extra_rows(x), hidden), x)
    both = memory.empty((2, longest, hidden), x)  # copies of x and of grad
    da, dh = memory.empty((end, inner), x), memory.empty((end, 2 * inner), x)
    preactivation = memory.empty((longest, 2 * inner), x) if h is None else h
    recomputed = preactivation if h is None else None
    matrices = list(zip(gate_up.unbind(0), down.unbind(0), strict=True))
    targets = None if into is None else _Targets(into, rows, x)
    views: dict[tuple[int, int], tuple[Tensor, ...]] = {}
    for (e, start, count, padded), kept_start in zip(blocks, starts, strict=True):
        to_h, to_y = matrices[e]
        if (padded, kept_start) not in views:
            views[padded, kept_start] = _backward_views(both, da, dh, padded, kept_start)
        copies, dy, dy_t, da_rows, dh_rows, dh_rows_t = views[padded, kept_start]
        if targets is not None or recomputed is not None:
            gather_into(x, rows.token, start, copies, count)
        gather_into(grad, rows.token, start, dy, count)
        if count < padded:  # zero rows of dy also give zero rows of da = dy @ to_y
            both.narrow(1, count, padded - count).zero_()
            dh_rows[count:].zero_()
        if recomputed is not None:
            product(copies, to_h.t(), recomputed.narrow(0, 0, padded))
        product(dy, to_y, da_rows)
        h_start = start if recomputed is None else 0
        outs = (dh_rows, da_rows, dweights)
        swiglu_backward_into(
            preactivation, h_start, da_rows, weights, rows.slot, start, count, outs
        )
        if targets is not None:
            targets.take(e, dh_rows_t, copies, dy_t, da_rows)
        product(dh_rows, to_h, dx.narrow(0, start, padded))
    dx = reduce_rows(dx, None, rows.row, rows.slot)
    return dx, dweights, DeferredInputs(dh, da) if defer else None


@_with_fastest_library
def weight_grads(
    grad: Tensor, x: Tensor, rows: Rows, deferred: DeferredInputs, into: WeightGrads
) -> None:
    """Compute the weight gradients that `backward` deferred, and write them to `into`."""
    blocks, longest = _expert_blocks(rows, x)
    both = memory.empty((2, longest, x.shape[1]), x)
    targets = _Targets(into, rows, x)
    for (e, start, count, padded), kept_start in zip(
        blocks, _padded_starts(blocks)[0], strict=True
    ):
        views = _backward_views(both, deferred.scaled, deferred.dh, padded, kept_start)
        copies, dy, dy_t, da_rows, _, dh_rows_t = views
        gather_into(x, rows.token, start, copies, count)
        gather_into(grad, rows.token, start, dy, count)
        if count < padded:
            both.narrow(1, count, padded - count).zero_()
        targets.take(e, dh_rows_t, copies, dy_t, da_rows)


def _backward_views(
    both: Tensor, da: Tensor, dh: Tensor, rows: int, start: int
) -> tuple[Tensor, ...]:
    """Return views of one expert's rows in the buffers, in this order: copied rows of x, dy, dy^T,
    da, dh and dh^T."""
    copies, dy = both.narrow(1, 0, rows).unbind(0)
    dh = dh.narrow(0, start, rows)
    return copies, dy, dy.t(), da.narrow(0, start, rows), dh, dh.t()


class _Targets:
    """Computes the weight gradients of all experts, and writes them to the tensors of a
    `WeightGrads`."""

    def __init__(self, into: WeightGrads, rows: Rows, x: Tensor) -> None:
        gate_up, down, self._add = into
        self._pairs = list(zip(gate_up.unbind(0), down.unbind(0), strict=True))
        self._scratch = None
        if needs_scratch(x, gate_up.dtype, self._add):
            self._scratch = memory.empty((gate_up[0].numel() if len(gate_up) else 0,), x)
        if not self._add:  # experts without rows have zero gradients
            bounds = rows.offsets.tolist()
            for e, pair in enumerate(self._pairs):
                if bounds[e] == bounds[e + 1]:
                    for target in pair:
                        target.zero_()

    def take(self, e: int, dh_t: Tensor, copies: Tensor, dy_t: Tensor, scaled: Tensor) -> None:
        """Compute the gradients of expert e: dh_t @ copies for gate_up, and dy_t @ scaled for down.
        Write or add the gradients to the tensors of the `WeightGrads`."""
        gate_up, down = self._pairs[e]
        product(dy_t, scaled, down, self._add, self._scratch)
        product(dh_t, copies, gate_up, self._add, self._scratch)


def _padded_starts(blocks: list[tuple[int, int, int, int]]) -> tuple[list[int], int]:
    """Return (index of each expert's first row in the tensors of `DeferredInputs`, number of rows
    of these tensors including padding)."""
    # Each first row is a multiple of 32, so that its address is aligned to 64 bytes for any row
    # length.
    starts, end = [], 0
    for *_, padded in blocks:
        starts.append(end)
        end += -(-padded // _MAX_PADDING) * _MAX_PADDING
    return starts, end


def _expert_blocks(rows: Rows, x: Tensor) -> tuple[list[tuple[int, int, int, int]], int]:
    """Return (list of tuples, largest padded row count). Each expert with rows has a tuple (expert,
    first row, row count, padded row count)."""
    bounds, rounds = rows.offsets.tolist(), by_onednn(x) and amx_kernel(x) is None
    blocks = []
    for e in range(len(bounds) - 1):
        start, count = bounds[e], bounds[e + 1] - bounds[e]
        if count:
            # All these shapes fit in oneDNN's cache of 1024 kernels.
            multiple = (_MAX_PADDING if count > 512 else 16) if rounds else 1
            blocks.append((e, start, count, -(-count // multiple) * multiple))
    return blocks, max((padded for *_, padded in blocks), default=0)
