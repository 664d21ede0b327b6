"""Tests that the permutation equals its specification in docs/formats/dataset.md."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

from data_prep.shuffle.order import PERMUTATION_ALGORITHM, Permutation

PAGE = Path(__file__).resolve().parents[2] / "docs" / "formats" / "dataset.md"
MASK = (1 << 64) - 1
GOLDEN = 0x9E3779B97F4A7C15


def mix(z: int) -> int:
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
    return z ^ (z >> 31)


def specified_keys(seed: int, epoch: int) -> list[int]:
    state = mix((seed + GOLDEN) & MASK)
    state = mix(((state ^ epoch) + GOLDEN) & MASK)
    return [mix((state + (r + 1) * GOLDEN) & MASK) for r in range(8)]


def specified(n: int, seed: int, epoch: int, i: int) -> int:
    """Return P(i) as defined in docs/formats/dataset.md, "Permutation", computed with Python
    integers."""
    bits = max(2, (n - 1).bit_length())
    left_bits = bits // 2
    right_bits = bits - left_bits
    keys = specified_keys(seed, epoch)
    while True:
        left, right = i >> right_bits, i % (1 << right_bits)
        for r in range(8):
            if r % 2 == 0:
                left ^= mix((right + keys[r]) & MASK) >> (64 - left_bits)
            else:
                right ^= mix((left + keys[r]) & MASK) >> (64 - right_bits)
        i = (left << right_bits) | right
        if i < n:
            return i


def page_vectors() -> list[tuple[int, int, int, list[int], int]]:
    rows = re.findall(
        r"^\| (\d+) \| (\d+) \| (\d+) \| ([\d, ]+) \| (\d+) \|$", PAGE.read_text(), re.M
    )
    return [
        (int(n), int(seed), int(epoch), [int(x) for x in first.split(",")], int(last))
        for n, seed, epoch, first, last in rows
    ]


def test_vectors_of_the_page():
    vectors = page_vectors()
    assert len(vectors) >= 9 and PERMUTATION_ALGORITHM in PAGE.read_text()
    for n, seed, epoch, first, last in vectors:
        permutation = Permutation(n, seed, epoch)
        assert permutation.apply(np.arange(len(first))).tolist() == first
        assert permutation.apply(np.array([n - 1])).tolist() == [last]
        assert [specified(n, seed, epoch, i) for i in range(len(first))] == first
    keys = specified_keys(42, 1)
    assert f"k[0] = {keys[0]:#x}" in PAGE.read_text() and f"k[7] = {keys[7]:#x}" in PAGE.read_text()


@pytest.mark.parametrize("n", [1, 2, 3, 37, 4096, 4097, (1 << 40) + 1])
def test_permutation_equals_its_specification(n):
    positions = np.unique(np.linspace(0, n - 1, 50).astype(np.int64))
    image = Permutation(n, 123, 4).apply(positions)
    assert image.dtype == np.int64
    assert image.tolist() == [specified(n, 123, 4, int(i)) for i in positions]


def test_all_small_sizes_are_permuted():
    for n in range(1, 300):
        assert sorted(Permutation(n, 123, 4).apply(np.arange(n)).tolist()) == list(range(n))


def test_permutation_of_a_range_equals_the_range_of_all():
    whole = Permutation(100_000, 3).apply(np.arange(100_000))
    stretch = Permutation(100_000, 3).apply(np.arange(40_000, 90_000).astype(np.uint32))
    assert np.array_equal(stretch, whole[40_000:90_000])
