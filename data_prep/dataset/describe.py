"""Descriptions of a finished data set: a report, statistics, and the text of an instance.

Losses are in nats. The bigram model is p(b | a) = (count(a, b) + 1) / (count(a) + V), where V is
the size of the vocabulary. Of the C tokens of an instance, the last C - 1 are targets, as in
training.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from data_prep import layout
from data_prep.dataset.manifest import BlendEntry, Manifest, read_manifest
from data_prep.dataset.reader import ShardReader
from data_prep.runtime.progress import Progress
from data_prep.shuffle.blend import BlendOrder, read_any_order
from data_prep.shuffle.order import MAX_SEED, Order, Permutation
from data_prep.tokenize.plan import read_plan
from data_prep.tokenize.store import docs_path, read_docs
from data_prep.tokenizer.sentencepiece_model import SentencePieceTokenizer
from data_prep.tokenizer.tokenizer import library_errors, open_tokenizer, sha256_of
from optimus.errors import ConfigError, DamageError, DataError, counted

MAX_EPOCHS = 4
"""A report contains a warning if a blend has more than MAX_EPOCHS epochs of a source. Training on
up to four epochs of a text is nearly as good as training on new text (arXiv 2305.16264)."""
MIN_HELD_OUT_DOCUMENTS = 20
MIN_HELD_OUT_TOKENS = 10_000
"""A report warns about a held-out split that has fewer than MIN_HELD_OUT_DOCUMENTS documents or
fewer than MIN_HELD_OUT_TOKENS tokens. The loss on so little text is mostly noise
(docs/formats/dataset.md, "Documents and tokens")."""
_MIN_LONG_DOCUMENTS = 10
_MIN_TOKENS_OF_LONG_DOCUMENTS = 200_000
"""Exception for long documents: a report does not warn about a held-out split that has at least
_MIN_LONG_DOCUMENTS documents and at least _MIN_TOKENS_OF_LONG_DOCUMENTS tokens, even if the split
has fewer than MIN_HELD_OUT_DOCUMENTS documents."""
_EXAMPLE_BATCH_TOKENS = 4096
"""Number of tokens per training step that reports assume: the value of `train.global_batch_tokens`
in configs/run/demo.toml."""
_MAX_SUGGESTED_FRACTION = 0.2


def report(
    out: str, manifests: Sequence[Manifest], wall_s: float
) -> tuple[dict[str, Any], list[str]]:
    """Return a report on a new data set.

    Args:
        out: Directory of the data set.
        manifests: The manifest of the training split and, if there is a held-out split, the
            manifest of the held-out split.
        wall_s: Wall-clock time of the command in seconds.

    Returns:
        (report as a JSON object, the same report as lines of text).
    """
    value: dict[str, Any] = {"out": out, "wall_s": round(wall_s, 3)}
    lines = []
    for manifest in manifests:
        value[manifest.part] = {
            "instances": manifest.num_instances,
            "context": manifest.context,
            "tokens": manifest.tokens,
            "tail_tokens": manifest.tail_tokens,
            "documents": manifest.documents,
            "shards": len(manifest.shards),
            "identity": manifest.identity,
        }
        lines.append(
            f"{out}: {manifest.part}: {counted(manifest.num_instances, 'instance')} of "
            f"{manifest.context} tokens from {counted(manifest.documents, 'document')} in "
            f"{counted(len(manifest.shards), 'shard')}; {manifest.tail_tokens:,} of "
            f"{counted(manifest.tokens, 'token')} in no instance (tails)"
        )
        if manifest.num_instances == 0:
            lines.append(
                f"{out}: {manifest.part}: the text is too short for one instance, so this split "
                "cannot be used"
            )
    train = manifests[0]
    lines.append(f"{out}: {for_training(train)}")
    if train.blend:
        value["blend"] = [vars(source) | {"epochs": _epochs(source)} for source in train.blend]
    for source in train.blend:
        lines.append(
            f"{out}: {source.tokens_dir} = {source.weight}: "
            f"{counted(source.quota, 'instance')} of {source.instances:,}, "
            f"{_epochs_text(source)}"
        )
    value["quarantined"] = train.quarantined.count
    if value["quarantined"]:
        documents = counted(train.quarantined.count, "document or file", "documents or files")
        lines.append(f"{out}: quarantined {documents}, listed in quarantine.jsonl")
    value["warnings"] = _warnings(train, manifests[1:])
    lines += [f"{out}: warning: {warning}" for warning in value["warnings"]]
    return value, lines


def for_training(manifest: Manifest) -> str:
    """Return a line of text that states the settings for training on a data set, and the number of
    tokens and steps of an epoch."""
    tokens = manifest.num_instances * manifest.context
    number_steps = tokens // _EXAMPLE_BATCH_TOKENS
    steps = counted(number_steps, "step") if number_steps else "less than one step"
    return (
        f"to train on this data set: train.seq_len = {manifest.context}, model.vocab_size = "
        f"{manifest.vocab_size} or more; one epoch is {counted(tokens, 'token')}, {steps} of "
        f"{_EXAMPLE_BATCH_TOKENS:,} tokens (train.global_batch_tokens)"
    )


def _epochs_text(source: BlendEntry) -> str:
    text = f"{_epochs(source):.3g}"
    return f"{text} epoch{'' if text == '1' else 's'}"


def _epochs(source: BlendEntry) -> float:
    return source.quota / source.instances


def _warnings(train: Manifest, held_out_parts: Sequence[Manifest]) -> list[str]:
    """Return warnings about small held-out splits, and about blend sources that are repeated too
    often."""
    warnings = []
    for source in train.blend:
        if _epochs(source) > MAX_EPOCHS:
            max_instances = math.floor(train.num_instances * MAX_EPOCHS / _epochs(source))
            warnings.append(
                f"{source.tokens_dir} is repeated for {_epochs_text(source)}; text that is "
                f"repeated for more than {MAX_EPOCHS} epochs helps less with each epoch: reduce "
                f"the weight of this source, add text to it, or set --instances to at most "
                f"{max_instances}"
            )
    for held_out in held_out_parts:
        number, in_instances = held_out.documents, held_out.num_instances * held_out.context
        if number >= MIN_HELD_OUT_DOCUMENTS and in_instances >= MIN_HELD_OUT_TOKENS:
            continue
        if number >= _MIN_LONG_DOCUMENTS and in_instances >= _MIN_TOKENS_OF_LONG_DOCUMENTS:
            continue
        documents, tokens = train.documents + held_out.documents, train.tokens + held_out.tokens
        # The suggested fraction holds out 1.5 times the minimum.
        needed = max(MIN_HELD_OUT_DOCUMENTS / documents, MIN_HELD_OUT_TOKENS / tokens) * 1.5
        digits = 1 - math.floor(math.log10(needed))
        fraction = math.ceil(needed * 10**digits) / 10**digits
        remedy = f"make the data set again in another directory, with --eval-fraction {fraction:g}"
        if fraction > _MAX_SUGGESTED_FRACTION:
            remedy = "give more text, or evaluate on a data set of other text (data.eval_path)"
        warnings.append(
            f"the held-out split has {counted(number, 'document')} with "
            f"{counted(in_instances, 'token')} in instances, too few for a meaningful loss (which "
            f"needs at least {MIN_HELD_OUT_DOCUMENTS} documents and {MIN_HELD_OUT_TOKENS:,} "
            f"tokens); {remedy}"
        )
    return warnings


MAX_BIGRAM_CELLS = 64_000_000
"""Bigrams are counted only if vocab_size^2 is at most MAX_BIGRAM_CELLS. The bigram counts take up
to 256 MB."""

MAX_IDS = 1 << 22
"""`stats` raises an error for an id of MAX_IDS or more, because no tokenizer has such large ids.
The counts of the ids therefore take at most 34 MB, even if a manifest permits ids up to 2^32."""

_BLOCK_TOKENS = 1 << 20


def stats(dataset: Path, held_out: Path | None = None) -> dict[str, Any]:
    """Return statistics of a data set.

    Args:
        dataset: Directory of the data set.
        held_out: Directory of a second data set. The losses of the unigram and bigram models of
            `dataset` are computed on this second data set.

    Returns:
        Counts, and the unigram entropy in nats. With `held_out`, the value of the key `held_out`
        contains the counts of the second data set and the losses in nats.

    Raises:
        DamageError: A data set is damaged.
        DataError: A data set cannot be read, or `held_out` and `dataset` have different tokenizers.
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
            raise DataError(
                f"{held_out} was made with another tokenizer than {dataset}; make both data sets "
                "with the same --tokenizer"
            )
        if other.vocab_size > manifest.vocab_size:
            raise DataError(
                f"{held_out} has vocab_size = {other.vocab_size}, above the {manifest.vocab_size} "
                f"of {dataset}, although both have the same tokenizer; make one of the data sets "
                "again"
            )
    counts, pairs = _count(dataset, manifest, with_pairs=other is not None)
    share = counts[counts > 0] / counts.sum()
    result["unigram_entropy"] = float(-(share * np.log(share)).sum())
    if held_out is not None and other is not None:
        result["held_out"] = {
            "instances": other.num_instances,
            "tokens": other.num_instances * other.context,
            "documents": other.documents,
            **_losses(held_out, other, counts, pairs, manifest.vocab_size),
        }
    return result


