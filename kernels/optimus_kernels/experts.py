"""The experts of a layer in one autograd function: out = sum over k of w * down(swiglu(gate_up x)).

Shapes in this file: T tokens, hidden size D, intermediate size F, E local experts, K experts per
token, N = T*K slots (one for each token and k), R rows (slots of local experts, sorted by expert).

Forward saves its inputs and, by default, the pre-activation h = gate_up x. Expert outputs are not
saved. The gradient of a routing weight w is the dot product <da, a>, where a = swiglu(h) and da is
the gradient of `out` times the matrix `down`.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils.flop_counter import register_flop_formula

from optimus_kernels import experts_grouped, experts_loop
from optimus_kernels.experts_operands import (
    Operands,
    WeightGrads,
    check,
    check_backward,
    dense,
    dense_backward,
)
from optimus_kernels.grouped_mm import form
from optimus_kernels.grouped_mm import reference as grouped_reference
from optimus_kernels.grouped_mm import reference_weight as grouped_weight_reference
from optimus_kernels.ops import check_operands, define, refuse_gradient
from optimus_kernels.rows import Rows, gather_reference, reduce_reference
from optimus_kernels.swiglu import reference as swiglu_reference
from optimus_kernels.swiglu import reference_backward as swiglu_backward_reference


class WeightWork:
    """Deferred computation of the weight gradients of one backward pass. The tensors that the
    computation needs stay in memory until this object is deleted."""

    def __init__(
        self,
        implementation: ModuleType,
        grad: Tensor,
        x: Tensor,
        rows: Rows,
        deferred: experts_loop.DeferredInputs,
    ) -> None:
        self._implementation, self._inputs = implementation, (grad, x, rows, deferred)

    @torch.no_grad()
    def compute(self, into: WeightGrads) -> None:
        """Compute the weight gradients and write them to `into`."""
        self._implementation.weight_grads(*self._inputs, into)


Destination = WeightGrads | Callable[[WeightWork], None] | None
"""Destination of weight gradients. `WeightGrads`: backward writes the gradients to these tensors.
Function: backward calls the function with a `WeightWork`, which computes the gradients later.
None: autograd gets the gradients."""


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
    """Return, for each token, the weighted sum of the outputs of the token's experts.

    Shapes: T tokens, K experts per token, E local experts, hidden size D, intermediate size F.

    Args:
        x: [T, D], fp32, bf16, fp16 or fp64. x, weights, gate_up and down must have the same device
            and dtype. Autocast converts these four tensors like the operands of a linear layer.
        weights: [T, K], routing weights.
        gate_up: [E, 2F, D]. For each expert: the F rows of the gate projection, then the F rows of
            the up projection.
        down: [E, D, F].
        rows: result of `route`. To save memory on accelerators, a caller may shorten rows.token and
            rows.slot to the rows of local experts.
        save_input_only: True to save memory by recomputing the pre-activation in backward instead
            of saving it.
        weight_grads: function that backward calls once to get the destination of the weight
            gradients (see `Destination`). If the function or the destination is None, backward
            returns the gradients of gate_up and down to autograd; otherwise, autograd does not get
            these gradients. torch.compile does not support this argument.

    Returns:
        [T, D] in the dtype of x.

    Raises:
        ValueError: shapes do not match.
        TypeError: dtypes or devices do not match.
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
    save_h = needed and not save_input_only
    return _Experts.apply(
        x, weights, gate_up, down, *_without_absent_rows(rows), save_h, weight_grads
    )


def _without_absent_rows(rows: Rows) -> Rows:
    """Return `rows` with `token` and `slot` cut to the rows of local experts.

    Return `rows` unchanged under torch.compile, or if the offsets are not on the CPU.
    """
    offsets, token, slot, row = rows
    # Under torch.compile, sizes must not depend on values. Reading offsets on an accelerator would
    # make the host wait.
    readable = offsets.is_cpu and not isinstance(offsets, FakeTensor)
    if torch.compiler.is_compiling() or not readable or offsets.numel() == 0:
        return rows
    local_rows = int(offsets[-1])
    if not 0 <= local_rows < len(token):
        return rows
    return Rows(offsets, token[:local_rows].clone(), slot[:local_rows].clone(), row)


