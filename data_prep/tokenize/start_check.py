"""What every start over existing output checks of token arrays and shards.

Sizes and headers of all files, and the hashes of all up to HASH_BYTES or else of a random sample of
that size; `optimus-data verify` reads the rest. Cost: docs/formats/dataset.md, "Commit and resume".
"""

from __future__ import annotations

import os
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from data_prep import layout
from data_prep.runtime.progress import say, short
from optimus.errors import DamageError, counted
from optimus.io import files

HASH_BYTES = 1 << 30
"""Of token arrays, and again of shards, whose hashes a start compares."""
_SEED = os.urandom(8)
"""Each start of a process takes another sample."""


@dataclass(frozen=True)
class Promise:
    """A file and the hash that its sidecar gives it."""

    path: Path
    xxh3: str


def require_header(path: Path, *headers: bytes) -> None:
    """Raises DamageError where an array does not begin with one of these headers."""
    with files.open_regular(path) as file:
        if file.read(layout.HEADER_BYTES) not in headers:
            raise DamageError(f"{path}: its header is damaged")


def sample(sizes: Sequence[int], seed: str | bytes | None = None) -> frozenset[int]:
    """Return the indices of the files whose hashes are compared: of all files up to HASH_BYTES in
    sum, else of a random sample of that size or of one larger file. Ranks that must agree give the
    same `seed`."""
    chosen, left = list(range(len(sizes))), HASH_BYTES
    if sum(sizes) > left:
        random.Random(_SEED if seed is None else seed).shuffle(chosen)
        count = 0
        while count < len(chosen) and (count == 0 or sizes[chosen[count]] <= left):
            left -= sizes[chosen[count]]
            count += 1
        del chosen[count:]
    return frozenset(chosen)


def say_sample(chosen: frozenset[int], sizes: Sequence[int], what: str, dataset: Path) -> None:
    """Name `verify` where not all of an earlier run's files of `what` are compared by hash."""
    if len(chosen) < len(sizes):
        part = sum(sizes[item] for item in chosen)
        say(
            f"{dataset}: the {counted(len(sizes), what)} of an earlier run are checked by size and "
            f"header, {len(chosen)} of them by hash ({short(part)}B of {short(sum(sizes))}B); "
            f"optimus-data verify {dataset} reads all"
        )


def damaged(promised: Iterable[Promise]) -> list[Path]:
    """The files that have another hash than they should."""
    return [file.path for file in promised if files.xxh3_file(file.path) != file.xxh3]


def are_whole(promised: Iterable[Promise]) -> bool:
    """Whether these files have the hashes they should; each that has not is named on stderr."""
    found = damaged(promised)
    for path in found:
        say(f"{path}: its content is damaged (hash differs); it is made again")
    return not found
