"""Names, dtypes, array headers and self-checking JSON: what every file of a data set is made of.

Which files there are: docs/formats/dataset.md.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import types
from collections.abc import Iterable, Sequence
from itertools import chain, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict, TypeVar, get_args, get_origin, get_type_hints

from optimus.errors import DamageError, DataError
from optimus.io import files

if TYPE_CHECKING:
    import numpy as np

VERSION = 1
"""Version of the file formats written here, unless PLAN_VERSION is. Readers refuse later ones."""
PLAN_VERSION = 2
"""Of plans, and of the sidecars of their units, that use what version 1 has no words for."""

MANIFEST = "manifest.json"
ORDER = "order.json"
PLAN = "plan.json"
TOKENIZER = "tokenizer.json"
SENTENCEPIECE = "tokenizer.model"
SET_ASIDE = "quarantine.jsonl"
TOKENS_DIR = "tokens"
SHARDS_DIR = "shards"
EVAL_DIR = "eval"

PARTS = ("train", "held-out")
"""The parts of a data set, each of which is one by itself."""
DTYPES = ("uint16", "uint32")
"""The types that token ids are stored in."""
MAX_CONTEXT = 1 << 31
"""Tokens of an instance."""
MAX_COUNT = 1 << 56
"""Above every count of tokens, bytes or instances, so that products with 64 do not wrap."""

ARRAY_BYTES, TOKENIZER_BYTES, _JSON_BYTES = 1 << 34, 1 << 28, 1 << 28
"""Largest files that are read in whole: tables of a unit, tokenizers, JSON (a million inputs)."""
HEADER_BYTES = 128
"""Length of every .npy header we write, so that data begins on a 64-byte boundary."""


def tokenizer_file(folder: Path) -> Path:
    """A data set's copy of its tokenizer, called by its kind.

    A sentencepiece model in a data set of an earlier version is called `tokenizer.json` too.
    """
    file, model = folder / TOKENIZER, folder / SENTENCEPIECE
    return model if model.exists() and not file.exists() else file


def unit_name(unit: int) -> str:
    """Stem of unit `unit`'s files under tokens/."""
    return f"unit-{unit:05d}"


def shard_name(shard: int) -> str:
    """Stem of shard `shard`'s files under shards/."""
    return f"shard-{shard:05d}"


def dtype_name(vocab_size: int) -> str:
    """`uint16` where every id below `vocab_size` fits it, else `uint32`. Raises DataError."""
    if not 1 <= vocab_size <= 1 << 32:
        raise DataError(f"a vocabulary of {vocab_size} ids does not fit in uint32")
    return "uint16" if vocab_size <= 1 << 16 else "uint32"


def little_endian(dtype: str) -> np.dtype:
    """The numpy dtype on disk of `uint16`, `uint32` or `int64`."""
    import numpy as np

    return np.dtype(dtype).newbyteorder("<")


def npy_header(shape: tuple[int, ...], dtype: str) -> bytes:
    """Header (version 1.0) of a C-ordered little-endian .npy file, exactly HEADER_BYTES long.

    Written here and not by numpy, whose padding may change between versions: the bytes of our
    files must not.
    """
    code = {"uint16": "<u2", "uint32": "<u4", "int64": "<i8", "uint8": "|u1"}[dtype]
    text = f"{{'descr': '{code}', 'fortran_order': False, 'shape': {shape!r}, }}"
    length = HEADER_BYTES - 10
    assert len(text) < length, text
    return b"\x93NUMPY\x01\x00" + length.to_bytes(2, "little") + f"{text:<{length - 1}}\n".encode()


def read_bytes(path: str | os.PathLike, limit_bytes: int = ARRAY_BYTES) -> bytes:
    """Return the content of a file. Raises DataError if it cannot be read or is larger."""
    try:
        return files.read_regular(path, limit_bytes)
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror}") from None
    except MemoryError:
        raise DataError(f"{path}: is larger than the free memory") from None


def write_checked_json(path: str | os.PathLike, value: dict[str, Any]) -> None:
    """Atomically write `value` so that `read_checked_json` notices any later change."""
    files.write_bytes(path, files.checked_json(value))


def read_checked_json(
    path: str | os.PathLike, *forms: str, newest: int = VERSION, xxh3: str | None = None
) -> dict[str, Any]:
    """Return the object that `write_checked_json` wrote, if its `format` is one of `forms`.

    Raises DataError naming the file when it is missing or of another format or version, and
    DamageError when it is damaged or its hash is not `xxh3`. The hash is compared before anything
    of the file is parsed: the name of the file may come from another file.
    """
    data = read_bytes(path, _JSON_BYTES)
    if xxh3 is not None and files.xxh3_bytes(data) != xxh3:
        raise DamageError(f"{path}: its hash is not the one in {ORDER}")
    try:
        value = files.parse_checked_json(data)
    except ValueError as error:
        raise DamageError(f"{path}: {error}") from None
    except RecursionError:
        raise _not_ours(path, "its objects are nested too deep") from None
    if value.get("format") not in forms or value.get("version") not in range(1, newest + 1):
        raise DataError(
            f"{path}: is {value.get('format')} version {value.get('version')}; "
            f"this program reads {forms[0]} version {newest}"
        )
    return value


class FileRecord(TypedDict):
    """A file in a sidecar."""

    size: int
    xxh3: str


_Record = TypeVar("_Record")
_CALLED = {str: "a string", int: "a whole number", float: "a number", bool: "true or false"}
_LARGEST = 1 << 64