class _Experts(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor, offsets: Tensor,
        token: Tensor, slot: Tensor, row: Tensor, save_h: bool, weight_grads: Any,
    ) -> Tensor:  # fmt: skip
        operands = Operands(x, weights, gate_up, down, offsets, token, slot, row)
        out, h = _forward(*operands, save_h)
        ctx.weight_grads = weight_grads
        ctx.save_for_backward(*operands, h if save_h else None)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of the inputs of `forward`. Raises NotImplementedError if
        create_graph is True."""
        # The ops of backward have no gradient. A second derivative would therefore be wrong without
        # an error.
        if torch.is_grad_enabled():
            raise NotImplementedError(
                "experts has no second derivative; use create_graph=False, or compute the experts "
                "in plain torch"
            )
        *operands, h = ctx.saved_tensors
        if ctx.weight_grads is not None:
            destination = ctx.weight_grads()
            if destination is not None:
                return *_backward_to(destination, grad, Operands(*operands), h), *(None,) * 8
        with_weights = ctx.needs_input_grad[2] or ctx.needs_input_grad[3]
        dx, dw, dgate_up, ddown = _backward(grad, *operands, h, with_weights)
        weight_grads = (dgate_up, ddown) if with_weights else (None, None)
        return dx, dw, *weight_grads, *(None,) * 6


def _backward_to(
    destination: WeightGrads | Callable[[WeightWork], None],
    grad: Tensor,
    operands: Operands,
    h: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Return the gradients of x and of the routing weights.

    If `destination` is a `WeightGrads`, write the gradients of gate_up and down to its tensors. If
    `destination` is a function, call it with the deferred computation of these gradients.
    """
    if isinstance(destination, WeightGrads):
        return _backward_into(grad, *operands, h, *destination)
    implementation = _implementation(operands.x, operands.gate_up)
    check_backward("experts", grad, operands, h)
    grad, operands, h = dense_backward("experts", grad, operands, h)
    dx, dw, deferred = implementation.backward(grad, operands, h, None, defer=True)
    destination(WeightWork(implementation, grad, operands.x, operands.rows, deferred))
    return dx, dw.to(operands.weights.dtype)


