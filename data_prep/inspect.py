"""One instance as people read it: its text, and which documents of which files it came from."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from data_prep import layout
from data_prep.blend import BlendOrder, read_any_order
from data_prep.manifest import read_manifest
from data_prep.permutation import MAX_SEED, Permutation
from data_prep.reader import ShardReader
from data_prep.shuffle import Order
from data_prep.token_arrays import docs_path, read_docs
from data_prep.token_plan import read_plan
from data_prep.tokenizer import library_panics, open_tokenizer, sha256_of
from optimus.errors import ConfigError, DamageError
from optimus.io import files


def inspect(dataset: Path, number: int) -> dict[str, Any]:
    """Instance `number` (they run on through epochs): ids, text, place and sources.

    Raises DataError for a damaged data set, ConfigError for a number that there is none of.
    """
    if number < 0:
        raise ConfigError(f"instance {number} does not exist; they are numbered from 0")
    manifest, order = read_manifest(dataset), read_any_order(dataset)
    if manifest.num_instances == 0:
        raise ConfigError(f"instance {number} does not exist; {dataset} has none")
    if (order.num_instances, order.context) != (manifest.num_instances, manifest.context):
        raise DamageError(f"{dataset / layout.ORDER}: is not the order of {layout.MANIFEST}")
    epoch, place = divmod(number, manifest.num_instances)
    if epoch > MAX_SEED:
        raise ConfigError(f"instance {number} is after the last epoch, number {MAX_SEED}")
    row = place
    if epoch > 0:
        permutation = Permutation(manifest.num_instances, manifest.seed, epoch)
        row = int(permutation.apply(np.array([place]))[0])
    ids = ShardReader(dataset, manifest).rows(row, row + 1)[0].tolist()
    source = int(order.epoch_zero().apply(np.array([row]))[0])
    tokenizer_path = _whole_tokenizer(dataset, manifest.tokenizer_sha256)
    with library_panics(tokenizer_path):
        text = open_tokenizer(tokenizer_path).decode(ids, skip_special_tokens=False)
    return {
        "instance": number,
        "epoch": epoch,
        "place": place,
        "instances": manifest.num_instances,
        "shard": manifest.shards[row // manifest.instances_per_shard].name,
        "row": row % manifest.instances_per_shard,
        "sources": _segments(dataset, order, source),
        "ids": ids,
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


def _segments(dataset: Path, order: Order | BlendOrder, source: int) -> list[dict[str, Any]]:
    """The documents along source instance `source`: tokens [first, stop) of it begin at
    `document_token` of the document in `line` (0: all) of `input`."""
    if isinstance(order, BlendOrder):
        number, _, own = next(order.split(np.array([source])))
        order, source = order.sources[number], int(own[0])
    tokens_dir = dataset / order.tokens_dir
    plan, starts = read_plan(tokens_dir), order.starts()
    if files.xxh3_file(tokens_dir / layout.PLAN) != order.plan:
        raise DamageError(
            f"{tokens_dir / layout.PLAN}: is not the plan in {layout.ORDER}; shuffle again"
        )
    position, end = source * order.context, (source + 1) * order.context
    segments = []
    while position < end:
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
