"""Tests of all ops: registration (opcheck), and comparison with the reference implementations."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

import optimus_kernels as kernels
from optimus_kernels import backend
from optimus_kernels.experts import reference as experts_reference
from optimus_kernels.experts import reference_backward as experts_backward_reference
from optimus_kernels.grouped_mm import form
from optimus_kernels.grouped_mm import reference as grouped_reference
from optimus_kernels.grouped_mm import reference_weight as grouped_weight_reference
from optimus_kernels.rows import (
    gather_reference,
    reduce_backward_reference,
    reduce_reference,
    route_reference,
)
from optimus_kernels.swiglu import reference as swiglu_reference
from optimus_kernels.swiglu import reference_backward as swiglu_backward_reference
from tests.kernels.op_checks import in_form, needs_torch_form

ops = torch.ops.optimus
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# T, K, E, first local expert, local experts, D, F: even and odd sizes, no token, no local expert.
SHAPES = {
    "all held": (37, 3, 5, 0, 5, 64, 32),
    "odd sizes, some held": (29, 2, 7, 2, 3, 67, 21),
    "no token": (0, 2, 4, 0, 4, 16, 8),
    "none held": (5, 1, 4, 9, 2, 16, 8),
    "few": (5, 3, 4, 0, 4, 8, 8),
    "many": (900, 8, 64, 0, 64, 129, 33),
}


def case(name, dtype=torch.float32):
    tokens, k, experts, first, local_experts, hidden, inner = SHAPES[name]
    generator = torch.Generator().manual_seed(len(name))
    chosen = torch.rand(tokens, experts, generator=generator).topk(k).indices
    rows = route_reference(chosen, first, local_experts)
    normal = lambda *shape: torch.randn(*shape, generator=generator).to(dtype)  # noqa: E731
    total = tokens * k
    return {
        "chosen": chosen,
        "first": first,
        "local_experts": local_experts,
        "rows": rows,
        "x": normal(tokens, hidden),
        "weights": torch.rand(tokens, k, generator=generator).to(dtype),
        "h": normal(total, 2 * inner),
        "da": normal(total, inner),
        "y": normal(total, hidden),
        "gate_up": normal(local_experts, 2 * inner, hidden) * 0.2,
        "down": normal(local_experts, hidden, inner) * 0.2,
    }


def arguments(name, dtype) -> dict[str, tuple]:
    """Return a dict that maps each op to a tuple of its arguments. `name` selects the sizes in
    SHAPES."""
    c = case(name, dtype)
    rows = c["rows"]
    weights, x, y, h, da = (c[key] for key in ("weights", "x", "y", "h", "da"))
    matrices = (c["gate_up"], c["down"])
    operands = (x, weights, *matrices, *rows)
    preactivation = torch.zeros(len(rows.token), h.shape[1], dtype=dtype)
    return {
        "route": (c["chosen"], c["first"], c["local_experts"]),
        "gather": (x, rows.token, rows.row),
        "swiglu": (h,),
        "swiglu_backward": (h, da, weights, rows.slot),
        "reduce_rows": (y, weights, rows.row, rows.slot),
        "reduce_rows_backward": (x, y, weights, rows.slot),
        "grouped_mm": (y, c["gate_up"].mT, rows.offsets),
        "grouped_mm_weight": (y, h, rows.offsets),
        "experts": (*operands, True),
        "experts_backward": (x, *operands, preactivation, True),
        "experts_backward_into": (
            *(x, *operands, None),
            *(torch.zeros_like(matrix) for matrix in matrices),
            False,
        ),
    }


@pytest.fixture
def torch_implementation():
    with in_form("torch"):
        yield


NAMES = tuple(arguments("all held", torch.float32))
DIFFERENTIABLE = {
    "gather": (0,),
    "swiglu": (0,),
    "reduce_rows": (0, 1),
    "grouped_mm": (0, 1),
    "grouped_mm_weight": (0, 1),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", ["all held", "no token", "odd sizes, some held"])
@pytest.mark.parametrize("name", NAMES)
def test_opcheck(name, shape, dtype):
    inputs = list(arguments(shape, dtype)[name])
    for index in DIFFERENTIABLE.get(name, ()):
        inputs[index] = inputs[index].clone().requires_grad_()
    tolerance = {"rtol": 1e-2, "atol": 1e-2} if dtype is torch.bfloat16 else {}
    torch.library.opcheck(getattr(ops, name).default, tuple(inputs), **tolerance)


def test_reduction_without_weights_passes_opcheck():
    y, _, row, slot = arguments("all held", torch.float32)["reduce_rows"]
    torch.library.opcheck(ops.reduce_rows.default, (y.requires_grad_(), None, row, slot))


@pytest.mark.parametrize("shape", SHAPES)
def test_route_sorts_by_expert_and_then_by_slot(shape):
    c = case(shape)
    rows = kernels.route(c["chosen"], c["first"], c["local_experts"])
    for ours, expected in zip(rows, c["rows"], strict=True):
        assert torch.equal(ours, expected)
    local = (c["chosen"] - c["first"]).flatten().tolist()
    slots = sorted((e, slot) for slot, e in enumerate(local) if 0 <= e < c["local_experts"])
    assert rows.offsets[-1] == len(slots)
    assert rows.slot.tolist() == [slot for _, slot in slots] + [-1] * (len(local) - len(slots))
    assert rows.row.flatten()[[slot for _, slot in slots]].tolist() == list(range(len(slots)))


REFERENCES = {
    "gather": gather_reference,
    "swiglu": swiglu_reference,
    "swiglu_backward": swiglu_backward_reference,
    "reduce_rows": reduce_reference,
    "reduce_rows_backward": reduce_backward_reference,
    "grouped_mm": grouped_reference,
    "grouped_mm_weight": grouped_weight_reference,
}
ERRORS = {torch.float32: 2e-6, torch.bfloat16: 4e-3, torch.float16: 5e-4}
"""Allowed relative errors by dtype. fp32 results can differ by a few rounding errors; bf16 and fp16
results can differ by half a unit in the last place."""


@pytest.mark.usefixtures("filled")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", REFERENCES)
def test_kernel_equals_its_reference(name, shape, dtype):
    inputs = arguments(shape, dtype)[name]
    ours, reference = getattr(ops, name)(*inputs), REFERENCES[name](*inputs)
    last = int(case(shape)["rows"].offsets[-1])
    for value, expected in zip(as_tuple(ours), as_tuple(reference), strict=True):
        if name == "grouped_mm":
            value, expected = value[:last], expected[:last]
        assert value.dtype == expected.dtype
        assert value.shape == expected.shape
        if expected.numel():
            error = (value - expected).double().norm()
            assert error <= ERRORS[dtype] * expected.double().norm()


def as_tuple(value):
    return value if isinstance(value, tuple) else (value,)


@pytest.mark.parametrize("name", DIFFERENTIABLE)
def test_gradients_equal_those_of_the_reference(name):
    inputs = arguments("odd sizes, some held", torch.float64)[name]
    last = int(inputs[-1][-1]) if name.startswith("grouped") else None
    results = []
    for function in (getattr(ops, name), REFERENCES[name]):
        leaves = list(inputs)
        for index in DIFFERENTIABLE[name]:
            leaves[index] = inputs[index].clone().requires_grad_()
        out = function(*leaves)
        out = out[:last] if name == "grouped_mm" else out
        probe = torch.linspace(-1, 1, out.numel(), dtype=torch.float64).view_as(out)
        asked = [leaves[index] for index in DIFFERENTIABLE[name]]
        results.append([out.detach(), *torch.autograd.grad((out * probe).sum(), asked)])
    for value, expected in zip(*results, strict=True):
        torch.testing.assert_close(value, expected)


LINEAR = ("gather", "grouped_mm", "grouped_mm_weight", "reduce_rows")


@pytest.mark.parametrize("name", LINEAR)
def test_first_and_second_derivatives_equal_finite_differences(name):
    """Ops without a second derivative are excluded: swiglu, and reduce_rows with weights."""
    inputs = list(arguments("few", torch.float64)[name])
    if name == "reduce_rows":
        inputs[1] = None
    indices = [index for index in DIFFERENTIABLE[name] if inputs[index] is not None]
    leaves = [inputs[index].requires_grad_() for index in indices]

    def run(*values):
        for index, value in zip(indices, values, strict=True):
            inputs[index] = value
        return getattr(ops, name)(*inputs)

    torch.autograd.gradcheck(run, leaves)
    torch.autograd.gradgradcheck(run, leaves)


@pytest.mark.parametrize("reduce", [ops.reduce_rows, reduce_reference])
@pytest.mark.parametrize("weighted", [False, True])
def test_sums_are_in_order_of_k(reduce, weighted):
    y = torch.tensor([[1e8], [-1e8], [1.0]]).repeat(1, 130)
    row, weights = torch.arange(3, dtype=torch.int32), torch.ones(1, 3) if weighted else None
    assert reduce(y, weights, row.view(1, 3), row).unique().tolist() == [1.0]


@pytest.mark.parametrize("threads", [2, 3])
def test_results_are_the_same_for_any_number_of_threads(threads):
    before = torch.get_num_threads()
    results = []
    for count in (1, threads):
        torch.set_num_threads(count)
        inputs = arguments("many", torch.bfloat16)
        names = ("route", "gather", "swiglu", "swiglu_backward", "reduce_rows")
        results.append(
            [value for name in names for value in as_tuple(getattr(ops, name)(*inputs[name]))]
        )
    torch.set_num_threads(before)
    assert all(torch.equal(value, other) for value, other in zip(*results, strict=True))


def test_kernels_were_compiled():
    assert backend.active("cpu").name == "cpu", backend.active("cpu").why_not


BAD = {
    "gather": ((torch.zeros(3, 4), torch.zeros(2, 1), torch.zeros(1, 2)), ValueError, "[3, 4]"),
    "swiglu": ((torch.zeros(3, 5),), ValueError, "[3, 5]"),
    "route": ((torch.zeros(3, dtype=torch.int64), 0, 2), ValueError, "[3]"),
    "grouped_mm": (
        (torch.zeros(3, 5), torch.zeros(2, 4, 4), torch.zeros(3, dtype=torch.int32)),
        ValueError,
        "[2, 4, 4]",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_mismatched_shapes_are_named(name):
    inputs, error, text = BAD[name]
    with pytest.raises(error) as failure:
        getattr(ops, name)(*inputs)
    assert text in str(failure.value)


@needs_torch_form
@pytest.mark.parametrize("name", ["grouped_mm", "grouped_mm_weight"])
def test_torch_implementation_accepts_the_gradient_of_a_sum(name, torch_implementation):
    """The gradient of a sum has stride 0, so the op must copy the gradient for torch's
    grouped_mm."""
    *values, offsets = arguments("all held", torch.float32)[name]
    leaves = [value.detach().requires_grad_() for value in values]
    getattr(ops, name)(*leaves, offsets).sum().backward()
    unit_grads = torch.ones_like(getattr(ops, name)(*values, offsets))
    expected = torch.autograd.grad(getattr(ops, name)(*leaves, offsets), leaves, unit_grads)
    for leaf, value in zip(leaves, expected, strict=True):
        assert torch.equal(leaf.grad, value)


def test_implementation_that_torch_lacks_is_refused():
    with in_form("torch"), pytest.raises(ValueError, match="float64"):
        kernels.grouped_mm(torch.zeros(2, 4).double(), torch.zeros(1, 4, 4).double(), offsets(2))
    with pytest.raises(ValueError, match="auto, torch, loop"):
        kernels.set_form("fast")


def offsets(rows):
    return torch.tensor([0, rows], dtype=torch.int32)


@needs_torch_form
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["experts", "experts_backward", "experts_backward_into"])
def test_experts_pass_opcheck_with_the_torch_implementation(name, dtype, torch_implementation):
    inputs = arguments("all held", dtype)[name]
    tolerance = {"rtol": 1e-2, "atol": 1e-2} if dtype is torch.bfloat16 else {}
    torch.library.opcheck(getattr(ops, name).default, inputs, **tolerance)


@pytest.mark.parametrize("implementation", [pytest.param("torch", marks=needs_torch_form), "loop"])
def test_experts_return_no_preactivation_unless_requested(implementation):
    *operands, _ = arguments("all held", torch.float32)["experts"]
    with in_form(implementation):
        kept, none = (ops.experts(*operands, keep) for keep in (True, False))
    assert torch.equal(none[0], kept[0])
    assert none[1].shape == (0,) and len(kept[1]) == len(operands[5])


ODD = [
    *[(torch.bfloat16, sizes) for sizes in ((32, 20), (20, 32), (7, 5))],
    (torch.float32, (7, 5)),
]


@needs_torch_form
@pytest.mark.parametrize(("dtype", "sizes"), ODD)
def test_torch_implementation_refuses_unaligned_rows(dtype, sizes, torch_implementation):
    hidden, inner = sizes
    rows = kernels.route(torch.tensor([[0, 1], [1, 2]]), 0, 3)
    x, weights = torch.randn(2, hidden).to(dtype), torch.rand(2, 2).to(dtype)
    gate_up, down = (
        torch.randn(shape).to(dtype) for shape in ((3, 2 * inner, hidden), (3, hidden, inner))
    )
    with pytest.raises(ValueError, match="multiple of 16 bytes") as refusal:
        kernels.experts(x, weights, gate_up, down, rows)
    assert "\n" not in str(refusal.value)
    with pytest.raises(ValueError, match="multiple of 16 bytes"):
        kernels.grouped_mm(x, down, torch.tensor([0, 1, 2, 2]).int())


@needs_torch_form
@pytest.mark.parametrize(("dtype", "sizes"), ODD)
def test_auto_uses_the_loop_for_unaligned_rows_on_accelerators(dtype, sizes, monkeypatch):
    """On accelerators, `auto` must select torch's implementation only if rows are aligned."""
    like = SimpleNamespace(
        device=torch.device("cpu"), dtype=dtype, is_cpu=False, element_size=dtype.itemsize.__int__
    )
    assert form(like, *sizes) == "loop"
    assert form(like, 64, 32) == "torch"


