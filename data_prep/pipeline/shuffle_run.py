"""The second step: the order of a data set is written, or found to be the one asked for."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from data_prep import layout
from data_prep.dataset.manifest import read_manifest
from data_prep.pipeline.begin import check_tokenizer, copy_tokenizer
from data_prep.runtime.ranks import ALONE, Team, together, wait_for
from data_prep.runtime.workspace import working_in
from data_prep.shuffle.blend import BlendOrder, read_any_order
from data_prep.shuffle.shuffle import Order, make_order, read_order, rows_of_shard
from data_prep.tokenize.duplicates import require_compared
from data_prep.tokenize.fused import require_arrays
from optimus.errors import DataError, counted
from optimus.io import files


@dataclass(frozen=True)
class ShuffleRequest:
    """What `shuffle`, `blend` and `run` are asked for."""

    context: int
    seed: int = 0
    carry_tails: bool = False
    shard_bytes: int = 0


def data_sets(out: Path) -> list[Path]:
    """The training set in `out` and its held-out set, where token arrays of it exist."""
    held_out = out / layout.EVAL_DIR
    return [out, held_out] if (held_out / layout.TOKENS_DIR / layout.PLAN).exists() else [out]


def shuffle(source: Path, target: Path, request: ShuffleRequest, team: Team = ALONE) -> list[Order]:
    """Write the order of both parts of `source`'s token arrays into data sets in `target`.

    Held-out tails are always carried: few documents are spread over all units. Rank 0 does it for
    all. Raises DataError where the training part has no instance, or `target` already has another
    order.
    """
    if not (source / layout.TOKENS_DIR / layout.PLAN).exists():
        raise DataError(f"{source} has no token arrays; give what tokenize, run or import wrote")
    with working_in(target, team.rank), together(team, target) as team:
        parts = [(part, target / part.relative_to(source)) for part in data_sets(source)]
        for part, _ in parts:
            require_arrays(part / layout.TOKENS_DIR)
            require_compared(part / layout.TOKENS_DIR)

        def done() -> bool:
            return all(_follows(place, part / layout.TOKENS_DIR) for part, place in parts)

        def do() -> None:
            orders = [_order_of(*pair, request, held_out=pair[0] != source) for pair in parts]
            for (part, place), order in zip(parts, orders, strict=True):  # before any write
                check_order(place, order, layout.tokenizer_file(part))
            for (part, place), order in zip(parts, orders, strict=True):
                write_order(place, order, layout.tokenizer_file(part))

        wait_for(team, done, do)
        return [as_asked(place, request, held_out=part != source) for part, place in parts]


def _order_of(part: Path, place: Path, request: ShuffleRequest, held_out: bool) -> Order:
    order = make_order(
        part / layout.TOKENS_DIR,
        place,
        request.context,
        request.seed,
        carry_tails=request.carry_tails or held_out,
        shard_bytes=request.shard_bytes,
    )
    if order.num_instances == 0 and not held_out:
        tokens = sum(unit.tokens for unit in order.units)
        raise DataError(
            f"{part}: {counted(tokens, 'token')} in {counted(len(order.units), 'array')} "
            "make no instance of "
            f"{request.context}; give more text, a smaller --context"
            + ("" if request.carry_tails else " or --carry-tails")
        )
    return order


def _follows(place: Path, tokens_dir: Path) -> bool:
    """Whether `place` has an order of these token arrays."""
    try:
        return read_order(place).plan == files.xxh3_file(tokens_dir / layout.PLAN)
    except (DataError, OSError):
        return False


def as_asked(place: Path, request: ShuffleRequest, held_out: bool) -> Order:
    """The order in `place`, if it is the one that was asked for: other ranks may ask for another.

    Raises DataError.
    """
    order = read_order(place)
    require_as_asked(place, order, request, request.carry_tails or held_out)
    return order


def require_as_asked(
    place: Path, order: Order | BlendOrder, request: ShuffleRequest, carry_tails: bool, **more: Any
) -> None:
    """Raises DataError where an order is not of this request, or has other values than `more`."""
    length = rows_of_shard(order.num_instances, order.row_bytes, request.shard_bytes)
    asked = {"context": request.context, "seed": request.seed, "carry_tails": carry_tails, **more}
    for key, now in {**asked, "instances_per_shard": length}.items():
        if getattr(order, key) != now:
            raise DataError(_another_order(place, key, getattr(order, key), now, order))


def _another_order(
    place: Path, key: str, then: object, now: object, order: Order | BlendOrder
) -> str:
    if isinstance(order, BlendOrder):
        return f"{place} is a blend with {key} = {then}, now {now}; choose another --out"
    return (
        f"{place} was shuffled with {key} = {then}, now {now}; another order of the same tokens "
        "goes elsewhere: optimus-data shuffle OUT --to NEW"
    )


def check_order(dataset: Path, order: Order | BlendOrder, tokenizer: Path) -> None:
    """Raises DataError where `dataset` holds other work than this order. Touches nothing."""
    path = dataset / layout.ORDER
    if not path.exists():
        own = dataset / layout.TOKENS_DIR / layout.PLAN
        if own.exists() and layout.TOKENS_DIR not in [one.tokens_dir for one in order.sources]:
            raise DataError(f"{dataset} has token arrays of its own; choose another output")
        check_tokenizer(tokenizer, dataset)
        return
    then = read_any_order(dataset)
    old, new = then.to_json(), order.to_json()
    if old["format"] != new["format"]:
        held = "a blend" if isinstance(then, BlendOrder) else "another data set, no blend"
        raise DataError(f"{dataset} holds {held}; choose another output")
    for key, value in old.items():
        if value == new.get(key):
            continue
        if key in ("part", "plan", "tokens_dir"):
            raise DataError(f"{dataset} was made of other token arrays; choose another output")
        if key == "units":
            raise DataError(f"{path}: the token arrays are not those that were shuffled; remove it")
        if key == "blended":
            raise DataError(
                f"{dataset} is a blend of other sources or shares; choose another --out"
            )
        raise DataError(_another_order(dataset, key, value, new.get(key), then))


def write_order(dataset: Path, order: Order | BlendOrder, tokenizer: Path) -> None:
    """Write an order that `check_order` allows, and a copy of the tokenizer beside it."""
    dataset.mkdir(exist_ok=True)
    if not (dataset / layout.ORDER).exists():
        content = files.checked_json(order.to_json())
        _remove_manifest_of_another(dataset, files.xxh3_bytes(content))
        files.write_bytes(dataset / layout.ORDER, content)
    copy_tokenizer(tokenizer, dataset)


def _remove_manifest_of_another(dataset: Path, order_xxh3: str) -> None:
    """Where an order was removed: else a reader would take shards of both for a whole data set."""
    try:
        if read_manifest(dataset).order_xxh3 != order_xxh3:
            (dataset / layout.MANIFEST).unlink()
    except DataError:  # there is none, or nobody can read it
        return
