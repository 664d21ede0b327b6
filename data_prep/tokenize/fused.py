"""`--fused`: token arrays wait packed, and go once the shards stand.

What else tokenizing wrote (documents, sidecars) stays: `inspect` still names sources. A mark says
that the arrays were removed on purpose. It is written before the first of them goes, so that
nothing can look like damage, and only after the manifest, so that nothing can be lost.
"""

from __future__ import annotations

from pathlib import Path

from data_prep import layout
from data_prep.runtime.progress import Progress
from data_prep.tokenize.packed import packed_path
from data_prep.tokenize.token_arrays import array_path
from data_prep.tokenize.token_plan import read_plan
from data_prep.tokenize.token_set import read_unit
from optimus.errors import DamageError, DataError
from optimus.io import files

FORM = "optimus-tokens-removed"
MARK = "removed.json"


def removed(tokens_dir: Path) -> bool:
    """Whether the arrays of `tokens_dir` were removed on purpose."""
    try:
        mark = layout.read_checked_json(tokens_dir / MARK, FORM)
        return mark.get("plan") == files.xxh3_file(tokens_dir / layout.PLAN)
    except (DataError, OSError):
        return False


def mark_removed(tokens_dir: Path) -> None:
    """Say that the arrays of a finished data set may go."""
    plan_xxh3 = files.xxh3_file(tokens_dir / layout.PLAN)
    if not removed(tokens_dir):
        value = {"format": FORM, "version": layout.VERSION, "plan": plan_xxh3}
        layout.write_checked_json(tokens_dir / MARK, value)


def check_arrays(tokens_dir: Path) -> None:
    """Read arrays that are not packed once more before they go: they are the proof of the shards.

    Packed ones were checked, block by block, whenever they were read. DamageError where one is
    not what its sidecar says.
    """
    plan_xxh3 = files.xxh3_file(tokens_dir / layout.PLAN)
    units = range(len(read_plan(tokens_dir).units))
    paths = {unit: path for unit in units if (path := array_path(tokens_dir, unit)).exists()}
    with Progress("check token arrays", sum(p.stat().st_size for p in paths.values()), "B") as bar:
        for unit, path in paths.items():
            if files.xxh3_file(path) != read_unit(tokens_dir, unit, plan_xxh3)["array"]["xxh3"]:
                shards = tokens_dir.parent / layout.SHARDS_DIR
                raise DamageError(
                    f"{path}: its content is damaged (hash differs), and with it shards made of "
                    f"it; remove it and {shards} and {tokens_dir.parent / layout.MANIFEST}, and "
                    "give the command again"
                )
            bar.advance(path.stat().st_size)


def remove_arrays(tokens_dir: Path) -> None:
    """Remove marked arrays; what is gone already is no error."""
    for unit in range(len(read_plan(tokens_dir).units)):
        array_path(tokens_dir, unit).unlink(missing_ok=True)
        packed_path(tokens_dir, unit).unlink(missing_ok=True)


def take_back(tokens_dir: Path) -> None:
    """Forget the removal, so that the arrays are made again."""
    (tokens_dir / MARK).unlink(missing_ok=True)


def require_arrays(tokens_dir: Path) -> None:
    """Raises DataError where the arrays were removed, saying how to get them back."""
    if removed(tokens_dir):
        raise DataError(
            f"{tokens_dir}: its arrays were removed by --fused; tokenize makes them again"
        )
