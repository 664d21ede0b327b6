"""`optimus-data verify`: read all files of a data set, and compare the hash of each file with the
stored hash."""

from __future__ import annotations

import dataclasses
import os
import shlex
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import numpy as np
import xxhash

from data_prep import layout
from data_prep.dataset.manifest import Manifest, ShardEntry, held_out_problem, read_manifest
from data_prep.pipeline.shard import FORM as SHARD_FORM
from data_prep.pipeline.shard import ShardRecord, make_manifest, read_source
from data_prep.runtime.progress import Progress
from data_prep.shuffle.blend import BlendOrder, quota_problem, read_any_order
from data_prep.shuffle.order import Order, Unit
from data_prep.tokenize.duplicates import duplicates_files, read_duplicates, require_distinct
from data_prep.tokenize.plan import TokenPlan, is_import, read_plan
from data_prep.tokenize.store import (
    array_path,
    check_array,
    docs_path,
    has_any_array,
    ids_path,
    problem_of_rows,
    read_docs,
    sidecar_path,
    unit_files,
)
from data_prep.tokenize.token_set import MARK, read_unit, removed
from data_prep.tokenizer.tokenizer import read_facts
from optimus.errors import DataError, counted, one_line
from optimus.io import files

_READ_BYTES = 4 << 20


def verify(dataset: Path) -> Iterator[str]:
    """Check a data set and its held-out split.

    Yields:
        A line for each problem. The line contains the file, the problem, and the commands that
        repair the file. A repaired file has the same bytes as before the damage
        (tests/data_prep/test_repair.py).
    """
    manifest, problem = None, ""
    try:
        manifest = read_manifest(dataset)
    except DataError as error:
        problem = str(error)
    try:
        order = read_any_order(dataset)
    except DataError as error:
        known = any((dataset / name).exists() for name in (layout.ORDER, layout.MANIFEST))
        yield f"{error}; {Repairs(dataset).of_order()}" if known else problem
        return
    repairs = Repairs(dataset, order)
    if manifest is None:
        yield f"{problem}; {repairs.of_shards(dataset / layout.MANIFEST)}"
        return
    for line in _check_manifest(dataset, manifest, order):
        yield f"{line}; {repairs.of_shards(dataset / layout.MANIFEST)}"
    yield from _check_small_files(dataset, manifest, repairs)
    if isinstance(order, BlendOrder) and (problem := quota_problem(order)):
        yield f"{dataset / layout.ORDER}: {problem}; {repairs.of_order()}"
    for source in order.sources:
        yield from _check_tokens(dataset, source, repairs)
    with Progress(f"verify {dataset}", sum(shard.size for shard in manifest.shards), "B") as bar:
        for number, shard in enumerate(manifest.shards):
            path, first = dataset / shard.name, number * manifest.instances_per_shard
            damaged = list(_check_shard(dataset, manifest, shard))
            if line := _check_sidecar(path.with_suffix(".json"), manifest, shard, first):
                yield f"{line}; {repairs.of_shards(path.with_suffix('.json'))}"
            for line in damaged:
                yield f"{line}; {repairs.of_shards(path, path.with_suffix('.json'))}"
            bar.advance(shard.size)
    if manifest.part == layout.SPLITS[0] and manifest.eval_fraction > 0:
        held_out = dataset / layout.EVAL_DIR
        try:
            problem = held_out_problem(manifest, dataset, read_manifest(held_out))
            held_out_order = read_any_order(held_out)
            plans = [o.plan for o in (order, held_out_order) if isinstance(o, Order)]
            if not problem and len({*plans}) > 1:
                path = held_out / layout.ORDER
                problem = f"{path}: has another plan than the training split in {dataset}"
        except DataError:
            problem = ""  # the check of the held-out split reports the problem
        if problem:
            remove = shlex.join(["rm", "-r", os.path.normpath(held_out)])
            yield f"{problem}; repair: {remove}; then {_again(_makers(dataset), dataset)}"
            return
        yield from verify(held_out)


