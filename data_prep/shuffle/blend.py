"""Blends: data sets that are mixed from several sources in exact proportions.

A source is a set of token arrays. `Mixing` determines the source of each instance, so that each
source gets an exact integer quota of instances. Specification, proof and test vectors:
docs/formats/dataset.md, "Mixing" and "Blends".
"""

from __future__ import annotations

import dataclasses
import functools
import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np

from data_prep import layout
from data_prep.shuffle.order import FORM as ORDER_FORM
from data_prep.shuffle.order import (
    PERMUTATION_ALGORITHM,
    InShards,
    Order,
    Permutation,
    check_in_shards,
    check_order_values,
    rows_of_shard,
)
from optimus.errors import ConfigError

MIXING_ALGORITHM = "largest-deficit"
"""Name of the algorithm in `Mixing`. Change the name if the algorithm changes."""

MAX_PERIOD = 1 << 20
"""Largest period of a `Mixing`. The period is the sum of the weights. The sequence of a period of
this length is computed in at most 2 s."""


def integer_weights(weights: Sequence[int | float | str | Fraction]) -> tuple[int, ...]:
    """Return the smallest whole numbers that have the same ratios as the weights.

    Args:
        weights: Numbers, or strings such as "0.7" or "7/10". A float is read as the decimal that
            `repr` prints: 0.7 and 0.3 become 7 and 3.

    Raises:
        ConfigError: a weight is not a positive number, or the sum of the result exceeds MAX_PERIOD.
    """
    exact = []
    for weight in weights:
        try:
            exact.append(Fraction(repr(weight) if isinstance(weight, float) else weight))
        except (ValueError, ZeroDivisionError):
            raise ConfigError(f"weight = {weight!r} is not a number; set it above 0") from None
        if exact[-1] <= 0:
            raise ConfigError(f"weight = {weight!r} must be above 0; leave the source out instead")
    scale = math.lcm(*(weight.denominator for weight in exact))
    whole = [int(weight * scale) for weight in exact]
    divisor = math.gcd(*whole)
    whole = [weight // divisor for weight in whole]
    if sum(whole) > MAX_PERIOD:
        raise ConfigError(
            f"the weights {', '.join(map(str, weights))} correspond to whole numbers with the sum "
            f"{sum(whole)}, above the limit of {MAX_PERIOD}; round the weights to fewer digits"
        )
    return tuple(whole)


class Mixing:
    """Infinite, periodic sequence of sources. The frequencies of the sources have the ratios of the
    integer weights. A `Mixing` is immutable."""

    def __init__(self, weights: Sequence[int]):
        """Compute one period of the sequence. Source i occurs weights[i] times in the period.

        `weights` are from `integer_weights`.
        """
        assert weights and min(weights) > 0 and sum(weights) <= MAX_PERIOD, weights
        assert len(weights) <= 1 << 16, len(weights)
        self.weights = tuple(weights)
        self.period = sum(weights)
        self._weights = np.array(weights, np.int64)
        self._picks = self._first_period()
        # For each position in the period: the number of earlier positions with the same source.
        self._before = np.empty(self.period, np.int64)
        for source in range(len(weights)):
            positions = np.flatnonzero(self._picks == source)
            assert len(positions) == weights[source]
            self._before[positions] = np.arange(len(positions))

    def _first_period(self) -> np.ndarray:
        picks = np.empty(self.period, np.uint16)
        deficit = np.zeros(len(self.weights), np.int64)
        for n in range(self.period):
            deficit += self._weights
            source = int(deficit.argmax())  # the first of equal maxima
            deficit[source] -= self.period
            picks[n] = source
        return picks

    def locate(self, start: int, stop: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the source of each instance in [start, stop), and the instance's number in the
        source.

        The instances of a source have the numbers 0, 1, 2 and so on. If the source has N instances,
        number n is instance n % N of its epoch n // N.

        Returns:
            (sources, numbers within the sources), two arrays int64 [stop - start].
        """
        assert 0 <= start <= stop < 1 << 62, (start, stop)
        rounds, positions = np.divmod(np.arange(start, stop, dtype=np.int64), self.period)
        sources = self._picks[positions].astype(np.int64)
        return sources, rounds * self._weights[sources] + self._before[positions]

    def before_repeating(self, available: Sequence[int]) -> int:
        """Return the number of instances of the mix before an instance of any source is repeated.

        Source i has available[i] different instances.
        """
        ends = []
        for source, (weight, count) in enumerate(zip(self.weights, available, strict=True)):
            rounds, rest = divmod(count, weight)
            position = np.flatnonzero(self._picks == source)[rest]
            ends.append(rounds * self.period + int(position))
        return min(ends)

    def quotas(self, instances: int) -> tuple[int, ...]:
        """Return the number of instances of each source among the first `instances` of the mix."""
        rounds, rest = divmod(instances, self.period)
        counts = np.bincount(self._picks[:rest], minlength=len(self.weights)).tolist()
        return tuple(
            rounds * weight + count for weight, count in zip(self.weights, counts, strict=True)
        )


FORM = "optimus-blend-order"
_WEIGHT = re.compile(r"[0-9]{1,18}(\.[0-9]{1,18})?")
_MAX_PICKS = 1 << 28
"""Limit for the number of sources of a blend times the period of its `Mixing`. If the product is
larger, the quotas of the blend are not checked, because the check would take minutes."""
_PASS_KEYS = 1 << 32
"""Factor of the epoch numbers that select the permutations of partial passes. A complete pass over
a source uses each instance once. A partial pass p over source s uses the first instances in the
permutation of epoch (s + 1) * 2^32 + p. Training never reaches such an epoch."""


def parse_weight(text: str) -> Fraction:
    """Return the exact value of a decimal number: 3/10 for "0.3".

    Raises ConfigError if `text` is not a decimal number above 0.
    """
    if not _WEIGHT.fullmatch(text) or Fraction(text) == 0:
        raise ConfigError(f"weight {text!r} is not a decimal number above 0, such as 2 or 0.35")
    return Fraction(text)


def mixing_of(weights: Sequence[str]) -> Mixing:
    """Return the `Mixing` for decimal weights such as "0.3".

    Raises ConfigError if a weight is not a decimal number above 0.
    """
    return Mixing(integer_weights([parse_weight(weight) for weight in weights]))


@dataclass(frozen=True)
class BlendSource:
    """A source of a blend: a set of token arrays. `order` divides the token arrays into instances.
    The permutation in `order` is not used."""

    weight: str
    quota: int
    """Number of instances of the blend that come from this source."""
    order: Order


@dataclass(frozen=True)
class BlendOrder(InShards):
    """Order of the instances of a blend. This order and the token arrays of the sources determine
    the bytes of all shards."""

    part: str
    context: int
    dtype: str
    seed: int
    permutation: str
    instances_per_shard: int
    blended: tuple[BlendSource, ...]

    @functools.cached_property
    def num_instances(self) -> int:
        return sum(source.quota for source in self.blended)

    @property
    def sources(self) -> tuple[Order, ...]:
        """Return the `Order` of each source, in the sequence of the `--source` arguments."""
        return tuple(source.order for source in self.blended)

    @property
    def weights(self) -> list[str]:
        return [source.weight for source in self.blended]

    @property
    def carry_tails(self) -> bool:
        return self.blended[0].order.carry_tails

    @property
    def tail_tokens(self) -> int:
        """Return the number of tokens that are in no instance, summed over all sources."""
        return sum(order.tail_tokens for order in self.sources)

    def tails(self) -> tuple[int, ...]:
        """Return, for each unit (token array) of each source, the number of tokens that are in no
        instance."""
        return tuple(tail for order in self.sources for tail in order.tails())

    def split(self, instances: np.ndarray) -> Iterator[tuple[int, np.ndarray, np.ndarray]]:
        """Group instances of the blend by source.

        Args:
            instances: Numbers of R instances before the shuffle, int64 [R].

        Yields:
            For each source with instances in `instances`: (index of the source, positions of the
            source's instances in `instances`, numbers of these instances within the source).
        """
        starts = np.concatenate([[0], np.cumsum([source.quota for source in self.blended])])
        owner = np.searchsorted(starts, instances, side="right") - 1
        for number in np.unique(owner):
            rows = np.flatnonzero(owner == number)
            yield int(number), rows, self._of_source(number, instances[rows] - starts[number])

    def _of_source(self, number: int, indices: np.ndarray) -> np.ndarray:
        """Return the instances of source `number` that the blend uses at the positions `indices`.
        Positions are counted among the instances of the blend that come from this source.

        The blend reads a source in one or more passes. A complete pass reads all instances in the
        order of the source. A partial last pass reads a random sample of the instances.
        """
        source = self.blended[number]
        size = source.order.num_instances
        whole = source.quota // size * size
        instances = indices % size
        late = np.flatnonzero(indices >= whole)
        if late.size:
            key = (int(number) + 1) * _PASS_KEYS + source.quota // size
            instances[late] = Permutation(size, self.seed, key).apply(instances[late])
        return instances

    def to_json(self) -> dict[str, Any]:
        value = {"format": FORM, "version": layout.VERSION, **dataclasses.asdict(self)}
        value["blended"] = [
            {"weight": source.weight, "quota": source.quota, "order": source.order.to_json()}
            for source in self.blended
        ]
        return value


def read_any_order(dataset: Path) -> Order | BlendOrder:
    """Read the order of a data set, which may be a blend.

    Raises:
        DataError: the order is missing, damaged, or has impossible values.
    """
    path = dataset / layout.ORDER
    value = layout.read_checked_json(path, ORDER_FORM, FORM)
    if value["format"] == ORDER_FORM:
        order = layout.as_record(Order, value, path)
        check_order_values(order, path)
        return order
    blend = layout.as_record(BlendOrder, value, path)
    check_in_shards(blend, path)
    for source in blend.blended:
        check_order_values(source.order, path)
    layout.require(
        path,
        (bool(blend.blended), "it has no sources"),
        (
            layout.are_counts([source.quota for source in blend.blended])
            and all(s.order.num_instances or not s.quota for s in blend.blended)
            and blend.num_instances < layout.MAX_COUNT,
            "a quota is negative or too large, or a source with a quota has no instances",
        ),
        (
            {(o.context, o.dtype, o.part) for o in blend.sources}
            == {(blend.context, blend.dtype, blend.part)},
            "a source has another context, dtype or part than the blend",
        ),
    )
    return blend


def quota_problem(blend: BlendOrder) -> str:
    """Check that the weights of a blend give the quotas of the blend.

    Return a description of the problem. Return "" if there is no problem, or if the check would
    take minutes.
    """
    try:
        weights = integer_weights([parse_weight(weight) for weight in blend.weights])
    except ConfigError as error:
        return str(error)
    if sum(weights) * len(weights) > _MAX_PICKS:
        return ""  # the computation of the exact quotas would take minutes
    expected = Mixing(weights).quotas(blend.num_instances)
    quotas = tuple(source.quota for source in blend.blended)
    return "" if quotas == expected else f"quotas {quotas}, but the weights give {expected}"


def make_blend(
    orders: Sequence[Order], weights: Sequence[str], seed: int, total: int, shard_bytes: int
) -> BlendOrder:
    """Return the order of a blend.

    Args:
        orders: The order of each source, with the same context and dtype.
        weights: The weight of each source, a decimal number.
        seed: Seed of the permutations.
        total: The number of instances. 0: the largest number without repeated instances.
        shard_bytes: Maximum size of a shard in bytes, as in `order.rows_of_shard`.

    Raises:
        ConfigError: a weight is not a decimal number above 0, or a source has no instances.
    """
    mixing = mixing_of(weights)
    available = [order.num_instances for order in orders]
    for order, count in zip(orders, available, strict=True):
        if count == 0:
            raise ConfigError(
                f"{order.tokens_dir} has no instance of {order.context} tokens; give more text or "
                "a smaller --context"
            )
    first = orders[0]
    assert all((o.context, o.dtype) == (first.context, first.dtype) for o in orders)
    total = total or mixing.before_repeating(available)
    if total == 0:
        raise ConfigError("the blend has no instances; give --instances or more text")
    return BlendOrder(
        part="train",
        context=first.context,
        dtype=first.dtype,
        seed=seed,
        permutation=PERMUTATION_ALGORITHM,
        instances_per_shard=rows_of_shard(total, first.row_bytes, shard_bytes),
        blended=tuple(
            BlendSource(weight, quota, order)
            for weight, quota, order in zip(weights, mixing.quotas(total), orders, strict=True)
        ),
    )
