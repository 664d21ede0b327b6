"""Tests of square_bins_. Sums of squares must be exact. If a tensor is added in slices, the bins
must be bitwise equal to the bins after adding the whole tensor."""

from __future__ import annotations

import math
from collections.abc import Iterator
from fractions import Fraction

import pytest
import torch

from optimus_kernels import library
from optimus_kernels.library import Native
from optimus_kernels.squares import BLOCK, new_bins, reference, square_bins_, total_of

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def native(cpu_library) -> Native:
    """Return the CPU kernels of one instruction set."""
    native = Native(cpu_library, "cpu")
    assert native.square_bins is not None
    return native


@pytest.fixture
def compiled(native, monkeypatch) -> Iterator[None]:
    """Use the compiled kernel, and check at the end of the test that it was called."""
    calls, function = [], native.square_bins

    def square_bins(*arguments: int) -> int:
        calls.append(arguments)
        return function(*arguments)

    monkeypatch.setattr(native, "square_bins", square_bins)
    monkeypatch.setattr(library, "native", lambda tensor: native)
    yield
    assert calls


def make(blocks: int, seed: int = 0) -> torch.Tensor:
    """Return random fp32 numbers [blocks * BLOCK] of all magnitudes, with zeros and subnormals."""
    generator = torch.Generator().manual_seed(seed)
    flat = torch.randn(blocks, BLOCK, generator=generator)
    flat *= 10.0 ** torch.randint(-44, 37, (blocks, 1), generator=generator)
    flat[::7] = 0
    return flat.flatten()


def bins_of(*flats: torch.Tensor) -> torch.Tensor:
    bins = new_bins(CPU)
    for flat in flats:
        square_bins_(bins, flat)
    return bins


@pytest.mark.usefixtures("compiled")
@pytest.mark.parametrize("blocks", [0, 1, 5, 40_000])
def test_reference_gives_the_same_bits(blocks):
    flat, expected = make(blocks), new_bins(CPU)
    reference(expected, flat)
    assert torch.equal(bins_of(flat), expected)


@pytest.mark.usefixtures("compiled")
@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
def test_non_finite_values_are_counted(value):
    flat, expected = make(70), new_bins(CPU)
    flat[33] = value
    flat[2000] = value
    reference(expected, flat)
    ours = bins_of(flat)
    assert torch.equal(ours, expected) and ours[-1] == 2
    assert math.isnan(total_of(ours))


@pytest.mark.usefixtures("compiled")
def test_slices_and_threads_change_no_bit():
    flat, threads = make(5000), torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        whole = bins_of(flat)
        torch.set_num_threads(1)
        slices = flat.split([BLOCK, 3 * BLOCK, 1000 * BLOCK, 3996 * BLOCK])
        assert torch.equal(bins_of(*reversed(slices)), whole)
    finally:
        torch.set_num_threads(threads)


def test_sum_is_exact():
    """The sum must equal the sum of exact fractions, except for the rounding to fp64."""
    flat = torch.randn(64 * BLOCK, generator=torch.Generator().manual_seed(1))
    exact = sum(Fraction(value) ** 2 for value in flat.tolist())
    assert abs(total_of(bins_of(flat)) / exact - 1) < 1e-15
    assert total_of(bins_of(torch.full((BLOCK,), 3e38))) == pytest.approx(32 * 9e76, rel=1e-7)
    assert total_of(bins_of(torch.full((BLOCK,), 1e-44))) == pytest.approx(32 * 9.63e-89, rel=1e-2)
    assert total_of(bins_of(torch.zeros(BLOCK))) == 0


def test_op_passes_opcheck():
    torch.library.opcheck(torch.ops.optimus.square_bins_.default, (new_bins(CPU), make(3)))


@pytest.mark.parametrize(
    ("flat", "error", "message"),
    [
        (torch.zeros(31), ValueError, r"\[31\] must .* a multiple of 32"),
        (torch.zeros(64, dtype=torch.bfloat16), TypeError, "bfloat16"),
        (torch.zeros(128)[::2], ValueError, "contiguous"),
    ],
)
def test_invalid_tensors_are_refused(flat, error, message):
    with pytest.raises(error, match=message):
        square_bins_(new_bins(CPU), flat)
