"""The third step of `optimus-data run`: write the instances to shards in permuted order, and then
write the manifest. A data set with a manifest is complete."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypedDict

import numpy as np
import xxhash

from data_prep import layout
from data_prep.dataset.manifest import (
    BlendEntry,
    InputEntry,
    Manifest,
    QuarantineEntry,
    ShardEntry,
    read_manifest,
)
from data_prep.pipeline.begin import write_once
from data_prep.runtime.pool import run_jobs
from data_prep.runtime.progress import Progress, say
from data_prep.runtime.ranks import WorkerGroup, run_task
from data_prep.shuffle.blend import BlendOrder
from data_prep.shuffle.gather import (
    INDEX_BYTES,
    Gatherer,
    Spill,
    SpillReader,
    choose_strategy,
    open_spill,
    rows_of_run,
)
from data_prep.shuffle.order import Order
from data_prep.tokenize.plan import TokenPlan
from data_prep.tokenize.store import plain_arrays
from data_prep.tokenize.token_set import (
    are_whole,
    damaged,
    read_token_set,
    sample,
    say_sample,
)
from optimus.errors import ConfigError, DamageError, DataError, counted
from optimus.io import files
from optimus.launch.environment import usable_memory

FORM = "optimus-shard"
PROCESS_BYTES = 100 << 20
"""Bytes of memory that a process needs in addition to the memory for rows: for the interpreter,
numpy, and the tables of token arrays."""
_LEAST_BLOCK_BYTES = 4 << 20
_ROWS_HELD = 3
"""Number of copies of a row that are in memory at the same time if rows are large: the copy that is
read, the copy that is gathered, and the copy that is written."""
_SPARE_BYTES = 16 << 20
"""Bytes of PROCESS_BYTES that are free for copies of large rows."""
_GOOD_BLOCK_BYTES = 28 << 20
"""Memory for the rows of a worker, in bytes. `memory_for` includes this memory for each worker if
the machine has enough memory."""


@dataclass(frozen=True)
class ShardWork:
    """Settings with which workers write the shards of a data set."""

    dataset: Path
    order: Order | BlendOrder
    order_xxh3: str
    block_bytes: int
    """Bytes of memory of each worker for rows, their indices, and the tokens of a sequential
    read."""
    spill: Spill | None = None
    """The sorted runs from which a worker reads the rows of a shard. None: a worker reads the rows
    from the token arrays."""
    sample: frozenset[int] = frozenset()
    """Indices of the shards whose hashes are compared if an earlier run wrote the shards; see
    `token_set.sample`."""


class ShardRecord(TypedDict):
    """Content of the sidecar of a shard, a JSON file. `order` is the hash of order.json, `first` is
    the row number of the shard's first instance, and `size` is the size of the shard in bytes."""

    order: str
    first: int
    instances: int
    size: int
    xxh3: str


def shard_path(dataset: Path, shard: int) -> Path:
    """Return the path of the file of the shard `shard`."""
    return dataset / layout.SHARDS_DIR / f"{layout.shard_name(shard)}.npy"


def sidecar_path(dataset: Path, shard: int) -> Path:
    """Return the path of the sidecar of a shard. The sidecar is written when the shard is
    complete."""
    return shard_path(dataset, shard).with_suffix(".json")


def divide_memory(memory_bytes: int, workers: int, row_bytes: int = 0) -> tuple[int, int]:
    """Divide memory between the workers. If there are several workers, the parent process also
    gets memory.

    Args:
        memory_bytes: Memory of all processes together, in bytes.
        workers: The largest number of workers.
        row_bytes: Size of a row (instance) in bytes.

    Returns:
        The number of workers that can run at once, and the bytes of memory of each worker for rows.

    Raises:
        ConfigError: the memory is not enough for one worker.
    """
    least = max(_LEAST_BLOCK_BYTES, _ROWS_HELD * row_bytes - _SPARE_BYTES)
    for count in range(workers, 0, -1):
        processes = count + (count > 1)
        block = (memory_bytes - processes * PROCESS_BYTES) // count
        if block >= least:
            return count, block
    whose = f" for rows of {row_bytes / 1e6:.0f} MB" if least > _LEAST_BLOCK_BYTES else ""
    raise ConfigError(
        f"--memory {memory_bytes / 1e6:.0f}MB is too little{whose}; give "
        f"{(PROCESS_BYTES + least) / 1e6 + 1:.0f}MB or more"
    )


