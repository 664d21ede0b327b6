"""Tests of the arithmetic of the CPU kernels of each instruction set: conversion, exp, NaN."""

from __future__ import annotations

import pytest
import torch

from optimus_kernels.library import DTYPES, Native

HALVES = (torch.bfloat16, torch.float16)


@pytest.fixture(scope="module")
def native(cpu_library):
    """Return the CPU kernels of one instruction set."""
    return Native(cpu_library, "cpu")


def all_halves(dtype):
    return torch.arange(-(2**15), 2**15).to(torch.int16).view(dtype)


def add_rows(native, rows):
    """Add K rows with the kernel `reduce`: `rows` is [K, D]. Return the sum [D], in the dtype of
    `rows`."""
    out = torch.empty_like(rows[0])
    slots = torch.arange(len(rows), dtype=torch.int32)
    sizes = (1, len(rows), rows.shape[1])
    arguments = (
        DTYPES[rows.dtype],
        rows.data_ptr(),
        None,
        slots.data_ptr(),
        *sizes,
        out.data_ptr(),
    )
    native.call("reduce", rows, *arguments)
    return out


def silu(native, g):
    """Compute silu(g) with the kernel `swiglu`. The kernel multiplies silu(g) by the up
    projection, which is 1 here."""
    h = torch.stack([g, torch.ones_like(g)]).view(1, -1).contiguous()
    out = torch.empty_like(g)
    native.call("swiglu", h, DTYPES[g.dtype], h.data_ptr(), 1, len(g), out.data_ptr())
    return out


@pytest.mark.parametrize("dtype", HALVES)
def test_conversion_to_fp32_and_back_keeps_all_16_bit_numbers(native, dtype):
    values = all_halves(dtype)
    out = add_rows(native, values.unsqueeze(0).contiguous())
    assert torch.equal(out.isnan(), values.isnan())
    same = ~values.isnan()
    assert torch.equal(out[same], values[same])


@pytest.mark.parametrize("dtype", HALVES)
def test_rounding_is_to_nearest_even_as_in_torch(native, dtype):
    values = all_halves(dtype)
    torch.manual_seed(0)
    for _ in range(4):
        rows = torch.stack([values, values[torch.randperm(len(values))]])
        out, expected = add_rows(native, rows), (rows[0].float() + rows[1].float()).to(dtype)
        assert torch.equal(out.isnan(), expected.isnan())
        same = ~expected.isnan()
        assert torch.equal(out[same], expected[same])


def test_silu_is_within_3_ulp(native):
    bits = torch.arange(0, 0x42B00000, 1009, dtype=torch.int32)  # bits of the numbers 0 to 88
    g = bits.view(torch.float32)
    for values in (g, -g):
        exact = values.double() * torch.sigmoid(values.double())
        unit = torch.finfo(torch.float32).eps * exact.abs().log2().floor().exp2()
        normal = exact.abs() >= torch.finfo(torch.float32).tiny
        ulp = ((silu(native, values).double() - exact).abs() / unit)[normal]
        assert ulp.max() < 3  # exp, an addition, a division and a product round


@pytest.mark.parametrize("dtype", [torch.float32, *HALVES])
def test_extreme_values_give_those_of_torch(native, dtype):
    inf = float("inf")
    g = torch.tensor([inf, -inf, torch.nan, 0.0, -0.0, 300.0, -300.0, 1e-7, -88.5]).to(dtype)
    out, expected = silu(native, g), torch.nn.functional.silu(g.float()).to(dtype)
    torch.testing.assert_close(out, expected, equal_nan=True, rtol=1e-2, atol=1e-35)


@pytest.mark.parametrize("dtype", [torch.float32, *HALVES])
@pytest.mark.parametrize("inner", [1, 15, 16, 17, 100])
def test_backward_keeps_nan_in_its_row(native, inner, dtype):
    h, da = torch.randn(3, 2 * inner).to(dtype), torch.randn(3, inner).to(dtype)
    h[1, 0] = torch.nan
    slot, weights = torch.arange(3, dtype=torch.int32), torch.ones(3, 1, dtype=dtype)
    dh, a, dw = torch.empty_like(h), torch.empty_like(da), torch.zeros(3, 1)
    ins = (t.data_ptr() for t in (h, da, weights, slot))
    outs = (t.data_ptr() for t in (dh, a, dw))
    native.call("swiglu_backward", h, DTYPES[dtype], *ins, 3, inner, *outs)
    assert dw.isnan().flatten().tolist() == [False, True, False]
    assert dh.isnan().any(dim=1).tolist() == [False, True, False]


def test_unknown_dtypes_and_sizes_are_refused_by_name(native):
    x = torch.zeros(4)
    with pytest.raises(RuntimeError, match="dtype"):
        native.call("swiglu", x, 7, x.data_ptr(), 1, 1, x.data_ptr())
    with pytest.raises(RuntimeError, match="size"):
        native.call("swiglu", x, 0, x.data_ptr(), -1, 1, x.data_ptr())