def _blocks(dataset: Path, manifest: Manifest) -> Iterator[tuple[np.ndarray, int]]:
    """Yield blocks of the ids of all instances.

    An instance that is longer than a block is divided into several blocks. Consecutive blocks of an
    instance overlap by one column, so that each pair of adjacent tokens is in a block.

    Yields:
        (block, seen). `block` is int64 [instances, columns], with at most _BLOCK_TOKENS ids. `seen`
        is 1 if the first column of the block repeats the last column of the previous block, else 0.
    """
    reader, context = ShardReader(dataset, manifest), manifest.context
    step = max(1, _BLOCK_TOKENS // context)
    with Progress(f"read {dataset}", manifest.num_instances, " instances") as progress:
        for first in range(0, manifest.num_instances, step):
            stop = min(first + step, manifest.num_instances)
            for left in range(0, max(1, context - 1), _BLOCK_TOKENS - 1):
                rows = reader.rows(first, stop, left, min(left + _BLOCK_TOKENS, context))
                if int(rows.max()) >= manifest.vocab_size:
                    raise DamageError(
                        f"{dataset}: contains id {int(rows.max())}, outside its vocabulary of "
                        f"{manifest.vocab_size}; optimus-data verify {dataset} names the damaged "
                        "shard"
                    )
                yield rows.astype(np.int64), int(left > 0)
            progress.advance(stop - first)


def _count(
    dataset: Path, manifest: Manifest, with_pairs: bool
) -> tuple[np.ndarray, np.ndarray | None]:
    """Return the counts of ids, int64 [largest id + 1], and of bigrams, uint32 [V*V].

    V is the vocabulary size. Bigrams do not span two instances. The counts of bigrams are None if
    `with_pairs` is False, or if V^2 is above MAX_BIGRAM_CELLS. Raises DamageError for an id of
    MAX_IDS or more.
    """
    size = manifest.vocab_size
    counts = np.zeros(0, np.int64)
    fits = with_pairs and size * size <= MAX_BIGRAM_CELLS
    pairs = np.zeros(size * size, np.uint32) if fits else None
    for rows, seen in _blocks(dataset, manifest):
        if (largest := int(rows.max())) >= MAX_IDS:
            raise DamageError(f"{dataset}: contains id {largest}; stats counts ids below {MAX_IDS}")
        block_counts = np.bincount(rows[:, seen:].ravel(), minlength=len(counts))
        block_counts[: len(counts)] += counts
        counts = block_counts
        if pairs is not None:
            np.add.at(pairs, (rows[:, :-1] * size + rows[:, 1:]).ravel(), np.uint32(1))
    return counts, pairs


def _losses(
    held_out: Path, manifest: Manifest, counts: np.ndarray, pairs: np.ndarray | None, size: int
) -> dict[str, float | None]:
    """Return the mean losses, in nats, of a unigram and a bigram model on a held-out data set. The
    probabilities of the models are estimated from counts in another data set, with 1 added to each
    count.

    Args:
        held_out: Directory of the held-out data set.
        manifest: Manifest of the held-out data set.
        counts: Counts of the ids in the other data set.
        pairs: Counts of the bigrams in the other data set. None: the bigram loss is None.
        size: Size of the vocabulary of the other data set.

    Returns:
        A dict with the keys `unigram_loss` and `bigram_loss`. The two values are None if the
        held-out data set has no targets.
    """
    targets = manifest.num_instances * (manifest.context - 1)
    if targets == 0:
        return {"unigram_loss": None, "bigram_loss": None}
    # The last value is the log-probability of each id that `counts` does not contain.
    unigram_log = np.log((np.append(counts, 0) + 1) / (counts.sum() + size))
    totals = pairs.reshape(size, size).sum(1, dtype=np.int64) if pairs is not None else None
    unigram = bigram = 0.0
    for rows, _ in _blocks(held_out, manifest):
        first, second = rows[:, :-1].ravel(), rows[:, 1:].ravel()
        unigram -= float(unigram_log[np.minimum(second, len(counts))].sum())
        if pairs is not None and totals is not None:
            probability = (pairs[first * size + second] + 1.0) / (totals[first] + size)
            bigram -= float(np.log(probability).sum())
    return {
        "unigram_loss": unigram / targets,
        "bigram_loss": bigram / targets if pairs is not None else None,
    }


def default_held_out(dataset: Path) -> Path | None:
    """Return the directory of the held-out split of a data set, or None if there is none."""
    held_out = dataset / layout.EVAL_DIR
    return held_out if (held_out / layout.MANIFEST).is_file() else None


MAX_TOKENS = 1 << 20
"""Largest context for which `inspect` shows an instance. The ids and text of such an instance take
100 MB of memory."""
MAX_CHARACTERS = 16 * MAX_TOKENS
"""Longest text that `inspect` shows, in characters."""


def documents_of(dataset: Path, number: int) -> list[str]:
    """Return the location of each document in an instance, in order. A location is FILE:LINE, or
    FILE if the document is a whole file.

    See `inspect` for the arguments and errors.
    """
    manifest, order = read_manifest(dataset), read_any_order(dataset)
    if not 0 <= number < manifest.num_instances * (MAX_SEED + 1):
        raise ConfigError(f"instance {number} does not exist in {dataset}; give another number")
    source = int(order.epoch_zero().apply(np.array([_row(manifest, number)]))[0])
    return [
        segment["input"] + (f":{segment['line']}" if segment["line"] else "")
        for segment in _segments(dataset, order, source)
    ]


def _row(manifest: Manifest, number: int) -> int:
    """Return the index of the row that contains instance `number`, counted over all shards.
    Instances are numbered as for `inspect`."""
    epoch, position = divmod(number, manifest.num_instances)
    if epoch == 0:
        return position
    permutation = Permutation(manifest.num_instances, manifest.seed, epoch)
    return int(permutation.apply(np.array([position]))[0])


def inspect(dataset: Path, number: int) -> dict[str, Any]:
    """Return the ids, text, position and sources of an instance.

    Args:
        dataset: Directory of the data set.
        number: Number of the instance, from 0. With N instances, epoch e has the numbers from e * N
            to (e + 1) * N - 1.

    Raises:
        DataError: The data set is damaged, or the text is too long.
        ConfigError: The instance does not exist, or has too many tokens.
    """
    if number < 0:
        raise ConfigError(f"instance {number} does not exist; instances are numbered from 0")
    manifest, order = read_manifest(dataset), read_any_order(dataset)
    if manifest.num_instances == 0:
        raise ConfigError(f"instance {number} does not exist; {dataset} contains no instances")
    if manifest.context > MAX_TOKENS:
        raise ConfigError(
            f"{dataset / layout.MANIFEST}: context = {manifest.context:,}, and inspect shows at "
            f"most {MAX_TOKENS:,} tokens; use optimus-data stats"
        )
    if (order.num_instances, order.context) != (manifest.num_instances, manifest.context):
        raise DamageError(
            f"{dataset / layout.ORDER}: num_instances or context differs from {layout.MANIFEST}"
        )
    epoch, position = divmod(number, manifest.num_instances)
    if epoch > MAX_SEED:
        raise ConfigError(
            f"instance {number} is in epoch {epoch}, and the last epoch is {MAX_SEED}; give a "
            "smaller number"
        )
    row = _row(manifest, number)
    ids = ShardReader(dataset, manifest).rows(row, row + 1)[0]
    source = int(order.epoch_zero().apply(np.array([row]))[0])
    tokenizer_path = layout.tokenizer_file(dataset)
    if not tokenizer_path.exists() or sha256_of(tokenizer_path) != manifest.tokenizer_sha256:
        raise DamageError(
            f"{tokenizer_path}: is not the tokenizer that made this data set (its SHA-256 differs)"
        )
    text = _decode(tokenizer_path, ids)
    return {
        "instance": number,
        "epoch": epoch,
        "place": position,
        "instances": manifest.num_instances,
        "shard": manifest.shards[row // manifest.instances_per_shard].name,
        "row": row % manifest.instances_per_shard,
        "sources": _segments(dataset, order, source),
        "ids": ids.tolist(),
        "text": text,
    }


def _decode(tokenizer_path: Path, ids: np.ndarray) -> str:
    """Return the text of an instance with the token ids `ids`.

    Raises DataError if the text has more than MAX_CHARACTERS characters. The limit is checked
    before all ids are decoded together, because the text of a single token may be as long as the
    tokenizer file.
    """
    tokenizer = open_tokenizer(tokenizer_path)
    if isinstance(tokenizer, SentencePieceTokenizer) and ids.max() >= tokenizer.vocab_size:
        raise DamageError(f"{tokenizer_path}: has no piece with id {ids.max()}")
    with library_errors(tokenizer_path):
        length = sum(
            count * len(tokenizer.decode([token], skip_special_tokens=False))
            for token, count in zip(
                *map(np.ndarray.tolist, np.unique(ids, return_counts=True)), strict=True
            )
        )
        if length > MAX_CHARACTERS:
            raise DataError(
                f"{tokenizer_path}: the text of the instance has {length:,} characters, and "
                f"inspect shows at most {MAX_CHARACTERS:,}; use a tokenizer with shorter tokens"
            )
        return tokenizer.decode(ids.tolist(), skip_special_tokens=False)


def _segments(dataset: Path, order: Order | BlendOrder, source: int) -> list[dict[str, Any]]:
    """Return descriptions of the documents in an instance, in order.

    `source` is the number of the instance before the shuffle. A description is a dict with the keys
    `first`, `stop`, `input`, `line` and `document_token`. Tokens [first, stop) of the instance
    belong to the document. The document is line `line` of the file `input`, or the whole file if
    `line` is 0. Token `first` of the instance is token `document_token` of the document.
    """
    if isinstance(order, BlendOrder):
        number, _, numbers = next(order.split(np.array([source])))
        order, source = order.sources[number], int(numbers[0])
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
            raise DamageError(
                f"{docs_path(tokens_dir, unit)}: does not list a document with a valid input for "
                f"token {offset} of its token array"
            )
        doc_end, source_file, line = (int(value) for value in docs[index])
        doc_start = int(docs[index - 1, 0]) if index else 0
        count = min(doc_end - offset, end - position, int(starts[unit + 1]) - position)
        first = position - source * order.context
        segment = {"first": first, "stop": first + count, "input": plan.inputs[source_file].name}
        segments.append(segment | {"line": line, "document_token": offset - doc_start})
        position += count
    return segments
