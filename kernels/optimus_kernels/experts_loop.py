"""The experts' two passes as a loop over experts: what an expert needs stays in the cache.

Its copies of tokens, activation and gradients live in scratch memory that all experts share; rows
of the results are slices of one buffer. Fastest on CPUs; on accelerators the host waits for the
offsets.

Our own product of bf16 (product.py) takes any number of rows. Without AMX it is oneDNN's, as all
fp16 is, and fp32 where `fastest_library` says so: it compiles a product for every new shape
(1.5-2.5 ms, against 0.08 for 256 rows of 256 x 512), and routing makes new shapes all the time. So
such products run over rows rounded up to 16, or 32 beyond 512: few enough shapes for its cache of
1024. In results, the rows too many are the next expert's, which comes later and writes over them;
in sums over rows they are zero.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, TypeVar, cast

from torch import Tensor

from optimus_kernels import memory
from optimus_kernels.experts_operands import Into, Saved
from optimus_kernels.gather import gather_into
from optimus_kernels.ops import compute_dtype
from optimus_kernels.product import by_onednn, fastest_library, needs_room, own, product
from optimus_kernels.reduction import reduce_rows
from optimus_kernels.route import Rows
from optimus_kernels.swiglu import swiglu_backward_into, swiglu_into

_MOST_ROUNDING = 32
_Pass = TypeVar("_Pass", bound=Callable[..., Any])


def extra_rows(x: Tensor) -> int:
    """By how many rows buffers are longer than their rows."""
    return _MOST_ROUNDING - 1 if by_onednn(x) else 0


class Kept(NamedTuple):
    """What weight gradients that wait are made from, beside the pass's inputs. An expert's rows
    begin where a multiple of 32 does, so on 64 bytes whatever their width, as scratch memory does;
    rows rounded up are zeros."""

    dh: Tensor
    """[P, 2F]: the gradient of the pre-activation."""
    scaled: Tensor
    """[P, F]: the activation times its routing weight."""


def _with_fastest_library(run: _Pass) -> _Pass:
    """A pass whose first operand (or its x) is of the products' dtype and device."""

    @functools.wraps(run)
    def call(first: Tensor | Saved, *rest: Any, **more: Any) -> Any:
        with fastest_library(first.x if isinstance(first, Saved) else first):
            return run(first, *rest, **more)

    return cast(_Pass, call)


def fresh_grads(parameters: Iterable[Tensor]) -> Into:
    """Memory for the gradients of gate_up and down, to be replaced."""
    gate_up, down = (memory.empty(parameter.shape, parameter) for parameter in parameters)
    return gate_up, down, False


@_with_fastest_library
def forward(saved: Saved, keep: bool) -> tuple[Tensor, Tensor]:
    """-> out [T, D] and h [R + extra, 2F], or [0] unless `keep`."""
    (x, weights, gate_up, down, *_), rows = saved, saved.rows
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


@_with_fastest_library
def backward(
    grad: Tensor, saved: Saved, h: Tensor | None, into: Into | None, keep: bool = False
) -> tuple[Tensor, Tensor, Kept | None]:
    """-> dx [T, D], dweights [T, K] (fp32 or fp64), and with `keep` what `weight_grads` wants;
    weight gradients go `into`, if anywhere."""
    (x, weights, gate_up, down, *_), rows = saved, saved.rows
    hidden, inner = x.shape[1], down.shape[2]
    parts, most = _parts(rows, x)
    places, end = _places(parts) if keep else ([0] * len(parts), most)
    dweights = weights.new_zeros(weights.shape, dtype=compute_dtype(x.dtype))
    dx = memory.empty((rows.token.shape[0] + extra_rows(x), hidden), x)
    both = memory.empty((2, most, hidden), x)  # copies of x and of grad
    da, dh = memory.empty((end, inner), x), memory.empty((end, 2 * inner), x)
    source = memory.empty((most, 2 * inner), x) if h is None else h
    again = source if h is None else None
    matrices = list(zip(gate_up.unbind(0), down.unbind(0), strict=True))
    targets = None if into is None else _Targets(into, rows, x)
    views: dict[tuple[int, int], tuple[Tensor, ...]] = {}
    for (e, start, count, padded), place in zip(parts, places, strict=True):
        to_h, to_y = matrices[e]
        if (padded, place) not in views:
            views[padded, place] = _backward_views(both, da, dh, padded, place)
        copies, dy, dy_t, da_part, dh_part, dh_part_t = views[padded, place]
        if targets is not None or again is not None:
            gather_into(x, rows.token, start, copies, count)
        gather_into(grad, rows.token, start, dy, count)
        if count < padded:  # clears the same rows of da, too, when it becomes dy @ to_y
            both.narrow(1, count, padded - count).zero_()
            dh_part[count:].zero_()
        if again is not None:
            product(copies, to_h.t(), again.narrow(0, 0, padded))
        product(dy, to_y, da_part)
        at = start if again is None else 0
        outs = (dh_part, da_part, dweights)
        swiglu_backward_into(source, at, da_part, weights, rows.slot, start, count, outs)
        if targets is not None:
            targets.take(e, dh_part_t, copies, dy_t, da_part)
        product(dh_part, to_h, dx.narrow(0, start, padded))
    dx = reduce_rows(dx, None, rows.row, rows.slot)
    return dx, dweights, Kept(dh, da) if keep else None


