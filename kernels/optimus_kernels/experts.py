"""The experts in one autograd function: out = sum over k of w * down(swiglu(gate_up x)).

T tokens, D hidden, F intermediate, E experts held, K experts a token, N = T*K slots, R rows.
Saved for backward: x, the weights, the pre-activation h and the indices (or x alone); no gathered
input, activation or output. The routing weight's gradient is <da, a> with da = dout Wd, which
backward has at hand; nothing is divided by a weight (Optimus paper, section 3.1, stages 4 and 5).
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils.flop_counter import register_flop_formula

from optimus_kernels import experts_grouped, experts_loop
from optimus_kernels.checks import check_operands
from optimus_kernels.experts_operands import Saved, check, check_backward, dense, dense_backward
from optimus_kernels.gather import reference as gather_twin
from optimus_kernels.grouped_mm import form
from optimus_kernels.grouped_mm import reference as grouped_twin
from optimus_kernels.grouped_mm import reference_weight as grouped_weight_twin
from optimus_kernels.ops import define, refuse_gradient
from optimus_kernels.reduction import reference as reduce_twin
from optimus_kernels.route import Rows
from optimus_kernels.swiglu import reference as swiglu_twin
from optimus_kernels.swiglu import reference_backward as swiglu_backward_twin


class WeightGrads(NamedTuple):
    """Memory that backward writes weight gradients to, of any dtype."""

    gate_up: Tensor
    """[E, 2F, D]"""
    down: Tensor
    """[E, D, F]"""
    add: bool
    """Add to what is there, rather than replace it: the sum has the bits of a gradient made apart
    and then added, as autograd does."""


class WeightWork:
    """What a backward pass has left to do: the weights' gradients. Keeps alive what they are made
    of: the output's gradient, x, and 3F numbers a row."""

    def __init__(
        self, room: ModuleType, grad: Tensor, x: Tensor, rows: Rows, kept: experts_loop.Kept
    ) -> None:
        self._room, self._saved = room, (grad, x, rows, kept)

    @torch.no_grad()
    def compute(self, into: WeightGrads) -> None:
        """Do it; to the bit what backward would have done."""
        self._room.weight_grads(*self._saved, into)


Destination = WeightGrads | Callable[[WeightWork], None] | None
"""Where a backward's weight gradients go: to this memory, nowhere yet (this takes the work), or to
autograd."""


def experts(
    x: Tensor,
    weights: Tensor,
    gate_up: Tensor,
    down: Tensor,
    rows: Rows,
    *,
    save_input_only: bool = False,
    weight_grads: Callable[[], Destination] | None = None,
) -> Tensor:
    """x [T, D], weights [T, K], gate_up [E, 2F, D] (gate above up), down [E, D, F], of one dtype
    and device; rows of `route`. Returns [T, D]. Where the offsets lie on the host, h is kept for
    the R rows held here alone. Elsewhere nobody waits for R, and h is kept for all N unless a
    caller who knows R passes rows.token and rows.slot shortened to it.

    `save_input_only` computes h again in backward: 22 % more arithmetic, 4 KB instead of 36 KB a
    token at OLMoE's sizes in bf16. `weight_grads`, asked once in each backward, says where the
    weights' gradients go; unless that is autograd, it gets none for them, and only runs what hangs
    on their accumulation. torch.compile does not take it. Under autocast the operands are taken
    in its dtype, as by a linear layer, but for fp64, and the result is of x's. Raises ValueError or
    TypeError.
    """
    device = x.device.type
    if x.dtype is not torch.float64 and not x.is_meta and torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
        with torch.autocast(device, enabled=False):
            out = experts(
                *(x.to(dtype), weights.to(dtype), gate_up.to(dtype), down.to(dtype)),
                rows,
                save_input_only=save_input_only,
                weight_grads=weight_grads,
            )
            return out.to(x.dtype)
    needed = torch.is_grad_enabled() and any(t.requires_grad for t in (x, weights, gate_up, down))
    keep = needed and not save_input_only
    return _Experts.apply(x, weights, gate_up, down, *_held(rows), keep, weight_grads)


def _held(rows: Rows) -> Rows:
    """Without the slots of experts held elsewhere, of which expert parallelism has most. Compiled
    code keeps them: its sizes must not depend on values."""
    offsets, token, slot, row = rows
    known = offsets.is_cpu and not isinstance(offsets, FakeTensor)
    if torch.compiler.is_compiling() or not known or offsets.numel() == 0:
        return rows
    held = int(offsets[-1])
    if not 0 <= held < len(token):
        return rows
    return Rows(offsets, token[:held].clone(), slot[:held].clone(), row)


