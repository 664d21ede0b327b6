"""The pipeline from text to a finished data set: tokenize, shuffle, shard, manifest.

Every step finds what earlier runs completed and does the rest, so the same command after a kill
ends with the same bytes.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from data_prep import layout
from data_prep.begin import begin, write_once
from data_prep.manifest import InputEntry, Manifest, SetAside, ShardEntry
from data_prep.shard import read_shard_record, shard_all, shard_path
from data_prep.shuffle import Order, make_order, read_order, read_token_set
from data_prep.sources import UNIT_BYTES, find_inputs, require_file
from data_prep.tokenize import make_plan, tokenize_all
from data_prep.tokenizer import read_facts
from data_prep.workspace import working_in
from optimus import files
from optimus.errors import DataError


@dataclass(frozen=True)
class TokenizeRequest:
    """What `tokenize` and `run` are asked for; defaults are the command line's."""

    inputs: Sequence[str]
    tokenizer: str
    out: Path
    workers: int
    exclude: Sequence[str] = ()
    eos: str | None = None
    text_field: str = "text"
    eval_fraction: float = 0.0
    unit_bytes: int = UNIT_BYTES
    quarantine: bool = False


@dataclass(frozen=True)
class ShuffleRequest:
    """What `shuffle` and `run` are asked for."""

    context: int
    seed: int = 0
    carry_tails: bool = False
    shard_bytes: int = 0


def tokenize(request: TokenizeRequest) -> None:
    """Token arrays of all inputs under request.out. Raises DataError and ConfigError."""
    tokenizer = require_file(request.tokenizer, "--tokenizer")
    facts = read_facts(tokenizer, request.eos)
    inputs = find_inputs(request.inputs, request.exclude, request.out)
    plan = make_plan(inputs, facts, request.text_field, request.eval_fraction, request.unit_bytes)
    with working_in(request.out):
        tokenize_all(begin(request.out, tokenizer, plan, request.quarantine), request.workers)


def data_sets(out: Path) -> list[Path]:
    """The training set in `out` and its held-out set, where token arrays of it exist."""
    held_out = out / layout.EVAL_DIR
    return [out, held_out] if (held_out / layout.TOKENS_DIR / layout.PLAN).exists() else [out]


def shuffle(source: Path, target: Path, request: ShuffleRequest) -> list[Order]:
    """Write the order of both parts of `source`'s token arrays into data sets in `target`.

    Held-out tails are always carried: few documents are spread over all units. Raises DataError
    where the training part has no instance, or `target` already has another order.
    """
    orders = []
    with working_in(target):
        for dataset in data_sets(source):
            place = target / dataset.relative_to(source)
            place.mkdir(exist_ok=True)
            order = make_order(
                dataset / layout.TOKENS_DIR,
                place,
                request.context,
                request.seed,
                carry_tails=request.carry_tails or dataset != source,
                shard_bytes=request.shard_bytes,
            )
            if order.num_instances == 0 and dataset == source:
                tokens = sum(unit.tokens for unit in order.units)
                raise DataError(
                    f"{source}: {tokens} tokens in {len(order.units)} arrays make no instance of "
                    f"{request.context}; give more text, a smaller --context or --carry-tails"
                )
            _settle_order(place, order)
            if place != dataset:
                tokenizer = (dataset / layout.TOKENIZER).read_bytes()
                write_once(place / layout.TOKENIZER, tokenizer)
            orders.append(order)
    return orders


def _settle_order(dataset: Path, order: Order) -> None:
    path = dataset / layout.ORDER
    if not path.exists():
        layout.write_checked_json(path, order.to_json())
        return
    old, new = read_order(dataset).to_json(), order.to_json()
    for key, then in old.items():
        if key == "units" and then != new[key]:
            raise DataError(f"{path}: the token arrays are not those that were shuffled; remove it")
        if then != new[key]:
            raise DataError(
                f"{dataset} was shuffled with {key} = {then}, now {new[key]}; another order of the "
                "same tokens goes elsewhere: optimus-data shuffle OUT --to NEW"
            )


def shard(out: Path, workers: int, memory_bytes: int) -> list[Manifest]:
    """Shards and manifest of every shuffled part of `out`, the training part's manifest last.

    Gives the manifests, the training part's first. Raises DataError and ConfigError.
    """
    manifests = []
    with working_in(out):
        for dataset in (out / layout.EVAL_DIR, out):
            if dataset == out or (dataset / layout.ORDER).exists():
                order = read_order(dataset)
                shard_all(dataset, order, workers, memory_bytes)
                manifests.insert(0, _finish(dataset, order))
    return manifests


def _finish(dataset: Path, order: Order) -> Manifest:
    """Write the manifest of a data set whose shards are complete."""
    plan, plan_xxh3, records = read_token_set(dataset / order.tokens_dir)
    if plan_xxh3 != order.plan:
        raise DataError(f"{dataset / layout.ORDER}: belongs to other token arrays; shuffle again")
    order_xxh3 = files.xxh3_file(dataset / layout.ORDER)
    shards = []
    for number in range(order.num_shards):
        record = read_shard_record(dataset, order, order_xxh3, number)
        name = shard_path(dataset, number).relative_to(dataset).as_posix()
        shards.append(ShardEntry(name, record["instances"], record["size"], record["xxh3"]))
    hashes = [xxh3 for record in records for xxh3 in record["inputs"]]
    inputs = tuple(
        InputEntry(file.name, file.size, xxh3)
        for file, xxh3 in zip(plan.inputs, hashes, strict=True)
    )
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
        eval_fraction=plan.eval_fraction,
        text_field=plan.text_field,
        documents=sum(unit.documents for unit in order.units),
        tokens=sum(unit.tokens for unit in order.units),
        tail_tokens=order.tail_tokens,
        carry_tails=order.carry_tails,
        tails=order.tails(),
        tokens_dir=order.tokens_dir,
        order_xxh3=order_xxh3,
        quarantined=_list_set_aside(dataset, inputs, records),
        instances_per_shard=order.instances_per_shard,
        shards=tuple(shards),
        inputs=inputs,
    )
    write_once(dataset / layout.MANIFEST, layout.checked_json(manifest.to_json()))
    return manifest


def _list_set_aside(
    dataset: Path, inputs: Sequence[InputEntry], records: Sequence[dict]
) -> SetAside:
    lines = list(_set_aside_lines(inputs, records))
    if not lines:
        return SetAside(0)
    content = "".join(lines).encode()
    write_once(dataset / layout.SET_ASIDE, content)
    return SetAside(len(lines), len(content), files.xxh3_bytes(content))


def _set_aside_lines(inputs: Sequence[InputEntry], records: Sequence[dict]) -> Iterator[str]:
    for record in records:
        for item in record["set_aside"]:
            yield json.dumps({**item, "input": inputs[item["input"]].name}) + "\n"
