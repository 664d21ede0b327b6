"""The plan of a set of token arrays. The plan is stored in the file plan.json.

The plan contains the inputs, the tokenizer, the options that affect the token arrays, and the
division of the inputs into units. The token arrays of a unit depend only on the plan. A plan that
`optimus-data import` wrote is recognized by `is_import`.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from data_prep import layout
from data_prep.sources.inputs import InputFile
from data_prep.tokenizer.tokenizer import TokenizerFacts

_FORM_PLAN = "optimus-token-plan"
IMPORT_FIELD = "import "
"""Prefix of `text_field` in a plan of `optimus-data import`. The dtype of the ids follows this
prefix."""
_SINCE_2 = ("max_document", "id_field")
"""Keys that exist only in plans of version 2. A plan without these keys has version 1."""


@dataclass(frozen=True)
class TokenPlan:
    """The values that determine the content of token arrays."""

    tokenizer: TokenizerFacts
    text_field: str
    eval_fraction: float
    inputs: tuple[InputFile, ...]
    units: tuple[tuple[int, int], ...]
    """Range [first, stop) of the inputs of each unit. A unit becomes one token array per split."""
    id_field: str = ""
    """Field with the id of a document. Different documents must have different ids. "": ids are not
    compared."""
    max_document: int | None = None
    """Largest size of a document in bytes. None: there is no limit, and plan.json does not contain
    this key."""

    @property
    def dtype(self) -> str:
        return layout.dtype_name(self.tokenizer.vocab_size)

    @property
    def splits(self) -> tuple[str, ...]:
        """Return the splits of the data set: "train" and, if documents are held out, "held-out"."""
        return layout.SPLITS if self.eval_fraction > 0 else layout.SPLITS[:1]

    def unit_bytes(self, unit: int) -> int:
        """Return the total size of the inputs of a unit, in bytes."""
        first, stop = self.units[unit]
        return sum(file.size for file in self.inputs[first:stop])

    def to_json(self) -> dict[str, Any]:
        value = {"format": _FORM_PLAN, "version": layout.VERSION, **dataclasses.asdict(self)}
        new = {key: value.pop(key) for key in _SINCE_2 if not value[key]}
        if len(new) < len(_SINCE_2):
            value["version"] = layout.PLAN_VERSION
        return value


def read_plan(tokens_dir: Path, xxh3: str | None = None) -> TokenPlan:
    """Read the plan of a folder of token arrays.

    Args:
        tokens_dir: The folder.
        xxh3: The hash that plan.json must have. None: the file may have any hash.

    Raises:
        DataError: the plan is missing, damaged or invalid.
    """
    path = tokens_dir / layout.PLAN
    plan = layout.read_record(path, TokenPlan, _FORM_PLAN, newest=layout.PLAN_VERSION, xxh3=xxh3)
    tokenizer, edges = plan.tokenizer, [edge for unit in plan.units for edge in unit]
    layout.require(
        path,
        (
            1 <= tokenizer.vocab_size <= 1 << 32,
            f"vocab_size = {tokenizer.vocab_size} is not from 1 to 2^32",
        ),
        (
            0 <= tokenizer.eos_id < tokenizer.vocab_size,
            f"eos_id = {tokenizer.eos_id} is outside the vocabulary of {tokenizer.vocab_size}",
        ),
        (
            0 <= plan.eval_fraction < 1,
            f"eval_fraction = {plan.eval_fraction} is not in the range [0, 1)",
        ),
        (
            layout.are_counts([file.size for file in plan.inputs]),
            "the size of an input is negative or too large",
        ),
        (
            layout.are_paths([file.name for file in plan.inputs]),
            "the name of an input is an invalid path",
        ),
        (
            bool(edges)
            and edges == sorted(edges)
            and edges[1:-1:2] == edges[2::2]
            and (edges[0], edges[-1]) == (0, len(plan.inputs)),
            "units are not consecutive ranges that contain all inputs",
        ),
        (plan.max_document is None or plan.max_document > 0, "max_document is not above 0"),
    )
    return plan


def is_import(text_field: str) -> bool:
    """Return True if token arrays were imported from token files, False if they were made from
    text.

    Args:
        text_field: The value of `text_field` in the plan or manifest of the token arrays.
    """
    return text_field.startswith(IMPORT_FIELD)


def held_out_below(eval_fraction: float) -> int:
    """Return eval_fraction * 2^64, rounded up.

    A document is held out if its xxh3-64 is below the returned number. The hash is computed from
    the text of the document or, for imported token files, from the token ids of the document.
    """
    return math.ceil(eval_fraction * 2.0**64)


def tokens_dirs(out: Path, plan: TokenPlan) -> dict[str, Path]:
    """Return the folder of token arrays for each split in the plan."""
    parents = {layout.SPLITS[0]: out, layout.SPLITS[1]: out / layout.EVAL_DIR}
    return {split: parents[split] / layout.TOKENS_DIR for split in plan.splits}
