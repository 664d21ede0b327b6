"""Data sets of token instances, addressed by an instance number that continues through epochs."""

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
"""Number of positions of an epoch that are permuted in one call. A call costs 80 us, which several
microbatches share. If there are many data ranks, each uses few positions of a block; the block then
costs 1.5 times as much as permuting only these positions."""
_CACHED_BLOCKS = 4


class InstanceSource(Protocol):
    """An endless stream of instances for training: a data set or a mix of several."""

    context: int
    """Tokens per instance (C)."""
    vocab_size: int
    """Number of token ids; all ids are below it."""
    eos_id: int
    """The token id that ends each document and occurs nowhere else."""
    identity: str
    """Hexadecimal string; equal for two sources only if they have the same instances."""
    tokenizer_sha256: str
    """SHA-256 of the tokenizer file, in hexadecimal."""

    @property
    def tokenizer_file(self) -> str:
        """Path of the tokenizer.json, or the tokenizer.model of sentencepiece, of the data."""

    def read(self, start: int, stop: int, out: np.ndarray | None = None) -> np.ndarray:
        """Return instances [start, stop), int64 [n, C], in `out` or a new array. The result does
        not depend on earlier calls. Raises DataError."""


class FiniteSource(InstanceSource, Protocol):
    """A source with a known number of instances, for evaluation."""

    num_instances: int
    """Number of instances before one repeats."""


class TokenDataset:
    """Instances of a finished data set. Opening reads the manifest; shards are mapped on demand.

    Epoch 0 is the stored order. Epoch e > 0 permutes it by the bijection with the key (seed, e), as
    docs/formats/dataset.md specifies. Reads keep no state; threads may share a data set.
    """

    def __init__(self, path: str | os.PathLike):
        """Open the data set in the directory `path`.

        Raises:
            DataError: The data set is missing, unfinished, damaged or empty.
        """
        self.path = Path(path)
        manifest = read_manifest(self.path)
        if manifest.permutation != ALGORITHM:
            raise DataError(
                f"{path} is permuted by {manifest.permutation}, not by {ALGORITHM}; prepare the "
                "data with this version"
            )
        if manifest.num_instances == 0:
            raise DataError(
                f"{path} has {counted(manifest.tokens, 'token')}, not one instance of "
                f"{manifest.context}; prepare it from more text (held-out data: with a larger "
                "--eval-fraction)"
            )
        self.num_instances = manifest.num_instances
        """Instances per epoch (N)."""
        self.split = manifest.part
        """`train` or `held-out`."""
        self.context, self.vocab_size = manifest.context, manifest.vocab_size
        self.eos_id, self.identity = manifest.eos_id, manifest.identity
        self.tokenizer_sha256 = manifest.tokenizer_sha256
        self._manifest = manifest
        self._seed = manifest.seed
        self._reader = ShardReader(self.path, manifest)
        self._permuted_block = functools.lru_cache(_CACHED_BLOCKS)(self._permute_block)

    def held_out(self) -> HeldOut | None:
        """Return the rule by which documents are held out; None for a blend whose sources no longer
        exist. Raises DataError."""
        return held_out_of_dataset(self.path, self._manifest)

    @property
    def tokenizer_file(self) -> str:
        return str(layout.tokenizer_file(self.path))

    def read(self, start: int, stop: int, out: np.ndarray | None = None) -> np.ndarray:
        """Return instances by number. Numbers continue through epochs.

        Args:
            start: Number of the first instance.
            stop: Number after the last instance.
            out: int64 [stop - start, C] for the result; None: a new array.

        Returns:
            Token ids, int64 [stop - start, C].

        Raises:
            DataError: A shard is missing.
            DamageError: A shard has another size than in the manifest, or an id outside the
                vocabulary.
        """
        out = np.empty((stop - start, self.context), np.int64) if out is None else out
        assert len(out) == stop - start, (out.shape, start, stop)
        for offset, epoch, first, count in self._by_epoch(start, stop):
            rows = out[offset : offset + count]
            if epoch == 0:
                self._reader.rows_into(rows, first)
            else:
                self._reader.pick_into(rows, self._permuted(epoch, first, first + count))
        self.check_ids(out, start)
        return out

    def check_ids(self, tokens: np.ndarray, start: int) -> None:
        """Check that the ids of instances are in the vocabulary, at 0.1 ns per token. A model would
        crash with another id or, if the vocabulary is divided over ranks, compute a wrong loss.

        Args:
            tokens: The instances, int64 [n, C].
            start: Number of the first instance.

        Raises:
            DamageError: An id is outside the vocabulary. The message has the shard and the row.
        """
        if tokens.max(initial=0) < self.vocab_size:
            return
        wrong = int((tokens.max(axis=1) >= self.vocab_size).argmax())
        epoch, position = divmod(start + wrong, self.num_instances)
        stored = position if epoch == 0 else int(self._permuted(epoch, position, position + 1)[0])
        shard, row = divmod(stored, self._manifest.instances_per_shard)
        raise DamageError(
            f"{self.path / self._manifest.shards[shard].name}: row {row} has id "
            f"{tokens[wrong].max()}, outside the vocabulary of {self.vocab_size}; run optimus-data "
            f"verify {self.path}"
        )

    def scatter(self, out: np.ndarray, indices: np.ndarray, start: int) -> None:
        """Read consecutive instances into rows of a batch: out[indices[i]] = instance start + i.

        A mix reads each of its sources in this way. Ids are not checked.

        Args:
            out: The batch, int64 [n, C].
            indices: Rows of `out`, int64 [m].
            start: Number of the first instance.

        Raises:
            DataError: As for `read`.
        """
        for offset, epoch, first, count in self._by_epoch(start, start + len(indices)):
            stop = first + count
            rows = np.arange(first, stop) if epoch == 0 else self._permuted(epoch, first, stop)
            self._reader.pick_into(out, rows, indices[offset : offset + count])

    def _by_epoch(self, start: int, stop: int) -> Iterator[tuple[int, int, int, int]]:
        """Divide instances [start, stop) by epoch: yield the offset from `start`, the epoch, the
        first position in the epoch and the count."""
        assert 0 <= start <= stop, (start, stop)
        number = start
        while number < stop:
            epoch, first = divmod(number, self.num_instances)
            count = min(stop - number, self.num_instances - first)
            yield number - start, epoch, first, count
            number += count

    def _permuted(self, epoch: int, first: int, stop: int) -> np.ndarray:
        """Return the stored rows at positions [first, stop) of an epoch, int64 [n]."""
        blocks = range(first // _BLOCK, -(-stop // _BLOCK))
        rows = np.concatenate([self._permuted_block(epoch, block) for block in blocks])
        return rows[first - blocks[0] * _BLOCK : stop - blocks[0] * _BLOCK]

    def _permute_block(self, epoch: int, block: int) -> np.ndarray:
        permutation = Permutation(self.num_instances, self._seed, epoch)
        stop = min((block + 1) * _BLOCK, self.num_instances)
        return permutation.apply(np.arange(block * _BLOCK, stop))