@_with_fastest_library
def weight_grads(grad: Tensor, x: Tensor, rows: Rows, kept: Kept, into: Into) -> None:
    """The weight gradients that `backward` left to do: the same products of the same bits."""
    parts, most = _parts(rows, x)
    both = memory.empty((2, most, x.shape[1]), x)
    targets = _Targets(into, rows, x)
    for (e, start, count, padded), place in zip(parts, _places(parts)[0], strict=True):
        views = _backward_views(both, kept.scaled, kept.dh, padded, place)
        copies, dy, dy_t, da_part, _, dh_part_t = views
        gather_into(x, rows.token, start, copies, count)
        gather_into(grad, rows.token, start, dy, count)
        if count < padded:
            both.narrow(1, count, padded - count).zero_()
        targets.take(e, dh_part_t, copies, dy_t, da_part)


def _backward_views(
    both: Tensor, da: Tensor, dh: Tensor, rows: int, place: int
) -> tuple[Tensor, ...]:
    """Rows of backward's scratch memory, made once for experts of as many rows; da's and dh's begin
    at `place`."""
    copies, dy = both.narrow(1, 0, rows).unbind(0)
    dh = dh.narrow(0, place, rows)
    return copies, dy, dy.t(), da.narrow(0, place, rows), dh, dh.t()


class _Targets:
    """Where experts' weight gradients go; those of experts without rows are seen to at once."""

    def __init__(self, into: Into, rows: Rows, x: Tensor) -> None:
        gate_up, down, self._add = into
        self._pairs = list(zip(gate_up.unbind(0), down.unbind(0), strict=True))
        self._room = None
        if needs_room(x, gate_up.dtype, self._add):
            self._room = memory.empty((gate_up[0].numel() if len(gate_up) else 0,), x)
        if not self._add:
            bounds = rows.offsets.tolist()
            for e, pair in enumerate(self._pairs):
                if bounds[e] == bounds[e + 1]:
                    for target in pair:
                        target.zero_()

    def take(self, e: int, dh_t: Tensor, copies: Tensor, dy_t: Tensor, scaled: Tensor) -> None:
        """dh^T [2F, R] x [R, D] and dy^T [D, R] a [R, F] of expert e."""
        gate_up, down = self._pairs[e]
        product(dy_t, scaled, down, self._add, self._room)
        product(dh_t, copies, gate_up, self._add, self._room)


def _places(parts: list[tuple[int, int, int, int]]) -> tuple[list[int], int]:
    """Where each expert's rows begin in what is kept, and where the last ones end."""
    places, end = [], 0
    for *_, padded in parts:
        places.append(end)
        end += -(-padded // _MOST_ROUNDING) * _MOST_ROUNDING
    return places, end


def _parts(rows: Rows, x: Tensor) -> tuple[list[tuple[int, int, int, int]], int]:
    """Of each expert that has rows: its number, first row, rows, rows rounded up; and the most."""
    bounds, rounds = rows.offsets.tolist(), by_onednn(x) and own(x) is None
    parts = []
    for e in range(len(bounds) - 1):
        start, count = bounds[e], bounds[e + 1] - bounds[e]
        if count:
            multiple = (_MOST_ROUNDING if count > 512 else 16) if rounds else 1
            parts.append((e, start, count, -(-count // multiple) * multiple))
    return parts, max((padded for *_, padded in parts), default=0)
