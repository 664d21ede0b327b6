"""What the compiled kernels of any backend must hold: every op against its twin computed in fp64.

T tokens, K experts a token, E experts held, D hidden, F intermediate. The twins get the same
elements as fp64, so an error is the kernel's own: rounding to the element type, and fp32 arithmetic
on values whose `scale` (the sum of the terms' sizes) is known.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
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
from optimus_kernels.swiglu import reference as swiglu_twin
from optimus_kernels.swiglu import reference_backward as swiglu_backward_twin
from optimus_kernels.swiglu import swiglu, swiglu_backward

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# Half a unit in the last place, relative; and the smallest steps of subnormal numbers, halved.
ROUNDING = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
SMALLEST = {torch.float32: 2.0**-149, torch.bfloat16: 2.0**-133, torch.float16: 2.0**-24}
FP32 = 2.0**-23
"""One rounding of fp32, with room for a function's own error."""


@dataclass(frozen=True)
class Routing:
    """How tokens choose experts."""

    name: str
    tokens: int
    top_k: int
    total: int
    """Experts of the layer."""
    first: int = 0
    held: int | None = None
    """None: all from `first` on."""
    one_for_all: bool = False
    """All tokens choose the same K experts."""

    @property
    def num_experts(self) -> int:
        return self.total - self.first if self.held is None else self.held

    def chosen(self, device: str) -> Tensor:
        """int64 [T, K]; made on the CPU, so that devices see the same."""
        generator = torch.Generator().manual_seed(self.tokens)
        scores = torch.rand(self.tokens, self.total, generator=generator)
        if self.one_for_all and self.tokens:
            scores = scores[:1].expand_as(scores)
        return scores.topk(self.top_k, dim=1).indices.to(device)


ROUTINGS = (
    Routing("one token", tokens=1, top_k=2, total=5),
    Routing("primes", tokens=101, top_k=3, total=7),
    Routing("no token", tokens=0, top_k=2, total=4),
    Routing("top 1", tokens=67, top_k=1, total=3),
    Routing("every expert", tokens=29, top_k=5, total=5),
    Routing("all on one", tokens=1201, top_k=1, total=64, one_for_all=True),
    Routing("a share of the experts", tokens=131, top_k=4, total=24, first=6, held=9),
    Routing("a share that none chose", tokens=17, top_k=1, total=9, first=5, held=2),
    Routing("no expert held", tokens=17, top_k=2, total=9, held=0),
    Routing("more pieces and experts than lanes", tokens=4211, top_k=4, total=67),
)
"""Odd, empty and lopsided cases. The last has 33 pieces of 512 slots, and more than 64 experts."""

SIZES = (1, 7, 64, 136, 521, 1056)
"""Of a row: narrower than a sub-group, odd, whole packs of 16 bytes, several sub-groups a row."""


def case(routing: Routing, device: str) -> Rows:
    """The rows by the twin, so that ops are checked apart from each other."""
    return route_reference(routing.chosen(device), routing.first, routing.num_experts)


def random(*shape: int, dtype: torch.dtype, device: str, seed: int = 0) -> Tensor:
    """Normal numbers, the same on every device."""
    generator = torch.Generator().manual_seed(seed + 1)
    return torch.randn(*shape, generator=generator).to(dtype).to(device)


def off_by_one(tensor: Tensor) -> Tensor:
    """The same numbers at an address that is no multiple of 16 bytes."""
    moved = tensor.new_empty(tensor.numel() + 1)[1:].view(tensor.shape)
    return moved.copy_(tensor)


