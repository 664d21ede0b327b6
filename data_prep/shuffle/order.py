"""The order of instances: division of token arrays into instances, and permutation of the
instances.

See docs/formats/dataset.md, "Instances and their order". An `Order` describes the shards, which the
step `shard` writes.

The permutation is an exactly specified bijection on [0, N), keyed with (seed, epoch). The bijection
is a Feistel network on b bits, where b >= 2 is the smallest number with N <= 2^b. The network is
applied again to its output until the output is below N (cycle walking). The permutation needs O(1)
memory for any N, and each machine can compute any range of the permutation. All arithmetic is
modulo 2^64. Specification and test vectors: docs/formats/dataset.md, "Permutation".
"""

from __future__ import annotations

import dataclasses
import functools
import operator
import os
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from data_prep import layout
from data_prep.tokenize.token_set import read_token_set

PERMUTATION_ALGORITHM = "feistel8-splitmix64"
"""Name of the algorithm in manifests. Change the name if the algorithm changes."""

MAX_SEED = (1 << 64) - 1
_ROUNDS = 8
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_CHUNK = 1 << 15
"""Number of indices to permute at a time, so that temporary arrays fit into the L2 cache."""


class Permutation:
    """Pseudorandom permutation of [0, n) that `seed` and `epoch` determine.

    `apply` maps positions to their images, and `inverse` maps images to their positions.
    """

    def __init__(self, n: int, seed: int, epoch: int = 0):
        assert n >= 0 and 0 <= seed <= MAX_SEED and 0 <= epoch <= MAX_SEED, (n, seed, epoch)
        self.n = n
        bits = max(2, (n - 1).bit_length())
        self._left_bits = bits // 2
        self._right_bits = bits - bits // 2
        state = _mix64(np.array([seed], np.uint64) + _GOLDEN)
        state = _mix64((state ^ np.uint64(epoch)) + _GOLDEN)
        round_keys = _mix64(state + np.arange(1, _ROUNDS + 1, dtype=np.uint64) * _GOLDEN)
        self._rounds = list(enumerate(round_keys))

    def apply(self, positions: np.ndarray) -> np.ndarray:
        """Return the images of `positions`.

        Args:
            positions: [k], of any integer dtype, in [0, n).

        Returns:
            int64 [k].
        """
        return self._walk(positions, self._rounds)

    def inverse(self, images: np.ndarray) -> np.ndarray:
        """Return the positions of `images`: inverse(apply(i)) == i. Shapes and dtypes are as for
        `apply`."""
        return self._walk(images, self._rounds[::-1])

    def _walk(self, values: np.ndarray, rounds: Sequence[tuple[int, np.uint64]]) -> np.ndarray:
        values = np.asarray(values)
        out = np.empty(values.shape, np.int64)
        for begin in range(0, len(values), _CHUNK):
            chunk = self._feistel(values[begin : begin + _CHUNK].astype(np.uint64), rounds)
            outside = np.flatnonzero(chunk >= self.n)
            while outside.size:
                again = self._feistel(chunk[outside], rounds)
                chunk[outside] = again
                outside = outside[again >= self.n]
            out[begin : begin + _CHUNK] = chunk
        return out

    def _feistel(self, value: np.ndarray, rounds: Sequence[tuple[int, np.uint64]]) -> np.ndarray:
        """Return the results of the Feistel network for uint64 values. If `rounds` are in reverse
        order, return the results of the inverse of the network."""
        right_bits = np.uint64(self._right_bits)
        left_drop = np.uint64(64 - self._left_bits)
        right_drop = np.uint64(64 - self._right_bits)
        left = value >> right_bits
        right = value & np.uint64((1 << self._right_bits) - 1)
        for r, key in rounds:
            if r % 2 == 0:
                left ^= _mix64(right + key) >> left_drop
            else:
                right ^= _mix64(left + key) >> right_drop
        return (left << right_bits) | right


def _mix64(value: np.ndarray) -> np.ndarray:
    """Apply the finalizer of splitmix64, a bijection, to a uint64 array in place."""
    value ^= value >> np.uint64(30)
    value *= np.uint64(0xBF58476D1CE4E5B9)
    value ^= value >> np.uint64(27)
    value *= np.uint64(0x94D049BB133111EB)
    value ^= value >> np.uint64(31)
    return value


FORM = "optimus-order"


