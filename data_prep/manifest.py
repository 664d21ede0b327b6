"""The manifest: written last, it says that a data set is whole and what it is."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from data_prep import layout
from optimus.errors import DataError

FORM = "optimus-dataset"


@dataclass(frozen=True)
class ShardEntry:
    """A shard as the manifest lists it; `name` is relative to the data set."""

    name: str
    instances: int
    size: int
    xxh3: str


@dataclass(frozen=True)
class InputEntry:
    """An input file with the hash of its bytes."""

    name: str
    size: int
    xxh3: str


@dataclass(frozen=True)
class SetAside:
    """What quarantine mode left out: how many documents or damaged files, and the list of them."""

    count: int
    size: int = 0
    xxh3: str = ""


@dataclass(frozen=True)
class BlendEntry:
    """A source of a blend: its token arrays, weight, instances given and instances it has."""

    tokens_dir: str
    weight: str
    quota: int
    instances: int


@dataclass(frozen=True)
class Manifest:
    """What a data set is. Field by field in docs/formats/dataset.md."""

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
    quarantined: SetAside
    instances_per_shard: int
    shards: tuple[ShardEntry, ...]
    inputs: tuple[InputEntry, ...]
    blend: tuple[BlendEntry, ...] = ()
    """The sources of a blend; not in the JSON of any other data set."""

    @property
    def identity(self) -> str:
        """SHA-256 of everything that decides which tokens a training run reads."""
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
    """The manifest of the data set in directory `dataset`.

    Raises DataError where there is none, or it is damaged or of another version.
    """
    dataset = Path(dataset)
    path = dataset / layout.MANIFEST
    if not path.exists():
        what = "not finished" if (dataset / layout.TOKENS_DIR).exists() else "not a data set"
        raise DataError(f"{path} is missing: {dataset} is {what}; make it with optimus-data run")
    value = layout.read_checked_json(path, FORM)
    names = {field.name for field in dataclasses.fields(Manifest)} - {"blend"}
    fields = {name: value[name] for name in names}
    fields["blend"] = tuple(BlendEntry(**source) for source in value.get("blend", ()))
    fields["tails"] = tuple(value["tails"])
    fields["quarantined"] = SetAside(**value["quarantined"])
    fields["shards"] = tuple(ShardEntry(**shard) for shard in value["shards"])
    fields["inputs"] = tuple(InputEntry(**file) for file in value["inputs"])
    return Manifest(**fields)