def memory_for(workers: int) -> int:
    """Return the default value of `--memory` for sharding, in bytes.

    The default is the memory that the workers need, but at most half of the memory of the machine
    and at least 2 GB. The default depends only on `workers` and the machine. Ranks on equal
    machines therefore divide the instances into the same sorted runs (`gather.rows_of_run`).
    """
    needed = (workers + 1) * (PROCESS_BYTES + _GOOD_BLOCK_BYTES)
    return max(2 * 10**9, min(needed, usable_memory() // 2))


def fewer_workers(step: str, memory_bytes: int, workers: int, asked: int, enough: int) -> str:
    """Return a message for a step that uses only `workers` of the `asked` workers.

    More than `workers` workers do not fit in the memory limit of `memory_bytes` bytes. All `asked`
    workers would fit in `enough` bytes.
    """
    return (
        f"{step}: uses {workers} of {counted(asked, 'worker')}, because more do not fit in "
        f"--memory {memory_bytes / 1e6:.0f}MB; --memory {enough / 1e6:.0f}MB is enough for all"
    )


def shard_all(
    dataset: Path,
    order: Order | BlendOrder,
    workers: int,
    memory_bytes: int,
    strategy: str,
    group: WorkerGroup,
) -> None:
    """Write the incomplete shards of a data set. Ranks share the work.

    Args:
        dataset: The directory of the data set.
        order: The order of the data set.
        workers: Number of worker processes of this rank, if the memory is enough.
        memory_bytes: Memory limit of this rank, in bytes.
        strategy: "auto", "gather" or "bucket".
        group: The ranks that share the work.

    Raises:
        ConfigError: the memory is not enough for one worker.
        DataError: a token array is missing or damaged.
    """
    asked = workers
    workers, block_bytes = divide_memory(memory_bytes, asked, order.row_bytes)
    if workers < asked:
        say(fewer_workers(group.label("shard"), memory_bytes, workers, asked, memory_for(asked)))
    (dataset / layout.SHARDS_DIR).mkdir(exist_ok=True)
    order_xxh3 = files.xxh3_file(dataset / layout.ORDER)
    work = ShardWork(dataset, order, order_xxh3, block_bytes)
    label = group.label("shard" if order.part == "train" else f"shard {order.part}")
    try:
        _shard_together(work, workers, strategy, group, label)
    except (
        OSError,
        DataError,
    ):  # possibly because other ranks have finished and removed files that this rank reads
        task = ShardTask(work, workers, label)
        if group.world == 1 or task.missing() or task.verify():
            raise
    _buffer.cache_clear()


def _shard_together(
    work: ShardWork, workers: int, strategy: str, group: WorkerGroup, label: str
) -> None:
    dataset, order = work.dataset, work.order
    rows = [stop - first for first, stop in map(order.shard_rows, range(order.num_shards))]
    sizes = [layout.HEADER_BYTES + count * order.row_bytes for count in rows]
    work = dataclasses.replace(work, sample=sample(sizes))
    task = ShardTask(work, workers, label)
    missing = task.missing()
    if len(missing) < len(rows) and group.rank == 0:
        say_sample(work.sample, sizes, "shard", dataset)
    run_rows = rows_of_run(order, work.block_bytes)
    if missing or task.verify():
        if group.rank == 0:
            _check_arrays(dataset, order)
        if choose_strategy(dataset, order, strategy, group, run_rows) == "bucket":
            spill = open_spill(
                dataset, order, work.order_xxh3, work.block_bytes, workers, group.label("sort")
            )
            run_task(group, spill)
            task = ShardTask(dataclasses.replace(work, spill=spill), workers, label)
    run_task(group, task)


@dataclass(frozen=True)
class ShardTask:
    """Task that writes the shards of a data set. Each work item is a shard."""

    work: ShardWork
    workers: int
    label: str

    @property
    def folder(self) -> Path:
        return self.work.dataset / layout.SHARDS_DIR

    def plan(self) -> list[int]:
        """Return the number of rows of each shard."""
        order = self.work.order
        return [stop - first for first, stop in map(order.shard_rows, range(order.num_shards))]

    def missing(self) -> list[int]:
        """Return the indices of the shards without a sidecar."""
        names = set(os.listdir(self.folder))
        shards = range(self.work.order.num_shards)
        return [shard for shard in shards if f"{layout.shard_name(shard)}.json" not in names]

    def do(self, shards: list[int]) -> None:
        """Write the shards with the indices `shards`. A complete shard in which no damage is
        detected is not written again."""
        rows = self.plan()
        with Progress(self.label, sum(rows[shard] for shard in shards), " instances") as progress:
            run_jobs(_do_shard, self.work, sorted(shards), self.workers, progress)

    def verify(self) -> list[int]:
        """Return the indices of shards that are incomplete or were written for another
        order.json."""
        incorrect, work = [], self.work
        for shard in range(work.order.num_shards):
            try:
                read_shard_record(work.dataset, work.order, work.order_xxh3, shard)
            except DataError:
                incorrect.append(shard)
        return incorrect


def _check_arrays(dataset: Path, order: Order | BlendOrder) -> None:
    """Compare the hashes of a sample of the token arrays in `order`. Raises DamageError if an array
    is damaged."""
    for source in order.sources:
        paths = plain_arrays(dataset / source.tokens_dir, range(len(source.units)))
        chosen = sample([path.stat().st_size for path in paths.values()])
        units = [unit for index, unit in enumerate(paths) if index in chosen]
        if wrong := damaged({paths[unit]: source.units[unit].xxh3 for unit in units}):
            raise DamageError(
                f"{wrong[0]}: its content is damaged (hash differs), so no shards are made from "
                f"this array; run optimus-data verify {dataset} to see how to repair the array"
            )


def read_shard_record(
    dataset: Path, order: Order | BlendOrder, order_xxh3: str, shard: int
) -> ShardRecord:
    """Read the sidecar of a shard, and check the size and header of the shard.

    Args:
        dataset: The directory of the data set.
        order: The order of the data set.
        order_xxh3: The hash of order.json.
        shard: The number of the shard.

    Raises:
        DataError: the shard or its sidecar is missing or damaged, or was written for another
            order.json.
    """
    record = layout.read_record(sidecar_path(dataset, shard), ShardRecord, FORM)
    path = shard_path(dataset, shard)
    first, stop = order.shard_rows(shard)
    if record["order"] != order_xxh3 or (record["first"], record["instances"]) != (
        first,
        stop - first,
    ):
        raise DataError(f"{sidecar_path(dataset, shard)}: was written for another {layout.ORDER}")
    if not path.exists():
        raise DataError(f"{path}: is missing")
    size = path.stat().st_size
    if size != record["size"]:
        raise DataError(f"{path}: has {size} bytes, but its sidecar (.json) lists {record['size']}")
    layout.require_header(path, layout.npy_header((stop - first, order.context), order.dtype))
    return record


def is_whole(dataset: Path, shard: int) -> bool:
    """Return True if the content of a complete shard has the hash in the shard's sidecar."""
    record = layout.read_record(sidecar_path(dataset, shard), ShardRecord, FORM)
    return are_whole({shard_path(dataset, shard): record["xxh3"]})


def _promised_hash(work: ShardWork, shard: int) -> str | None:
    """Return the hash of a shard from the sidecar or manifest that an earlier run has written.

    Return None if these files do not contain a hash for the order of `work`.
    """
    with contextlib.suppress(DataError):
        record = layout.read_record(sidecar_path(work.dataset, shard), ShardRecord, FORM)
        if record["order"] == work.order_xxh3:
            return record["xxh3"]
    with contextlib.suppress(DataError):
        manifest = read_manifest(work.dataset)
        if manifest.order_xxh3 == work.order_xxh3:
            return manifest.shards[shard].xxh3
    return None


def _do_shard(work: ShardWork, shard: int, advance: Callable[[int], None]) -> None:
    order = work.order
    first, stop = order.shard_rows(shard)
    is_complete = True
    try:
        read_shard_record(work.dataset, order, work.order_xxh3, shard)
    except DataError as error:
        is_complete = False
        if _promised_hash(work, shard) is not None:  # else the shard was never complete
            say(f"{error}; the shard is made again")
    if is_complete and (shard not in work.sample or is_whole(work.dataset, shard)):
        advance(stop - first)
        return
    path = shard_path(work.dataset, shard)
    header = layout.npy_header((stop - first, order.context), order.dtype)
    digest = xxhash.xxh3_64(header)
    source: Gatherer | SpillReader
    if work.spill is None:
        source = Gatherer(work.dataset, order, work.block_bytes // 8)
    else:
        source = SpillReader(work.spill, shard)
    with contextlib.closing(source), files.atomic_writer(path) as file:
        file.write(header)
        permutation = order.epoch_zero()
        # Rows and indices take three quarters of `block_bytes`. The rest is for the tokens of a
        # sequential read, and for the rows that are selected from these tokens.
        step = max(1, work.block_bytes * 3 // 4 // (order.row_bytes + INDEX_BYTES))
        buffer = _buffer(min(step, order.instances_per_shard), order.context, order.dtype)
        for begin in range(first, stop, step):
            instances = permutation.apply(np.arange(begin, min(begin + step, stop)))
            rows = source.rows(instances, buffer[: len(instances)])
            file.write(rows.data)
            digest.update(rows.data)
            advance(len(rows))
        size = file.tell()
        if (promised := _promised_hash(work, shard)) not in (None, digest.hexdigest()):
            raise DamageError(
                f"{path}: the new shard differs from the shard that an earlier run wrote (hash "
                f"{promised}), so a token array is damaged; run optimus-data verify "
                f"{work.dataset} to see how to repair the array"
            )
    record = {
        "format": FORM,
        "version": layout.VERSION,
        "order": work.order_xxh3,
        "first": first,
        "instances": stop - first,
        "size": size,
        "xxh3": digest.hexdigest(),
    }
    layout.write_checked_json(sidecar_path(work.dataset, shard), record)


@functools.lru_cache(maxsize=1)
def _buffer(rows: int, context: int, dtype: str) -> np.ndarray:
    """Return an uninitialized array [rows, context]. The array is cached: this process uses the
    same memory for each shard."""
    return np.empty((rows, context), layout.little_endian(dtype))


@dataclass(frozen=True)
class Source:
    """Description of a complete set of token arrays.

    `plan` is the content of plan.json. `inputs` are the entries for the input files. `records` are
    the contents of the sidecars of the units.
    """

    plan: TokenPlan
    inputs: tuple[InputEntry, ...]
    records: Sequence[Mapping[str, Any]]


def finish(dataset: Path, order: Order | BlendOrder) -> Manifest:
    """Write and return the manifest of a data set whose shards are complete.

    Raises the errors of `read_source` and `read_shard_record`.
    """
    sources = [read_source(dataset, source) for source in order.sources]
    order_xxh3 = files.xxh3_file(dataset / layout.ORDER)
    if content := _list_quarantined(sources):
        write_once(dataset / layout.SET_ASIDE, content)
    shards = []
    for number in range(order.num_shards):
        record = read_shard_record(dataset, order, order_xxh3, number)
        name = shard_path(dataset, number).relative_to(dataset).as_posix()
        shards.append(ShardEntry(name, record["instances"], record["size"], record["xxh3"]))
    manifest = make_manifest(order, order_xxh3, sources, shards)
    write_once(dataset / layout.MANIFEST, files.checked_json(manifest.to_json()))
    return manifest


def make_manifest(
    order: Order | BlendOrder,
    order_xxh3: str,
    sources: Sequence[Source],
    shards: Sequence[ShardEntry],
) -> Manifest:
    """Return the manifest of a data set.

    Args:
        order: The order of the data set.
        order_xxh3: The hash of order.json.
        sources: Description of each set of token arrays in the order.
        shards: The entries of the shards of the data set.
    """
    plan, blended, quarantined = sources[0].plan, isinstance(order, BlendOrder), QuarantineEntry(0)
    if content := _list_quarantined(sources):
        num_lines = content.count(b"\n")
        quarantined = QuarantineEntry(num_lines, len(content), files.xxh3_bytes(content))
    units = [unit for source in order.sources for unit in source.units]
    return Manifest(
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
        quarantined=quarantined,
        instances_per_shard=order.instances_per_shard,
        shards=tuple(shards),
        inputs=tuple(file for source in sources for file in source.inputs),
        blend=tuple(
            BlendEntry(s.order.tokens_dir, s.weight, s.quota, s.order.num_instances)
            for s in order.blended
        )
        if isinstance(order, BlendOrder)
        else (),
    )


def read_source(dataset: Path, order: Order, has_arrays: bool = True) -> Source:
    """Read the plan and the sidecars of an order's token arrays.

    Args:
        dataset: The directory of the data set.
        order: The order of the data set. For a blend, it is the order of a source.
        has_arrays: False: missing arrays are not an error, because `--fused` removes arrays.

    Raises:
        DataError: a file is missing or damaged, or belongs to another plan.
    """
    plan, plan_xxh3, records = read_token_set(dataset / order.tokens_dir, has_arrays)
    if plan_xxh3 != order.plan:
        raise DataError(
            f"{dataset / layout.ORDER}: belongs to other token arrays; run "
            "optimus-data shuffle again"
        )
    hashes = [xxh3 for record in records for xxh3 in record["inputs"]]
    inputs = tuple(
        InputEntry(file.name, file.size, xxh3)
        for file, xxh3 in zip(plan.inputs, hashes, strict=True)
    )
    return Source(plan, inputs, records)


def _list_quarantined(sources: Sequence[Source]) -> bytes:
    """Return the bytes to write to quarantine.jsonl: a JSON line for each document or file that was
    left out. The result is empty if nothing was left out."""
    lines = [
        json.dumps({**entry, "input": source.inputs[entry["input"]].name}) + "\n"
        for source in sources
        for record in source.records
        for entry in record["set_aside"]
    ]
    return "".join(lines).encode()
