"""One instance as people read it: its text, and which documents of which files it came from."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from data_prep import layout
from data_prep.dataset.manifest import read_manifest
from data_prep.dataset.reader import ShardReader
from data_prep.shuffle.blend import BlendOrder, read_any_order
from data_prep.shuffle.permutation import MAX_SEED, Permutation
from data_prep.shuffle.shuffle import Order
from data_prep.tokenize.token_arrays import docs_path, read_docs
from data_prep.tokenize.token_plan import read_plan
from data_prep.tokenizer.sentencepiece_model import SentencePieceTokenizer
from data_prep.tokenizer.tokenizer import library_panics, open_tokenizer, sha256_of
from optimus.errors import ConfigError, DamageError, DataError

MAX_TOKENS = 1 << 20
"""Largest context of an instance that is shown: its ids and its text take some 100 MB."""
MAX_CHARACTERS = 16 * MAX_TOKENS
"""Longest text of an instance that is shown."""


def inspect(dataset: Path, number: int) -> dict[str, Any]:
    """Instance `number` (they run on through epochs): ids, text, place and sources.

    Raises DataError for a damaged data set, ConfigError for a number that there is none of.
    """
    if number < 0:
        raise ConfigError(f"instance {number} does not exist; they are numbered from 0")
    manifest, order = read_manifest(dataset), read_any_order(dataset)
    if manifest.num_instances == 0:
        raise ConfigError(f"instance {number} does not exist; {dataset} has none")
    if manifest.context > MAX_TOKENS:
        raise ConfigError(
            f"{dataset / layout.MANIFEST}: context = {manifest.context:,}, and inspect shows at "
            f"most {MAX_TOKENS:,} tokens; use optimus-data stats"
        )
    if (order.num_instances, order.context) != (manifest.num_instances, manifest.context):
        raise DamageError(f"{dataset / layout.ORDER}: is not the order of {layout.MANIFEST}")
    epoch, place = divmod(number, manifest.num_instances)
    if epoch > MAX_SEED:
        raise ConfigError(f"instance {number} is after the last epoch, number {MAX_SEED}")
    row = place
    if epoch > 0:
        permutation = Permutation(manifest.num_instances, manifest.seed, epoch)
        row = int(permutation.apply(np.array([place]))[0])
    ids = ShardReader(dataset, manifest).rows(row, row + 1)[0]
    source = int(order.epoch_zero().apply(np.array([row]))[0])
    tokenizer_path = _whole_tokenizer(dataset, manifest.tokenizer_sha256)
    text = _decode(tokenizer_path, ids)
    return {
        "instance": number,
        "epoch": epoch,
        "place": place,
        "instances": manifest.num_instances,
        "shard": manifest.shards[row // manifest.instances_per_shard].name,
        "row": row % manifest.instances_per_shard,
        "sources": _segments(dataset, order, source),
        "ids": ids.tolist(),
        "text": text,
    }


def _whole_tokenizer(dataset: Path, sha256: str) -> Path:
    """The copy of the tokenizer. Raises DamageError where it is not what it was."""
    path = layout.tokenizer_file(dataset)
    if not path.exists() or sha256_of(path) != sha256:
        raise DamageError(
            f"{path}: is not the tokenizer that made this data set (its SHA-256 differs)"
        )
    return path


def _decode(tokenizer_path: Path, ids: np.ndarray) -> str:
    """The text of an instance. Raises DataError for one of more than MAX_CHARACTERS: the text of a
    token may be as long as the file of the tokenizer."""
    tokenizer = open_tokenizer(tokenizer_path)
    if isinstance(tokenizer, SentencePieceTokenizer) and ids.max() >= tokenizer.vocab_size:
        raise DamageError(f"{tokenizer_path}: has no piece of id {ids.max()}")
    with library_panics(tokenizer_path):
        length = sum(
            count * len(tokenizer.decode([token], skip_special_tokens=False))
            for token, count in zip(
                *map(np.ndarray.tolist, np.unique(ids, return_counts=True)), strict=True
            )
        )
        if length > MAX_CHARACTERS:
            raise DataError(
                f"{tokenizer_path}: makes a text of {length:,} characters of the instance, and "
                f"inspect shows at most {MAX_CHARACTERS:,}; use a tokenizer with shorter tokens"
            )
        return tokenizer.decode(ids.tolist(), skip_special_tokens=False)


def _segments(dataset: Path, order: Order | BlendOrder, source: int) -> list[dict[str, Any]]:
    """The documents along source instance `source`: tokens [first, stop) of it begin at
    `document_token` of the document in `line` (0: all) of `input`."""
    if isinstance(order, BlendOrder):
        number, _, own = next(order.split(np.array([source])))
        order, source = order.sources[number], int(own[0])
    tokens_dir = dataset / order.tokens_dir
    plan, starts = read_plan(tokens_dir, order.plan), order.starts()
    position, end = source * order.context, (source + 1) * order.context
    segments, unit, docs = [], -1, np.empty((0, 3), np.int64)
    while position < end:
        if unit < 0 or position >= starts[unit + 1]:
            unit = int(np.searchsorted(starts, position, side="right")) - 1
            docs = read_docs(tokens_dir, unit, order.units[unit].docs_xxh3)
        offset = position - int(starts[unit])
        index = int(np.searchsorted(docs[:, 0], offset, side="right"))
        if index == len(docs) or not 0 <= docs[index, 1] < len(plan.inputs):
            raise DamageError(f"{docs_path(tokens_dir, unit)}: has no input for token {offset}")
        doc_end, source_file, line = (int(value) for value in docs[index])
        doc_start = int(docs[index - 1, 0]) if index else 0
        count = min(doc_end - offset, end - position, int(starts[unit + 1]) - position)
        first = position - source * order.context
        segment = {"first": first, "stop": first + count, "input": plan.inputs[source_file].name}
        segments.append(segment | {"line": line, "document_token": offset - doc_start})
        position += count
    return segments
