"""Figures of a data set, and the two yardsticks that any model must beat: unigram and bigram.

All in nats. The bigram model is p(b | a) = (count(a, b) + 1) / (count(a) + V), counted and scored
over the C-1 targets inside instances, as the training loss is.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from data_prep import layout
from data_prep.dataset.manifest import Manifest, read_manifest
from data_prep.dataset.reader import ShardReader
from data_prep.runtime.progress import Progress
from optimus.errors import DamageError, DataError

MAX_BIGRAM_CELLS = 64_000_000
"""Largest vocabulary^2 for which bigrams are counted: 256 MB of uint32."""

MAX_IDS = 1 << 22
"""Above the ids of any tokenizer: 34 MB of counts. A manifest may claim 2^32."""

_BLOCK_TOKENS = 1 << 20


def stats(dataset: Path, held_out: Path | None = None) -> dict[str, Any]:
    """Counts and unigram entropy of `dataset`; with `held_out`, the yardsticks' losses on it.

    Raises DamageError for damaged data, and DataError for a held-out set made by another tokenizer.
    """
    manifest = read_manifest(dataset)
    result: dict[str, Any] = {
        "instances": manifest.num_instances,
        "context": manifest.context,
        "tokens": manifest.num_instances * manifest.context,
        "tail_tokens": manifest.tail_tokens,
        "documents": manifest.documents,
        "vocab_size": manifest.vocab_size,
        "dtype": manifest.dtype,
        "shards": len(manifest.shards),
        "inputs": len(manifest.inputs),
        "input_bytes": sum(file.size for file in manifest.inputs),
        "quarantined": manifest.quarantined.count,
    }
    other = None
    if held_out is not None:
        other = read_manifest(held_out)
        if other.tokenizer_sha256 != manifest.tokenizer_sha256:
            raise DataError(f"{held_out} was made by another tokenizer than {dataset}")
        if other.vocab_size > manifest.vocab_size:
            raise DataError(
                f"{held_out} has {other.vocab_size} ids, more than the {manifest.vocab_size} of "
                f"{dataset} with the same tokenizer; make one of them again"
            )
    counts, pairs = _count(dataset, manifest, with_pairs=other is not None)
    result["unigram_entropy"] = _entropy(counts)
    if held_out is not None and other is not None:
        result["held_out"] = {
            "instances": other.num_instances,
            "tokens": other.num_instances * other.context,
            "documents": other.documents,
            **_losses(held_out, other, counts, pairs, manifest.vocab_size),
        }
    return result


def _blocks(dataset: Path, manifest: Manifest) -> Iterator[tuple[np.ndarray, int]]:
    """Yield the ids of all instances, int64 [n, c] of at most _BLOCK_TOKENS, and the number of
    first columns that the block before had, too: 1 inside an instance longer than a block, so that
    no pair is lost, else 0."""
    reader, context = ShardReader(dataset, manifest), manifest.context
    step = max(1, _BLOCK_TOKENS // context)
    with Progress(f"read {dataset}", manifest.num_instances, " instances") as progress:
        for first in range(0, manifest.num_instances, step):
            stop = min(first + step, manifest.num_instances)
            for left in range(0, max(1, context - 1), _BLOCK_TOKENS - 1):
                rows = reader.rows(first, stop, left, min(left + _BLOCK_TOKENS, context))
                if int(rows.max()) >= manifest.vocab_size:
                    raise DamageError(
                        f"{dataset}: holds id {int(rows.max())}, outside its vocabulary of "
                        f"{manifest.vocab_size}; optimus-data verify {dataset} names the damaged "
                        "shard"
                    )
                yield rows.astype(np.int64), int(left > 0)
            progress.advance(stop - first)


def _count(
    dataset: Path, manifest: Manifest, with_pairs: bool
) -> tuple[np.ndarray, np.ndarray | None]:
    """Counts of ids, int64 [largest id + 1], and of pairs inside instances, uint32 [V*V] where
    they fit. Raises DamageError for an id that no tokenizer has."""
    size = manifest.vocab_size
    counts = np.zeros(0, np.int64)
    fits = with_pairs and size * size <= MAX_BIGRAM_CELLS
    pairs = np.zeros(size * size, np.uint32) if fits else None
    for rows, seen in _blocks(dataset, manifest):
        if (largest := int(rows.max())) >= MAX_IDS:
            raise DamageError(f"{dataset}: holds id {largest}; stats counts ids below {MAX_IDS}")
        found = np.bincount(rows[:, seen:].ravel(), minlength=len(counts))
        found[: len(counts)] += counts
        counts = found
        if pairs is not None:
            np.add.at(pairs, (rows[:, :-1] * size + rows[:, 1:]).ravel(), np.uint32(1))
    return counts, pairs


def _entropy(counts: np.ndarray) -> float:
    share = counts[counts > 0] / counts.sum()
    return float(-(share * np.log(share)).sum())


def _losses(
    held_out: Path, manifest: Manifest, counts: np.ndarray, pairs: np.ndarray | None, size: int
) -> dict[str, float | None]:
    """Mean losses of the add-one unigram and bigram models; None where they cannot be had."""
    targets = manifest.num_instances * (manifest.context - 1)
    if targets == 0:
        return {"unigram_loss": None, "bigram_loss": None}
    # The last stands for all ids that were not counted.
    unigram_log = np.log((np.append(counts, 0) + 1) / (counts.sum() + size))
    before = pairs.reshape(size, size).sum(1, dtype=np.int64) if pairs is not None else None
    unigram = bigram = 0.0
    for rows, _ in _blocks(held_out, manifest):
        first, second = rows[:, :-1].ravel(), rows[:, 1:].ravel()
        unigram -= float(unigram_log[np.minimum(second, len(counts))].sum())
        if pairs is not None and before is not None:
            chance = (pairs[first * size + second] + 1.0) / (before[first] + size)
            bigram -= float(np.log(chance).sum())
    return {
        "unigram_loss": unigram / targets,
        "bigram_loss": bigram / targets if pairs is not None else None,
    }


def default_held_out(dataset: Path) -> Path | None:
    """The data set's own held-out part, if it has one."""
    own = dataset / layout.EVAL_DIR
    return own if (own / layout.MANIFEST).is_file() else None
