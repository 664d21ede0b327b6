"""Is a data set whole? Every byte that it promises is read and compared with its hash."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from data_prep import layout
from data_prep.blend import BlendOrder, read_any_order
from data_prep.duplicates import read_whole
from data_prep.fused import removed
from data_prep.manifest import Manifest, ShardEntry, read_manifest
from data_prep.packed import PackedArray, packed_path
from data_prep.progress import Progress
from data_prep.shard import FORM as SHARD_FORM
from data_prep.shuffle import Order
from data_prep.token_arrays import array_path, docs_path, ids_path
from data_prep.token_plan import read_plan
from data_prep.token_set import read_unit
from data_prep.tokenizer import read_facts
from optimus import files
from optimus.errors import DataError

_READ_BYTES = 4 << 20


def verify(dataset: Path) -> Iterator[str]:
    """Every damage found in `dataset` and in its held-out part, a line each, naming the file."""
    try:
        manifest = read_manifest(dataset)
        order = read_any_order(dataset)
    except DataError as error:
        yield str(error)
        return
    yield from _check_counts(dataset, manifest, order)
    yield from _check_small_files(dataset, manifest)
    for source in order.sources:
        yield from _check_tokens(dataset, source)
    with Progress(f"verify {dataset}", sum(shard.size for shard in manifest.shards), "B") as bar:
        for shard in manifest.shards:
            yield from _check_shard(dataset, manifest, shard)
            bar.advance(shard.size)
    if manifest.part == "train" and manifest.eval_fraction > 0:
        yield from verify(dataset / layout.EVAL_DIR)


def _check_counts(dataset: Path, manifest: Manifest, order: Order | BlendOrder) -> Iterator[str]:
    """The manifest against itself and against the order."""
    path = dataset / layout.MANIFEST
    if manifest.order_xxh3 != files.xxh3_file(dataset / layout.ORDER):
        yield f"{dataset / layout.ORDER}: is not the order that {path} names"
        return
    for key in ("num_instances", "context", "dtype", "seed", "permutation", "tail_tokens"):
        if getattr(manifest, key) != getattr(order, key):
            yield f"{path}: {key} = {getattr(manifest, key)}, its order says {getattr(order, key)}"
    stored = sum(shard.instances for shard in manifest.shards)
    if stored != manifest.num_instances:
        yield f"{path}: num_instances = {manifest.num_instances}, its shards hold {stored}"
    counts = [stop - first for first, stop in map(order.shard_rows, range(order.num_shards))]
    if [shard.instances for shard in manifest.shards] != counts:
        yield f"{path}: its list of shards is not that of its order"


def _check_small_files(dataset: Path, manifest: Manifest) -> Iterator[str]:
    path = layout.tokenizer_file(dataset)
    try:
        facts = read_facts(path, manifest.eos_token)
    except DataError as error:
        yield str(error)
    else:
        if facts.sha256 != manifest.tokenizer_sha256:
            yield f"{path}: is not the tokenizer that made this data set (its SHA-256 differs)"
    aside = manifest.quarantined
    if aside.count:
        yield from _check_file(dataset / layout.SET_ASIDE, aside.size, aside.xxh3)


def _check_file(path: Path, size: int, xxh3: str) -> Iterator[str]:
    try:
        found = os.path.getsize(path)
        if found != size:
            yield f"{path}: has {found} bytes instead of {size}"
        elif files.xxh3_file(path) != xxh3:
            yield f"{path}: its content is damaged (hash differs)"
    except OSError as error:
        yield f"{path}: cannot be read: {error.strerror}"


def _check_tokens(dataset: Path, order: Order) -> Iterator[str]:
    tokens_dir = dataset / order.tokens_dir
    try:
        plan = read_plan(tokens_dir)
    except DataError as error:
        yield str(error)
        return
    if files.xxh3_file(tokens_dir / layout.PLAN) != order.plan or len(plan.units) != len(
        order.units
    ):
        yield f"{tokens_dir / layout.PLAN}: is not the plan that {dataset / layout.ORDER} names"
        return
    if plan.id_field and order.part == "train":
        try:
            read_whole(tokens_dir, order.plan)
        except DataError as error:
            yield str(error)
    has_arrays = not removed(tokens_dir)
    for number, unit in enumerate(order.units):
        try:
            record = read_unit(tokens_dir, number, order.plan, has_arrays)
        except DataError as error:
            yield str(error)
            continue
        array, docs = array_path(tokens_dir, number), docs_path(tokens_dir, number)
        if (record["array"]["xxh3"], record["docs"]["xxh3"]) != (unit.xxh3, unit.docs_xxh3):
            yield f"{array}: its sidecar is not the one that was shuffled"
        itemsize = layout.little_endian(plan.dtype).itemsize
        if record["array"]["size"] != layout.HEADER_BYTES + unit.tokens * itemsize:
            yield f"{array}: cannot hold {unit.tokens} tokens in {record['array']['size']} bytes"
        if has_arrays and not array.exists():
            yield from _check_packed(tokens_dir, number, plan.dtype, record["array"])
        elif has_arrays:
            yield from _check_file(array, record["array"]["size"], unit.xxh3)
        yield from _check_file(docs, record["docs"]["size"], unit.docs_xxh3)
        if ids := record.get("ids"):
            yield from _check_file(ids_path(tokens_dir, number), ids["size"], ids["xxh3"])


def _check_packed(
    tokens_dir: Path, unit: int, dtype: str, promised: dict[str, Any]
) -> Iterator[str]:
    """A packed array, which stands until `run --fused` comes to its end."""
    path = packed_path(tokens_dir, unit)
    try:
        with PackedArray(path, dtype) as packed:
            if packed.describe() != promised:
                yield f"{path}: its content is damaged (hash differs)"
    except DataError as error:
        yield str(error)
    except OSError as error:
        yield f"{path}: cannot be read: {error.strerror}"


def _check_shard(dataset: Path, manifest: Manifest, shard: ShardEntry) -> Iterator[str]:
    """Size, header, hash and range of ids of one shard, in one reading of it."""
    path = dataset / shard.name
    header = layout.npy_header((shard.instances, manifest.context), manifest.dtype)
    dtype = layout.little_endian(manifest.dtype)
    promised = len(header) + shard.instances * manifest.context * dtype.itemsize
    if shard.size != promised:
        yield f"{dataset / layout.MANIFEST}: {shard.name} cannot have {shard.size} bytes"
    try:
        yield from _check_sidecar(path, shard)
        size = path.stat().st_size
        if size != shard.size:
            yield f"{path}: has {size} bytes instead of {shard.size}"
            return
        largest, xxh3, found = _scan(path, dtype)
    except (OSError, DataError) as error:
        yield str(error) if isinstance(error, DataError) else f"{path}: {error.strerror}"
        return
    if xxh3 != shard.xxh3:
        yield f"{path}: its content is damaged (hash differs)"
    elif found != header:
        yield f"{path}: its header is not that of {manifest.dtype} [{shard.instances}, C]"
    elif largest >= manifest.vocab_size:
        yield f"{path}: holds id {largest}, outside the vocabulary of {manifest.vocab_size}"


def _check_sidecar(path: Path, shard: ShardEntry) -> Iterator[str]:
    sidecar = path.with_suffix(".json")
    record: dict[str, Any] = layout.read_checked_json(sidecar, SHARD_FORM)
    if record["xxh3"] != shard.xxh3:
        yield f"{sidecar}: names another hash than the manifest"


def _scan(path: Path, dtype: np.dtype) -> tuple[int, str, bytes]:
    """Largest id, hash and header of a shard file."""
    largest = -1
    with open(path, "rb", buffering=0) as file:
        header = file.read(layout.HEADER_BYTES)
        digest = xxhash.xxh3_64(header)
        while block := file.read(_READ_BYTES):
            digest.update(block)
            largest = max(largest, int(np.frombuffer(block, dtype).max()))
    return largest, digest.hexdigest(), header