class _Experts(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor, offsets: Tensor,
        token: Tensor, slot: Tensor, row: Tensor, keep: bool, weight_grads: Any,
    ) -> Tensor:  # fmt: skip
        saved = Saved(x, weights, gate_up, down, offsets, token, slot, row)
        out, h = _forward(*saved, keep)
        ctx.weight_grads = weight_grads
        ctx.save_for_backward(*saved, h if keep else None)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Its ops have no gradient of their own, so that a second one would be silently wrong."""
        if torch.is_grad_enabled():
            raise NotImplementedError(
                "experts has no second derivative; leave out create_graph, or compute experts in "
                "plain torch"
            )
        *saved, h = ctx.saved_tensors
        if ctx.weight_grads is not None:
            where = ctx.weight_grads()
            if where is not None:
                return *_backward_elsewhere(where, grad, Saved(*saved), h), *(None,) * 8
        with_weights = ctx.needs_input_grad[2] or ctx.needs_input_grad[3]
        dx, dw, dgate_up, ddown = _backward(grad, *saved, h, with_weights)
        if not with_weights:
            dgate_up = ddown = None
        return dx, dw, dgate_up, ddown, *(None,) * 6


def _backward_elsewhere(
    where: WeightGrads | Callable[[WeightWork], None], grad: Tensor, saved: Saved, h: Tensor | None
) -> tuple[Tensor, Tensor]:
    """dx and dweights; the weights' own gradients go to `where`, which is not autograd."""
    if isinstance(where, WeightGrads):
        return _backward_into(grad, *saved, h, *where)
    room = _room(saved.x, saved.gate_up)
    grad, saved, h = dense_backward("experts", grad, saved, h)
    dx, dw, kept = room.backward(grad, saved, h, None, keep=True)
    where(WeightWork(room, grad, saved.x, saved.rows, kept))
    return dx, dw.to(saved.weights.dtype)