@pytest.mark.parametrize(
    ("name", "index"),
    [("gather", 1), ("reduce_rows", 2), ("reduce_rows_backward", 3), ("swiglu_backward", 3)],
)
@pytest.mark.parametrize("out_of_range", [10**8, -2])
def test_debug_mode_refuses_rows_that_do_not_exist(name, index, out_of_range, monkeypatch):
    monkeypatch.setenv("OPTIMUS_KERNELS_DEBUG", "1")
    inputs = list(arguments("all held", torch.float32)[name])
    getattr(ops, name)(*inputs)
    inputs[index] = inputs[index].clone()
    inputs[index].view(-1)[5] = out_of_range
    with pytest.raises(
        ValueError, match=rf"{name}: .* has 1 indices .* first is {out_of_range} at position 5"
    ):
        getattr(ops, name)(*inputs)


@pytest.mark.usefixtures("filled")
@pytest.mark.parametrize("with_weights", [True, False])
@pytest.mark.parametrize("h_saved", [True, False])
@pytest.mark.parametrize("implementation", [pytest.param("torch", marks=needs_torch_form), "loop"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_experts_equal_their_reference(shape, dtype, implementation, h_saved, with_weights):
    *operands, _ = arguments(shape, dtype)["experts"]
    if implementation == "torch" and (
        dtype is torch.float16 or shape in ("odd sizes, some held", "many")
    ):
        pytest.skip("torch has no grouped product for these operands")
    last = int(operands[4][-1])
    with in_form(implementation):
        out, h = ops.experts(*operands, True)
        grad = torch.randn(out.shape, generator=torch.Generator().manual_seed(3)).to(dtype)
        ours = ops.experts_backward(grad, *operands, h if h_saved else None, with_weights)
    expected_out, expected_h = experts_reference(*operands)
    expected_grads = experts_backward_reference(
        grad, *operands, expected_h if h_saved else None, with_weights
    )
    assert h.shape == expected_h.shape
    pairs = [
        (out, expected_out),
        (h[:last], expected_h[:last]),
        *zip(ours, expected_grads, strict=True),
    ]
    for value, expected in pairs:
        assert value.dtype == expected.dtype and value.shape == expected.shape
        if expected.numel():
            error = (value - expected).double().norm()
            assert error <= 4 * ERRORS[dtype] * expected.double().norm()  # errors of four steps
