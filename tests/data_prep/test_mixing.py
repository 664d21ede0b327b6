"""Tests of mixing by exact integer quotas: definition, period, limits, and the examples in
docs/formats/dataset.md."""

from __future__ import annotations

import re
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest

from data_prep.shuffle.blend import MAX_PERIOD, Mixing, integer_weights
from optimus.errors import ConfigError

PAGE = Path(__file__).parents[2] / "docs" / "formats" / "dataset.md"


def order_by_definition(weights: list[int], count: int) -> list[int]:
    """Return the source of each of the first `count` instances, computed by the definition with
    exact fractions."""
    picked, total, picks = [0] * len(weights), sum(weights), []
    for n in range(count):
        lags = [Fraction(w * (n + 1), total) - g for w, g in zip(weights, picked, strict=True)]
        picks.append(lags.index(max(lags)))
        picked[picks[-1]] += 1
    return picks


@pytest.mark.parametrize(
    "weights", [[1], [1, 1, 1], [3, 1, 4], [7, 3], [1, 100], [5, 5, 1, 17, 2], [1] * 40 + [60]]
)
def test_order_follows_the_largest_deficit(weights):
    mixing, count = Mixing(weights), 3 * sum(weights) + 5
    sources, numbers = mixing.locate(0, count)
    assert sources.tolist() == order_by_definition(weights, count)
    for source in range(len(weights)):
        picked = numbers[sources == source]
        assert picked.tolist() == list(range(len(picked)))


def test_locate_of_a_range_equals_the_range_of_all():
    mixing = Mixing((5, 2, 9))
    sources, numbers = mixing.locate(0, 500)
    for start, stop in ((0, 0), (1, 2), (15, 17), (33, 499)):
        stretch = mixing.locate(start, stop)
        assert np.array_equal(stretch[0], sources[start:stop])
        assert np.array_equal(stretch[1], numbers[start:stop])
    far = (1 << 60) // 16 * 16  # a whole number of periods
    assert mixing.locate(far, far + 40)[0].tolist() == sources[:40].tolist()
    assert mixing.locate(far, far + 40)[1].tolist() == [
        int(number) + far // 16 * (5, 2, 9)[source]
        for source, number in zip(sources[:40], numbers[:40], strict=True)
    ]


def test_quotas_are_the_counts_of_the_order():
    mixing = Mixing((5, 2, 9, 1))
    sources, _ = mixing.locate(0, 200)
    for count in (0, 1, 16, 17, 18, 123, 200):
        expected = np.bincount(sources[:count], minlength=4).tolist()
        assert list(mixing.quotas(count)) == expected and sum(expected) == count
    assert mixing.quotas(17 * 10**15) == (5 * 10**15, 2 * 10**15, 9 * 10**15, 10**15)


def test_instances_before_a_source_repeats():
    mixing = Mixing((3, 1, 4))
    for available in ((3, 1, 4), (100, 100, 100), (0, 9, 9), (7, 1, 30), (6, 2, 8), (1, 1, 1)):
        count = mixing.before_repeating(available)
        inside = zip(mixing.quotas(count), available, strict=True)
        assert all(quota <= size for quota, size in inside)
        beyond = zip(mixing.quotas(count + 1), available, strict=True)
        assert any(quota > size for quota, size in beyond)


@pytest.mark.parametrize(
    ("weights", "whole"),
    [
        ([0.7, 0.3], (7, 3)),
        ([2, 4, 6], (1, 2, 3)),
        ([0.1, 0.2, 0.3], (1, 2, 3)),
        (["1/3", "0.5", 1], (2, 3, 6)),
        ([1e-3, 1], (1, 1000)),
        ([3.0], (1,)),
    ],
)
def test_weights_become_whole_numbers(weights, whole):
    assert integer_weights(weights) == whole


@pytest.mark.parametrize(
    ("weights", "needle"),
    [
        ([1, 0], "weight = 0 must be above 0"),
        ([1, -0.5], "weight = -0.5 must be above 0"),
        (["x"], "weight = 'x' is not a number"),
        (["1/0"], "weight = '1/0' is not a number"),
        ([float("nan")], "weight = nan is not a number"),
        ([0.1234567, 1], "round the weights to fewer digits"),
    ],
)
def test_impossible_weights_are_refused(weights, needle):
    with pytest.raises(ConfigError) as caught:
        integer_weights(weights)
    assert needle in str(caught.value) and "\n" not in str(caught.value)
    assert integer_weights([MAX_PERIOD - 1, 1]) == (MAX_PERIOD - 1, 1)


def test_vectors_of_the_page():
    section = PAGE.read_text().split("## Mixing", 1)[1].split("\n## ", 1)[0]
    rows = re.findall(r"^\| ([\d, ]+) \| ([\d, ]+) \| ([\d, ]+) \|$", section, re.MULTILINE)
    assert len(rows) >= 4
    for weights, order, quotas in rows:
        mixing = Mixing([int(w) for w in weights.split(",")])
        expected = [int(source) for source in order.split(",")]
        assert mixing.locate(0, len(expected))[0].tolist() == expected
        assert mixing.quotas(1000) == tuple(int(count) for count in quotas.split(","))
