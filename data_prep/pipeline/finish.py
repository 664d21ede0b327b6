"""The end of a data set: its manifest, made of the sidecars of all token arrays and shards."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from data_prep import layout
from data_prep.dataset.manifest import BlendEntry, InputEntry, Manifest, SetAside, ShardEntry
from data_prep.pipeline.begin import write_once
from data_prep.pipeline.shard import read_shard_record, shard_path
from data_prep.shuffle.blend import BlendOrder
from data_prep.shuffle.shuffle import Order
from data_prep.tokenize.token_plan import TokenPlan
from data_prep.tokenize.token_set import read_token_set
from optimus.errors import DataError
from optimus.io import files


@dataclass(frozen=True)
class _Source:
    """A complete set of token arrays: its plan, its inputs with their hashes, what it set aside."""

    plan: TokenPlan
    inputs: tuple[InputEntry, ...]
    records: Sequence[Mapping[str, Any]]


def finish(dataset: Path, order: Order | BlendOrder) -> Manifest:
    """Write the manifest of a data set whose shards are complete. Raises DataError."""
    sources = [_read_source(dataset, source) for source in order.sources]
    plan, blended = sources[0].plan, isinstance(order, BlendOrder)
    order_xxh3 = files.xxh3_file(dataset / layout.ORDER)
    units = [unit for source in order.sources for unit in source.units]
    manifest = Manifest(
        part=order.part,
        num_instances=order.num_instances,
        context=order.context,
        dtype=order.dtype,
        vocab_size=plan.tokenizer.vocab_size,
        eos_token=plan.tokenizer.eos_token,
        eos_id=plan.tokenizer.eos_id,
        tokenizer_sha256=plan.tokenizer.sha256,
        seed=order.seed,
        permutation=order.permutation,
        eval_fraction=0.0 if blended else plan.eval_fraction,
        text_field=plan.text_field,
        documents=sum(unit.documents for unit in units),
        tokens=sum(unit.tokens for unit in units),
        tail_tokens=order.tail_tokens,
        carry_tails=order.carry_tails,
        tails=order.tails(),
        tokens_dir=order.sources[0].tokens_dir,
        order_xxh3=order_xxh3,
        quarantined=_list_set_aside(dataset, sources),
        instances_per_shard=order.instances_per_shard,
        shards=tuple(_shard_entries(dataset, order, order_xxh3)),
        inputs=tuple(file for source in sources for file in source.inputs),
        blend=tuple(
            BlendEntry(s.order.tokens_dir, s.weight, s.quota, s.order.num_instances)
            for s in order.blended
        )
        if isinstance(order, BlendOrder)
        else (),
    )
    write_once(dataset / layout.MANIFEST, files.checked_json(manifest.to_json()))
    return manifest


def _shard_entries(
    dataset: Path, order: Order | BlendOrder, order_xxh3: str
) -> Iterator[ShardEntry]:
    for number in range(order.num_shards):
        record = read_shard_record(dataset, order, order_xxh3, number)
        name = shard_path(dataset, number).relative_to(dataset).as_posix()
        yield ShardEntry(name, record["instances"], record["size"], record["xxh3"])


def _read_source(dataset: Path, order: Order) -> _Source:
    plan, plan_xxh3, records = read_token_set(dataset / order.tokens_dir)
    if plan_xxh3 != order.plan:
        raise DataError(f"{dataset / layout.ORDER}: belongs to other token arrays; shuffle again")
    hashes = [xxh3 for record in records for xxh3 in record["inputs"]]
    inputs = tuple(
        InputEntry(file.name, file.size, xxh3)
        for file, xxh3 in zip(plan.inputs, hashes, strict=True)
    )
    return _Source(plan, inputs, records)


def _list_set_aside(dataset: Path, sources: Sequence[_Source]) -> SetAside:
    lines = [line for source in sources for line in _set_aside_lines(source)]
    if not lines:
        return SetAside(0)
    content = "".join(lines).encode()
    write_once(dataset / layout.SET_ASIDE, content)
    return SetAside(len(lines), len(content), files.xxh3_bytes(content))


def _set_aside_lines(source: _Source) -> Iterator[str]:
    for record in source.records:
        for item in record["set_aside"]:
            yield json.dumps({**item, "input": source.inputs[item["input"]].name}) + "\n"
