"""Reader of token files that other programs wrote: flat arrays of ids and the ends of documents.

Megatron-LM: `NAME.bin` contains the ids of all sequences; `NAME.idx` contains the dtype of the ids,
the length of each sequence and the first sequence of each document (version 1 of the format in
megatron/core/datasets/indexed_dataset.py). dolma and OLMo: a `.npy` file without a header contains
only ids, with EOS after each document. A `.npy` file with a header can also be read if its array
has one dimension.
"""

from __future__ import annotations

import os
import struct
import warnings
from dataclasses import dataclass
from pathlib import Path
from tokenize import TokenError

import numpy as np

from data_prep.layout import read_bytes
from optimus.errors import DataError, counted, one_line
from optimus.io import files

_IDX_MAGIC = b"MMIDIDX\x00\x00"
_IDX_HEAD = struct.Struct("<QBQQ")
"""Format of the fields after the magic number: version, dtype, number of sequences, number of
document indices."""
_IDX_TYPES = {1: "u1", 2: "i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}
_NPY_MAGIC = b"\x93NUMPY"
_NPY_ERRORS = (
    *(ValueError, TypeError, OverflowError, RecursionError, MemoryError, SyntaxError),
    TokenError,
)
"""Exceptions that numpy raises for a .npy file with a damaged header. There are many such
exceptions, because numpy parses the header as Python code and does not check the shape."""


@dataclass(frozen=True)
class Foreign:
    """Token ids and ends of documents in a token file that another program wrote."""

    ids: np.ndarray
    """[T] of any integer dtype, memory-mapped from the file."""
    ends: np.ndarray
    """int64 [D], ascending: the offset after the last token of each document. Empty if the file
    does not list documents; then only EOS tokens mark the ends of documents."""


def open_foreign(name: str, dtype: str | None) -> Foreign:
    """Memory-map the ids of a token file.

    Args:
        name: A .npy file, or a Megatron-LM .bin file with an .idx file of the same stem.
        dtype: The dtype of a .npy file without a header. None: a .npy file must have a header.

    Raises:
        DataError: the file is damaged, incomplete or of another format.
    """
    try:
        return _megatron(Path(name)) if name.endswith(".bin") else _npy(Path(name), dtype)
    except OSError as error:
        raise DataError(f"{error.filename or name}: cannot be read: {error.strerror}") from None


def index_of(name: str) -> str:
    """Return the name of the .idx file (the index) of a Megatron-LM .bin file."""
    return name.removesuffix(".bin") + ".idx"


def _megatron(path: Path) -> Foreign:
    idx = index_of(str(path))
    head = len(_IDX_MAGIC) + _IDX_HEAD.size
    with files.open_regular(idx) as file:
        data, size = file.read(head), os.fstat(file.fileno()).st_size
    if not data.startswith(_IDX_MAGIC) or len(data) < head:
        raise DataError(
            f"{idx}: is not a Megatron-LM index, which begins with MMIDIDX; copy it again, or "
            "--exclude the .bin file"
        )
    version, code, sequences, documents = _IDX_HEAD.unpack_from(data, len(_IDX_MAGIC))
    if version != 1 or code not in _IDX_TYPES:
        raise DataError(
            f"{idx}: version {version} with the dtype code {code} is not supported; write version "
            "1 with integer ids"
        )
    if size != head + 12 * sequences + 8 * documents:  # checked before the whole file is read
        raise DataError(
            f"{idx}: its size of {size} bytes does not match "
            f"{counted(sequences, 'sequence')} and {documents} document indices; the file is "
            "damaged or multimodal: copy it again, or make it again from text"
        )
    data = read_bytes(idx)
    lengths = np.frombuffer(data, "<i4", sequences, head).astype(np.int64)
    pointers = np.frombuffer(data, "<i8", sequences, head + 4 * sequences)
    indices = np.frombuffer(data, "<i8", documents, head + 12 * sequences)
    dtype = np.dtype(_IDX_TYPES[code])
    stops = np.cumsum(lengths)
    if (lengths < 0).any() or not np.array_equal(pointers, (stops - lengths) * dtype.itemsize):
        raise DataError(
            f"{idx}: the offsets of its sequences do not match their lengths; make the data set "
            "again"
        )
    ascending = documents == 0 or (indices[0] == 0 and (np.diff(indices) >= 0).all())
    if not ascending or (documents and indices[-1] != sequences):
        raise DataError(
            f"{idx}: its document indices do not ascend from 0 to {sequences}; copy it again"
        )
    ids = _raw(path, dtype)
    tokens = int(stops[-1]) if sequences else 0
    if len(ids) != tokens:
        raise DataError(
            f"{path}: contains {counted(len(ids), 'id')}, but its index lists {tokens}; copy both "
            "files again"
        )
    ends = np.concatenate([[0], stops])[indices[1:]] if documents else stops
    return Foreign(ids, ends.astype(np.int64))


def _npy(path: Path, dtype: str | None) -> Foreign:
    no_ends = np.empty(0, np.int64)
    with open(path, "rb") as file:
        has_header = file.read(len(_NPY_MAGIC)) == _NPY_MAGIC
    if not has_header:
        if dtype is None:
            raise DataError(
                f"{path}: has no header with the dtype of its ids; set --dtype to the dtype with "
                "which the file was written, uint16 or uint32"
            )
        return Foreign(_raw(path, np.dtype(dtype).newbyteorder("<")), no_ends)
    try:
        # The warnings of np.load are not needed. After the warning of an overflow, np.load raises
        # an error. The other warning is about headers that Python 2 wrote.
        with np.errstate(over="ignore"), warnings.catch_warnings(action="ignore"):
            ids = np.load(path, mmap_mode="r", allow_pickle=False)
    except _NPY_ERRORS as error:
        raise DataError(f"{path}: is a damaged .npy file: {one_line(error)}") from None
    if ids.ndim != 1 or ids.dtype.kind not in "iu":
        raise DataError(
            f"{path}: is an array of dtype {ids.dtype} and shape {list(ids.shape)}; write a "
            "one-dimensional array of integers"
        )
    if dtype is not None and ids.dtype != np.dtype(dtype):
        raise DataError(
            f"{path}: its header has the dtype {ids.dtype}, not --dtype {dtype}; leave out --dtype"
        )
    return Foreign(ids, no_ends)


def _raw(path: Path, dtype: np.dtype) -> np.ndarray:
    size = os.path.getsize(path)
    if size % dtype.itemsize:
        raise DataError(
            f"{path}: its size of {size} bytes is not a multiple of the {dtype.itemsize} bytes of "
            f"a {dtype.name} id; the file is truncated or has ids of another dtype: copy it again, "
            "or set --dtype to the dtype of its ids"
        )
    return np.memmap(path, dtype, "r") if size else np.empty(0, dtype)
