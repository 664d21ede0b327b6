"""The second step: write the order of a data set or of a blend, or check an existing one."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from data_prep import layout
from data_prep.dataset.manifest import check_held_out, held_out_rule, read_manifest
from data_prep.pipeline.begin import check_tokenizer, copy_tokenizer, require_tokens
from data_prep.runtime.ranks import ALONE, Team, together, wait_for
from data_prep.runtime.workspace import working_in
from data_prep.shuffle.blend import BlendOrder, make_blend, mixing_of, parse_weight, read_any_order
from data_prep.shuffle.order import Order, make_order, read_order, rows_of_shard
from data_prep.tokenize.plan import PARTS, read_plan
from data_prep.tokenize.token_set import split_of
from optimus.errors import ConfigError, DataError, counted
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
            require_tokens(part / layout.TOKENS_DIR)

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


def blend(
    sources: Sequence[str], out: Path, ask: ShuffleRequest, instances: int, team: Team
) -> BlendOrder:
    """Write the order of a blend into `out`, or find it there. Rank 0 does it for all.

    `sources` are `DIR=WEIGHT`, DIR with token arrays of `tokenize` or `run`; `instances` in all, 0:
    the most that repeats none. Raises ConfigError for bad sources and weights, DataError for
    sources that cannot go together.
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

    def write() -> None:
        _write(out, folders, weights, ask, instances)

    with working_in(out, team.rank), together(team, out) as team:
        wait_for(team, lambda: made() is not None, write)
        order = made()
        assert order is not None
        most = mixing_of(weights).before_repeating([one.num_instances for one in order.sources])
        more = {"weights": weights, "num_instances": instances or most}
        # Other ranks may ask for another blend.
        require_as_asked(out, order, ask, ask.carry_tails, **more)
        return order


def _parse(sources: Sequence[str], out: Path) -> tuple[list[Path], list[str]]:
    folders, weights = [], []
    for text in sources:
        name, sign, weight = text.rpartition("=")
        if not sign or not name:
            raise ConfigError(f"--source {text!r} is not DIR=WEIGHT, such as data/code=0.3")
        parse_weight(weight)
        folders.append(Path(name))
        weights.append(weight)
    real = [folder.resolve() for folder in folders]
    for folder, place in zip(folders, real, strict=True):
        if real.count(place) > 1:
            raise ConfigError(f"--source {folder} is named twice; give it one weight")
        if place == out.resolve():
            raise ConfigError(f"--out {out} is a source of the blend; choose another")
    return folders, weights


def _check_together(folders: Sequence[Path]) -> list[str]:
    """The hash of each source's plan.

    Raises DataError where tokenizers differ, or what is held out: a text that one source holds out
    must not come back by another, nor by a source that is a held-out part itself.
    """
    plans = []
    first = None
    for folder in folders:
        tokens_dir = folder / layout.TOKENS_DIR
        require_tokens(tokens_dir)
        plan = read_plan(tokens_dir)
        if split_of(tokens_dir) != PARTS[0]:
            raise DataError(
                f"--source {folder} is the held-out part of a data set, which is not trained on; "
                f"its training part is {folder.parent}"
            )
        first = first or plan
        if plan.tokenizer != first.tokenizer:
            raise DataError(f"{folder} was made by another tokenizer or --eos than {folders[0]}")
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
            shard_bytes=1,  # of no consequence: the blend has shards of its own
        )
        for folder in folders
    ]
    order = make_blend(orders, weights, ask.seed, instances, ask.shard_bytes)
    tokenizer = layout.tokenizer_file(folders[0])
    if not (out / layout.ORDER).exists():  # else the disk holds some of its shards already
        _check_disk(out, order)
    check_order(out, order, tokenizer)
    write_order(out, order, tokenizer)


def _check_disk(out: Path, order: BlendOrder) -> None:
    """Raises ConfigError for a blend that the disk cannot hold, before its order stands."""
    needs, free = order.num_instances * order.row_bytes, shutil.disk_usage(out).free
    if needs > free:
        fit = free // order.row_bytes  # of --instances, 0 means the most
        raise ConfigError(
            f"{counted(order.num_instances, 'instance')} of {order.context} take "
            f"{needs / 1e9:,.1f} GB and "
            f"the disk of {out} has {free / 1e9:,.1f} GB; give "
            + (f"--instances {fit} or fewer, or another --out" if fit else "another --out")
        )
