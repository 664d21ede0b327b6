"""A data set of token instances, addressed by one number that runs on through epochs."""

from __future__ import annotations

import functools
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

import numpy as np

from data_prep import layout
from data_prep.held_out import HeldOut, held_out_of_dataset
from data_prep.manifest import read_manifest
from data_prep.permutation import ALGORITHM, Permutation
from data_prep.reader import ShardReader
from optimus.errors import DamageError, DataError, counted

_BLOCK = 256
"""Places permuted at once: the cost of a call, 80 us, is shared by the next microbatches, while a
rank of many, which needs few of a block, pays 1.5 times what its own few would cost."""
_BLOCKS_KEPT = 4


class InstanceSource(Protocol):
    """What training reads from: one data set, or several mixed."""

    context: int
    """Tokens of an instance (C)."""
    vocab_size: int
    """One more than the largest id that can occur."""
    eos_id: int
    """The id that ends every document and occurs nowhere else."""
    identity: str
    """Hex string that is equal for two sources only if they give the same instances."""
    tokenizer_sha256: str
    """Of the tokenizer that made the ids."""

    @property
    def tokenizer_file(self) -> str:
        """The tokenizer.json, or tokenizer.model of sentencepiece, that made the ids."""

    def read(self, start: int, stop: int, out: np.ndarray | None = None) -> np.ndarray:
        """Instances [start, stop), int64 [n, C], in `out` or a new array; stateless."""


class FiniteSource(InstanceSource, Protocol):
    """A source that evaluation can read to its end."""

    num_instances: int
    """How many instances it has before any repeats."""


class TokenDataset:
    """Instances of a finished data set. Opening reads the manifest; shards are mapped when needed.

    Epoch 0 is the stored order; epoch e > 0 permutes it by the bijection keyed with (seed, e), as
    docs/formats/dataset.md specifies. Stateless: what a number names never depends on what was
    read before. Threads may share it.
    """

    def __init__(self, path: str | os.PathLike):
        """Raises DataError, in one line, for a data set missing, unfinished, damaged or empty."""
        self.path = Path(path)
        manifest = read_manifest(self.path)
        if manifest.permutation != ALGORITHM:
            raise DataError(
                f"{path} is permuted by {manifest.permutation}, this program knows {ALGORITHM}; "
                "prepare the data with this version"
            )
        if manifest.num_instances == 0:
            raise DataError(
                f"{path} holds {counted(manifest.tokens, 'token')}, not one instance of "
                f"{manifest.context}; "
                "prepare it from more text (a held-out part: with a larger --eval-fraction)"
            )
        self.num_instances = manifest.num_instances
        """Instances of one epoch (N)."""
        self.part = manifest.part
        """`train` or `held-out`."""
        self.context, self.vocab_size = manifest.context, manifest.vocab_size
        self.eos_id, self.identity = manifest.eos_id, manifest.identity
        self.tokenizer_sha256 = manifest.tokenizer_sha256
        """Of the tokenizer that made the ids."""
        self._manifest = manifest
        self._seed = manifest.seed
        self._reader = ShardReader(self.path, manifest)
        self._permuted_block = functools.lru_cache(_BLOCKS_KEPT)(self._permute_block)

    def held_out(self) -> HeldOut | None:
        """Which documents it holds out; None: a blend whose sources are gone. Raises DataError."""
        return held_out_of_dataset(self.path, self._manifest)

    @property
    def tokenizer_file(self) -> str:
        return str(layout.tokenizer_file(self.path))

    def read(self, start: int, stop: int, out: np.ndarray | None = None) -> np.ndarray:
        """Instances [start, stop), int64 [n, C], in `out` or a new array; numbers run on through
        epochs.

        Raises DataError for a shard that is missing, DamageError for one that has another size than
        the manifest says or an id outside the vocabulary.
        """
        out = np.empty((stop - start, self.context), np.int64) if out is None else out
        assert len(out) == stop - start, (out.shape, start, stop)
        for first, epoch, place, count in self._by_epoch(start, stop):
            part = out[first : first + count]
            if epoch == 0:
                self._reader.rows_into(part, place)
            else:
                self._reader.pick_into(part, self._permuted(epoch, place, place + count))
        self.check_ids(out, start)
        return out

    def check_ids(self, tokens: np.ndarray, start: int) -> None:
        """Raises DamageError, naming shard and row, where `tokens` [n, C], which instances from
        `start` on are, hold an id outside the vocabulary: a model would crash on it, or, with its
        vocabulary divided over ranks, go on without a word. It costs some 0.1 ns a token."""
        if tokens.max(initial=0) < self.vocab_size:
            return
        wrong = int((tokens.max(axis=1) >= self.vocab_size).argmax())
        epoch, place = divmod(start + wrong, self.num_instances)
        stored = place if epoch == 0 else int(self._permuted(epoch, place, place + 1)[0])
        shard, row = divmod(stored, self._manifest.instances_per_shard)
        raise DamageError(
            f"{self.path / self._manifest.shards[shard].name}: row {row} holds id "
            f"{tokens[wrong].max()}, outside the vocabulary of {self.vocab_size}; run optimus-data "
            f"verify {self.path}"
        )

    def scatter(self, out: np.ndarray, places: np.ndarray, start: int) -> None:
        """out[places[i]] = instance start + i, for all i; `out` is int64 [n, C]. Raises DataError.

        Ids are not checked. For a mix, whose own batch holds the instances of several sources.
        """
        for first, epoch, place, count in self._by_epoch(start, start + len(places)):
            last = place + count
            rows = np.arange(place, last) if epoch == 0 else self._permuted(epoch, place, last)
            self._reader.pick_into(out, rows, places[first : first + count])

    def _by_epoch(self, start: int, stop: int) -> Iterator[tuple[int, int, int, int]]:
        """Of instances [start, stop): offset from `start`, epoch, place in it and count of each."""
        assert 0 <= start <= stop, (start, stop)
        number = start
        while number < stop:
            epoch, place = divmod(number, self.num_instances)
            count = min(stop - number, self.num_instances - place)
            yield number - start, epoch, place, count
            number += count

    def _permuted(self, epoch: int, first: int, stop: int) -> np.ndarray:
        """Rows at the places [first, stop) of an epoch, int64 [n], from blocks of them."""
        blocks = range(first // _BLOCK, -(-stop // _BLOCK))
        rows = np.concatenate([self._permuted_block(epoch, block) for block in blocks])
        return rows[first - blocks[0] * _BLOCK : stop - blocks[0] * _BLOCK]

    def _permute_block(self, epoch: int, block: int) -> np.ndarray:
        permutation = Permutation(self.num_instances, self._seed, epoch)
        stop = min((block + 1) * _BLOCK, self.num_instances)
        return permutation.apply(np.arange(block * _BLOCK, stop))
