"""Operands that ops refuse, or take however they lie in memory; gradients that there are not."""

from __future__ import annotations

import pytest
import torch

import optimus_kernels as kernels
from tests.kernels.test_ops import arguments, as_tuple

ops = torch.ops.optimus
GIVEN = arguments("odd sizes, some held", torch.float32)
FLOATING = [name for name in GIVEN if name != "route"]
ROWS = ("offsets", "token", "slot", "row")


def experts_of(rows, given=GIVEN["experts"]):
    x, weights, gate_up, down = (value.clone().requires_grad_() for value in given[:4])
    out = kernels.experts(x, weights, gate_up, down, rows)
    probe = torch.linspace(-1, 1, out.numel()).view_as(out)
    return out.detach(), *torch.autograd.grad((out * probe).sum(), (x, weights, gate_up, down))


def tensors_of(name):
    return [at for at, value in enumerate(GIVEN[name]) if isinstance(value, torch.Tensor)]


def apart(value: torch.Tensor) -> torch.Tensor:
    """The same numbers, two places apart in memory."""
    return torch.stack([value, torch.full_like(value, 3)], -1)[..., 0]


@pytest.mark.parametrize("field", ROWS)
def test_rows_may_lie_in_memory_in_any_order(field):
    rows = kernels.Rows(*GIVEN["experts"][4:8])
    spread = rows._replace(**{field: apart(getattr(rows, field))})
    for value, same in zip(experts_of(spread), experts_of(rows), strict=True):
        assert torch.equal(value, same)


@pytest.mark.parametrize("name", [name for name in FLOATING if not name.endswith("into")])
def test_every_operand_may_lie_in_memory_in_any_order(name):
    expected = as_tuple(getattr(ops, name)(*GIVEN[name]))
    last = int(GIVEN["experts"][4][-1])
    for at in tensors_of(name):
        given = list(GIVEN[name])
        given[at] = apart(given[at])
        for value, same in zip(as_tuple(getattr(ops, name)(*given)), expected, strict=True):
            if name == "grouped_mm":
                value, same = value[:last], same[:last]
            torch.testing.assert_close(value, same)


@pytest.mark.parametrize("field", ROWS)
def test_rows_of_another_dtype_are_refused(field):
    rows = kernels.Rows(*GIVEN["experts"][4:8])
    wide = rows._replace(**{field: getattr(rows, field).long()})
    with pytest.raises(TypeError, match=rf"^experts: .*rows.{field} torch.int64.*int32"):
        experts_of(wide)


@pytest.mark.parametrize("how", ["torch.int32", "torch.complex64", "mixed", "meta"])
@pytest.mark.parametrize("name", FLOATING)
def test_other_dtypes_and_mixed_ones_and_devices_are_refused(name, how):
    floats = [at for at in tensors_of(name) if GIVEN[name][at].is_floating_point()]
    cases = [floats]
    if how == "mixed":
        cases = [[at] for at in floats] if len(floats) > 1 else []
    elif how == "meta":
        cases = [[at] for at in tensors_of(name)] if len(tensors_of(name)) > 1 else []
    for changed in cases:
        given = list(GIVEN[name])
        for at in changed:
            kind = {"mixed": torch.float64, "meta": "meta"}.get(how) or getattr(torch, how[6:])
            given[at] = given[at].to(kind)
        if name.endswith("into") and set(changed) <= {10, 11} and how == "mixed":
            continue  # gradients may be summed in another dtype
        with pytest.raises(TypeError, match={"mixed": "float64"}.get(how, how)) as refusal:
            getattr(ops, name)(*given)
        assert str(refusal.value).startswith(name) and "\n" not in str(refusal.value)


def test_rows_that_do_not_hold_all_that_is_routed_are_refused():
    rows = kernels.Rows(*GIVEN["experts"][4:8])
    held = int(rows.offsets[-1])
    cut = rows._replace(token=rows.token[:held], slot=rows.slot[:held])
    for value, same in zip(experts_of(cut), experts_of(rows), strict=True):
        assert torch.equal(value, same)
    short = rows._replace(token=rows.token[: held - 1], slot=rows.slot[: held - 1])
    with pytest.raises(ValueError, match=rf"offsets must rise .* {held - 1} rows"):
        experts_of(short)
    with pytest.raises(ValueError, match="rows.token .* rows.slot"):
        experts_of(rows._replace(token=rows.token[:held]))


@pytest.mark.parametrize("wrong", [[0, 99], [0, 5, 3], [1, 4], [-1, 4], [[0, 4]], []])
def test_offsets_of_no_rows_are_refused(wrong):
    offsets = torch.tensor(wrong, dtype=torch.int32)
    rows, weights = torch.ones(6, 8), torch.ones(max(0, offsets.shape[-1] - 1), 8, 4)
    with pytest.raises(ValueError, match="offsets"):
        kernels.grouped_mm(rows, weights, offsets)
    with pytest.raises(ValueError, match="offsets"):
        kernels.grouped_mm_weight(rows, rows, offsets)


def test_debug_mode_looks_at_the_experts_rows(monkeypatch):
    monkeypatch.setenv("OPTIMUS_KERNELS_DEBUG", "1")
    rows = kernels.Rows(*GIVEN["experts"][4:8])
    for field in ROWS[1:]:
        wild = getattr(rows, field).clone()
        wild.view(-1)[1] = 10**8
        with pytest.raises(ValueError, match=rf"experts: rows.{field} .*first 100000000"):
            experts_of(rows._replace(**{field: wild}))


@pytest.mark.parametrize(
    "name",
    [
        *("experts", "experts_backward", "experts_backward_into"),
        *("swiglu_backward", "reduce_rows_backward"),
    ],
)
def test_an_op_without_a_gradient_refuses_to_give_one(name):
    given = list(GIVEN[name])
    given[0] = given[0].clone().requires_grad_()
    with pytest.raises(NotImplementedError, match=f"optimus.{name} has no gradient"):
        as_tuple(getattr(ops, name)(*given))[0].sum().backward()


@pytest.mark.parametrize("name", ["swiglu", "reduce_rows"])
def test_second_derivatives_are_refused_rather_than_zero(name):
    given = list(GIVEN[name])
    given[0] = leaf = given[0].clone().requires_grad_()
    first = torch.autograd.grad(getattr(ops, name)(*given).square().sum(), leaf, create_graph=True)
    with pytest.raises(NotImplementedError, match=f"optimus.{name}_backward has no gradient"):
        first[0].square().sum().backward()
