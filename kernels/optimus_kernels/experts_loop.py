"""The experts' two passes as a loop over experts: what an expert needs stays in the cache.

Its copies of tokens, activation and gradients live in scratch memory that all experts share; rows of
the results are slices of one buffer. Fastest on CPUs; on accelerators it copies offsets to the host.

oneDNN compiles a product of 16-bit numbers for every new shape (1.5-2.5 ms, against 0.08 for 256 rows
of 256 x 512), and routing makes new shapes all the time. So products run over rows rounded up to 32:
few enough shapes for its cache of 1024. In results, the rows too many are the next expert's, which
comes later and writes over them; in sums over rows they are zero.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor

from optimus_kernels import memory
from optimus_kernels.gather import gather_into
from optimus_kernels.reduction import reduce_rows
from optimus_kernels.route import Rows
from optimus_kernels.swiglu import swiglu_backward_into, swiglu_into


def row_multiple(x: Tensor) -> int:
    """What the rows of an expert's products are rounded up to."""
    return 32 if x.device.type == "cpu" and x.dtype in (torch.bfloat16, torch.float16) else 1


def extra_rows(x: Tensor) -> int:
    """By how many rows buffers are longer than their rows."""
    return row_multiple(x) - 1


def fresh_grads(parameters: Iterable[Tensor]) -> tuple[Tensor, Tensor, bool]:
    """Memory for the gradients of gate_up and down, to be replaced."""
    gate_up, down = (memory.empty(parameter.shape, parameter) for parameter in parameters)
    return gate_up, down, False


def forward(
    x: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor, rows: Rows, keep: bool
) -> tuple[Tensor, Tensor]:
    """-> out [T, D] and h [R + extra, 2F], or [0] unless `keep`."""
    hidden, inner = x.shape[1], down.shape[2]
    bounds, total = rows.offsets.tolist(), len(rows.token) + extra_rows(x)
    most = _most(bounds, row_multiple(x))
    h = memory.empty((total if keep else most, 2 * inner), x)
    y = memory.empty((total, hidden), x)
    copies, a = _scratch(x, most, hidden), _scratch(x, most, inner)
    to_h, to_y = gate_up.mT.unbind(0), down.mT.unbind(0)
    for e, start, count, padded in _parts(bounds, row_multiple(x)):
        part = slice(start, start + padded)
        gather_into(x, rows.token[start : start + count], copies[:count])
        h_part = torch.mm(copies[:padded], to_h[e], out=h[part] if keep else h[:padded])
        swiglu_into(h_part[:count], a[:count])
        torch.mm(a[:padded], to_y[e], out=y[part])
    out = reduce_rows(y, weights, rows.row, rows.slot)
    return out, h if keep else x.new_empty(0)


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
    bounds, total = rows.offsets.tolist(), len(rows.token) + extra_rows(x)
    most = _most(bounds, row_multiple(x))
    dweights = weights.new_zeros(weights.shape, dtype=_sum_dtype(x))
    dx = memory.empty((total, hidden), x)
    copies, dy = _scratch(x, most, hidden), _scratch(x, most, hidden)
    da, dh = _scratch(x, most, inner), _scratch(x, most, 2 * inner)
    again = _scratch(x, most, 2 * inner) if h is None else None
    if into is not None and not into[2]:
        _clear_idle(into, bounds)
    for e, start, count, padded in _parts(bounds, row_multiple(x)):
        token, slot = (t[start : start + count] for t in (rows.token, rows.slot))
        if into is not None or again is not None:
            gather_into(x, token, copies[:count])
        h_part = h[start : start + padded] if again is None else again[:padded]
        if again is not None:
            torch.mm(copies[:padded], gate_up[e].t(), out=h_part)
        gather_into(grad, token, dy[:count])
        torch.mm(dy[:padded], down[e], out=da[:padded])
        swiglu_backward_into(
            h_part[:count], da[:count], weights, slot, dh[:count], da[:count], dweights
        )
        if into is not None:
            _clear_tails((copies, dy, da, dh), count, padded)
            _put(into[1][e], dy[:padded].t(), da[:padded], into[2])
            _put(into[0][e], dh[:padded].t(), copies[:padded], into[2])
        torch.mm(dh[:padded], gate_up[e], out=dx[start : start + padded])
    return reduce_rows(dx, None, rows.row, rows.slot), dweights


def _put(target: Tensor, a: Tensor, b: Tensor, add: bool) -> None:
    """target = a @ b, or that much more."""
    if target.dtype != a.dtype:
        product = torch.mm(a, b)
        target.add_(product) if add else target.copy_(product)
    elif add:
        target.addmm_(a, b)
    else:
        torch.mm(a, b, out=target)


def _clear_idle(into: tuple[Tensor, Tensor, bool], bounds: Sequence[int]) -> None:
    for e in range(len(bounds) - 1):
        if bounds[e] == bounds[e + 1]:
            into[0][e] = 0
            into[1][e] = 0


def _clear_tails(buffers: Iterable[Tensor], count: int, padded: int) -> None:
    if count < padded:
        for buffer in buffers:
            buffer[count:padded].zero_()


def _scratch(x: Tensor, rows: int, width: int) -> Tensor:
    return memory.empty((rows, width), x)


def _sum_dtype(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype is torch.float64 else torch.float32


def _most(bounds: Sequence[int], multiple: int) -> int:
    return max((padded for *_, padded in _parts(bounds, multiple)), default=0)


def _parts(bounds: Sequence[int], multiple: int) -> Iterator[tuple[int, int, int, int]]:
    """Of each expert that has rows: its number, first row, rows, rows rounded up."""
    for e in range(len(bounds) - 1):
        start, count = bounds[e], bounds[e + 1] - bounds[e]
        if count:
            yield e, start, count, (count + multiple - 1) // multiple * multiple
