"""Which documents a data set holds out, and that two read together hold out the same."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from data_prep import layout
from data_prep.dataset.manifest import Manifest
from data_prep.shuffle.blend import read_any_order
from data_prep.tokenize.token_plan import TokenPlan, is_import, read_plan
from optimus.errors import DataError


@dataclass(frozen=True)
class HeldOut:
    """What is held out."""

    fraction: float
    by_ids: bool
    """By imported ids, and not by text."""


def held_out_of(rules: TokenPlan | Manifest) -> HeldOut:
    """What a plan, or the manifest of a data set that is no blend, holds out."""
    return HeldOut(rules.eval_fraction, is_import(rules.text_field))


def held_out_of_dataset(dataset: Path, manifest: Manifest) -> HeldOut | None:
    """What a data set holds out. A blend: what each of its sources does, None where the first of
    them is gone or no longer has the plan whose hash is in the order of the blend."""
    if not manifest.blend:
        return held_out_of(manifest)
    if not (dataset / layout.ORDER).exists():  # only shards and manifest were copied here
        return None
    source = read_any_order(dataset).sources[0]
    try:
        return held_out_of(read_plan(dataset / source.tokens_dir, source.plan))
    except DataError:
        return None


def check_held_out(first: Path, one: HeldOut, second: Path, other: HeldOut) -> None:
    """Raises DataError where one might train on what the other holds out."""
    if other.fraction != one.fraction:
        raise DataError(
            f"{second} holds out {other.fraction:g} of its documents and {first} "
            f"{one.fraction:g}, so that one might train on what the other holds out; make "
            "them with the same --eval-fraction"
        )
    if other.fraction and other.by_ids != one.by_ids:
        raise DataError(
            f"{first} and {second} hold out documents, one by text and one by imported ids, so "
            "that one might train on what the other holds out; make them without --eval-fraction"
        )