def reference(
    x: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor,
    offsets: Tensor, token: Tensor, slot: Tensor, row: Tensor, keep: bool = True,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The twin, of the other ops' twins: out [T, D] and h [N, 2F], or [0] unless `keep`."""
    h = grouped_twin(gather_twin(x, token, row), gate_up.mT, offsets)
    y = grouped_twin(swiglu_twin(h), down.mT, offsets)
    return reduce_twin(y, weights, row, slot), h if keep else x.new_empty(0)


def reference_backward(
    grad: Tensor, x: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor,
    offsets: Tensor, token: Tensor, slot: Tensor, row: Tensor, h: Tensor | None, with_weights: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """The backward's twin: dx, dweights, dgate_up, ddown (the last two [0] unless asked for)."""
    copies, dy = gather_twin(x, token, row), gather_twin(grad, token, row)
    h = grouped_twin(copies, gate_up.mT, offsets) if h is None else h
    da = grouped_twin(dy, down, offsets)
    dh, scaled, dweights = swiglu_backward_twin(h, da, weights, slot)
    dx = reduce_twin(grouped_twin(dh, gate_up, offsets), None, row, slot)
    none = x.new_empty(0)
    grads = ((dh, copies), (dy, scaled)) if with_weights else ()
    dgate_up, ddown = (
        (grouped_weight_twin(a, b, offsets) for a, b in grads) if grads else (none,) * 2
    )
    return dx, dweights.to(weights.dtype), dgate_up, ddown


def _room(x: Tensor, gate_up: Tensor) -> ModuleType:
    """Chosen once for all products: rows of D, F and 2F; 2F fits wherever F does."""
    taken = form(x, gate_up.shape[2], gate_up.shape[1] // 2)
    return experts_grouped if taken == "torch" else experts_loop


def _run_forward(*operands: Any) -> tuple[Tensor, Tensor]:
    saved, keep = Saved(*operands[:8]), operands[8]
    check("experts", saved)
    saved = dense("experts", saved)
    out, h = _room(saved.x, saved.gate_up).forward(saved, keep)
    # The loop has spare rows behind. Sizes must not tell the form: torch.compile keeps what it
    # compiled on disk, where a run of the other form finds it.
    return out, h[: saved.token.shape[0]] if keep else h


def _fake_forward(*operands: Any) -> tuple[Tensor, Tensor]:
    saved, keep = Saved(*operands[:8]), operands[8]
    check("experts", saved)
    h = (saved.token.shape[0], saved.gate_up.shape[1]) if keep else (0,)
    return saved.x.new_empty(saved.x.shape), saved.x.new_empty(h)


def _run_backward(grad: Tensor, *operands: Any) -> tuple[Tensor, ...]:
    h, with_weights = operands[8:]
    grad, saved, h = dense_backward("experts_backward", grad, Saved(*operands[:8]), h)
    into = experts_loop.fresh_grads((saved.gate_up, saved.down)) if with_weights else None
    room = _room(saved.x, saved.gate_up)
    dx, dw, _ = room.backward(grad, saved, h, into)
    grads = into[:2] if into else (saved.x.new_empty(0), saved.x.new_empty(0))
    return dx, dw.to(saved.weights.dtype), *grads


def _fake_backward(grad: Tensor, *operands: Any) -> tuple[Tensor, ...]:
    saved, (h, with_weights) = Saved(*operands[:8]), operands[8:]
    check_backward("experts_backward", grad, saved, h)
    x, weights, gate_up, down = saved[:4]
    grads = (t.new_empty(t.shape if with_weights else (0,)) for t in (gate_up, down))
    return x.new_empty(x.shape), weights.new_empty(weights.shape), *grads


def _check_into(into: WeightGrads, saved: Saved) -> None:
    if into.gate_up.shape != saved.gate_up.shape or into.down.shape != saved.down.shape:
        raise ValueError(
            f"experts: gradients go to {list(into.gate_up.shape)} and {list(into.down.shape)}, "
            f"the weights are {list(saved.gate_up.shape)} and {list(saved.down.shape)}"
        )
    for name, target in (("gate_up", into.gate_up), ("down", into.down)):
        check_operands(f"experts_backward_into: memory for {name}", {"it": target}, {})
        if target.device != saved.x.device:
            raise TypeError(
                f"experts_backward_into: memory for {name} is on {target.device}, x on "
                f"{saved.x.device}"
            )


def _run_backward_into(grad: Tensor, *operands: Any) -> tuple[Tensor, Tensor]:
    h, into = operands[8], WeightGrads(*operands[9:])
    refuse_gradient("experts_backward_into", grad, *operands[:4])
    grad, saved, h = dense_backward("experts_backward_into", grad, Saved(*operands[:8]), h)
    _check_into(into, saved)
    room = _room(saved.x, saved.gate_up)
    dx, dw, _ = room.backward(grad, saved, h, into)
    return dx, dw.to(saved.weights.dtype)


def _fake_backward_into(grad: Tensor, *operands: Any) -> tuple[Tensor, Tensor]:
    saved = Saved(*operands[:8])
    check_backward("experts_backward_into", grad, saved, operands[8])
    _check_into(WeightGrads(*operands[9:]), saved)
    return saved.x.new_empty(saved.x.shape), saved.weights.new_empty(saved.weights.shape)


_SAVED = (
    "Tensor x, Tensor weights, Tensor gate_up, Tensor down, "
    "Tensor offsets, Tensor token, Tensor slot, Tensor row"
)
_forward = define(f"experts({_SAVED}, bool keep) -> (Tensor, Tensor)", _run_forward, _fake_forward)
_backward = define(
    f"experts_backward(Tensor grad, {_SAVED}, Tensor? h, bool with_weights)"
    " -> (Tensor, Tensor, Tensor, Tensor)",
    _run_backward,
    _fake_backward,
)
_backward_into = define(
    f"experts_backward_into(Tensor grad, {_SAVED}, Tensor? h, Tensor(a!) gate_up_grad, "
    "Tensor(b!) down_grad, bool add) -> (Tensor, Tensor)",
    _run_backward_into,
    _fake_backward_into,
)


@register_flop_formula(torch.ops.optimus.experts)
def _flops_forward(
    x: torch.Size, weights: torch.Size, gate_up: torch.Size, down: torch.Size,
    offsets: torch.Size, token: torch.Size, *_: Any, **__: Any,
) -> int:  # fmt: skip
    """For torch's FlopCounterMode, which does not see inside an op: 3 products of R x D x F."""
    return 6 * token[0] * x[1] * down[2]


@register_flop_formula(
    [torch.ops.optimus.experts_backward, torch.ops.optimus.experts_backward_into]
)
def _flops_backward(
    grad: torch.Size, x: torch.Size, weights: torch.Size, gate_up: torch.Size, down: torch.Size,
    offsets: torch.Size, token: torch.Size, slot: torch.Size, row: torch.Size,
    h: torch.Size | None, *more: Any, **__: Any,
) -> int:  # fmt: skip
    """Twice as much; h again where it was not kept; half where weights get no gradient."""
    products = 6 if more[:1] == (False,) else 12
    return (products + (4 if h is None else 0)) * token[0] * x[1] * down[2]
