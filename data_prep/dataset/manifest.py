"""The manifest of a data set, and the rules that select held-out documents.

The manifest is the last file that is written. A data set with a manifest is complete.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from data_prep import layout
from data_prep.shuffle.blend import read_any_order
from data_prep.tokenize.plan import TokenPlan, is_import, read_plan
from optimus.errors import DataError, counted

FORM = "optimus-dataset"


@dataclass(frozen=True)
class ShardEntry:
    """Manifest entry for a shard. `name` is the path of the shard's file, relative to the directory
    of the data set. `size` is the size of the file in bytes."""

    name: str
    instances: int
    size: int
    xxh3: str


@dataclass(frozen=True)
class InputEntry:
    """Manifest entry for an input file: the path, the size in bytes, and the hash of the file."""

    name: str
    size: int
    xxh3: str


@dataclass(frozen=True)
class QuarantineEntry:
    """Manifest entry for quarantine.jsonl, the list of documents and files that were left out.

    `count` is the number of documents and files that quarantine.jsonl lists. `size` and `xxh3` are
    the size in bytes and the hash of quarantine.jsonl.
    """

    count: int
    size: int = 0
    xxh3: str = ""


@dataclass(frozen=True)
class BlendEntry:
    """Manifest entry for a source of a blend. A source is a set of token arrays."""

    tokens_dir: str
    weight: str
    quota: int
    """Number of instances of the blend that come from this source."""
    instances: int
    """Number of instances in one epoch of the source."""


@dataclass(frozen=True)
class Manifest:
    """Content of manifest.json. docs/formats/dataset.md describes each field."""

    part: str
    num_instances: int
    context: int
    dtype: str
    vocab_size: int
    eos_token: str
    eos_id: int
    tokenizer_sha256: str
    seed: int
    permutation: str
    eval_fraction: float
    text_field: str
    documents: int
    tokens: int
    tail_tokens: int
    carry_tails: bool
    tails: tuple[int, ...]
    tokens_dir: str
    order_xxh3: str
    quarantined: QuarantineEntry
    instances_per_shard: int
    shards: tuple[ShardEntry, ...]
    inputs: tuple[InputEntry, ...]
    blend: tuple[BlendEntry, ...] = ()
    """Sources of a blend. Empty if the data set is not a blend; manifest.json then omits this
    key."""

    @property
    def identity(self) -> str:
        """SHA-256 of all values that determine the tokens that a training run reads."""
        facts = [
            layout.VERSION,
            self.num_instances,
            self.context,
            self.dtype,
            self.vocab_size,
            self.tokenizer_sha256,
            self.seed,
            self.permutation,
            [shard.xxh3 for shard in self.shards],
        ]
        return hashlib.sha256(json.dumps(facts).encode()).hexdigest()

    def to_json(self) -> dict[str, Any]:
        value = {"format": FORM, "version": layout.VERSION, **dataclasses.asdict(self)}
        if not self.blend:
            del value["blend"]
        return value


def read_manifest(dataset: str | os.PathLike) -> Manifest:
    """Return the manifest of the data set in the directory `dataset`.

    Raises:
        DataError: The manifest is missing, damaged or of another version, or contains values that
            optimus-data does not write.
    """
    dataset = Path(dataset)
    path = dataset / layout.MANIFEST
    if not path.exists():
        state = "not finished" if (dataset / layout.TOKENS_DIR).exists() else "not a data set"
        raise DataError(f"{path} is missing: {dataset} is {state}; make it with optimus-data run")
    manifest = layout.read_record(path, Manifest, FORM)
    _check(manifest, path)
    return manifest


def held_out_problem(manifest: Manifest, dataset: Path, held_out: Manifest) -> str:
    """Check that `held_out` is the manifest of a data set's held-out split.

    Args:
        manifest: Manifest of the data set.
        dataset: Directory of the data set, for the message.
        held_out: Manifest that was read from the directory of the held-out split.

    Returns:
        A description of the problem, or "" if there is none.
    """
    if held_out.part != layout.SPLITS[1]:
        problem = f"part = {held_out.part!r}"
    elif held_out.tokenizer_sha256 != manifest.tokenizer_sha256:
        problem = "another tokenizer"
    else:
        return ""
    path = dataset / layout.EVAL_DIR / layout.MANIFEST
    return f"{path}: has {problem}, so it is not the held-out part of {dataset}"


def _check(manifest: Manifest, path: Path) -> None:
    """Raise DataError if a value of the manifest is impossible or contradicts another value."""
    layout.require(
        path,
        (manifest.part in layout.SPLITS, f"part is none of {', '.join(layout.SPLITS)}"),
        (
            1 <= manifest.context <= layout.MAX_CONTEXT,
            f"context = {manifest.context} is not from 1 to {layout.MAX_CONTEXT}",
        ),
        (
            1 <= manifest.vocab_size <= 1 << 32,
            f"vocab_size = {manifest.vocab_size} is not from 1 to 2^32",
        ),
    )
    dtype = layout.dtype_name(manifest.vocab_size)
    layout.require(
        path,
        (
            manifest.dtype == dtype,
            f"dtype = {manifest.dtype!r:.80}, but a vocabulary of {manifest.vocab_size} ids needs "
            f"{dtype}",
        ),
        (
            0 <= manifest.eos_id < manifest.vocab_size,
            f"eos_id = {manifest.eos_id} is outside the vocabulary of {manifest.vocab_size}",
        ),
        (
            re.fullmatch("[0-9a-f]{64}", manifest.tokenizer_sha256) is not None,
            "tokenizer_sha256 is not 64 hexadecimal digits",
        ),
        (0 <= manifest.seed < 1 << 64, f"seed = {manifest.seed} is not from 0 to 2^64 - 1"),
        (
            0 <= manifest.eval_fraction < 1,
            f"eval_fraction = {manifest.eval_fraction} is not in the range [0, 1)",
        ),
    )
    quarantined, inputs, blend = manifest.quarantined, manifest.inputs, manifest.blend
    counts = [
        *(manifest.num_instances, manifest.documents, manifest.tokens, manifest.tail_tokens),
        *(*manifest.tails, quarantined.count, quarantined.size),
        *(file.size for file in inputs),
        *(count for source in blend for count in (source.quota, source.instances)),
    ]
    hashes = [
        manifest.order_xxh3,
        *(file.xxh3 for file in inputs),
        *(shard.xxh3 for shard in manifest.shards),
        *[quarantined.xxh3] * (quarantined.count > 0),
    ]
    folders = [manifest.tokens_dir, *[source.tokens_dir for source in blend]]
    layout.require(
        path,
        (layout.are_counts(counts), "a count or size is negative or too large"),
        (layout.are_hashes(hashes), "an xxh3 hash is not 16 hexadecimal digits"),
        (layout.are_paths(file.name for file in inputs), "the name of an input is not a path"),
        (all(map(layout.is_relative_path, folders)), "a tokens_dir is not a relative path"),
        (sum(manifest.tails) == manifest.tail_tokens, "tail_tokens is not the sum of tails"),
        (
            not blend or sum(source.quota for source in blend) == manifest.num_instances,
            "num_instances is not the sum of the quotas of blend",
        ),
    )
    _check_shards(manifest, path)


def _check_shards(manifest: Manifest, path: Path) -> None:
    """Raise DataError if the entries for shards contradict another value of the manifest."""
    shards, full = manifest.shards, manifest.instances_per_shard
    layout.require(
        path,
        (
            0 < full < layout.MAX_COUNT,
            f"instances_per_shard = {full} is not from 1 to 2^56 - 1",
        ),
    )
    number = -(-manifest.num_instances // full)
    layout.require(
        path,
        (
            len(shards) == number,
            f"lists {counted(len(shards), 'shard')}, but num_instances = "
            f"{manifest.num_instances} and instances_per_shard = {full} make {number:,}",
        ),
    )
    row_bytes = manifest.context * layout.little_endian(manifest.dtype).itemsize
    starts = range(0, manifest.num_instances, full)
    instances = [min(full, manifest.num_instances - start) for start in starts]
    expected = (
        ("name", [f"{layout.SHARDS_DIR}/{layout.shard_name(n)}.npy" for n in range(number)]),
        ("instances", instances),
        ("size", [layout.HEADER_BYTES + count * row_bytes for count in instances]),
    )
    for key, values in expected:
        for shard, value in zip(shards, values, strict=True):
            if (actual := getattr(shard, key)) != value:
                problem = (
                    f"a shard has {key} = {actual!r:.80}, but num_instances, instances_per_shard "
                    "and context give "
                )
                layout.require(path, (False, problem + repr(value)))


@dataclass(frozen=True)
class HeldOutRule:
    """Rule that selects the documents to hold out for evaluation. A document is held out if the
    hash of the document is below a limit."""

    fraction: float
    """Expected fraction of the documents that are held out (`--eval-fraction`)."""
    by_ids: bool
    """True: the hash of a document is the hash of its imported token ids. False: the hash of a
    document is the hash of its text."""


def held_out_rule(rules: TokenPlan | Manifest) -> HeldOutRule:
    """Return the rule that selects held-out documents, from a plan.json or a manifest.

    Do not pass the manifest of a blend: such a manifest does not contain the rule.
    """
    return HeldOutRule(rules.eval_fraction, is_import(rules.text_field))


def dataset_held_out_rule(dataset: Path, manifest: Manifest) -> HeldOutRule | None:
    """Return the rule that a data set uses to hold out documents.

    Args:
        dataset: Directory of the data set.
        manifest: Manifest of the data set.

    Returns:
        The rule. The rule of a blend is read from its first source, because all sources have the
        same rule. The result is None if the order.json of a blend is missing, or if the first
        source of the blend is missing or was made again with another plan.

    Raises:
        DataError: The order of a blend is damaged.
    """
    if not manifest.blend:
        return held_out_rule(manifest)
    if not (dataset / layout.ORDER).exists():  # only shards and manifest were copied
        return None
    source = read_any_order(dataset).sources[0]
    try:
        return held_out_rule(read_plan(dataset / source.tokens_dir, source.plan))
    except DataError:
        return None


def check_held_out(first: Path, rule: HeldOutRule, second: Path, other: HeldOutRule) -> None:
    """Check that two data sets use the same rule to hold out documents. With different rules, a
    training document of one data set could be a held-out document of the other data set.

    Args:
        first: Directory of a data set, for the message.
        rule: Rule of the first data set.
        second: Directory of the other data set, for the message.
        other: Rule of the other data set.

    Raises:
        DataError: The fractions differ; or the fractions are above 0, and one rule uses the hash of
            ids while the other rule uses the hash of text.
    """
    if other.fraction != rule.fraction:
        raise DataError(
            f"{second} holds out the fraction {other.fraction:g} of its documents, but {first} "
            f"holds out the fraction {rule.fraction:g}: training on one data set could use "
            "documents that the other data set holds out; make both data sets with the same "
            "--eval-fraction"
        )
    if other.fraction and other.by_ids != rule.by_ids:
        raise DataError(
            f"{first} and {second} select held-out documents differently: one data set by the text "
            "of a document, the other data set by imported ids. Training on one data set could use "
            "documents that the other data set holds out; make both data sets without "
            "--eval-fraction"
        )