class Repairs:
    """Builder of texts with shell commands that repair damaged files of a data set. A repaired file
    has the same bytes as before the damage."""

    def __init__(self, dataset: Path, order: Order | BlendOrder | None = None):
        self._dataset, self._order = dataset, order
        # The value of --out of the command that made the data set. A held-out split is in a folder
        # of this directory.
        self._out = Path(os.path.normpath(dataset))
        above = self._out.parent
        whole = any((above / name).exists() for name in (layout.TOKENS_DIR, layout.ORDER))
        if self._out.name == layout.EVAL_DIR and whole:
            self._out = above

    def of_shards(self, *paths: Path) -> str:
        """Return commands that repair files of `optimus-data shard`: shards and their sidecars,
        manifest.json and quarantine.jsonl."""
        assert self._order is not None
        has_tokens = any(map(self._is_inside, self._order.sources))
        if has_tokens and _is_fused(self._dataset / layout.TOKENS_DIR):
            return _repair(paths, self._again("run --fused"))
        return _repair(paths, shlex.join(["optimus-data", "shard", str(self._out)]))

    def of_order(self) -> str:
        """Return commands that repair order.json."""
        tokens_dir = self._dataset / layout.TOKENS_DIR
        makers = "run or shuffle" if tokens_dir.is_dir() else "shuffle --to or blend"
        makers = "run --fused" if _is_fused(tokens_dir) else makers
        return _repair([self._dataset / layout.ORDER], self._again(makers))

    def of_tokenizer(self, path: Path) -> str:
        """Return commands that repair the copy of the tokenizer."""
        if isinstance(self._order, BlendOrder):
            return _repair([path], self._again("blend"))
        foreign = self._order is not None and not self._is_inside(self._order)
        return _repair([path], self._again("shuffle" if foreign else _makers(self._dataset)))

    def of_tokens(self, source: Order, *paths: Path) -> str:
        """Return commands that repair files in the folder of token arrays of `source`.

        The commands do not remove files outside the data set, because a damaged order.json could
        name any folder of the user.
        """
        if not self._is_inside(source):
            out = str((self._dataset / source.tokens_dir).parent)
            command = shlex.join(["optimus-data", "verify", out])
            return f"repair: {command}, or the same command that made these token arrays"
        folders = [self._out / name / layout.TOKENS_DIR for name in ("", layout.EVAL_DIR)]
        marks = [folder / MARK for folder in folders if (folder / MARK).exists()]
        return _repair([*paths, *marks], self._again(_makers(self._dataset)))

    def _again(self, makers: str) -> str:
        return _again(makers, self._out)

    def _is_inside(self, source: Order | BlendOrder) -> bool:
        """Return True if the token arrays of `source` are in the folder `tokens` of the data set
        and this folder is not a symbolic link."""
        if not isinstance(source, Order) or source.tokens_dir != layout.TOKENS_DIR:
            return False
        return not (self._dataset / layout.TOKENS_DIR).is_symlink()


def _makers(dataset: Path) -> str:
    """Return the names of the commands that may have made a data set's token arrays."""
    if _is_fused(dataset / layout.TOKENS_DIR):
        return "run --fused"
    try:
        imported = is_import(read_plan(dataset / layout.TOKENS_DIR).text_field)
    except DataError:
        return "run, tokenize or import"
    return "import" if imported else "run or tokenize"


def _is_fused(tokens_dir: Path) -> bool:
    """Return True if `--fused` has removed some or all token arrays from the folder `tokens_dir`.
    The folder then contains the mark file of `--fused`, or contains no arrays."""
    if not tokens_dir.is_dir():
        return False
    return (tokens_dir / MARK).exists() or not has_any_array(tokens_dir)


def _again(makers: str, out: Path) -> str:
    return f"the same optimus-data {makers} command that made {out}"


def _repair(paths: Iterable[Path], command: str) -> str:
    names = dict.fromkeys(os.path.normpath(path) for path in paths)
    return f"repair: {shlex.join(['rm', '-f', *names])}; then {command}"


