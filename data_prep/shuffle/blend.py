"""Blends: several sets of token arrays in one data set, each with an exact share of instances.

`Mixing` divides a stream over sources by exact integer quotas. Specification, proof and test
vectors: docs/formats/dataset.md, "Mixing" and "Blends". Shapes: n instances asked for, W sum of the
weights.
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


FORM = "optimus-blend-order"
_WEIGHT = re.compile(r"[0-9]{1,18}(\.[0-9]{1,18})?")
_PASS_KEYS = 1 << 32
"""Epoch key of pass p of source s: (s + 1) * 2^32 + p, which no epoch of training reaches."""


def parse_weight(text: str) -> Fraction:
    """`0.3` is exactly 3/10. Raises ConfigError unless it is a plain decimal above 0."""
    if not _WEIGHT.fullmatch(text) or Fraction(text) == 0:
        raise ConfigError(f"weight {text!r} is not a decimal number above 0, such as 2 or 0.35")
    return Fraction(text)


def mixing_of(weights: Sequence[str]) -> Mixing:
    """The mix of sources with these weights. Raises ConfigError."""
    return Mixing(integer_weights([parse_weight(weight) for weight in weights]))


@dataclass(frozen=True)
class BlendSource:
    """A source of a blend: its own order, of which only the cut into instances counts."""

    weight: str
    quota: int
    """Instances that it gives."""
    order: Order


@dataclass(frozen=True)
class BlendOrder(InShards):
    """Everything that decides the bytes of a blend's shards, given the token arrays."""

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
        """The order of every source, in the order of the command line."""
        return tuple(source.order for source in self.blended)

    @property
    def weights(self) -> list[str]:
        return [source.weight for source in self.blended]

    @property
    def carry_tails(self) -> bool:
        return self.blended[0].order.carry_tails

    @property
    def tail_tokens(self) -> int:
        """Tokens in no instance of any source's cut."""
        return sum(order.tail_tokens for order in self.sources)

    def tails(self) -> tuple[int, ...]:
        """The same unit by unit, one source after the other."""
        return tuple(tail for order in self.sources for tail in order.tails())

    def split(self, instances: np.ndarray) -> Iterator[tuple[int, np.ndarray, np.ndarray]]:
        """(source, places, its instances): where blend instances int64 [R] come from.

        `places` are the rows of `instances` that fall to the source, all of it with each once.
        """
        starts = np.concatenate([[0], np.cumsum([source.quota for source in self.blended])])
        owner = np.searchsorted(starts, instances, side="right") - 1
        for number in np.unique(owner):
            places = np.flatnonzero(owner == number)
            yield int(number), places, self._of_source(number, instances[places] - starts[number])

    def _of_source(self, number: int, which: np.ndarray) -> np.ndarray:
        """Instances of a source's cut: whole passes in order, a last, partial one by P."""
        source = self.blended[number]
        size = source.order.num_instances
        whole = source.quota // size * size
        found = which % size
        late = np.flatnonzero(which >= whole)
        if late.size:
            key = (int(number) + 1) * _PASS_KEYS + source.quota // size
            found[late] = Permutation(size, self.seed, key).apply(found[late])
        return found

    def to_json(self) -> dict[str, Any]:
        value = {"format": FORM, "version": layout.VERSION, **dataclasses.asdict(self)}
        value["blended"] = [
            {"weight": source.weight, "quota": source.quota, "order": source.order.to_json()}
            for source in self.blended
        ]
        return value


def read_any_order(dataset: Path) -> Order | BlendOrder:
    """The order of a data set, blended or not. Raises DataError."""
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
            "the quota of a source is negative, too large or of a source without instances",
        ),
        (
            {(o.context, o.dtype) for o in blend.sources} == {(blend.context, blend.dtype)},
            "its sources have another context or dtype",
        ),
    )
    return blend


def make_blend(
    orders: Sequence[Order], weights: Sequence[str], seed: int, total: int, shard_bytes: int
) -> BlendOrder:
    """Blend sources cut by `orders`. `total` 0: the most that repeats no instance.

    Raises ConfigError for a bad weight, a source without instances, or sources that differ in
    context or dtype.
    """
    mixing = mixing_of(weights)
    available = [order.num_instances for order in orders]
    for order, count in zip(orders, available, strict=True):
        if count == 0:
            raise ConfigError(f"{order.tokens_dir} has no instance of {order.context} tokens")
    first = orders[0]
    assert all((o.context, o.dtype) == (first.context, first.dtype) for o in orders)
    total = total or mixing.before_repeating(available)
    if total == 0:
        raise ConfigError("the blend is empty at these weights; give --instances or more text")
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
