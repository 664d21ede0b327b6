"""The experts' two passes as a loop over experts: what an expert needs stays in the cache.

Its copies of tokens, activation and gradients live in scratch memory that all experts share; rows
of the results are slices of one buffer. Fastest on CPUs; on accelerators the host waits for the
offsets.

Our own product of bf16 (product.py) takes any number of rows. Without AMX it is oneDNN's, as all
fp16 is: it compiles a product of 16-bit numbers for every new shape (1.5-2.5 ms, against 0.08 for
256 rows of 256 x 512), and routing makes new shapes all the time. So such products run over rows
rounded up to 16, or 32 beyond 512: few enough shapes for its cache of 1024. In results, the rows
too many are the next expert's, which comes later and writes over them; in sums over rows they are
zero.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from optimus_kernels import memory
from optimus_kernels.gather import gather_into
from optimus_kernels.ops import compute_dtype
from optimus_kernels.product import own, product
from optimus_kernels.reduction import reduce_rows
from optimus_kernels.route import Rows
from optimus_kernels.swiglu import swiglu_backward_into, swiglu_into

_MOST_ROUNDING = 32


def extra_rows(x: Tensor) -> int:
    """By how many rows buffers are longer than their rows."""
    return _MOST_ROUNDING - 1 if _rounds(x) else 0


def _rounds(x: Tensor) -> bool:
    return x.device.type == "cpu" and x.dtype in (torch.bfloat16, torch.float16)


def fresh_grads(parameters: Iterable[Tensor]) -> tuple[Tensor, Tensor, bool]:
    """Memory for the gradients of gate_up and down, to be replaced."""
    gate_up, down = (memory.empty(parameter.shape, parameter) for parameter in parameters)
    return gate_up, down, False


def forward(
    x: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor, rows: Rows, keep: bool
) -> tuple[Tensor, Tensor]:
    """-> out [T, D] and h [R + extra, 2F], or [0] unless `keep`."""
    hidden, inner = x.shape[1], down.shape[2]
    parts, most = _parts(rows, x)
    total = rows.token.shape[0] + extra_rows(x)
    h = memory.empty((total if keep else most, 2 * inner), x)
    y = memory.empty((total, hidden), x)
    copies, a = memory.empty((most, hidden), x), memory.empty((most, inner), x)
    to_h, to_y = gate_up.mT.unbind(0), down.mT.unbind(0)
    for e, start, count, padded in parts:
        at = start if keep else 0
        gather_into(x, rows.token, start, copies, count)
        product(copies.narrow(0, 0, padded), to_h[e], h.narrow(0, at, padded))
        swiglu_into(h, at, a, count)
        product(a.narrow(0, 0, padded), to_y[e], y.narrow(0, start, padded))
    out = reduce_rows(y, weights, rows.row, rows.slot)
    if not keep:
        return out, x.new_empty(0)
    last = parts[-1][1] + parts[-1][2] if parts else 0
    h[last:] = 0  # nobody reads them, but an op's results are not left to chance
    return out, h


def backward(
    grad: Tensor,
    x: Tensor,
    weights: Tensor,
    gate_up: Tensor,
    down: Tensor,
    rows: Rows,
    h: Tensor | None,
    into: tuple[Tensor, Tensor, bool] | None,
) -> tuple[Tensor, Tensor]:
    """-> dx [T, D], dweights [T, K] (fp32 or fp64); weight gradients go `into`, if anywhere."""
    hidden, inner = x.shape[1], down.shape[2]
    parts, most = _parts(rows, x)
    dweights = weights.new_zeros(weights.shape, dtype=compute_dtype(x.dtype))
    dx = memory.empty((rows.token.shape[0] + extra_rows(x), hidden), x)
    both = memory.empty((2, most, hidden), x)  # copies of x and of grad
    da, dh = memory.empty((most, inner), x), memory.empty((most, 2 * inner), x)
    again = memory.empty((most, 2 * inner), x) if h is None else None
    matrices = list(zip(gate_up.unbind(0), down.unbind(0), strict=True))
    targets = list(zip(into[0].unbind(0), into[1].unbind(0), strict=True)) if into else []
    if into is not None and not into[2]:
        _clear_idle(targets, rows)
    views: dict[int, tuple[Tensor, ...]] = {}
    for e, start, count, padded in parts:
        to_h, to_y = matrices[e]
        if padded not in views:
            views[padded] = _backward_views(both, da, dh, padded)
        copies, dy, dy_t, da_part, dh_part, dh_part_t = views[padded]
        if into is not None or again is not None:
            gather_into(x, rows.token, start, copies, count)
        gather_into(grad, rows.token, start, dy, count)
        if count < padded:  # clears the same rows of da, too, when it becomes dy @ to_y
            both.narrow(1, count, padded - count).zero_()
            dh.narrow(0, count, padded - count).zero_()
        if again is not None:
            product(copies, to_h.t(), again.narrow(0, 0, padded))
        product(dy, to_y, da_part)
        source, at = (h, start) if again is None else (again, 0)
        swiglu_backward_into(source, at, da, weights, rows.slot, start, count, (dh, da, dweights))
        if into is not None:
            product(dy_t, da_part, targets[e][1], into[2])
            product(dh_part_t, copies, targets[e][0], into[2])
        product(dh_part, to_h, dx.narrow(0, start, padded))
    return reduce_rows(dx, None, rows.row, rows.slot), dweights


def _backward_views(both: Tensor, da: Tensor, dh: Tensor, rows: int) -> tuple[Tensor, ...]:
    """The first rows of backward's scratch memory, made once for experts of as many rows."""
    copies, dy = both.narrow(1, 0, rows).unbind(0)
    dh = dh.narrow(0, 0, rows)
    return copies, dy, dy.t(), da.narrow(0, 0, rows), dh, dh.t()


def _clear_idle(targets: Sequence[tuple[Tensor, Tensor]], rows: Rows) -> None:
    bounds = rows.offsets.tolist()
    for e, pair in enumerate(targets):
        if bounds[e] == bounds[e + 1]:
            for target in pair:
                target.zero_()


def _parts(rows: Rows, x: Tensor) -> tuple[list[tuple[int, int, int, int]], int]:
    """Of each expert that has rows: its number, first row, rows, rows rounded up; and the most."""
    bounds, rounds = rows.offsets.tolist(), _rounds(x) and own(x) is None
    parts = []
    for e in range(len(bounds) - 1):
        start, count = bounds[e], bounds[e + 1] - bounds[e]
        if count:
            multiple = (_MOST_ROUNDING if count > 512 else 16) if rounds else 1
            parts.append((e, start, count, -(-count // multiple) * multiple))
    return parts, max((padded for *_, padded in parts), default=0)
