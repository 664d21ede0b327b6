"""File names, dtypes, array headers and checksummed JSON of a data set.

A unit is a range of input files that are tokenized together. A unit has one token array per split.
The sidecar of a unit is a JSON file that contains the sizes and hashes of the unit's other files. A
shard has a similar sidecar. docs/formats/dataset.md lists all files.
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
"""Version number in all files, except that a plan.json and the sidecar of a unit may have
PLAN_VERSION. Readers refuse files of later versions."""
PLAN_VERSION = 2
"""Version number in a plan.json or in the sidecar of a unit, if the file has keys that do not exist
in version 1."""

MANIFEST = "manifest.json"
ORDER = "order.json"
PLAN = "plan.json"
TOKENIZER = "tokenizer.json"
SENTENCEPIECE = "tokenizer.model"
SET_ASIDE = "quarantine.jsonl"
TOKENS_DIR = "tokens"
SHARDS_DIR = "shards"
EVAL_DIR = "eval"

SPLITS = ("train", "held-out")
"""The splits of the documents. Each split is stored as a separate data set."""
DTYPES = ("uint16", "uint32")
"""The dtypes of stored token ids."""
MAX_CONTEXT = 1 << 31
"""Largest number of tokens in an instance."""
MAX_COUNT = 1 << 56
"""Exclusive upper limit of counts of tokens, bytes or instances. This limit ensures that an int64
can represent 64 * count."""

ARRAY_BYTES, TOKENIZER_BYTES, _JSON_BYTES = 1 << 34, 1 << 28, 1 << 28
"""Largest accepted sizes, in bytes, of files that are read into memory as a whole. ARRAY_BYTES
applies to the table of a unit's documents, TOKENIZER_BYTES to a tokenizer, and _JSON_BYTES to a
JSON file. The JSON file of a large data set lists a million inputs."""
HEADER_BYTES = 128
"""Length in bytes of the headers that `npy_header` makes. With this length, the data after the
header is aligned to 64 bytes."""


def tokenizer_file(folder: Path) -> Path:
    """Return the path of the tokenizer file of a data set in the directory `folder`.

    The name is `tokenizer.model` for a sentencepiece model, else `tokenizer.json`. A data set of an
    earlier version may have a sentencepiece model named `tokenizer.json`.
    """
    file, model = folder / TOKENIZER, folder / SENTENCEPIECE
    return model if model.exists() and not file.exists() else file


def unit_name(unit: int) -> str:
    """Return the stem of the file names of the unit `unit`, such as "unit-00000"."""
    return f"unit-{unit:05d}"


def shard_name(shard: int) -> str:
    """Return the stem of the file names of the shard `shard`, such as "shard-00000"."""
    return f"shard-{shard:05d}"


def dtype_name(vocab_size: int) -> str:
    """Return the dtype in which token ids below `vocab_size` are stored: "uint16" or "uint32".

    Raises DataError if `vocab_size` is not from 1 to 2^32.
    """
    if not 1 <= vocab_size <= 1 << 32:
        raise DataError(
            f"vocab_size = {vocab_size} is not from 1 to 2^32, but ids are stored as uint16 or "
            "uint32; use another tokenizer"
        )
    return "uint16" if vocab_size <= 1 << 16 else "uint32"


def little_endian(dtype: str) -> np.dtype:
    """Return the little-endian numpy dtype with the name `dtype`: "uint16", "uint32" or "int64"."""
    import numpy as np

    return np.dtype(dtype).newbyteorder("<")


def npy_header(shape: tuple[int, ...], dtype: str) -> bytes:
    """Return the header (version 1.0) of a C-ordered little-endian .npy file, HEADER_BYTES long.

    This function does not call numpy: another version of numpy could write another padding, and the
    bytes of a data set must not change.
    """
    code = {"uint16": "<u2", "uint32": "<u4", "int64": "<i8", "uint8": "|u1"}[dtype]
    text = f"{{'descr': '{code}', 'fortran_order': False, 'shape': {shape!r}, }}"
    length = HEADER_BYTES - 10
    assert len(text) < length, text
    return b"\x93NUMPY\x01\x00" + length.to_bytes(2, "little") + f"{text:<{length - 1}}\n".encode()


def require_npy(path: Path, size: int, *headers: bytes) -> None:
    """Check the size and the header of a .npy file.

    Args:
        path: The file.
        size: The size in bytes that the file must have.
        headers: The allowed headers.

    Raises:
        DataError: the file is missing.
        DamageError: the file has another size or header.
    """
    if not path.exists():
        raise DataError(f"{path}: is missing")
    actual = os.path.getsize(path)
    if actual != size:
        raise DamageError(f"{path}: has {actual} bytes, but its sidecar (.json) lists {size}")
    require_header(path, *headers)


def require_header(path: Path, *headers: bytes) -> None:
    """Raise DamageError if a .npy file does not begin with one of `headers`."""
    with files.open_regular(path) as file:
        if file.read(HEADER_BYTES) not in headers:
            raise DamageError(f"{path}: its header is damaged")


def read_bytes(path: str | os.PathLike, limit_bytes: int = ARRAY_BYTES) -> bytes:
    """Return the content of a file.

    Raises DataError if the file cannot be read or has more than `limit_bytes` bytes.
    """
    try:
        return files.read_regular(path, limit_bytes)
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror}") from None
    except MemoryError:
        raise DataError(f"{path}: is larger than the free memory") from None


def write_checked_json(path: str | os.PathLike, value: dict[str, Any]) -> None:
    """Atomically write `value` as JSON, with a hash that `read_checked_json` checks."""
    files.write_bytes(path, files.checked_json(value))


def read_checked_json(
    path: str | os.PathLike, *forms: str, newest: int = VERSION, xxh3: str | None = None
) -> dict[str, Any]:
    """Read a file that `write_checked_json` wrote, and return its JSON object.

    Args:
        path: The file.
        forms: The allowed values of the key `format`.
        newest: The largest allowed value of the key `version`.
        xxh3: The hash that order.json states for the file. None: the file may have any hash.

    Raises:
        DataError: the file is missing, or its format or version is not allowed.
        DamageError: the file is damaged, or its hash is not `xxh3`.
    """
    data = read_bytes(path, _JSON_BYTES)
    if xxh3 is not None and files.xxh3_bytes(data) != xxh3:
        raise DamageError(f"{path}: its hash differs from the hash in {ORDER}")
    try:
        value = files.parse_checked_json(data)
    except ValueError as error:
        raise DamageError(f"{path}: {error}") from None
    except RecursionError:
        raise foreign(path, "its JSON objects are nested too deeply") from None
    version = value.get("version")
    known = type(version) is int and 1 <= version <= newest  # not True or 1.0, which equal 1
    if value.get("format") not in forms or not known:
        raise DataError(
            f"{path}: is {value.get('format')} version {value.get('version')}; "
            f"this program reads {forms[0]} version {newest}"
        )
    return value


class FileRecord(TypedDict):
    """Record in a sidecar: the size in bytes and the hash of a file."""

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
    """Read a file that `write_checked_json` wrote, and convert its JSON object to type `kind`.

    See `read_checked_json` and `as_record` for the arguments and errors.
    """
    return as_record(kind, read_checked_json(path, *forms, newest=newest, xxh3=xxh3), path)


def as_record(kind: type[_Record], value: dict[str, Any], path: str | os.PathLike) -> _Record:
    """Convert a JSON object to type `kind`, and check the type of each field.

    Args:
        kind: A dataclass or TypedDict. The type of a field is str, int, float, bool, a list, a
            tuple, a dataclass or a TypedDict, or the union of such a type and None. A field with a
            default may be missing in `value`. Keys of `value` that are not fields are ignored.
        value: The JSON object, from `read_checked_json`.
        path: The file, for the error message.

    Raises:
        DataError: A key is missing, or its value has another type. A file that another program has
            written can have this problem although its hash is correct.
    """
    try:
        return _column(kind, [value], "")[0]
    except ValueError as error:
        raise foreign(path, error) from None


def require(path: str | os.PathLike, *checks: tuple[bool, str]) -> None:
    """Raise DataError if a condition in `checks` is False.

    Args:
        path: The file with the checked values, for the error message.
        checks: Pairs (condition, text). The message contains the text of the first False condition.
    """
    for holds, problem in checks:
        if not holds:
            raise foreign(path, problem)


def are_hashes(texts: Sequence[str]) -> bool:
    """Return True if all texts have the form of xxh3-64 hashes: 16 lowercase hexadecimal digits."""
    return set(map(len, texts)) <= {16} and not "".join(texts).strip("0123456789abcdef")


def are_counts(numbers: Sequence[int]) -> bool:
    """Return True if all numbers are at least 0 and below MAX_COUNT."""
    return not numbers or (min(numbers) >= 0 and max(numbers) < MAX_COUNT)


def are_paths(texts: Iterable[str]) -> bool:
    """Return True if all texts can be paths. A path can be encoded for the file system, and does
    not contain NUL."""
    try:
        return b"\0" not in os.fsencode("".join(texts))
    except UnicodeEncodeError:  # half of a surrogate pair
        return False


def is_relative_path(text: str) -> bool:
    """Return True if `text` is a relative path."""
    return text != "" and not os.path.isabs(text) and are_paths([text])


def foreign(path: str | os.PathLike, problem: object) -> DataError:
    """Return a DataError for a file with a correct hash but a content that optimus-data never
    writes. `problem` describes the content."""
    return DataError(
        f"{path}: {problem}; optimus-data did not write this file: copy it again or make it again"
    )


def _column(kind: Any, values: list[Any], key: str) -> list[Any]:
    """Convert `values`, the values of the key `key` in several JSON objects, to type `kind`. Return
    the converted values in the same order.

    A data set can list a million files. One call for all objects is faster than one call per
    object. Raises ValueError if a value has another type.
    """
    origin, arguments = get_origin(kind), get_args(kind)
    if origin is types.UnionType:  # `kind` is "type | None"
        items = iter(_column(arguments[0], [value for value in values if value is not None], key))
        return [None if value is None else next(items) for value in values]
    elif kind in _CALLED:
        if not set(map(type, values)) <= ({int, float} if kind is float else {kind}):
            raise ValueError(f"{key} is not {_CALLED[kind]}")
        # This also refuses NaN, which fails each comparison.
        ends = (min(values), max(values)) if values and kind is int else values
        if kind in (int, float) and not all(-_LARGEST < value < _LARGEST for value in ends):
            raise ValueError(f"{key} is not a number between -2^64 and 2^64")
    elif origin is None:
        return _objects(kind, values, key)
    elif not set(map(type, values)) <= {list}:
        raise ValueError(f"{key} is not a list")
    elif origin is list or arguments[-1] is Ellipsis:
        items = iter(_column(arguments[0], list(chain.from_iterable(values)), key))
        return [origin(islice(items, len(value))) for value in values]
    else:
        if any(len(value) != len(arguments) for value in values):
            raise ValueError(f"{key} is not a list of {len(arguments)} values")
        columns = zip(*values, strict=True)
        checked = [_column(a, list(c), key) for a, c in zip(arguments, columns, strict=False)]
        return list(zip(*checked, strict=True))
    return values


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
    # The constructor of a frozen dataclass calls object.__setattr__ for each field. An update of
    # __dict__ takes half as long.
    names, objects = [name for name, *_ in _fields(kind)], []
    for row in zip(*columns, strict=True):
        made = object.__new__(kind)
        made.__dict__.update(zip(names, row, strict=True))
        objects.append(made)
    return objects


@functools.cache
def _fields(kind: Any) -> list[tuple[str, Any, Any]]:
    """Return the name, the type and the default (or MISSING) of each field of the dataclass or
    TypedDict `kind`."""
    hints = get_type_hints(kind)
    if dataclasses.is_dataclass(kind):
        return [
            (field.name, hints[field.name], field.default) for field in dataclasses.fields(kind)
        ]
    optional = kind.__optional_keys__
    return [(n, hint, None if n in optional else dataclasses.MISSING) for n, hint in hints.items()]