def _check_manifest(dataset: Path, manifest: Manifest, order: Order | BlendOrder) -> Iterator[str]:
    """Compare the manifest with order.json, and with the plans and sidecars of the token arrays.

    Yields:
        A line for each difference. Damage of the token arrays, their plans and their sidecars is
        not reported, because `_check_tokens` reports it.
    """
    path = dataset / layout.MANIFEST
    order_xxh3 = files.xxh3_file(dataset / layout.ORDER)
    if manifest.order_xxh3 != order_xxh3:
        yield f"{dataset / layout.ORDER}: its hash differs from the hash in {path}"
        return
    sources = []
    try:
        for source in order.sources:
            tokens_dir = dataset / source.tokens_dir
            read_plan(tokens_dir, source.plan)  # first, because order.json may name a wrong folder
            sources.append(read_source(dataset, source, not removed(tokens_dir)))
    except DataError:
        return  # _check_tokens reports the damage
    expected = make_manifest(order, order_xxh3, sources, manifest.shards)
    for field in dataclasses.fields(Manifest):
        value, right = getattr(manifest, field.name), getattr(expected, field.name)
        if value != right:
            name = f"{path}: {field.name}"
            if isinstance(right, (str, int, float)):
                yield f"{name} = {one_line(value)}, but order and tokens give {one_line(right)}"
            else:
                yield f"{name} differs from the value that order and tokens give"


def _check_small_files(dataset: Path, manifest: Manifest, repairs: Repairs) -> Iterator[str]:
    path = layout.tokenizer_file(dataset)
    problem = None
    try:
        facts = read_facts(path, manifest.eos_token)
    except DataError as error:
        problem = str(error)
    else:
        if facts.sha256 != manifest.tokenizer_sha256:
            problem = f"{path}: is not the tokenizer that made this data set (its SHA-256 differs)"
    if problem:
        yield f"{problem}; {repairs.of_tokenizer(path)}"
    aside, path = manifest.quarantined, dataset / layout.SET_ASIDE
    if aside.count:
        for line in _check_file(path, aside.size, aside.xxh3):
            yield f"{line}; {repairs.of_shards(path)}"
    elif path.exists():
        yield f"{path}: {layout.MANIFEST} does not list this file; remove the file"


def _check_file(path: Path, size: int, xxh3: str) -> Iterator[str]:
    try:
        actual = os.path.getsize(path)
        if actual != size:
            yield f"{path}: has {actual} bytes instead of {size}"
        elif files.xxh3_file(path) != xxh3:
            yield f"{path}: its content is damaged (hash differs)"
    except OSError as error:
        yield f"{path}: cannot be read: {error.strerror}"


def _check_tokens(dataset: Path, order: Order, repairs: Repairs) -> Iterator[str]:
    tokens_dir = dataset / order.tokens_dir
    path = tokens_dir / layout.PLAN
    try:
        plan = read_plan(tokens_dir, order.plan)
    except DataError as error:
        yield f"{error}; {repairs.of_tokens(order, path)}"
        return
    if len(plan.units) != len(order.units):
        line = f"{dataset / layout.ORDER}: has another number of units than {path}"
        yield f"{line}; {repairs.of_order()}"
        return
    if plan.id_field and order.part == layout.SPLITS[0]:
        try:
            read_duplicates(tokens_dir, plan, order.plan)
            require_distinct(tokens_dir)
        except DataError as error:
            yield f"{error}; {repairs.of_tokens(order, *duplicates_files(tokens_dir))}"
    for number in range(len(order.units)):
        for line in _check_unit(tokens_dir, number, order, plan):
            yield f"{line}; {repairs.of_tokens(order, *unit_files(tokens_dir, number))}"


