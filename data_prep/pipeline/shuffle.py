"""The second step of `optimus-data run`: write the order.json of a data set or of a blend, or check
an existing order.json."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from data_prep import layout
from data_prep.dataset.manifest import check_held_out, held_out_rule, read_manifest
from data_prep.pipeline.begin import check_tokenizer, copy_tokenizer, require_tokens
from data_prep.runtime.ranks import ALONE, WorkerGroup, failure_scope, wait_for
from data_prep.runtime.workspace import working_in
from data_prep.shuffle.blend import BlendOrder, make_blend, mixing_of, parse_weight, read_any_order
from data_prep.shuffle.order import Order, make_order, read_order, rows_of_shard
from data_prep.tokenize.plan import read_plan
from data_prep.tokenize.token_set import split_of
from optimus.errors import ConfigError, DataError, counted
from optimus.io import files


@dataclass(frozen=True)
class ShuffleRequest:
    """The parameters of `shuffle`, `blend` and `run` that determine the division of tokens into
    instances and of instances into shards."""

    context: int
    """Tokens of an instance."""
    seed: int = 0
    carry_tails: bool = False
    """True: an instance can continue in the next token array. False: the tokens after the last
    complete instance of a token array, called the tail of the array, are in no instance."""
    shard_bytes: int = 0
    """Maximum size of a shard in bytes. 0: the default of `order.rows_of_shard`."""


def data_sets(out: Path) -> list[Path]:
    """Return a list with the directory of the training split. If there is a held-out split, its
    directory is the second element of the list."""
    held_out = out / layout.EVAL_DIR
    return [out, held_out] if (held_out / layout.TOKENS_DIR / layout.PLAN).exists() else [out]


def shuffle(
    source: Path, target: Path, request: ShuffleRequest, group: WorkerGroup = ALONE
) -> list[Order]:
    """Write an order.json for the token arrays of each split. Rank 0 does this for all ranks.

    For the held-out split, `carry_tails` is always True, so that an instance can continue in the
    next token array. A token array of this split has few documents. Without `carry_tails`, most
    tokens of such an array could be in its tail, and thus in no instance.

    Args:
        source: The directory that contains the token arrays.
        target: The directory of the data set, to which order.json is written. `target` can be equal
            to `source`.
        request: The parameters of instances and shards.
        group: The ranks that share the work.

    Returns:
        The order of each split, the training split first.

    Raises:
        DataError: the training split has no instance, or `target` has another order.
    """
    if not (source / layout.TOKENS_DIR / layout.PLAN).exists():
        raise DataError(f"{source} has no token arrays; give the output of tokenize, run or import")
    with working_in(target, group.rank), failure_scope(group, target) as group:
        pairs = [(split, target / split.relative_to(source)) for split in data_sets(source)]
        for split, _ in pairs:
            require_tokens(split / layout.TOKENS_DIR)

        def done() -> bool:
            try:
                return all(
                    read_order(dataset).plan
                    == files.xxh3_file(split / layout.TOKENS_DIR / layout.PLAN)
                    for split, dataset in pairs
                )
            except (DataError, OSError):  # a data set has no order yet
                return False

        def do() -> None:
            orders = [_order_of(*pair, request, held_out=pair[0] != source) for pair in pairs]
            for (split, dataset), order in zip(pairs, orders, strict=True):  # before any write
                check_order(dataset, order, layout.tokenizer_file(split))
            for (split, dataset), order in zip(pairs, orders, strict=True):
                write_order(dataset, order, layout.tokenizer_file(split))

        wait_for(group, done, do)
        return [
            read_requested_order(dataset, request, held_out=split != source)
            for split, dataset in pairs
        ]


def _order_of(split: Path, dataset: Path, request: ShuffleRequest, held_out: bool) -> Order:
    order = make_order(
        split / layout.TOKENS_DIR,
        dataset,
        request.context,
        request.seed,
        carry_tails=request.carry_tails or held_out,
        shard_bytes=request.shard_bytes,
    )
    if order.num_instances == 0 and not held_out:
        tokens = sum(unit.tokens for unit in order.units)
        raise DataError(
            f"{split}: {counted(tokens, 'token')} in {counted(len(order.units), 'array')} "
            f"make no instance of {request.context} tokens; give more text, "
            + ("or " if request.carry_tails else "--carry-tails or ")
            + "a smaller --context"
        )
    return order


def read_requested_order(dataset: Path, request: ShuffleRequest, held_out: bool) -> Order:
    """Read the order that rank 0 has written, and check that it has the parameters of `request`.

    The check detects ranks that were started with different parameters.

    Args:
        dataset: The directory of the data set.
        request: The parameters of instances and shards.
        held_out: True: the data set is the held-out split, for which carry_tails is always True.

    Raises:
        DataError: the order is missing or was made for another request.
    """
    order = read_order(dataset)
    _check_request(dataset, order, request, request.carry_tails or held_out)
    return order


def _check_request(
    dataset: Path,
    order: Order | BlendOrder,
    request: ShuffleRequest,
    carry_tails: bool,
    **more: Any,
) -> None:
    """Raise DataError if an attribute of `order` does not have its expected value. Expected are the
    values of `request`, `carry_tails`, and the values of `more`, which maps names of further
    attributes to values."""
    length = rows_of_shard(order.num_instances, order.row_bytes, request.shard_bytes)
    values = {"context": request.context, "seed": request.seed, "carry_tails": carry_tails, **more}
    for key, now in {**values, "instances_per_shard": length}.items():
        if getattr(order, key) != now:
            raise DataError(_another_order(dataset, key, getattr(order, key), now, order))


def _another_order(
    dataset: Path, key: str, then: object, now: object, order: Order | BlendOrder
) -> str:
    if isinstance(order, BlendOrder):
        return f"{dataset} is a blend with {key} = {then}, now {now}; choose another --out"
    return (
        f"{dataset} was shuffled with {key} = {then}, now {now}; to write another order of the "
        "same tokens to another directory, use optimus-data shuffle OUT --to NEW"
    )


def check_order(dataset: Path, order: Order | BlendOrder, tokenizer: Path) -> None:
    """Check that `order` and a copy of `tokenizer` can be written to `dataset`. Does not write
    files.

    Raises DataError if `dataset` has a different order.json. If `dataset` has no order.json, raises
    DataError if `dataset` has a different tokenizer, or has token arrays that `order` does not use.
    """
    path = dataset / layout.ORDER
    if not path.exists():
        plan = dataset / layout.TOKENS_DIR / layout.PLAN
        folders = [source.tokens_dir for source in order.sources]
        if plan.exists() and layout.TOKENS_DIR not in folders:
            raise DataError(f"{dataset} already contains token arrays; choose another output")
        check_tokenizer(tokenizer, dataset)
        return
    then = read_any_order(dataset)
    old, new = then.to_json(), order.to_json()
    if old["format"] != new["format"]:
        kind = "a blend" if isinstance(then, BlendOrder) else "another data set, no blend"
        raise DataError(f"{dataset} already contains {kind}; choose another output")
    for key, value in old.items():
        if value == new.get(key):
            continue
        if key in ("part", "plan", "tokens_dir"):
            raise DataError(f"{dataset} was made of other token arrays; choose another output")
        if key == "units":
            raise DataError(
                f"{path}: the token arrays have changed since they were shuffled; remove this file "
                "and run the same command again"
            )
        if key == "blended":
            raise DataError(
                f"{dataset} already contains another blend: its sources, their weights or the "
                "number of instances differ; choose another --out"
            )
        raise DataError(_another_order(dataset, key, value, new.get(key), then))


def write_order(dataset: Path, order: Order | BlendOrder, tokenizer: Path) -> None:
    """Copy the tokenizer to the data set, and write `order` to order.json if this file does not
    exist. The caller must have called `check_order`."""
    dataset.mkdir(exist_ok=True)
    if not (dataset / layout.ORDER).exists():
        content = files.checked_json(order.to_json())
        with contextlib.suppress(DataError):  # the manifest is missing or cannot be read
            # Remove the manifest of another order, because this manifest lists other shards.
            if read_manifest(dataset).order_xxh3 != files.xxh3_bytes(content):
                (dataset / layout.MANIFEST).unlink()
        files.write_bytes(dataset / layout.ORDER, content)
    copy_tokenizer(tokenizer, dataset)


def blend(
    sources: Sequence[str], out: Path, ask: ShuffleRequest, instances: int, group: WorkerGroup
) -> BlendOrder:
    """Write the order.json of a blend, unless an equal order.json exists. Return the order.

    Rank 0 writes the file for all ranks.

    Args:
        sources: `DIR=WEIGHT` of each source. DIR contains token arrays.
        out: The directory of the data set, to which order.json is written.
        ask: The parameters of instances and shards.
        instances: The number of instances. 0: the largest number without repeated instances.
        group: The ranks that share the work.

    Raises:
        ConfigError: a source or weight is malformed.
        DataError: the sources have different tokenizers or held-out rules, or `out` has another
            order.
    """
    folders, weights = _parse(sources, out)
    plans = _check_together(folders)

    def made() -> BlendOrder | None:
        try:
            order = read_any_order(out)
        except DataError:
            return None
        if isinstance(order, BlendOrder) and [s.plan for s in order.sources] == plans:
            return order
        return None

    with working_in(out, group.rank), failure_scope(group, out) as group:
        wait_for(
            group,
            lambda: made() is not None,
            lambda: _write(out, folders, weights, ask, instances),
        )
        order = made()
        assert order is not None
        available = [source.num_instances for source in order.sources]
        most = mixing_of(weights).before_repeating(available)
        more = {"weights": weights, "num_instances": instances or most}
        # Rank 0 may have been started with another request.
        _check_request(out, order, ask, ask.carry_tails, **more)
        return order


def _parse(sources: Sequence[str], out: Path) -> tuple[list[Path], list[str]]:
    folders, weights = [], []
    for text in sources:
        name, sign, weight = text.rpartition("=")
        if not sign or not name:
            raise ConfigError(
                f"--source {text!r} does not have the form DIR=WEIGHT; give a directory and its "
                "weight, for example data/code=0.3"
            )
        parse_weight(weight)
        folders.append(Path(name))
        weights.append(weight)
    real = [folder.resolve() for folder in folders]
    for folder, path in zip(folders, real, strict=True):
        if real.count(path) > 1:
            raise ConfigError(f"--source {folder} is named twice; give it one weight")
        if path == out.resolve():
            raise ConfigError(f"--out {out} is a source of the blend; choose another --out")
    return folders, weights


def _check_together(folders: Sequence[Path]) -> list[str]:
    """Check that the sources can be blended, and return the hash of the plan of each source.

    Raises DataError if the sources have different tokenizers or held-out rules, or if a source is a
    held-out split. These checks ensure that no source contains a held-out document of another
    source.
    """
    plans = []
    first = None
    for folder in folders:
        tokens_dir = folder / layout.TOKENS_DIR
        require_tokens(tokens_dir)
        plan = read_plan(tokens_dir)
        if split_of(tokens_dir) != layout.SPLITS[0]:
            raise DataError(
                f"--source {folder} is a held-out split, which must not be used for training; give "
                f"the training split, {folder.parent}"
            )
        first = first or plan
        if plan.tokenizer != first.tokenizer:
            raise DataError(
                f"{folder} was made with another tokenizer or --eos than {folders[0]}; make both "
                "sources with the same --tokenizer and --eos"
            )
        check_held_out(folders[0], held_out_rule(first), folder, held_out_rule(plan))
        plans.append(files.xxh3_file(tokens_dir / layout.PLAN))
    return plans


def _write(
    out: Path, folders: Sequence[Path], weights: list[str], ask: ShuffleRequest, instances: int
) -> None:
    orders = [
        make_order(
            folder / layout.TOKENS_DIR,
            out,
            ask.context,
            ask.seed,
            carry_tails=ask.carry_tails,
            shard_bytes=1,  # not used: `make_blend` computes the length of shards
        )
        for folder in folders
    ]
    order = make_blend(orders, weights, ask.seed, instances, ask.shard_bytes)
    tokenizer = layout.tokenizer_file(folders[0])
    if not (out / layout.ORDER).exists():  # else some shards of the blend may be on the disk
        _check_disk(out, order)
    check_order(out, order, tokenizer)
    write_order(out, order, tokenizer)


def _check_disk(out: Path, order: BlendOrder) -> None:
    """Raise ConfigError if the disk does not have enough free space for a blend."""
    needs, free = order.num_instances * order.row_bytes, shutil.disk_usage(out).free
    if needs > free:
        fit = free // order.row_bytes  # 0 is not suggested: --instances 0 selects the largest blend
        raise ConfigError(
            f"{counted(order.num_instances, 'instance')} of {order.context} tokens take "
            f"{needs / 1e9:,.1f} GB, and "
            f"the disk of {out} has {free / 1e9:,.1f} GB of free space; give "
            + (f"--instances {fit} or fewer, or another --out" if fit else "another --out")
        )
