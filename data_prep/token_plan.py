"""The plan of a set of token arrays: what tokenizing does, settled before it starts.

What a unit holds depends on the plan alone. `import` has one, too (`is_import`).
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from data_prep import layout
from data_prep.sources import InputFile
from data_prep.tokenizer import TokenizerFacts

PARTS = ("train", "held-out")
_FORM_PLAN = "optimus-token-plan"
IMPORT_FIELD = "import "
"""In a plan of import, stands in the place of a field of text before the way ids were read."""
_SINCE_2 = ("max_document", "id_field")
"""Keys of a plan of version 2; one that has none of them is of version 1."""


@dataclass(frozen=True)
class TokenPlan:
    """What tokenizing does, settled before it starts: inputs, tokenizer, rules, units."""

    tokenizer: TokenizerFacts
    text_field: str
    eval_fraction: float
    inputs: tuple[InputFile, ...]
    units: tuple[tuple[int, int], ...]
    """Unit u holds inputs [first, stop)."""
    id_field: str = ""
    """Field of a document's own id, which no two may share; empty: ids are not looked at."""
    max_document: int | None = None
    """Documents of more bytes cannot be used. Not in the JSON where there is none."""

    @property
    def dtype(self) -> str:
        return layout.dtype_name(self.tokenizer.vocab_size)

    @property
    def parts(self) -> tuple[str, ...]:
        return PARTS if self.eval_fraction > 0 else PARTS[:1]

    def unit_bytes(self, unit: int) -> int:
        """Input bytes of a unit."""
        first, stop = self.units[unit]
        return sum(file.size for file in self.inputs[first:stop])

    def to_json(self) -> dict[str, Any]:
        value = {"format": _FORM_PLAN, "version": layout.VERSION, **dataclasses.asdict(self)}
        new = {key: value.pop(key) for key in _SINCE_2 if not value[key]}
        if len(new) < len(_SINCE_2):
            value["version"] = layout.PLAN_VERSION
        return value


def read_plan(tokens_dir: Path) -> TokenPlan:
    """The plan under `tokens_dir`. Raises DataError."""
    path = tokens_dir / layout.PLAN
    value = layout.read_checked_json(path, _FORM_PLAN, newest=layout.PLAN_VERSION)
    return TokenPlan(
        tokenizer=TokenizerFacts(**value["tokenizer"]),
        text_field=value["text_field"],
        eval_fraction=value["eval_fraction"],
        inputs=tuple(InputFile(**file) for file in value["inputs"]),
        units=tuple((first, stop) for first, stop in value["units"]),
        **{key: value[key] for key in _SINCE_2 if key in value},
    )


def is_import(text_field: str) -> bool:
    """Whether the arrays of a plan or manifest with this field come from token files, whose text is
    not known, and not from text."""
    return text_field.startswith(IMPORT_FIELD)


def held_out_below(eval_fraction: float) -> int:
    """A document is held out if xxh3_64 of its text is below this: h < f * 2^64, exactly."""
    return math.ceil(eval_fraction * 2.0**64)


def parts_dirs(out: Path, plan: TokenPlan) -> dict[str, Path]:
    """The folders of token arrays of each part that the plan makes."""
    places = {
        PARTS[0]: out / layout.TOKENS_DIR,
        PARTS[1]: out / layout.EVAL_DIR / layout.TOKENS_DIR,
    }
    return {part: places[part] for part in plan.parts}
