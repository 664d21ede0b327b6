"""Tests of the operands of ops. Ops must refuse wrong operands and accept any strides. The backward
pass of an op without a backward formula must raise an error."""

from __future__ import annotations

import pytest
import torch

import optimus_kernels as kernels
from tests.kernels.test_ops import arguments, as_tuple

ops = torch.ops.optimus
ARGUMENTS = arguments("odd sizes, some held", torch.float32)
FLOATING = [name for name in ARGUMENTS if name != "route"]
ROWS = ("offsets", "token", "slot", "row")


def experts_of(rows, operands=ARGUMENTS["experts"]):
    x, weights, gate_up, down = (value.clone().requires_grad_() for value in operands[:4])
    out = kernels.experts(x, weights, gate_up, down, rows)
    probe = torch.linspace(-1, 1, out.numel()).view_as(out)
    return out.detach(), *torch.autograd.grad((out * probe).sum(), (x, weights, gate_up, down))


def tensor_indices(name):
    return [index for index, value in enumerate(ARGUMENTS[name]) if isinstance(value, torch.Tensor)]


def strided(value: torch.Tensor) -> torch.Tensor:
    """Return a copy with stride 2 in the last dim."""
    return torch.stack([value, torch.full_like(value, 3)], -1)[..., 0]


@pytest.mark.parametrize("field", ROWS)
def test_rows_may_have_any_strides(field):
    rows = kernels.Rows(*ARGUMENTS["experts"][4:8])
    changed = rows._replace(**{field: strided(getattr(rows, field))})
    for value, expected in zip(experts_of(changed), experts_of(rows), strict=True):
        assert torch.equal(value, expected)


@pytest.mark.parametrize("name", [name for name in ARGUMENTS if not name.endswith("into")])
def test_operands_may_have_any_strides(name):
    expected_results = as_tuple(getattr(ops, name)(*ARGUMENTS[name]))
    last = int(ARGUMENTS["experts"][4][-1])
    for index in tensor_indices(name):
        changed = list(ARGUMENTS[name])
        changed[index] = strided(changed[index])
        for value, expected in zip(
            as_tuple(getattr(ops, name)(*changed)), expected_results, strict=True
        ):
            if name == "grouped_mm":
                value, expected = value[:last], expected[:last]
            torch.testing.assert_close(value, expected)


@pytest.mark.parametrize("field", ROWS)
def test_rows_of_another_dtype_are_refused(field):
    rows = kernels.Rows(*ARGUMENTS["experts"][4:8])
    wide = rows._replace(**{field: getattr(rows, field).long()})
    with pytest.raises(TypeError, match=rf"^experts: .*rows.{field} torch.int64.*int32"):
        experts_of(wide)


@pytest.mark.parametrize("change", ["torch.int32", "torch.complex64", "mixed", "meta"])
@pytest.mark.parametrize("name", FLOATING)
def test_operands_of_other_or_mixed_dtypes_and_devices_are_refused(name, change):
    floats = [index for index in tensor_indices(name) if ARGUMENTS[name][index].is_floating_point()]
    cases = [floats]
    if change == "mixed":
        cases = [[index] for index in floats] if len(floats) > 1 else []
    elif change == "meta":
        cases = [[index] for index in tensor_indices(name)] if len(tensor_indices(name)) > 1 else []
    for changed in cases:
        operands = list(ARGUMENTS[name])
        for index in changed:
            target = {"mixed": torch.float64, "meta": "meta"}.get(change) or getattr(
                torch, change[6:]
            )
            operands[index] = operands[index].to(target)
        if name.endswith("into") and set(changed) <= {10, 11} and change == "mixed":
            continue  # sums of gradients can have another dtype
        with pytest.raises(TypeError, match={"mixed": "float64"}.get(change, change)) as refusal:
            getattr(ops, name)(*operands)
        assert str(refusal.value).startswith(name) and "\n" not in str(refusal.value)


def test_rows_shorter_than_the_routed_slots_are_refused():
    rows = kernels.Rows(*ARGUMENTS["experts"][4:8])
    local_rows = int(rows.offsets[-1])
    shortened = rows._replace(token=rows.token[:local_rows], slot=rows.slot[:local_rows])
    for value, expected in zip(experts_of(shortened), experts_of(rows), strict=True):
        assert torch.equal(value, expected)
    too_short = rows._replace(token=rows.token[: local_rows - 1], slot=rows.slot[: local_rows - 1])
    with pytest.raises(ValueError, match=rf"offsets must start .* {local_rows - 1} rows"):
        experts_of(too_short)
    with pytest.raises(ValueError, match="rows.token .* rows.slot"):
        experts_of(rows._replace(token=rows.token[:local_rows]))


@pytest.mark.parametrize("wrong", [[0, 99], [0, 5, 3], [1, 4], [-1, 4], [[0, 4]], []])
def test_invalid_offsets_are_refused(wrong):
    offsets = torch.tensor(wrong, dtype=torch.int32)
    rows, weights = torch.ones(6, 8), torch.ones(max(0, offsets.shape[-1] - 1), 8, 4)
    with pytest.raises(ValueError, match="offsets"):
        kernels.grouped_mm(rows, weights, offsets)
    with pytest.raises(ValueError, match="offsets"):
        kernels.grouped_mm_weight(rows, rows, offsets)


def test_debug_mode_checks_the_rows_of_experts(monkeypatch):
    monkeypatch.setenv("OPTIMUS_KERNELS_DEBUG", "1")
    rows = kernels.Rows(*ARGUMENTS["experts"][4:8])
    for field in ROWS[1:]:
        out_of_range = getattr(rows, field).clone()
        out_of_range.view(-1)[1] = 10**8
        with pytest.raises(ValueError, match=rf"experts: rows.{field} .*first is 100000000"):
            experts_of(rows._replace(**{field: out_of_range}))


@pytest.mark.parametrize(
    "name",
    [
        *("experts", "experts_backward", "experts_backward_into"),
        *("swiglu_backward", "reduce_rows_backward"),
    ],
)
def test_gradient_of_an_op_without_a_formula_is_refused(name):
    operands = list(ARGUMENTS[name])
    operands[0] = operands[0].clone().requires_grad_()
    with pytest.raises(NotImplementedError, match=f"optimus.{name} has no gradient"):
        as_tuple(getattr(ops, name)(*operands))[0].sum().backward()


@pytest.mark.parametrize("name", ["swiglu", "reduce_rows"])
def test_second_derivatives_are_refused(name):
    operands = list(ARGUMENTS[name])
    operands[0] = leaf = operands[0].clone().requires_grad_()
    first = torch.autograd.grad(
        getattr(ops, name)(*operands).square().sum(), leaf, create_graph=True
    )
    with pytest.raises(NotImplementedError, match=f"optimus.{name}_backward has no gradient"):
        first[0].square().sum().backward()
