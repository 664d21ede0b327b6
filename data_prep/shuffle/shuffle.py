"""The shuffle: how token arrays divide into instances, and in which order instances are sharded.

docs/formats/dataset.md, "Instances and their order". Pure plans; sharding executes them.
"""

from __future__ import annotations

import dataclasses
import functools
import operator
import os
from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from data_prep import layout
from data_prep.shuffle.permutation import PERMUTATION_ALGORITHM, Permutation
from data_prep.tokenize.token_set import read_token_set

FORM = "optimus-order"


@dataclass(frozen=True)
class Unit:
    """A token array as the order sees it."""

    tokens: int
    documents: int
    kept: int
    """Tokens from its start that take part; the rest is its tail, in no instance."""
    xxh3: str
    """Hash of the array's file."""
    docs_xxh3: str
    """Hash of its table of documents."""


class InShards(ABC):
    """Division of instances into shards, given their number, a seed and the length of a shard."""

    part: str
    context: int
    dtype: str
    instances_per_shard: int
    seed: int

    @property
    @abstractmethod
    def num_instances(self) -> int: ...

    @property
    def row_bytes(self) -> int:
        return self.context * layout.little_endian(self.dtype).itemsize

    @property
    def num_shards(self) -> int:
        return -(-self.num_instances // self.instances_per_shard)

    def shard_rows(self, shard: int) -> tuple[int, int]:
        """Rows [first, stop) of a shard."""
        first = shard * self.instances_per_shard
        return first, min(first + self.instances_per_shard, self.num_instances)

    def epoch_zero(self) -> Permutation:
        """The permutation that the shards are written in."""
        return Permutation(self.num_instances, self.seed)


@dataclass(frozen=True)
class Order(InShards):
    """Everything that decides the bytes of the shards, given the token arrays."""

    part: str
    plan: str
    """Hash of the plan of tokenization."""
    tokens_dir: str
    """The folder of token arrays, relative to the data set."""
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
        """The sets of token arrays that it orders: itself. A blend has several."""
        return (self,)

    @property
    def tail_tokens(self) -> int:
        """Tokens that are in no instance, of all units."""
        return sum(unit.tokens for unit in self.units) - self.num_instances * self.context

    def tails(self) -> tuple[int, ...]:
        """Tokens of each unit that are in no instance, dropped from its end."""
        tails = [unit.tokens - unit.kept for unit in self.units]
        left = sum(unit.kept for unit in self.units) % self.context
        for number in reversed(range(len(self.units))):  # carried: the end of the concatenation
            dropped = min(left, self.units[number].kept)
            tails[number] += dropped
            left -= dropped
        return tuple(tails)

    def starts(self) -> np.ndarray:
        """Place of every unit's first kept token in the concatenation, and its end: int64 [U+1]."""
        return np.concatenate([[0], np.cumsum([unit.kept for unit in self.units], dtype=np.int64)])

    def to_json(self) -> dict[str, Any]:
        return {"format": FORM, "version": layout.VERSION, **dataclasses.asdict(self)}


def read_order(dataset: Path) -> Order:
    """The order of a data set. Raises DataError."""
    path = dataset / layout.ORDER
    order = layout.read_record(path, Order, FORM)
    check_order_values(order, path)
    return order


def check_order_values(order: Order, path: Path) -> None:
    """Raise DataError where the values of an order read from `path` cannot be those of one."""
    check_in_shards(order, path)
    units = order.units
    kept, tokens = ([getattr(unit, key) for unit in units] for key in ("kept", "tokens"))
    hashes = [text for unit in units for text in (unit.xxh3, unit.docs_xxh3)]
    layout.require(
        path,
        (bool(units), "it has no units"),
        (
            layout.are_counts([*tokens, *kept, *(unit.documents for unit in units)])
            and sum(tokens) < layout.MAX_COUNT
            and all(map(operator.le, kept, tokens)),
            "a count of units is negative, too large or above the tokens of its unit",
        ),
        (layout.are_hashes([order.plan, *hashes]), "a hash is not 16 hexadecimal digits"),
        (
            layout.is_relative_path(order.tokens_dir),
            "tokens_dir is not a relative path",
        ),
    )


def check_in_shards(order: InShards, path: Path) -> None:
    """Raise DataError where context, type, seed or the length of shards cannot be."""
    layout.require(
        path,
        (order.part in layout.PARTS, f"part is none of {', '.join(layout.PARTS)}"),
        (order.dtype in layout.DTYPES, f"dtype is none of {', '.join(layout.DTYPES)}"),
        (
            1 <= order.context <= layout.MAX_CONTEXT,
            f"context = {order.context} is not from 1 to {layout.MAX_CONTEXT}",
        ),
        (0 <= order.seed < 1 << 64, f"seed = {order.seed} is not below 2^64"),
        (
            0 < order.instances_per_shard < layout.MAX_COUNT,
            f"instances_per_shard = {order.instances_per_shard} is not above 0",
        ),
    )


def rows_of_shard(num_instances: int, row_bytes: int, shard_bytes: int) -> int:
    """Rows of every shard but the last.

    `shard_bytes` 0: a 64th of the data, from 4 MiB to 1 GiB: work for every core, never too many
    files.
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
    """The order of the token arrays in `tokens_dir` for a data set in `dataset`.

    `shard_bytes` as in `rows_of_shard`. Raises DataError where arrays are missing or damaged.
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
        tokens_dir=_relative(tokens_dir, dataset),
        context=context,
        dtype=plan.dtype,
        seed=seed,
        permutation=PERMUTATION_ALGORITHM,
        carry_tails=carry_tails,
        instances_per_shard=rows_of_shard(num_instances, row_bytes, shard_bytes),
        units=units,
    )


def _relative(tokens_dir: Path, dataset: Path) -> str:
    if tokens_dir.parent == dataset:
        return tokens_dir.name  # also where the folder is a link to another disk
    return os.path.relpath(tokens_dir.resolve(), dataset.resolve())