def read_record(
    path: str | os.PathLike,
    kind: type[_Record],
    *forms: str,
    newest: int = VERSION,
    xxh3: str | None = None,
) -> _Record:
    """Return the content of a file that `write_checked_json` wrote as `kind`, which says its keys.

    Raises DataError and DamageError as `read_checked_json` and `as_record`.
    """
    return as_record(kind, read_checked_json(path, *forms, newest=newest, xxh3=xxh3), path)


def as_record(kind: type[_Record], value: dict[str, Any], path: str | os.PathLike) -> _Record:
    """Return the object `value` of a JSON file as `kind`, each key of the type annotated there.

    Args:
        kind: A dataclass, or a TypedDict, of str, int, float, bool, lists, tuples and such classes.
            A field with a default may be missing. Keys that it lacks are ignored.
        value: What `read_checked_json` gave.
        path: The file, for the message.

    Raises:
        DataError: a key is missing or of another type: the hash in a file guards against accidents,
            not against who writes another.
    """
    try:
        return _column(kind, [value], "")[0]
    except ValueError as error:
        raise _not_ours(path, error) from None


def require(path: str | os.PathLike, *checks: tuple[bool, str]) -> None:
    """Raise DataError with the text of the first of `checks` that does not hold."""
    for holds, problem in checks:
        if not holds:
            raise _not_ours(path, problem)


def are_hashes(texts: Sequence[str]) -> bool:
    """Return whether all texts are xxh3-64 as we write them."""
    return set(map(len, texts)) <= {16} and not "".join(texts).strip("0123456789abcdef")


def are_counts(numbers: Sequence[int]) -> bool:
    """Return whether all numbers are counts."""
    return not numbers or (min(numbers) >= 0 and max(numbers) < MAX_COUNT)


def are_paths(texts: Iterable[str]) -> bool:
    """Return whether the system takes all texts as paths."""
    try:
        return b"\0" not in os.fsencode("".join(texts))
    except UnicodeEncodeError:  # half of a surrogate pair
        return False


def is_relative_path(text: str) -> bool:
    """Return whether `text` is a path relative to the data set, as this package writes them."""
    return text != "" and not os.path.isabs(text) and are_paths([text])


def _not_ours(path: str | os.PathLike, problem: object) -> DataError:
    return DataError(f"{path}: {problem}; optimus-data did not write this, copy or make it again")


def _column(kind: Any, values: list[Any], key: str) -> list[Any]:
    """Return what all objects of a list have under `key`, checked and made `kind`.

    By columns, because a data set may list a million files. Raises ValueError.
    """
    origin, arguments = get_origin(kind), get_args(kind)
    if origin is types.UnionType:  # of a scalar and None
        _column(arguments[0], [value for value in values if value is not None], key)
    elif kind in _CALLED:
        _check_scalars(kind, values, key)
    elif origin is None:
        return _objects(kind, values, key)
    elif not set(map(type, values)) <= {list}:
        raise ValueError(f"{key} is not a list")
    elif origin is list or arguments[-1] is Ellipsis:
        items = iter(_column(arguments[0], list(chain.from_iterable(values)), key))
        return [origin(islice(items, len(value))) for value in values]
    else:
        if any(len(value) != len(arguments) for value in values):
            raise ValueError(f"{key} is not a list of {len(arguments)}")
        columns = zip(*values, strict=True)
        checked = [_column(a, list(c), key) for a, c in zip(arguments, columns, strict=False)]
        return list(zip(*checked, strict=True))
    return values


def _check_scalars(kind: type, values: list[Any], key: str) -> None:
    if not set(map(type, values)) <= ({int, float} if kind is float else {kind}):
        raise ValueError(f"{key} is not {_CALLED[kind]}")
    # A NaN is refused, too: it is not within any bounds.
    ends = (min(values), max(values)) if values and kind is int else values
    if kind in (int, float) and not all(-_LARGEST < value < _LARGEST for value in ends):
        raise ValueError(f"{key} is not a number within 2^64")


def _objects(kind: Any, values: list[Any], key: str) -> list[Any]:
    if not set(map(type, values)) <= {dict}:
        raise ValueError(f"{key} is not an object")
    columns = []
    for name, hint, default in _fields(kind):
        inner = f"{key}.{name}" if key else name
        try:
            columns.append(_column(hint, [value[name] for value in values], inner))
        except KeyError:
            if default is dataclasses.MISSING:
                raise ValueError(f"{inner} is missing") from None
            items = iter(_column(hint, [v[name] for v in values if name in v], inner))
            columns.append([next(items) if name in v else default for v in values])
    is_dataclass = dataclasses.is_dataclass(kind)
    if not is_dataclass:
        return values
    if len(values) == 1:
        return [kind(*next(zip(*columns, strict=True)))]
    # A frozen dataclass sets each field through object.__setattr__; this takes half as long.
    names, objects = [name for name, *_ in _fields(kind)], []
    for row in zip(*columns, strict=True):
        made = object.__new__(kind)
        made.__dict__.update(zip(names, row, strict=True))
        objects.append(made)
    return objects


@functools.cache
def _fields(kind: Any) -> list[tuple[str, Any, Any]]:
    """Return name, type and default (or MISSING) of each field of a dataclass or TypedDict."""
    hints = get_type_hints(kind)
    if dataclasses.is_dataclass(kind):
        return [
            (field.name, hints[field.name], field.default) for field in dataclasses.fields(kind)
        ]
    optional = kind.__optional_keys__
    return [(n, hint, None if n in optional else dataclasses.MISSING) for n, hint in hints.items()]
