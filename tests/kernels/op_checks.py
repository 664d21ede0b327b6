"""Checks of the compiled kernels of all backends: each op against its reference in fp64.

T tokens, K experts per token, E local experts, D hidden, F intermediate, N routed rows. The
reference computes in fp64 from the same elements, so the difference of the results is the error of
the kernel. This error has two causes: rounding to the element type, and fp32 arithmetic on values
with a known `scale` (the sum of the absolute values of the terms).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from optimus_kernels.experts import experts
from optimus_kernels.grouped_mm import set_form, torch_form_works
from optimus_kernels.rows import (
    Rows,
    gather,
    gather_reference,
    reduce_backward_reference,
    reduce_reference,
    reduce_rows,
    reduce_rows_backward,
    route,
    route_reference,
)
from optimus_kernels.swiglu import reference as swiglu_reference
from optimus_kernels.swiglu import reference_backward as swiglu_backward_reference
from optimus_kernels.swiglu import swiglu, swiglu_backward

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# Half a unit in the last place, relative; and half of the smallest subnormal number.
ROUNDING = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
SMALLEST = {torch.float32: 2.0**-149, torch.bfloat16: 2.0**-133, torch.float16: 2.0**-24}
FP32 = 2.0**-23
"""Maximum relative error of an fp32 operation: twice the maximum error of a correct rounding,
because functions such as exp are not correctly rounded."""


@dataclass(frozen=True)
class Routing:
    """Sizes of a layer and its tokens. The experts that the tokens choose are random."""

    name: str
    tokens: int
    top_k: int
    total: int
    """Number of experts of the layer."""
    first: int = 0
    """Number of the first local expert."""
    num_local: int | None = None
    """Number of local experts; None: all experts from number `first` to the last."""
    same_experts: bool = False
    """True if all tokens choose the same K experts."""

    @property
    def num_experts(self) -> int:
        return self.total - self.first if self.num_local is None else self.num_local

    def chosen(self, device: str) -> Tensor:
        """Return the experts of each token, int64 [T, K], the same on all devices."""
        generator = torch.Generator().manual_seed(self.tokens)
        scores = torch.rand(self.tokens, self.total, generator=generator)
        if self.same_experts and self.tokens:
            scores = scores[:1].expand_as(scores)
        return scores.topk(self.top_k, dim=1).indices.to(device)


ROUTINGS = (
    Routing("one token", tokens=1, top_k=2, total=5),
    Routing("primes", tokens=101, top_k=3, total=7),
    Routing("no token", tokens=0, top_k=2, total=4),
    Routing("top 1", tokens=67, top_k=1, total=3),
    Routing("every expert", tokens=29, top_k=5, total=5),
    Routing("all on one", tokens=1201, top_k=1, total=64, same_experts=True),
    Routing("a share of the experts", tokens=131, top_k=4, total=24, first=6, num_local=9),
    Routing("a share that none chose", tokens=17, top_k=1, total=9, first=5, num_local=2),
    Routing("no local expert", tokens=17, top_k=2, total=9, num_local=0),
    Routing("more blocks and experts than lanes", tokens=4211, top_k=4, total=67),
)
"""Routings with odd sizes, without tokens or experts, and with unbalanced loads. The last routing
has 33 blocks of 512 slots and more than 64 experts."""

SIZES = (1, 7, 64, 136, 521, 1056)
"""Lengths of a row: below a sub-group, odd, multiples of 16 bytes, several sub-groups per row."""


def case(routing: Routing, device: str) -> Rows:
    """Return the rows of a routing, computed by the reference implementation of `route`. An error
    of the `route` kernel therefore does not affect the checks of other ops."""
    return route_reference(routing.chosen(device), routing.first, routing.num_experts)


def random(*shape: int, dtype: torch.dtype, device: str, seed: int = 0) -> Tensor:
    """Return normal random numbers, the same on all devices."""
    generator = torch.Generator().manual_seed(seed + 1)
    return torch.randn(*shape, generator=generator).to(dtype).to(device)


def unaligned(tensor: Tensor) -> Tensor:
    """Return a copy whose address is not a multiple of 16 bytes."""
    moved = tensor.new_empty(tensor.numel() + 1)[1:].view(tensor.shape)
    return moved.copy_(tensor)


def assert_close(actual: Tensor, exact: Tensor, scale: Tensor, roundings: int) -> None:
    """Assert that `actual` is `exact` (fp64) rounded to the dtype of `actual`. An additional error
    is permitted: the error of `roundings` fp32 operations on values with the magnitude `scale`."""
    assert actual.shape == exact.shape, (actual.shape, exact.shape)
    allowed = ROUNDING[actual.dtype] * exact.abs() + SMALLEST[actual.dtype]
    # The factor is 2, because an fp32 error can cause rounding to the other neighbour of the exact
    # value.
    allowed = allowed + 2 * roundings * FP32 * scale.abs()
    error = (actual.double() - exact).abs()
    wrong = ~(error <= allowed)
    assert not wrong.any(), (
        f"{int(wrong.sum())} of {wrong.numel()} wrong, first at {wrong.nonzero()[0].tolist()}: "
        f"{actual[wrong][0]} instead of {exact[wrong][0]}"
    )


def check_route(routing: Routing, device: str) -> None:
    """Assert that all outputs of `route` equal the outputs of its reference implementation."""
    actual = route(routing.chosen(device), routing.first, routing.num_experts)
    for name, ours, theirs in zip(actual._fields, actual, case(routing, device), strict=True):
        assert ours.dtype is torch.int32
        assert torch.equal(ours, theirs), f"{name}: {ours} instead of {theirs}"


def check_gather(routing: Routing, size: int, dtype: torch.dtype, device: str) -> None:
    """Assert that each row has the bits of its token, and that rows without a token are zeros."""
    rows = case(routing, device)
    x = random(routing.tokens, size, dtype=dtype, device=device)
    for tokens in (x, unaligned(x)):
        actual = gather(tokens, rows.token, rows.row)
        assert torch.equal(actual, gather_reference(x, rows.token, rows.row))


def check_swiglu(rows: int, size: int, dtype: torch.dtype, device: str) -> None:
    h = 3 * random(rows, 2 * size, dtype=dtype, device=device)
    exact = swiglu_reference(h.double())
    for operand in (h, unaligned(h)):
        assert_close(swiglu(operand), exact, exact, roundings=6)


def check_swiglu_backward(routing: Routing, size: int, dtype: torch.dtype, device: str) -> None:
    rows = case(routing, device)
    h = 3 * random(len(rows.slot), 2 * size, dtype=dtype, device=device)
    da = random(len(rows.slot), size, dtype=dtype, device=device, seed=1)
    w = random(routing.tokens, routing.top_k, dtype=dtype, device=device, seed=2)
    wide = h.double(), da.double(), w.double()
    exact = swiglu_backward_reference(*wide, rows.slot)
    # The terms of s + silu (1 - s) can cancel, so the absolute values of the terms bound the error.
    (g, u), weight = wide[0].chunk(2, dim=1), _of_rows(wide[2], rows.slot)
    s = g.sigmoid()
    slope = (weight * wide[1] * u).abs() * (s + (g * s).abs())
    scale_dh = torch.cat([slope, exact[0][:, size:].abs()], dim=1)
    terms = _to_slots((wide[1] * swiglu_reference(wide[0])).abs().sum(1), rows.slot, w)
    for operand in (lambda t: t, unaligned):
        actual = swiglu_backward(operand(h), operand(da), w, rows.slot)
        assert_close(actual[0], exact[0], scale_dh, roundings=8)
        assert_close(actual[1], exact[1], exact[1], roundings=7)
        assert actual[2].dtype is torch.float32
        assert_close(actual[2], exact[2], terms, roundings=8 + size.bit_length())


def check_reduce(
    routing: Routing, size: int, dtype: torch.dtype, weighted: bool, device: str
) -> None:
    rows = case(routing, device)
    y = random(len(rows.slot), size, dtype=dtype, device=device)
    w = random(routing.tokens, routing.top_k, dtype=dtype, device=device, seed=2)
    w = w if weighted else None
    exact, scale = (
        reduce_reference(change(y), w if w is None else change(w), rows.row, rows.slot)
        for change in (Tensor.double, lambda t: t.double().abs())
    )
    for operand in (y, unaligned(y)):
        actual = reduce_rows(operand, w, rows.row, rows.slot)
        assert_close(actual, exact, scale, roundings=1 + routing.top_k)


def check_reduce_backward(routing: Routing, size: int, dtype: torch.dtype, device: str) -> None:
    rows = case(routing, device)
    y = random(len(rows.slot), size, dtype=dtype, device=device)
    grad = random(routing.tokens, size, dtype=dtype, device=device, seed=1)
    w = random(routing.tokens, routing.top_k, dtype=dtype, device=device, seed=2)
    wide = grad.double(), y.double(), w.double()
    exact = reduce_backward_reference(*wide, rows.slot)
    terms = reduce_backward_reference(wide[0].abs(), wide[1].abs(), wide[2], rows.slot)[1]
    for operand in (lambda t: t, unaligned):
        actual = reduce_rows_backward(operand(grad), operand(y), w, rows.slot)
        assert_close(actual[0], exact[0], exact[0], roundings=1)
        assert_close(actual[1], exact[1], terms, roundings=2 + size.bit_length())


def check_rows(routing: Routing, size: int, dtype: torch.dtype, device: str) -> None:
    """Check all ops that work row by row."""
    check_gather(routing, size, dtype, device)
    check_reduce(routing, size, dtype, True, device)
    check_reduce(routing, size, dtype, False, device)
    check_reduce_backward(routing, size, dtype, device)
    check_swiglu(routing.tokens, size, dtype, device)
    check_swiglu_backward(routing, size, dtype, device)


def experts_step(
    routing: Routing, dtype: torch.dtype, like: torch.dtype, device: str
) -> Callable[[], list[Tensor]]:
    """Return a function that computes a forward and a backward pass of the experts.

    Args:
        routing: The choice of experts.
        dtype: The dtype of the computation.
        like: A dtype in which all inputs are exact.
        device: The device, to which the inputs are copied before the call.

    Returns:
        A function that returns the output and the gradients of x, weights, gate_up and down.
    """
    hidden, inner, num_experts = 128, 64, routing.num_experts
    shapes = (
        (routing.tokens, hidden),
        (routing.tokens, routing.top_k),
        (num_experts, 2 * inner, hidden),
        (num_experts, hidden, inner),
        (routing.tokens, hidden),
    )
    exact = [
        random(*shape, dtype=like, device=device, seed=seed) / (8 if len(shape) == 3 else 1)
        for seed, shape in enumerate(shapes)
    ]
    *inputs, grad = (tensor.to(dtype) for tensor in exact)
    for tensor in inputs:
        tensor.requires_grad_()
    chosen = routing.chosen(device)

    def step() -> list[Tensor]:
        rows = route(chosen, routing.first, routing.num_experts)
        out = experts(*inputs, rows)
        return [out.detach(), *torch.autograd.grad(out, inputs, grad)]

    return step


def assert_near(actual: list[Tensor], exact: list[Tensor], tolerance: float) -> None:
    """Assert that the relative norm of the error of each tensor is at most the tolerance."""
    for tensor, expected in zip(actual, exact, strict=True):
        expected = expected.to(tensor.device)
        error = (tensor.double() - expected).norm() / expected.norm()
        assert error <= tolerance, f"{list(tensor.shape)}: relative error {error:.2g}"


def check_non_finite(device: str) -> None:
    """Assert that NaN and infinities are at the same elements as in the reference."""
    h = random(5, 2 * 64, dtype=torch.float32, device=device)
    h[1, 3], h[2, 4], h[3, 5] = torch.nan, torch.inf, -torch.inf
    actual, reference = swiglu(h), swiglu_reference(h)
    for kind in (torch.isnan, torch.isposinf, torch.isneginf):
        assert torch.equal(kind(actual), kind(reference))


def check_out_of_range(device: str) -> None:
    """Assert that experts outside the local range get no row and access no memory, also with
    numbers at the limits of int64."""
    chosen = torch.tensor([[0, 2], [-1, 1], [2**62, -(2**63)], [3, 2**63 - 1]], device=device)
    rows, reference = route(chosen, 1, 2), route_reference(chosen, 1, 2)
    assert all(map(torch.equal, rows, reference))
    assert rows.offsets.tolist() == [0, 1, 2]


def _of_rows(weights: Tensor, slot: Tensor) -> Tensor:
    """Return the weight of each row, [N, 1]; 0 for a row without a slot."""
    of_slot = weights.flatten()[slot.clamp(min=0).long()] if weights.numel() else weights.flatten()
    return of_slot.masked_fill(slot < 0, 0).unsqueeze(1)


def _to_slots(of_row: Tensor, slot: Tensor, like: Tensor) -> Tensor:
    """Return the values of rows [N] by slot, [T, K]; 0 for slots without a row."""
    out = of_row.new_zeros(like.numel())
    has_slot = slot >= 0
    out[slot[has_slot].long()] = of_row[has_slot]
    return out.view(like.shape)


TORCH_FORM_WORKS = torch_form_works("cpu", torch.float32)
needs_torch_form = pytest.mark.skipif(
    not TORCH_FORM_WORKS, reason=f"torch {torch.__version__} has no grouped products on CPUs"
)


@contextlib.contextmanager
def in_form(name: str) -> Iterator[None]:
    """Use the implementation `name` of grouped products, "loop" or "torch", in a `with` block."""
    set_form(name)
    try:
        yield
    finally:
        set_form("auto")


FORMS = ("loop", pytest.param("torch", marks=needs_torch_form))
"""Names of the tested implementations of grouped products. torch 2.8 has no grouped product on a
CPU."""
