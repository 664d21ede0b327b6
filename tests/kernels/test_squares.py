"""square_bins_: exact sums of squares, the same bits however tensors are cut."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
import torch

import optimus_kernels.squares as module
from optimus_kernels.squares import BLOCK, new_bins, reference, square_bins_, total_of

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def kernel(cpu_library):
    """That of one instruction set."""
    return module._bind(cpu_library)


@pytest.fixture
def compiled(kernel, monkeypatch) -> None:
    monkeypatch.setattr(module, "_own", lambda flat: kernel)


def make(blocks: int, seed: int = 0) -> torch.Tensor:
    """Numbers of all magnitudes, zeros and subnormal ones among them."""
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
def test_the_twin_gives_the_same_bits(blocks):
    flat, theirs = make(blocks), new_bins(CPU)
    reference(theirs, flat)
    assert torch.equal(bins_of(flat), theirs)


@pytest.mark.usefixtures("compiled")
@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
def test_what_is_not_finite_is_counted(value):
    flat, theirs = make(70), new_bins(CPU)
    flat[33] = value
    flat[2000] = value
    reference(theirs, flat)
    ours = bins_of(flat)
    assert torch.equal(ours, theirs) and ours[-1] == 2
    assert math.isnan(total_of(ours))


@pytest.mark.usefixtures("compiled")
def test_cuts_and_threads_change_no_bit():
    flat, threads = make(5000), torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        whole = bins_of(flat)
        torch.set_num_threads(1)
        pieces = flat.split([BLOCK, 3 * BLOCK, 1000 * BLOCK, 3996 * BLOCK])
        assert torch.equal(bins_of(*reversed(pieces)), whole)
    finally:
        torch.set_num_threads(threads)


def test_the_sum_is_right():
    """Against exact fractions; only the 32 of a block are rounded, in fp64."""
    flat = torch.randn(64 * BLOCK, generator=torch.Generator().manual_seed(1))
    exact = sum(Fraction(value) ** 2 for value in flat.tolist())
    assert abs(total_of(bins_of(flat)) / exact - 1) < 1e-15
    assert total_of(bins_of(torch.full((BLOCK,), 3e38))) == pytest.approx(32 * 9e76, rel=1e-7)
    assert total_of(bins_of(torch.full((BLOCK,), 1e-44))) == pytest.approx(32 * 9.63e-89, rel=1e-2)
    assert total_of(bins_of(torch.zeros(BLOCK))) == 0


def test_the_op_is_registered_as_it_behaves():
    torch.library.opcheck(torch.ops.optimus.square_bins_.default, (new_bins(CPU), make(3)))


@pytest.mark.parametrize(
    ("flat", "error", "words"),
    [
        (torch.zeros(31), ValueError, r"\[31\] a multiple of 32"),
        (torch.zeros(64, dtype=torch.bfloat16), TypeError, "bfloat16"),
        (torch.zeros(128)[::2], ValueError, "contiguous"),
    ],
)
def test_wrong_tensors_are_refused(flat, error, words):
    with pytest.raises(error, match=words):
        square_bins_(new_bins(CPU), flat)
