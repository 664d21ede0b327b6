"""Making a blend: the sources' token arrays become the order of one data set."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

from data_prep import layout
from data_prep.dataset.held_out import check_held_out, held_out_of
from data_prep.pipeline.shuffle_run import (
    ShuffleRequest,
    check_order,
    require_as_asked,
    write_order,
)
from data_prep.runtime.ranks import Team, together, wait_for
from data_prep.runtime.workspace import working_in
from data_prep.shuffle.blend import BlendOrder, make_blend, mixing_of, parse_weight, read_any_order
from data_prep.shuffle.shuffle import make_order
from data_prep.tokenize.duplicates import require_compared
from data_prep.tokenize.fused import require_arrays
from data_prep.tokenize.token_plan import PARTS, read_plan
from data_prep.tokenize.token_set import part_of
from optimus.errors import ConfigError, DataError, counted
from optimus.io import files


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
        require_arrays(tokens_dir)
        plan = read_plan(tokens_dir)
        if part_of(tokens_dir) != PARTS[0]:
            raise DataError(
                f"--source {folder} is the held-out part of a data set, which is not trained on; "
                f"its training part is {folder.parent}"
            )
        require_compared(tokens_dir)
        first = first or plan
        if plan.tokenizer != first.tokenizer:
            raise DataError(f"{folder} was made by another tokenizer or --eos than {folders[0]}")
        check_held_out(folders[0], held_out_of(first), folder, held_out_of(plan))
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