def _check_unit(tokens_dir: Path, number: int, order: Order, plan: TokenPlan) -> Iterator[str]:
    unit = order.units[number]
    paths = [array_path(tokens_dir, number, packed) for packed in (False, True)]
    has_array = not removed(tokens_dir) or any(path.exists() for path in paths)
    try:
        record = read_unit(tokens_dir, number, order.plan, has_array)
    except DataError as error:
        yield str(error)
        return
    expected = {"part": order.part, "tokens": unit.tokens, "documents": unit.documents}
    for key, value in expected.items():
        if record.get(key) != value:
            path = sidecar_path(tokens_dir, number)
            yield f"{path}: {key} = {record.get(key)}, but {layout.ORDER} says {value}"
    array = array_path(tokens_dir, number)
    if (record["array"]["xxh3"], record["docs"]["xxh3"]) != (unit.xxh3, unit.docs_xxh3):
        yield f"{array}: the hashes in its sidecar differ from the hashes in {layout.ORDER}"
    itemsize = layout.little_endian(plan.dtype).itemsize
    if record["array"]["size"] != layout.HEADER_BYTES + unit.tokens * itemsize:
        size = counted(record["array"]["size"], "byte")
        yield f"{array}: {size} is not the size of an array of {counted(unit.tokens, 'token')}"
    ends = None
    try:
        table = read_docs(tokens_dir, number, unit.docs_xxh3)
        if problem := _problem_of_docs(table, unit, range(*plan.units[number])):
            yield f"{docs_path(tokens_dir, number)}: {problem}"
        ends = table[:, 0]
    except DataError as error:
        yield str(error)
    if has_array:
        try:
            num_bytes, facts = record["array"]["size"], plan.tokenizer
            check_array(
                *(tokens_dir, number, plan.dtype, num_bytes, unit.xxh3),
                *(facts.vocab_size, facts.eos_id, ends),
            )
        except DataError as error:
            yield str(error)
    if ids := record.get("ids"):
        yield from _check_file(ids_path(tokens_dir, number), ids["size"], ids["xxh3"])


def _problem_of_docs(table: np.ndarray, unit: Unit, inputs: range) -> str:
    """Check that a table of documents, int64 [D, 3], has the counts in `unit`, and that each row
    has an input number in `inputs`.

    Return a description of the first problem, or "" if there is none.
    """
    tokens = int(table[-1, 0]) if len(table) else 0
    if (len(table), tokens) != (unit.documents, unit.tokens):
        actual = f"{counted(len(table), 'document')} with {counted(tokens, 'token')}"
        expected = f"{counted(unit.documents, 'document')} with {counted(unit.tokens, 'token')}"
        return f"has {actual} instead of {expected}"
    return problem_of_rows(table, inputs)


def _check_sidecar(path: Path, manifest: Manifest, shard: ShardEntry, first: int) -> str:
    """Compare the sidecar of a shard with the manifest. Return a description of the differences, or
    "" if there are none.

    `first` is the number of the shard's first instance.
    """
    try:
        record: Mapping[str, object] = layout.read_record(path, ShardRecord, SHARD_FORM)
    except DataError as error:
        return str(error)
    expected = {
        "order": manifest.order_xxh3,
        "first": first,
        "instances": shard.instances,
        "size": shard.size,
        "xxh3": shard.xxh3,
    }
    different = [key for key in expected if record[key] != expected[key]]
    values = (f"{key} is {record[key]} instead of {expected[key]}" for key in different)
    return f"{path}: {one_line(', '.join(values))}" if different else ""


def _check_shard(dataset: Path, manifest: Manifest, shard: ShardEntry) -> Iterator[str]:
    """Compare a shard with the manifest. Yield a line that describes the first problem, if any."""
    path = dataset / shard.name
    header = layout.npy_header((shard.instances, manifest.context), manifest.dtype)
    dtype = layout.little_endian(manifest.dtype)
    try:
        size = path.stat().st_size
        if size != shard.size:
            yield f"{path}: has {size} bytes instead of {shard.size}"
            return
        largest, xxh3, actual_header = _scan(path, dtype)
    except (OSError, DataError) as error:
        yield str(error) if isinstance(error, DataError) else f"{path}: {error.strerror}"
        return
    if xxh3 != shard.xxh3:
        yield f"{path}: its content is damaged (hash differs)"
    elif actual_header != header:
        shape = [shard.instances, manifest.context]
        yield f"{path}: its header does not describe an array {manifest.dtype} {shape}"
    elif largest >= manifest.vocab_size:
        yield f"{path}: contains id {largest}, outside the vocabulary of {manifest.vocab_size}"


def _scan(path: Path, dtype: np.dtype) -> tuple[int, str, bytes]:
    """Return the largest id, the hash (hexadecimal) and the header of a shard."""
    largest = -1
    with files.open_regular(path) as file:
        header = file.read(layout.HEADER_BYTES)
        digest = xxhash.xxh3_64(header)
        while block := file.read(_READ_BYTES):
            digest.update(block)
            largest = max(largest, int(np.frombuffer(block, dtype).max()))
    return largest, digest.hexdigest(), header