@dataclass(frozen=True)
class Unit:
    """Entry of an `Order` for a token array.

    The array contains the tokens of one unit: a range of input files that are tokenized together.
    """

    tokens: int
    documents: int
    kept: int
    """Instances can contain only the first `kept` tokens of the array. The remaining tokens are the
    tail of the array."""
    xxh3: str
    """Hash of the file that contains the token array."""
    docs_xxh3: str
    """Hash of the file that contains the table of the array's documents."""


class InShards(ABC):
    """Base class of Order and BlendOrder: the division of the instances of a data set into
    shards."""

    part: str
    context: int
    dtype: str
    instances_per_shard: int
    seed: int
    permutation: str

    @property
    @abstractmethod
    def num_instances(self) -> int: ...

    @property
    def row_bytes(self) -> int:
        """Return the size of an instance in bytes."""
        return self.context * layout.little_endian(self.dtype).itemsize

    @property
    def num_shards(self) -> int:
        return -(-self.num_instances // self.instances_per_shard)

    def shard_rows(self, shard: int) -> tuple[int, int]:
        """Return the range [first, stop) of the rows in a shard."""
        first = shard * self.instances_per_shard
        return first, min(first + self.instances_per_shard, self.num_instances)

    def epoch_zero(self) -> Permutation:
        """Return the permutation that maps each row of the shards to the instance in that row."""
        return Permutation(self.num_instances, self.seed)


@dataclass(frozen=True)
class Order(InShards):
    """Order of the instances of a data set that is made from one set of token arrays. The order and
    the token arrays determine the bytes of all shards."""

    part: str
    plan: str
    """Hash of the plan.json of tokenization."""
    tokens_dir: str
    """Path of the folder of token arrays, relative to the directory of the data set."""
    context: int
    dtype: str
    seed: int
    permutation: str
    carry_tails: bool
    instances_per_shard: int
    units: tuple[Unit, ...]

    @functools.cached_property
    def num_instances(self) -> int:
        return sum(unit.kept for unit in self.units) // self.context

    @property
    def sources(self) -> tuple[Order, ...]:
        """Return a tuple that contains only this order. In contrast, `BlendOrder.sources` contains
        an order for each source of the blend."""
        return (self,)

    def split(self, instances: np.ndarray) -> Iterator[tuple[int, np.ndarray, np.ndarray]]:
        """Group `instances` by source, like `BlendOrder.split`. This order has a single source. The
        method yields one group: source 0 with all `instances`."""
        yield 0, np.arange(len(instances)), instances

    @property
    def tail_tokens(self) -> int:
        """Return the number of tokens, over all token arrays, that are in no instance."""
        return sum(unit.tokens for unit in self.units) - self.num_instances * self.context

    def tails(self) -> tuple[int, ...]:
        """Return, for each unit, the number of tokens at the end of the unit that are in no
        instance."""
        tails = [unit.tokens - unit.kept for unit in self.units]
        left = sum(unit.kept for unit in self.units) % self.context
        # With carried tails, the dropped tokens are at the end of the concatenated units.
        for number in reversed(range(len(self.units))):
            dropped = min(left, self.units[number].kept)
            tails[number] += dropped
            left -= dropped
        return tuple(tails)

    def starts(self) -> np.ndarray:
        """Return the position of each unit in the concatenated kept tokens, int64 [U + 1].

        The last value is the number of kept tokens of all U units.
        """
        return np.concatenate([[0], np.cumsum([unit.kept for unit in self.units], dtype=np.int64)])

    def to_json(self) -> dict[str, Any]:
        return {"format": FORM, "version": layout.VERSION, **dataclasses.asdict(self)}


def read_order(dataset: Path) -> Order:
    """Read the order of a data set that is not a blend.

    Raises:
        DataError: the order is missing, damaged, of a blend, or has impossible values.
    """
    path = dataset / layout.ORDER
    order = layout.read_record(path, Order, FORM)
    check_order_values(order, path)
    return order


def check_order_values(order: Order, path: Path) -> None:
    """Raise DataError if a value of `order`, which was read from `path`, is impossible."""
    check_in_shards(order, path)
    units, size = order.units, order.context
    kept, tokens = ([getattr(unit, key) for unit in units] for key in ("kept", "tokens"))
    hashes = [text for unit in units for text in (unit.xxh3, unit.docs_xxh3)]
    layout.require(
        path,
        (bool(units), "it lists no units, which are token arrays"),
        (
            layout.are_counts([*tokens, *kept, *(unit.documents for unit in units)])
            and sum(tokens) < layout.MAX_COUNT
            and all(map(operator.le, kept, tokens)),
            "a count of a unit is negative or too large, or kept is above the tokens of the unit",
        ),
        (
            kept == (tokens if order.carry_tails else [n // size * size for n in tokens]),
            "the kept tokens of a unit do not follow from carry_tails and context",
        ),
        (layout.are_hashes([order.plan, *hashes]), "a hash is not 16 hexadecimal digits"),
        (
            layout.is_relative_path(order.tokens_dir),
            "tokens_dir is not a relative path",
        ),
    )


def check_in_shards(order: InShards, path: Path) -> None:
    """Check the split, context, dtype, seed, permutation and number of instances per shard of
    `order`. `path` is the file of the order. Raises DataError if a value is impossible."""
    layout.require(
        path,
        (order.part in layout.SPLITS, f"part is none of {', '.join(layout.SPLITS)}"),
        (order.dtype in layout.DTYPES, f"dtype is none of {', '.join(layout.DTYPES)}"),
        (
            1 <= order.context <= layout.MAX_CONTEXT,
            f"context = {order.context} is not from 1 to {layout.MAX_CONTEXT}",
        ),
        (0 <= order.seed < 1 << 64, f"seed = {order.seed} is not from 0 to 2^64 - 1"),
        (
            order.permutation == PERMUTATION_ALGORITHM,
            f"permutation = {order.permutation!r:.80}, but this version of optimus-data supports "
            f"only {PERMUTATION_ALGORITHM}",
        ),
        (
            0 < order.instances_per_shard < layout.MAX_COUNT,
            f"instances_per_shard = {order.instances_per_shard} is not from 1 to 2^56 - 1",
        ),
    )


def rows_of_shard(num_instances: int, row_bytes: int, shard_bytes: int) -> int:
    """Return the number of instances (rows) per shard. The last shard can have fewer instances.

    Args:
        num_instances: Number of instances in the data set.
        row_bytes: Size of an instance in bytes.
        shard_bytes: Maximum size of a shard in bytes. If an instance is larger, a shard has one
            instance. 0 selects 1/64 of the size of the data set, but at least 4 MiB and at most
            1 GiB.
    """
    shard_bytes = shard_bytes or min(max(num_instances * row_bytes // 64, 4 << 20), 1 << 30)
    return max(1, shard_bytes // row_bytes)


def make_order(
    tokens_dir: Path,
    dataset: Path,
    context: int,
    seed: int,
    *,
    carry_tails: bool,
    shard_bytes: int,
) -> Order:
    """Return an order for the instances of a set of token arrays.

    Args:
        tokens_dir: The folder of token arrays.
        dataset: The directory of the data set to which the order belongs.
        context: Tokens of an instance.
        seed: Seed of the permutation.
        carry_tails: True: an instance can continue in the next token array. Fewer than `context`
            tokens at the end of the concatenated arrays are in no instance. False: fewer than
            `context` tokens at the end of each array are in no instance.
        shard_bytes: Maximum size of a shard in bytes, as in `rows_of_shard`.

    Raises:
        DataError: token arrays are missing or damaged.
    """
    plan, plan_xxh3, records = read_token_set(tokens_dir)
    units = tuple(
        Unit(
            tokens=record["tokens"],
            documents=record["documents"],
            kept=record["tokens"] if carry_tails else record["tokens"] // context * context,
            xxh3=record["array"]["xxh3"],
            docs_xxh3=record["docs"]["xxh3"],
        )
        for record in records
    )
    row_bytes = context * layout.little_endian(plan.dtype).itemsize
    num_instances = sum(unit.kept for unit in units) // context
    return Order(
        part=records[0]["part"],
        plan=plan_xxh3,
        tokens_dir=tokens_dir.name  # even if the folder is a link to another disk
        if tokens_dir.parent == dataset
        else os.path.relpath(tokens_dir.resolve(), dataset.resolve()),
        context=context,
        dtype=plan.dtype,
        seed=seed,
        permutation=PERMUTATION_ALGORITHM,
        carry_tails=carry_tails,
        instances_per_shard=rows_of_shard(num_instances, row_bytes, shard_bytes),
        units=units,
    )
