"""What a finished data set is, for people and as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from data_prep.manifest import Manifest


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
            f"{out}: {manifest.part}: {manifest.num_instances:,} instances of {manifest.context} "
            f"tokens from {manifest.documents:,} documents in {len(manifest.shards)} shards; "
            f"{manifest.tail_tokens:,} of {manifest.tokens:,} tokens left over as tails"
        )
        if manifest.num_instances == 0:
            lines.append(f"{out}: {manifest.part}: too little for one instance; it cannot be used")
    for source in manifests[0].blend:
        lines.append(
            f"{out}: {source.tokens_dir} = {source.weight}: {source.quota:,} instances of "
            f"{source.instances:,}"
        )
    if manifests[0].blend:
        value["blend"] = [vars(source) for source in manifests[0].blend]
    aside = manifests[0].quarantined.count
    value["quarantined"] = aside
    if aside:
        lines.append(f"{out}: set aside {aside} documents or files, listed in quarantine.jsonl")
    return value, lines