def assert_close(actual: Tensor, exact: Tensor, scale: Tensor, roundings: int) -> None:
    """`actual` is `exact` (fp64) rounded to its dtype, but for fp32 roundings of `scale`."""
    assert actual.shape == exact.shape, (actual.shape, exact.shape)
    allowed = ROUNDING[actual.dtype] * exact.abs() + SMALLEST[actual.dtype]
    # Twice: an fp32 error may tip a value to the other neighbour.
    allowed = allowed + 2 * roundings * FP32 * scale.abs()
    error = (actual.double() - exact).abs()
    wrong = ~(error <= allowed)
    assert not wrong.any(), (
        f"{int(wrong.sum())} of {wrong.numel()} wrong, first at {wrong.nonzero()[0].tolist()}: "
        f"{actual[wrong][0]} for {exact[wrong][0]}"
    )


def check_route(routing: Routing, device: str) -> None:
    """Exactly the twin's, entry by entry."""
    actual = route(routing.chosen(device), routing.first, routing.num_experts)
    for name, ours, theirs in zip(actual._fields, actual, case(routing, device), strict=True):
        assert ours.dtype is torch.int32
        assert torch.equal(ours, theirs), f"{name}: {ours} for {theirs}"


def check_gather(routing: Routing, size: int, dtype: torch.dtype, device: str) -> None:
    """A copy, bit for bit, and zeros where there is no token."""
    rows = case(routing, device)
    x = random(routing.tokens, size, dtype=dtype, device=device)
    for given in (x, off_by_one(x)):
        actual = gather(given, rows.token, rows.row)
        assert torch.equal(actual, gather_reference(x, rows.token, rows.row))


def check_swiglu(rows: int, size: int, dtype: torch.dtype, device: str) -> None:
    h = 3 * random(rows, 2 * size, dtype=dtype, device=device)
    exact = swiglu_twin(h.double())
    for given in (h, off_by_one(h)):
        assert_close(swiglu(given), exact, exact, roundings=6)


def check_swiglu_backward(routing: Routing, size: int, dtype: torch.dtype, device: str) -> None:
    rows = case(routing, device)
    h = 3 * random(len(rows.slot), 2 * size, dtype=dtype, device=device)
    da = random(len(rows.slot), size, dtype=dtype, device=device, seed=1)
    w = random(routing.tokens, routing.top_k, dtype=dtype, device=device, seed=2)
    wide = h.double(), da.double(), w.double()
    exact = swiglu_backward_twin(*wide, rows.slot)
    # s + silu (1 - s) may cancel: its terms' sizes bound its error.
    (g, u), weight = wide[0].chunk(2, dim=1), _of_rows(wide[2], rows.slot)
    s = g.sigmoid()
    slope = (weight * wide[1] * u).abs() * (s + (g * s).abs())
    scale_dh = torch.cat([slope, exact[0][:, size:].abs()], dim=1)
    terms = _to_slots((wide[1] * swiglu_twin(wide[0])).abs().sum(1), rows.slot, w)
    for give in (lambda t: t, off_by_one):
        actual = swiglu_backward(give(h), give(da), w, rows.slot)
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
    for given in (y, off_by_one(y)):
        actual = reduce_rows(given, w, rows.row, rows.slot)
        assert_close(actual, exact, scale, roundings=1 + routing.top_k)


def check_reduce_backward(routing: Routing, size: int, dtype: torch.dtype, device: str) -> None:
    rows = case(routing, device)
    y = random(len(rows.slot), size, dtype=dtype, device=device)
    grad = random(routing.tokens, size, dtype=dtype, device=device, seed=1)
    w = random(routing.tokens, routing.top_k, dtype=dtype, device=device, seed=2)
    wide = grad.double(), y.double(), w.double()
    exact = reduce_backward_reference(*wide, rows.slot)
    terms = reduce_backward_reference(wide[0].abs(), wide[1].abs(), wide[2], rows.slot)[1]
    for give in (lambda t: t, off_by_one):
        actual = reduce_rows_backward(give(grad), give(y), w, rows.slot)
        assert_close(actual[0], exact[0], exact[0], roundings=1)
        assert_close(actual[1], exact[1], terms, roundings=2 + size.bit_length())


