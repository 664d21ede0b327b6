"""Preparation of an output directory: check its content, and write the plan and the tokenizer."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from data_prep import layout
from data_prep.runtime.memory import Limits
from data_prep.shuffle.blend import read_any_order
from data_prep.shuffle.order import Order
from data_prep.sources.documents import NO_LIMITS
from data_prep.sources.inputs import InputFile
from data_prep.tokenize.duplicates import require_distinct
from data_prep.tokenize.plan import TokenPlan, is_import, read_plan, tokens_dirs
from data_prep.tokenize.token_set import require_arrays
from data_prep.tokenize.tokenize import TokenizeWork
from data_prep.tokenizer.sentencepiece_model import is_sentencepiece
from optimus.errors import DataError, counted
from optimus.io import files


def begin(
    out: Path,
    tokenizer_file: Path,
    plan: TokenPlan,
    quarantine: bool,
    limits: Limits = NO_LIMITS,
) -> TokenizeWork:
    """Write the plan and a copy of the tokenizer to the directory of each split. Return the
    settings with which workers tokenize the inputs.

    Files that already exist are checked and not written again.

    Args:
        out: The output directory.
        tokenizer_file: The tokenizer.
        plan: The plan of tokenization.
        quarantine: True: leave out documents that cannot be used. False: raise an error.
        limits: Limits on the size of a document, and on the memory of a worker for a document.

    Raises:
        DataError: `out` already has another plan, order.json or tokenizer. The message names the
            difference.
    """
    content = files.checked_json(plan.to_json())
    folders = tokens_dirs(out, plan).values()
    for folder in folders:  # all checks before the first write
        _check_output(out, folder, tokenizer_file, plan, files.xxh3_bytes(content))
    for folder in folders:
        folder.mkdir(parents=True, exist_ok=True)
        write_once(folder / layout.PLAN, content)
        copy_tokenizer(tokenizer_file, folder.parent)
    copy = layout.tokenizer_file(tokens_dirs(out, plan)["train"].parent)
    return TokenizeWork(plan, files.xxh3_bytes(content), out, copy, quarantine, limits)


def _check_output(
    out: Path, tokens_dir: Path, tokenizer_file: Path, plan: TokenPlan, plan_xxh3: str
) -> None:
    """Raise DataError if the data set in the parent directory of `tokens_dir` belongs to another
    run.

    If the data set has a plan, the plan must equal `plan`. Otherwise, if the data set has an
    order.json, this file must name the plan with the hash `plan_xxh3`. If the data set has neither
    of these files, its tokenizer must equal `tokenizer_file`.
    """
    if (tokens_dir / layout.PLAN).exists():
        for difference in differences(read_plan(tokens_dir), plan):
            raise DataError(
                f"{out} was started with {difference}; choose another --out, or remove {out}"
            )
        return
    dataset = tokens_dir.parent
    if (dataset / layout.ORDER).exists():
        order = read_any_order(dataset)
        expected = (tokens_dir.name, plan_xxh3)
        if not isinstance(order, Order) or (order.tokens_dir, order.plan) != expected:
            raise DataError(
                f"{dataset} contains the order of other token arrays (blend or `shuffle --to` "
                "wrote this order); choose another --out"
            )
    check_tokenizer(tokenizer_file, dataset)


def require_tokens(tokens_dir: Path) -> None:
    """Raise DataError if `--fused` has removed the token arrays, or if the document ids have not
    been compared. The comparison of the ids is the last step of tokenization."""
    require_arrays(tokens_dir)
    require_distinct(tokens_dir)


def check_tokenizer(source: Path, folder: Path) -> None:
    """Raise DataError if a data set without order.json has a tokenizer that differs from `source`.

    Args:
        source: The tokenizer file of the user.
        folder: The directory of the data set.
    """
    if (folder / layout.ORDER).exists():
        return  # order.json determines the tokenizer; `copy_tokenizer` replaces a damaged copy
    copy = layout.tokenizer_file(folder)
    if copy.exists() and _read(copy) != _read(source):
        raise DataError(f"{copy} and {source} are different tokenizers; choose another output")


def copy_tokenizer(source: Path, folder: Path) -> None:
    """Copy a tokenizer into a data set, unless an identical copy exists.

    The copy of a sentencepiece model is named tokenizer.model, unless an earlier version of Optimus
    has copied it as tokenizer.json. The copy of any other tokenizer is named tokenizer.json.
    """
    content, name = _read(source), layout.TOKENIZER
    if is_sentencepiece(source):
        old = folder / layout.TOKENIZER
        if old.exists() and _read(old) == content:
            return
        name = layout.SENTENCEPIECE
    write_once(folder / name, content)


def _read(tokenizer: Path) -> bytes:
    return layout.read_bytes(tokenizer, layout.TOKENIZER_BYTES)


def write_once(path: Path, content: bytes) -> None:
    """Write `content` to the file `path`, unless the file already contains `content`."""
    if not path.exists() or layout.read_bytes(path) != content:
        files.write_bytes(path, content)


def differences(old: TokenPlan, new: TokenPlan) -> Iterator[str]:
    """Yield a text, such as `eval_fraction = 0.0, now 0.1`, for each difference between the plan of
    an earlier run and the plan of this run."""
    for key in ("sha256", "eos_token", "vocab_size"):
        then, now = getattr(old.tokenizer, key), getattr(new.tokenizer, key)
        if then != now:
            yield f"tokenizer {key} = {then}, now {now}"
    then, now = is_import(old.text_field), is_import(new.text_field)
    if then != now:
        kinds = ("text", "imported token files")
        yield f"{kinds[then]}, now {kinds[now]}"
        return
    for key in ("text_field", "eval_fraction", "id_field", "max_document"):
        then, now = getattr(old, key), getattr(new, key)
        if then != now:
            shown = ["''" if value == "" else value for value in (then, now)]
            yield f"{key} = {shown[0]}, now {shown[1]}"
    yield from _input_differences(old.inputs, new.inputs)
    if old.units != new.units:
        yield (
            f"{counted(len(old.units), 'unit')} (token arrays per split), now {len(new.units)}: "
            "give the same --unit-size as before"
        )


def _input_differences(old: tuple[InputFile, ...], new: tuple[InputFile, ...]) -> Iterator[str]:
    then, now = ({file.name: file.size for file in files} for files in (old, new))
    for name in then.keys() - now.keys():
        yield f"the input {name}, which is not among the inputs now"
    for name in sorted(now.keys() - then.keys()):
        yield f"{counted(len(then), 'input')}, and {name} was not among them"
    for name in sorted(then.keys() & now.keys()):
        if then[name] != now[name]:
            yield f"an input {name} of {then[name]} bytes, now {now[name]}"
