"""Describe a finished data set, for people and as JSON."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from data_prep.dataset.manifest import BlendEntry, Manifest
from optimus.errors import counted

MAX_EPOCHS = 4
"""Repeating text up to about four times is nearly as good as new text (arXiv 2305.16264)."""
MIN_HELD_OUT_DOCUMENTS = 20
MIN_HELD_OUT_TOKENS = 10_000
"""Below either, the held-out loss is mostly chance: docs/formats/dataset.md, "Documents"."""
_EXAMPLE_BATCH_TOKENS = 4096
"""`train.global_batch_tokens` of configs/run/demo.toml."""
_MAX_SUGGESTED_FRACTION = 0.2


def report(
    out: str, manifests: Sequence[Manifest], wall_s: float
) -> tuple[dict[str, Any], list[str]]:
    """The facts of a data set's parts, the training part first, and lines that say them."""
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
            f"{counted(manifest.tokens, 'token')} left over as tails"
        )
        if manifest.num_instances == 0:
            lines.append(f"{out}: {manifest.part}: too little for one instance; it cannot be used")
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
    aside = train.quarantined.count
    value["quarantined"] = aside
    if aside:
        what = counted(aside, "document or file", "documents or files")
        lines.append(f"{out}: quarantined {what}, listed in quarantine.jsonl")
    value["warnings"] = [_repeats(train, source) for source in train.blend if _too_often(source)]
    value["warnings"] += [_few_held_out(train, part) for part in manifests[1:] if _is_small(part)]
    lines += [f"{out}: warning: {warning}" for warning in value["warnings"]]
    return value, lines


def for_training(manifest: Manifest) -> str:
    """The settings of a run that follow from a training part, and the length of an epoch."""
    tokens = manifest.num_instances * manifest.context
    number_steps = tokens // _EXAMPLE_BATCH_TOKENS
    steps = counted(number_steps, "step") if number_steps else "less than one step"
    return (
        f"to train on it: train.seq_len = {manifest.context}, model.vocab_size = "
        f"{manifest.vocab_size} or more; one epoch is {counted(tokens, 'token')}, {steps} of "
        f"{_EXAMPLE_BATCH_TOKENS:,} tokens (train.global_batch_tokens)"
    )


def _epochs_text(source: BlendEntry) -> str:
    text = f"{_epochs(source):.3g}"
    return f"{text} epoch{'' if text == '1' else 's'}"


def _epochs(source: BlendEntry) -> float:
    return source.quota / source.instances


def _too_often(source: BlendEntry) -> bool:
    return _epochs(source) > MAX_EPOCHS


def _repeats(train: Manifest, source: BlendEntry) -> str:
    most = math.floor(train.num_instances * MAX_EPOCHS / _epochs(source))
    return (
        f"{source.tokens_dir} is repeated for {_epochs_text(source)}; above {MAX_EPOCHS}, "
        f"repeated text helps ever less: give it a smaller weight, more text, or at most "
        f"--instances {most}"
    )


def _is_small(held_out: Manifest) -> bool:
    few = held_out.documents < MIN_HELD_OUT_DOCUMENTS
    return few or held_out.num_instances * held_out.context < MIN_HELD_OUT_TOKENS


def _few_held_out(train: Manifest, held_out: Manifest) -> str:
    """What is too little, and the fraction that should hold out one and a half times enough."""
    documents, tokens = train.documents + held_out.documents, train.tokens + held_out.tokens
    needed = max(MIN_HELD_OUT_DOCUMENTS / documents, MIN_HELD_OUT_TOKENS / tokens) * 1.5
    digits = 1 - math.floor(math.log10(needed))
    fraction = math.ceil(needed * 10**digits) / 10**digits
    remedy = f"make the data set again elsewhere, with --eval-fraction {fraction:g}"
    if fraction > _MAX_SUGGESTED_FRACTION:
        remedy = "give more text, or evaluate on a data set of other text (data.eval_path)"
    return (
        f"the held-out part is {counted(held_out.documents, 'document')} with "
        f"{counted(held_out.num_instances * held_out.context, 'token')} in instances, too little "
        f"for its loss to mean much (at least {MIN_HELD_OUT_DOCUMENTS} documents and "
        f"{MIN_HELD_OUT_TOKENS:,} tokens); {remedy}"
    )