def check_rows(routing: Routing, size: int, dtype: torch.dtype, device: str) -> None:
    """All ops that are done row by row."""
    check_gather(routing, size, dtype, device)
    check_reduce(routing, size, dtype, True, device)
    check_reduce(routing, size, dtype, False, device)
    check_reduce_backward(routing, size, dtype, device)
    check_swiglu(routing.tokens, size, dtype, device)
    check_swiglu_backward(routing, size, dtype, device)


def experts_step(routing: Routing, dtype: torch.dtype, like: torch.dtype, device: str):
    """A function of no argument: the experts' output and the gradients of x, weights, gate_up and
    down, in `dtype`, of numbers that are exact in `like`. Its inputs are on the device before."""
    hidden, inner, held = 128, 64, routing.num_experts
    shapes = (
        (routing.tokens, hidden),
        (routing.tokens, routing.top_k),
        (held, 2 * inner, hidden),
        (held, hidden, inner),
        (routing.tokens, hidden),
    )
    made = [
        random(*shape, dtype=like, device=device, seed=seed) / (8 if len(shape) == 3 else 1)
        for seed, shape in enumerate(shapes)
    ]
    *inputs, grad = (tensor.to(dtype) for tensor in made)
    for tensor in inputs:
        tensor.requires_grad_()
    chosen = routing.chosen(device)

    def step() -> list[Tensor]:
        rows = route(chosen, routing.first, routing.num_experts)
        out = experts(*inputs, rows)
        return [out.detach(), *torch.autograd.grad(out, inputs, grad)]

    return step


def assert_near(actual: list[Tensor], exact: list[Tensor], tolerance: float) -> None:
    """By relative norm, tensor by tensor."""
    for one, other in zip(actual, exact, strict=True):
        other = other.to(one.device)
        error = (one.double() - other).norm() / other.norm()
        assert error <= tolerance, f"{list(one.shape)}: off by {error:.2g}"


def check_what_is_not_finite(device: str) -> None:
    """NaN and infinities come out where they belong, and nowhere else."""
    h = random(5, 2 * 64, dtype=torch.float32, device=device)
    h[1, 3], h[2, 4], h[3, 5] = torch.nan, torch.inf, -torch.inf
    actual, twin = swiglu(h), swiglu_twin(h)
    for kind in (torch.isnan, torch.isposinf, torch.isneginf):
        assert torch.equal(kind(actual), kind(twin))


def check_numbers_from_elsewhere(device: str) -> None:
    """Experts out of range, however far, get no row and touch no memory."""
    chosen = torch.tensor([[0, 2], [-1, 1], [2**62, -(2**63)], [3, 2**63 - 1]], device=device)
    rows, twin = route(chosen, 1, 2), route_reference(chosen, 1, 2)
    assert all(map(torch.equal, rows, twin))
    assert rows.offsets.tolist() == [0, 1, 2]


def _of_rows(weights: Tensor, slot: Tensor) -> Tensor:
    """[R, 1]: each row's weight; 0 for a row that has no slot."""
    of_slot = weights.flatten()[slot.clamp(min=0).long()] if weights.numel() else weights.flatten()
    return of_slot.masked_fill(slot < 0, 0).unsqueeze(1)


def _to_slots(of_row: Tensor, slot: Tensor, like: Tensor) -> Tensor:
    """[T, K] from [R]; zeros for slots that have no row."""
    out = of_row.new_zeros(like.numel())
    here = slot >= 0
    out[slot[here].long()] = of_row[here]
    return out.view(like.shape)


TORCH_FORM_WORKS = torch_form_works("cpu", torch.float32)
needs_torch_form = pytest.mark.skipif(
    not TORCH_FORM_WORKS, reason=f"torch {torch.__version__} has no grouped products on CPUs"
)


@contextlib.contextmanager
def in_form(name: str) -> Iterator[None]:
    set_form(name)
    try:
        yield
    finally:
        set_form("auto")


FORMS = ("loop", pytest.param("torch", marks=needs_torch_form))
