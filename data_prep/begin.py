"""The beginning of an output directory: its plan and tokenizer, and the refusal to mix two."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from data_prep import layout
from data_prep.documents import NO_LIMITS
from data_prep.limits import Limits
from data_prep.sentencepiece_model import is_sentencepiece
from data_prep.sources import InputFile
from data_prep.tokenize import TokenizeWork, TokenPlan, parts_dirs, read_plan
from optimus import files
from optimus.errors import DataError


def begin(
    out: Path,
    tokenizer_file: Path,
    plan: TokenPlan,
    quarantine: bool,
    limits: Limits = NO_LIMITS,
) -> TokenizeWork:
    """Write the plan and a copy of the tokenizer into every part of `out`, or find them there.

    Raises DataError naming the difference where `out` was begun with another plan.
    """
    content = files.checked_json(plan.to_json())
    for folder in parts_dirs(out, plan).values():
        folder.mkdir(parents=True, exist_ok=True)
        if (folder / layout.PLAN).exists():
            for difference in differences(read_plan(folder), plan):
                raise DataError(
                    f"{out} was begun with {difference}; choose another --out, or remove {out}"
                )
        write_once(folder / layout.PLAN, content)
        copy_tokenizer(tokenizer_file, folder.parent)
    copy = layout.tokenizer_file(parts_dirs(out, plan)["train"].parent)
    return TokenizeWork(plan, files.xxh3_bytes(content), out, copy, quarantine, limits)


def copy_tokenizer(source: Path, folder: Path) -> None:
    """Put a tokenizer beside a data set, by the name of its kind, unless a copy is there already.

    A sentencepiece model that an earlier version called tokenizer.json stays what it is called.
    """
    content, name = source.read_bytes(), layout.TOKENIZER
    if is_sentencepiece(source):
        old = folder / layout.TOKENIZER
        if old.exists() and old.read_bytes() == content:
            return
        name = layout.SENTENCEPIECE
    write_once(folder / name, content)


def write_once(path: Path, content: bytes) -> None:
    """Make `path` hold `content`, without touching a file that already does."""
    if not path.exists() or path.read_bytes() != content:
        files.write_bytes(path, content)


def differences(old: TokenPlan, new: TokenPlan) -> Iterator[str]:
    """What of `old` is not so in `new`, each as `key = then, now ...`."""
    for key in ("sha256", "eos_token", "vocab_size"):
        then, now = getattr(old.tokenizer, key), getattr(new.tokenizer, key)
        if then != now:
            yield f"tokenizer {key} = {then}, now {now}"
    for key in ("text_field", "eval_fraction", "id_field", "max_document"):
        then, now = getattr(old, key), getattr(new, key)
        if then != now:
            yield f"{key} = {then}, now {now}"
    yield from _input_differences(old.inputs, new.inputs)
    if old.units != new.units:
        yield f"{len(old.units)} units of work, now {len(new.units)}: keep --unit-size as it was"


def _input_differences(old: tuple[InputFile, ...], new: tuple[InputFile, ...]) -> Iterator[str]:
    then, now = ({file.name: file.size for file in files} for files in (old, new))
    for name in then.keys() - now.keys():
        yield f"the input {name}, which is not named now"
    for name in sorted(now.keys() - then.keys()):
        yield f"{len(then)} inputs, and {name} was not among them"
    for name in sorted(then.keys() & now.keys()):
        if then[name] != now[name]:
            yield f"an input {name} of {then[name]} bytes, now {now[name]}"
