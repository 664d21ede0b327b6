"""Several sources in one stream, by exact integer quotas: which source an instance comes from.

Specification, proof and test vectors: docs/formats/dataset.md, "Mixing".

Shapes: n instances asked for, W sum of the weights.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction

import numpy as np

from optimus.errors import ConfigError

MIXING_ALGORITHM = "largest-deficit"
"""A change of anything below needs another name."""

MAX_PERIOD = 1 << 20
"""Largest sum of the weights: one period is worked out at the start (at most some 2 seconds)."""


def integer_weights(weights: Sequence[int | float | str | Fraction]) -> tuple[int, ...]:
    """The smallest whole numbers in the same ratios; a float counts as the decimal it is shown as.

    So 0.7 and 0.3 are 7 and 3, and "1/3" is exact. Raises ConfigError where a weight is not a
    positive number or their sum, in lowest terms, exceeds MAX_PERIOD.
    """
    exact = []
    for weight in weights:
        try:
            exact.append(Fraction(repr(weight) if isinstance(weight, float) else weight))
        except (ValueError, ZeroDivisionError):
            raise ConfigError(f"weight = {weight!r} is not a number; give one above 0") from None
        if exact[-1] <= 0:
            raise ConfigError(f"weight = {weight!r} must be above 0; leave the source out instead")
    scale = math.lcm(*(weight.denominator for weight in exact))
    whole = [int(weight * scale) for weight in exact]
    divisor = math.gcd(*whole)
    whole = [weight // divisor for weight in whole]
    if sum(whole) > MAX_PERIOD:
        raise ConfigError(
            f"weights {', '.join(map(str, weights))} are {sum(whole)} parts in whole numbers, more "
            f"than {MAX_PERIOD}; round them to fewer digits"
        )
    return tuple(whole)


class Mixing:
    """The endless order of sources that whole-number weights give. Immutable."""

    def __init__(self, weights: Sequence[int]):
        """`weights` as from `integer_weights`; source i has weights[i] of every period."""
        assert weights and min(weights) > 0 and sum(weights) <= MAX_PERIOD, weights
        assert len(weights) <= 1 << 16, len(weights)
        self.weights = tuple(weights)
        self.period = sum(weights)
        self._weights = np.array(weights, np.int64)
        self._picks = self._one_period()
        self._before = np.empty(self.period, np.int64)  # earlier picks of the same source
        for source in range(len(weights)):
            places = np.flatnonzero(self._picks == source)
            assert len(places) == weights[source]
            self._before[places] = np.arange(len(places))

    def _one_period(self) -> np.ndarray:
        picks = np.empty(self.period, np.uint16)
        deficit = np.zeros(len(self.weights), np.int64)
        for n in range(self.period):
            deficit += self._weights
            source = int(deficit.argmax())  # the first of equals
            deficit[source] -= self.period
            picks[n] = source
        return picks

    def locate(self, start: int, stop: int) -> tuple[np.ndarray, np.ndarray]:
        """Source of each of the instances [start, stop), and its number there: int64 [n] both.

        Numbers within a source are consecutive, and run on through its epochs.
        """
        assert 0 <= start <= stop < 1 << 62, (start, stop)
        rounds, places = np.divmod(np.arange(start, stop, dtype=np.int64), self.period)
        sources = self._picks[places].astype(np.int64)
        return sources, rounds * self._weights[sources] + self._before[places]

    def before_repeating(self, available: Sequence[int]) -> int:
        """How many instances the mix has until a source of available[i] instances must repeat."""
        ends = []
        for source, (weight, count) in enumerate(zip(self.weights, available, strict=True)):
            rounds, rest = divmod(count, weight)
            place = np.flatnonzero(self._picks == source)[rest]
            ends.append(rounds * self.period + int(place))
        return min(ends)

    def quotas(self, instances: int) -> tuple[int, ...]:
        """How many of the first `instances` each source gives; they add up to it."""
        rounds, rest = divmod(instances, self.period)
        counts = np.bincount(self._picks[:rest], minlength=len(self.weights)).tolist()
        return tuple(
            rounds * weight + count for weight, count in zip(self.weights, counts, strict=True)
        )