def reference(
    x: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor,
    offsets: Tensor, token: Tensor, slot: Tensor, row: Tensor, save_h: bool = True,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return the output [T, D] and the pre-activation h [N, 2F], computed in plain torch. If
    `save_h` is False, h is empty."""
    h = grouped_reference(gather_reference(x, token, row), gate_up.mT, offsets)
    y = grouped_reference(swiglu_reference(h), down.mT, offsets)
    return reduce_reference(y, weights, row, slot), h if save_h else x.new_empty(0)


def reference_backward(
    grad: Tensor, x: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor,
    offsets: Tensor, token: Tensor, slot: Tensor, row: Tensor, h: Tensor | None, with_weights: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Return the gradients dx, dweights, dgate_up and ddown, computed in plain torch. If
    `with_weights` is False, dgate_up and ddown are empty."""
    copies, dy = gather_reference(x, token, row), gather_reference(grad, token, row)
    h = grouped_reference(copies, gate_up.mT, offsets) if h is None else h
    da = grouped_reference(dy, down, offsets)
    dh, scaled, dweights = swiglu_backward_reference(h, da, weights, slot)
    dx = reduce_reference(grouped_reference(dh, gate_up, offsets), None, row, slot)
    none = x.new_empty(0)
    grads = ((dh, copies), (dy, scaled)) if with_weights else ()
    dgate_up, ddown = (
        (grouped_weight_reference(a, b, offsets) for a, b in grads) if grads else (none,) * 2
    )
    return dx, dweights.to(weights.dtype), dgate_up, ddown


def _implementation(x: Tensor, gate_up: Tensor) -> ModuleType:
    """Return the module to use for forward and backward: experts_grouped or experts_loop."""
    # Rows have D, F or 2F elements. If rows of F elements are aligned, rows of 2F elements are
    # aligned, too.
    if x.is_meta:  # `optimus plan` computes the memory that accelerators need
        return experts_grouped
    chosen = form(x, gate_up.shape[2], gate_up.shape[1] // 2)
    return experts_grouped if chosen == "torch" else experts_loop


def _fake_forward(*arguments: Any) -> tuple[Tensor, Tensor]:
    operands, save_h = Operands(*arguments[:8]), arguments[8]
    h = (operands.token.shape[0], operands.gate_up.shape[1]) if save_h else (0,)
    return operands.x.new_empty(operands.x.shape), operands.x.new_empty(h)


def _fake_backward(grad: Tensor, *arguments: Any) -> tuple[Tensor, ...]:
    x, weights, gate_up, down = arguments[:4]
    grads = (t.new_empty(t.shape if arguments[9] else (0,)) for t in (gate_up, down))
    return x.new_empty(x.shape), weights.new_empty(weights.shape), *grads


def _check_backward_into(grad: Tensor, *arguments: Any) -> None:
    operands, into = Operands(*arguments[:8]), WeightGrads(*arguments[9:])
    check_backward("experts_backward_into", grad, operands, arguments[8])
    if into.gate_up.shape != operands.gate_up.shape or into.down.shape != operands.down.shape:
        raise ValueError(
            f"experts: the tensors for the gradients of gate_up and down have the shapes "
            f"{list(into.gate_up.shape)} and {list(into.down.shape)}; they must have the shapes of "
            f"gate_up and down, {list(operands.gate_up.shape)} and {list(operands.down.shape)}"
        )
    for name, target in (("gate_up", into.gate_up), ("down", into.down)):
        check_operands(f"experts_backward_into: gradient of {name}", {name: target}, {})
        if target.device != operands.x.device:
            raise TypeError(
                f"experts_backward_into: gradient of {name} is on {target.device}; move it to "
                f"{operands.x.device}"
            )


_OPERANDS = (
    "Tensor x, Tensor weights, Tensor gate_up, Tensor down, "
    "Tensor offsets, Tensor token, Tensor slot, Tensor row"
)


@define(
    f"experts({_OPERANDS}, bool keep) -> (Tensor, Tensor)",
    _fake_forward,
    lambda *arguments: check("experts", Operands(*arguments[:8])),
)
def _forward(*arguments: Any) -> tuple[Tensor, Tensor]:
    operands, save_h = dense("experts", Operands(*arguments[:8])), arguments[8]
    out, h = _implementation(operands.x, operands.gate_up).forward(operands, save_h)
    # experts_loop appends padding rows to h. Both implementations must return the same sizes,
    # because torch.compile caches compiled code on disk, and a run with the other implementation
    # may load it.
    return out, h[: operands.token.shape[0]] if save_h else h


@define(
    f"experts_backward(Tensor grad, {_OPERANDS}, Tensor? h, bool with_weights)"
    " -> (Tensor, Tensor, Tensor, Tensor)",
    _fake_backward,
    lambda grad, *arguments: check_backward(
        "experts_backward", grad, Operands(*arguments[:8]), arguments[8]
    ),
)
def _backward(grad: Tensor, *arguments: Any) -> tuple[Tensor, ...]:
    h, with_weights = arguments[8:]
    grad, operands, h = dense_backward("experts_backward", grad, Operands(*arguments[:8]), h)
    into = experts_loop.fresh_grads((operands.gate_up, operands.down)) if with_weights else None
    implementation = _implementation(operands.x, operands.gate_up)
    dx, dw, _ = implementation.backward(grad, operands, h, into)
    grads = into[:2] if into else (operands.x.new_empty(0), operands.x.new_empty(0))
    return dx, dw.to(operands.weights.dtype), *grads


@define(
    f"experts_backward_into(Tensor grad, {_OPERANDS}, Tensor? h, Tensor(a!) gate_up_grad, "
    "Tensor(b!) down_grad, bool add) -> (Tensor, Tensor)",
    lambda grad, x, weights, *_: (x.new_empty(x.shape), weights.new_empty(weights.shape)),
    _check_backward_into,
)
def _backward_into(grad: Tensor, *arguments: Any) -> tuple[Tensor, Tensor]:
    h, into = arguments[8], WeightGrads(*arguments[9:])
    refuse_gradient("experts_backward_into", grad, *arguments[:4])
    grad, operands, h = dense_backward("experts_backward_into", grad, Operands(*arguments[:8]), h)
    implementation = _implementation(operands.x, operands.gate_up)
    dx, dw, _ = implementation.backward(grad, operands, h, into)
    return dx, dw.to(operands.weights.dtype)


@register_flop_formula(torch.ops.optimus.experts)
def _flops_forward(
    x: torch.Size, weights: torch.Size, gate_up: torch.Size, down: torch.Size,
    offsets: torch.Size, token: torch.Size, *_: Any, **__: Any,
) -> int:  # fmt: skip
    """Return the FLOPs of forward for torch's FlopCounterMode: 3 matrix products of R x D x F."""
    return 6 * token[0] * x[1] * down[2]


@register_flop_formula(
    [torch.ops.optimus.experts_backward, torch.ops.optimus.experts_backward_into]
)
def _flops_backward(
    grad: torch.Size, x: torch.Size, weights: torch.Size, gate_up: torch.Size, down: torch.Size,
    offsets: torch.Size, token: torch.Size, slot: torch.Size, row: torch.Size,
    h: torch.Size | None, *more: Any, **__: Any,
) -> int:  # fmt: skip
    """Return the FLOPs of backward for torch's FlopCounterMode."""
    # The weight gradients need the same number of FLOPs as dx. Recomputing h adds 2 products of R x
    # D x F.
    products = 6 if more[:1] == (False,) else 12
    return (products + (4 if h is None else 0)) * token[0] * x[1] * down[2]
