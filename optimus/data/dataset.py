"""Reader of data sets of instances, which are token sequences of equal length.

Instances are numbered from 0. The numbers continue from one epoch to the next.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

import numpy as np

from data_prep.dataset import (
    PERMUTATION_ALGORITHM,
    HeldOutRule,
    Permutation,
    ShardReader,
    dataset_held_out_rule,
    documents_of,
    read_manifest,
    tokenizer_file,
)
from optimus.errors import DamageError, DataError, counted

_BLOCK = 256
"""Number of instances in a block. A block is a range of consecutive positions in the permuted order
of an epoch. `_permute_block` computes the stored positions of a block's instances. A data set
caches these positions for the `_CACHED_BLOCKS` most recently used blocks, because several
microbatches use the same block."""
_CACHED_BLOCKS = 4


class InstanceSource(Protocol):
    """Protocol of an endless stream of instances (token sequences). `TokenDataset` and
    `MixedDataset` implement this protocol."""

    context: int
    """Tokens per instance."""
    vocab_size: int
    """Size of the vocabulary. All token ids are smaller than this size."""
    eos_id: int
    """Id of the token that ends each document and occurs nowhere else."""
    identity: str
    """Fingerprint in hexadecimal. Sources with the same fingerprint have the same instances."""
    tokenizer_sha256: str
    """SHA-256 of the tokenizer file, in hexadecimal."""

    @property
    def tokenizer_file(self) -> str:
        """Path of the tokenizer of the instances: a tokenizer.json, or a tokenizer.model of
        sentencepiece."""

    def read(self, start: int, stop: int, out: np.ndarray | None = None) -> np.ndarray:
        """Return the token ids of instances [start, stop), int64 [stop - start, context].

        The ids are written to `out`, or to a new array if `out` is None. Raises DataError if an
        instance cannot be read.
        """

    def locate(self, start: int, stop: int) -> list[tuple[str, int]]:
        """Return the locations of instances [start, stop).

        The location of an instance is a tuple of the directory of a data set and the number of the
        instance in this data set. `optimus-data inspect` accepts these two values as arguments.
        """


class FiniteSource(InstanceSource, Protocol):
    """Protocol of an `InstanceSource` with a known number of different instances. Evaluation uses
    such a source."""

    num_instances: int
    """Number of instances that can be read before an instance is repeated."""


class TokenDataset:
    """Reader of a complete data set that `optimus-data` has written. Several threads can use the
    same reader at the same time.

    Epoch 0 reads the instances in stored order. Later epochs read them in pseudorandom orders,
    which docs/formats/dataset.md specifies.
    """

    def __init__(self, path: str | os.PathLike):
        """Open the data set in the directory `path` and read its manifest.

        Raises:
            DataError: The data set is missing, unfinished, damaged or empty.
        """
        self.path = Path(path)
        manifest = read_manifest(self.path)
        if manifest.permutation != PERMUTATION_ALGORITHM:
            raise DataError(
                f"{path} is permuted by {manifest.permutation}, but this version supports only "
                f"{PERMUTATION_ALGORITHM}; prepare the data again with this version"
            )
        if manifest.num_instances == 0:
            raise DataError(
                f"{path} has {counted(manifest.tokens, 'token')}, fewer than one instance of "
                f"{manifest.context} tokens; prepare the data set from more text or, for held-out "
                "data, with a larger --eval-fraction"
            )
        self.num_instances = manifest.num_instances
        """Number of instances per epoch."""
        self.split = manifest.part
        """Type of the data set: `train` for training data or `held-out` for evaluation data."""
        self.context, self.vocab_size = manifest.context, manifest.vocab_size
        self.eos_id, self.identity = manifest.eos_id, manifest.identity
        self.tokenizer_sha256 = manifest.tokenizer_sha256
        self._manifest = manifest
        self._seed = manifest.seed
        self._reader = ShardReader(self.path, manifest)
        self._permuted_block = functools.lru_cache(_CACHED_BLOCKS)(self._permute_block)

    def check_shards(self) -> None:
        """Raise DataError unless all shard files exist and have the sizes in the manifest."""
        self._reader.check_sizes()

    def held_out(self) -> HeldOutRule | None:
        """Return the rule by which `optimus-data` selected the documents that only evaluation uses.

        Return None if the rule is unknown. For a data set made by `optimus-data blend`, the rule is
        unknown if the data set's order.json is missing, or if the first source of the blend is
        missing or has changed.
        """
        return dataset_held_out_rule(self.path, self._manifest)

    @property
    def tokenizer_file(self) -> str:
        return str(tokenizer_file(self.path))

    def read(self, start: int, stop: int, out: np.ndarray | None = None) -> np.ndarray:
        """Return the token ids of instances [start, stop).

        The instances of all epochs are numbered in sequence: epoch 1 begins with instance
        `num_instances`.

        Args:
            start: Number of the first instance.
            stop: Number after the last instance.
            out: Array int64 [stop - start, context] for the result; None to create a new array.

        Returns:
            Token ids, int64 [stop - start, context].

        Raises:
            DataError: A shard is missing or cannot be read.
            DamageError: A shard has a wrong size, or an id is outside the vocabulary.
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

    def locate(self, start: int, stop: int) -> list[tuple[str, int]]:
        """For each instance in [start, stop), return (absolute path of this data set, number of the
        instance)."""
        path = str(self.path.absolute())
        return [(path, number) for number in range(start, stop)]

    def documents(self, number: int) -> list[str]:
        """Return the location, in the input files, of each document in the instance `number`.

        A location is FILE:LINE, or FILE for a document that is a whole file. The locations have the
        order of the documents in the instance.

        Raises:
            ConfigError: There is no such instance.
            DataError: The data set has no record of the locations, or is damaged.
        """
        return documents_of(self.path, number)

    def check_ids(self, tokens: np.ndarray, start: int) -> None:
        """Check that the token ids of instances are in the vocabulary.

        A model with a sharded vocabulary does not detect an invalid id, and computes a wrong loss.

        Args:
            tokens: The instances, int64 [number of instances, context].
            start: Number of the first instance in `tokens`.

        Raises:
            DamageError: An id is outside the vocabulary. The message names the shard and row.
        """
        if tokens.max(initial=0) < self.vocab_size:
            return
        wrong = int((tokens.max(axis=1) >= self.vocab_size).argmax())
        epoch, position = divmod(start + wrong, self.num_instances)
        stored = position if epoch == 0 else int(self._permuted(epoch, position, position + 1)[0])
        shard, row = divmod(stored, self._manifest.instances_per_shard)
        raise DamageError(
            f"{self.path / self._manifest.shards[shard].name}: row {row} has token id "
            f"{tokens[wrong].max()}, outside the vocabulary of {self.vocab_size} ids; run "
            f"optimus-data verify {self.path}"
        )

    def scatter(self, out: np.ndarray, indices: np.ndarray, start: int) -> None:
        """Read consecutive instances into rows of a batch: out[indices[i]] = instance start + i.

        Token ids are not compared with the vocabulary.

        Args:
            out: The batch, int64 [number of rows, context].
            indices: Row of `out` for each instance, int64 [number of instances to read].
            start: Number of the first instance to read.

        Raises:
            DataError: A shard is missing or cannot be read.
            DamageError: The size of a shard differs from the size in the manifest.
        """
        for offset, epoch, first, count in self._by_epoch(start, start + len(indices)):
            stop = first + count
            rows = np.arange(first, stop) if epoch == 0 else self._permuted(epoch, first, stop)
            self._reader.pick_into(out, rows, indices[offset : offset + count])

    def _by_epoch(self, start: int, stop: int) -> Iterator[tuple[int, int, int, int]]:
        """Divide the instances [start, stop) into ranges that each belong to one epoch.

        Yield (offset of the range from `start`, epoch, first position in the epoch, length).
        """
        assert 0 <= start <= stop, (start, stop)
        number = start
        while number < stop:
            epoch, first = divmod(number, self.num_instances)
            count = min(stop - number, self.num_instances - first)
            yield number - start, epoch, first, count
            number += count

    def _permuted(self, epoch: int, first: int, stop: int) -> np.ndarray:
        """Return the indices, in the stored order, of the instances at positions [first, stop) of
        an epoch: int64 [stop - first]. `epoch` must be at least 1."""
        blocks = range(first // _BLOCK, -(-stop // _BLOCK))
        rows = np.concatenate([self._permuted_block(epoch, block) for block in blocks])
        return rows[first - blocks[0] * _BLOCK : stop - blocks[0] * _BLOCK]

    def _permute_block(self, epoch: int, block: int) -> np.ndarray:
        permutation = Permutation(self.num_instances, self._seed, epoch)
        stop = min((block + 1) * _BLOCK, self.num_instances)
        return permutation.apply(np.arange(block * _BLOCK, stop))
