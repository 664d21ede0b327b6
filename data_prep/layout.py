"""Names, dtypes, array headers and self-checking JSON: what every file of a data set is made of.

Which files there are: docs/formats/dataset.md.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from optimus import files
from optimus.errors import DamageError, DataError

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


def read_bytes(path: str | os.PathLike) -> bytes:
    """The content of a file. Raises DataError where it cannot be read."""
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror}") from None


def write_checked_json(path: str | os.PathLike, value: dict[str, Any]) -> None:
    """Atomically write `value` so that `read_checked_json` notices any later change."""
    files.write_bytes(path, files.checked_json(value))


def read_checked_json(
    path: str | os.PathLike, *forms: str, newest: int = VERSION
) -> dict[str, Any]:
    """What `write_checked_json` wrote, if every byte is as written and its `format` is of `forms`.

    Raises DataError naming the file when it is missing or of another format or version, and
    DamageError when it is damaged.
    """
    data = read_bytes(path)
    try:
        value = files.parse_checked_json(data)
    except ValueError as error:
        raise DamageError(f"{path}: {error}") from None
    if value.get("format") not in forms or value.get("version") not in range(1, newest + 1):
        raise DataError(
            f"{path}: is {value.get('format')} version {value.get('version')}; "
            f"this program reads {forms[0]} version {newest}"
        )
    return value
