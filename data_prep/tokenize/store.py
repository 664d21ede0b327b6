"""Token arrays T_i and tables of documents. Tokenization writes these files, and sharding reads
them.

A unit is a range of input files, with T tokens and D documents. `unit-*.npy` contains the tokens,
[T] in the dtype of the data set. `unit-*.docs.npy` is a table of the documents, int64 [D, 3], with
a row (end, input, line) for each document: the offset after the document's EOS, the number of the
input in the plan, and the line of the document in the input (0: the whole file). `unit-*.ids.npy`
contains the hashes of the document ids, uint8 [D, 16], and exists only if a document has an id.

With `--fused`, `unit-*.packed` (data_prep/tokenize/packed.py) replaces `unit-*.npy`.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
from array import array
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import xxhash

from data_prep.layout import (
    DTYPES,
    HEADER_BYTES,
    MAX_COUNT,
    little_endian,
    npy_header,
    read_bytes,
    require_npy,
    unit_name,
)
from data_prep.tokenize.packed import PackedArray, PackedStore
from optimus.errors import DamageError, DataError
from optimus.io import files

ID_BYTES = 16
"""Size in bytes of the hash of a document id."""
_OPEN_FILES = 256
_READ_BYTES = 4 << 20
_ARRAY = re.compile(r"unit-[0-9]+\.(npy|packed)")
_EOS_IN_TEXT = "the tokenizer returned the EOS id for plain text; name another EOS token with --eos"


def array_path(tokens_dir: Path, unit: int, packed: bool = False) -> Path:
    """Return the path of the token array of a unit: a .packed file if `packed` is True, else a .npy
    file."""
    return tokens_dir / f"{unit_name(unit)}.{'packed' if packed else 'npy'}"


def docs_path(tokens_dir: Path, unit: int) -> Path:
    """Return the path of a unit's document table."""
    return tokens_dir / f"{unit_name(unit)}.docs.npy"


def ids_path(tokens_dir: Path, unit: int) -> Path:
    """Return the path of the file that contains the hashes of a unit's document ids.

    The file exists only if at least one document of the unit has an id.
    """
    return tokens_dir / f"{unit_name(unit)}.ids.npy"


def sidecar_path(tokens_dir: Path, unit: int) -> Path:
    """Return the path of the sidecar of a unit: a JSON file that is written after the unit's other
    files in the folder."""
    return tokens_dir / f"{unit_name(unit)}.json"


def plain_arrays(tokens_dir: Path, units: Iterable[int]) -> dict[int, Path]:
    """Return a dict that maps each unit with a .npy token array to the path of this array.

    Units with a packed array are not included: the hash of a packed array is not compared, because
    every read of a packed array checks the data.
    """
    paths = {unit: array_path(tokens_dir, unit) for unit in units}
    return {unit: path for unit, path in paths.items() if path.exists()}


def has_any_array(tokens_dir: Path) -> bool:
    """Return True if a folder contains at least one token array."""
    return any(map(_ARRAY.fullmatch, os.listdir(tokens_dir)))


def unit_files(tokens_dir: Path, unit: int) -> list[Path]:
    """Return the paths of the existing files of a unit."""
    paths = [array_path(tokens_dir, unit), docs_path(tokens_dir, unit), ids_path(tokens_dir, unit)]
    paths += [array_path(tokens_dir, unit, packed=True), sidecar_path(tokens_dir, unit)]
    return [path for path in paths if path.exists()]


def require_array(tokens_dir: Path, unit: int, tokens: int, size: int) -> None:
    """Check that the token array of a unit, packed or not, exists and has `tokens` tokens.

    `size` is the size in bytes of a .npy file that contains the array. Raises DataError if the
    array is missing, and DamageError if the size or the header of the file is wrong.
    """
    path = array_path(tokens_dir, unit)
    if not path.exists():
        packed_path = array_path(tokens_dir, unit, packed=True)
        with contextlib.suppress(OSError, DataError), PackedArray(packed_path, "uint16") as packed:
            if packed.tokens == tokens:
                return
    require_npy(path, size, *(npy_header((tokens,), dtype) for dtype in DTYPES))


def problem_of_rows(table: np.ndarray, inputs: range) -> str:
    """Check the inputs and lines in a table of documents. Return a description of the first
    problem, or "" if there is none.

    The documents must be sorted by input and, within an input, by line.

    Args:
        table: int64 [D, 3]: end, input and line of each document.
        inputs: Numbers of the inputs that the table may contain.
    """
    sources, lines = table[:, 1], table[:, 2]
    if len(table) and not (inputs[0] <= sources.min() and sources.max() <= inputs[-1]):
        return "names an input outside the unit"
    if len(table) and not (lines.min() >= 0 and lines.max() < MAX_COUNT):
        return "names an impossible line of an input"
    steps = np.diff(sources)
    if (steps < 0).any() or (np.diff(lines)[steps == 0] < 0).any():
        return "its documents are not sorted by input and line"
    return ""


def check_array(
    tokens_dir: Path,
    unit: int,
    dtype: str,
    size: int,
    xxh3: str,
    vocab_size: int,
    eos_id: int,
    ends: np.ndarray | None,
) -> None:
    """Read and check the token array of a unit, packed or not.

    Args:
        tokens_dir: The folder of token arrays.
        unit: The number of the unit.
        dtype: The dtype of the ids.
        size: The size in bytes of a .npy file that contains the array, even if the array is packed.
        xxh3: The hash of a .npy file that contains the array, even if the array is packed.
        vocab_size: The number of ids of the tokenizer.
        eos_id: The id that ends each document and occurs nowhere else.
        ends: The offset after the last id of each document, int64 [D]. None: the ends of documents
            are not checked.

    Raises:
        DataError: the array cannot be read.
        DamageError: the array is damaged, or its ids contradict `vocab_size` or `ends`.
    """
    path = array_path(tokens_dir, unit)
    packed = array_path(tokens_dir, unit, packed=True)
    tokens = (size - HEADER_BYTES) // little_endian(dtype).itemsize
    digest, start, documents, problem = xxhash.xxh3_64(), 0, 0, ""
    blocks: Iterator[np.ndarray]
    try:
        with contextlib.ExitStack() as stack:
            if path.exists() or not packed.exists():
                actual = os.path.getsize(path)
                if actual != size:
                    raise DamageError(f"{path}: has {actual} bytes instead of {size}")
                file = stack.enter_context(files.open_regular(path))
                header = file.read(HEADER_BYTES)
                if header != npy_header((tokens,), dtype):
                    raise DamageError(f"{path}: its header does not describe {tokens} {dtype} ids")
                digest.update(header)
                blocks = (
                    np.frombuffer(data, little_endian(dtype))
                    for data in iter(lambda: file.read(_READ_BYTES), b"")
                )
            else:
                path = packed
                array = stack.enter_context(PackedArray(packed, dtype))
                digest.update(npy_header((array.tokens,), dtype))
                blocks = array.blocks()
            for ids in blocks:
                digest.update(ids.data)
                after_eos = np.flatnonzero(ids == eos_id) + start + 1
                if int(ids.max()) >= vocab_size:
                    problem = f"contains id {ids.max()}, outside the vocabulary of {vocab_size}"
                elif ends is not None:
                    expected = ends[documents : documents + len(after_eos)]
                    if not np.array_equal(after_eos, expected):
                        problem = "its documents do not end where its table of documents says"
                documents, start = documents + len(after_eos), start + len(ids)
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror}") from None
    if digest.hexdigest() != xxh3 or start != tokens:
        raise DamageError(f"{path}: its content is damaged (hash differs)")
    if ends is not None and documents != len(ends):
        problem = problem or "its documents do not end where its table of documents says"
    if problem:
        raise DamageError(f"{path}: {problem}")


class PlainStore:
    """Writer of a .npy token array, for a TokenArrayWriter. `file` must be empty."""

    def __init__(self, file: BinaryIO, dtype: str):
        self._file, self._dtype, self._itemsize = file, dtype, little_endian(dtype).itemsize
        file.write(bytes(HEADER_BYTES))  # replaced by `finish`, when the length is known

    def append(self, ids: np.ndarray) -> None:
        """Append ids. `ids` must have the dtype of the array."""
        self._file.write(ids.data)

    def truncate(self, tokens: int) -> None:
        """Remove all tokens after the first `tokens`."""
        self._file.seek(self._offset(tokens))
        self._file.truncate()

    def _offset(self, tokens: int) -> int:
        return HEADER_BYTES + tokens * self._itemsize

    def save(self, first: int, stop: int) -> bytes:
        """Return the ids with the indices [first, stop) as bytes, for a checkpoint."""
        self._file.flush()
        size = (stop - first) * self._itemsize
        with open(self._file.name, "rb") as written:
            written.seek(self._offset(first))
            ids = written.read(size)
        assert len(ids) == size
        return ids

    def saved_ids(self, saved: bytes | memoryview) -> Iterator[np.ndarray]:
        """Yield the ids in `saved`, a result of `save`. Raises ValueError if `saved` is damaged."""
        yield np.frombuffer(saved, little_endian(self._dtype))

    def finish(self) -> dict[str, Any]:
        """Write the header. Return the size and hash of the file, for the sidecar."""
        tokens = (self._file.tell() - HEADER_BYTES) // self._itemsize
        self._file.seek(0)
        self._file.write(npy_header((tokens,), self._dtype))
        self._file.flush()
        return {"size": os.path.getsize(self._file.name), "xxh3": files.xxh3_file(self._file.name)}


class TokenArrayWriter:
    """Writer that appends documents to the token array of a unit. `file` must be empty."""

    def __init__(self, file: BinaryIO, vocab_size: int, dtype: str, eos_id: int, packed: bool):
        self._store = PackedStore(file, dtype) if packed else PlainStore(file, dtype)
        self._vocab_size, self._dtype, self._eos_id = vocab_size, dtype, eos_id
        self._docs = array("q")
        self._id_hashes = bytearray()
        self._saved = (0, 0)  # number of tokens and length of `_docs` at the last checkpoint
        self.tokens = 0

    @property
    def documents(self) -> int:
        return len(self._docs) // 3

    def append(
        self,
        encoded: list[np.ndarray],
        sources: list[tuple[int, int]],
        id_hashes: Sequence[bytes] = (),
        where: Sequence[str] = (),
    ) -> None:
        """Append documents, and EOS after each document.

        The method checks all ids before it converts them to the stored dtype, because numpy
        converts 70000 to the uint16 4464 without an error.

        Args:
            encoded: The ids of each document, uint32 [T], without EOS.
            sources: Input and line of each document.
            id_hashes: The hash of each document's id, ID_BYTES long. The hash is zeros if the
                document has no id. Empty: no document has an id.
            where: File and line of each document, for an error message.

        Raises:
            DataError: an id is EOS or outside the vocabulary.
        """
        eos = np.array([self._eos_id], np.uint32)
        flat = np.concatenate([array for ids in encoded for array in (ids, eos)])
        if int(flat.max()) >= self._vocab_size:
            raise DataError(self._outside(int(flat.max())))
        if np.count_nonzero(flat == self._eos_id) != len(encoded):
            wrong = next(n for n, ids in enumerate(encoded) if np.any(ids == self._eos_id))
            raise DataError(f"{where[wrong]}: {_EOS_IN_TEXT}" if where else _EOS_IN_TEXT)
        for ids, (source, line) in zip(encoded, sources, strict=True):
            self.tokens += len(ids) + 1
            self._docs.extend((self.tokens, source, line))
        self._id_hashes += b"".join(id_hashes) or bytes(ID_BYTES * len(encoded))
        self._store.append(flat.astype(little_endian(self._dtype)))

    def extend(self, ids: np.ndarray, where: str = "") -> None:
        """Append ids to the current, incomplete document. The next call of `close` ends this
        document. The ids are checked as in `append`."""
        if len(ids) and int(ids.max()) >= self._vocab_size:
            raise DataError(self._outside(int(ids.max())))
        if np.any(ids == self._eos_id):
            raise DataError(f"{where}: {_EOS_IN_TEXT}" if where else _EOS_IN_TEXT)
        self._store.append(ids.astype(little_endian(self._dtype)))
        self.tokens += len(ids)

    def close(self, source: int, line: int, id_hash: bytes = b"") -> None:
        """End the current document, whose ids `extend` has appended: append EOS, and add a row to
        the table of documents."""
        self._store.append(np.array([self._eos_id], little_endian(self._dtype)))
        self.tokens += 1
        self._docs.extend((self.tokens, source, line))
        self._id_hashes += id_hash or bytes(ID_BYTES)

    def _outside(self, token: int) -> str:
        return (
            f"the tokenizer returned id {token}, outside its vocabulary of {self._vocab_size}; its "
            "tokenizer.json is inconsistent; use another tokenizer"
        )

    def drop_input(self, source: int) -> None:
        """Remove all documents of the input `source`, which must be the last documents in the
        array."""
        while self._docs and self._docs[-2] == source:
            del self._docs[-3:]
        self.tokens = self._docs[-3] if self._docs else 0
        del self._id_hashes[self.documents * ID_BYTES :]
        self._saved = (0, 0)
        self._store.truncate(self.tokens)

    def checkpoint(self) -> list[bytes]:
        """Return the data that was added since the last call of `checkpoint`.

        The result contains three byte strings: token ids, rows of the table of documents, and
        hashes of document ids.
        """
        tokens, values = self._saved
        ids = self._store.save(tokens, self.tokens)
        self._saved = (self.tokens, len(self._docs))
        rows = np.array(self._docs[values:], little_endian("int64")).tobytes()
        return [ids, rows, bytes(self._id_hashes[values // 3 * ID_BYTES :])]

    def restore(
        self,
        inputs: range,
        ids: bytes | memoryview,
        rows: bytes | memoryview,
        id_hashes: bytes | memoryview,
    ) -> None:
        """Check the documents in a checkpoint, and append them to the array.

        Args:
            inputs: The inputs from which the documents may come.
            ids: The token ids, from `checkpoint`.
            rows: The rows of the table of documents, from `checkpoint`.
            id_hashes: The hashes of document ids, from `checkpoint`.

        Raises:
            ValueError: The arguments cannot be a result of `checkpoint`.
        """
        table = np.frombuffer(rows, little_endian("int64")).reshape(-1, 3)
        if len(id_hashes) != len(table) * ID_BYTES:
            raise ValueError("its number of id hashes differs from its number of documents")
        last = np.array([[0, *self._docs[-2:]]]) if self._docs else np.array([[0, inputs[0], 0]])
        if problem := problem_of_rows(np.concatenate([last, table]), inputs):
            raise ValueError(problem)
        documents = 0
        for block in self._store.saved_ids(ids):
            if len(block) and int(block.max()) >= self._vocab_size:
                raise ValueError(f"contains an id outside the vocabulary of {self._vocab_size}")
            ends = np.flatnonzero(block == self._eos_id) + self.tokens + 1
            if not np.array_equal(ends, table[documents : documents + len(ends), 0]):
                raise ValueError("contains documents that do not end at an EOS id")
            documents += len(ends)
            self._store.append(block)
            self.tokens += len(block)
        if documents != len(table):
            raise ValueError("contains documents that do not end at an EOS id")
        self._docs.extend(table.ravel().tolist())
        self._id_hashes += id_hashes
        self._saved = (self.tokens, len(self._docs))

    def finish(self) -> dict[str, Any]:
        """Complete the file of the token array. Return the size and the hash of the array as a .npy
        file, for the sidecar."""
        return self._store.finish()

    def docs_bytes(self) -> bytes:
        """Return the content of a .npy file with the table of documents."""
        table = np.array(self._docs, little_endian("int64"))
        return npy_header((self.documents, 3), "int64") + table.tobytes()

    def ids_bytes(self) -> bytes:
        """Return the content of a .npy file with the hashes of document ids.

        If no document has an id, the result is empty.
        """
        if not any(self._id_hashes):
            return b""
        return npy_header((self.documents, ID_BYTES), "uint8") + bytes(self._id_hashes)


def hash_of_id(value: Any) -> bytes:
    """Return the hash of a document id, or ID_BYTES zeros if the id is missing, null, NaN or ""."""
    if value is None or value == "" or value != value:
        return bytes(ID_BYTES)
    if isinstance(value, str):
        content = b"s" + value.encode("utf-8", "surrogatepass")
    else:
        content = b"j" + json.dumps(value, sort_keys=True, default=str).encode()
    return hashlib.blake2b(content, digest_size=ID_BYTES).digest()


def read_docs(tokens_dir: Path, unit: int, xxh3: str | None = None) -> np.ndarray:
    """Read a unit's document table.

    Args:
        tokens_dir: The folder of token arrays.
        unit: The number of the unit.
        xxh3: The hash that the file must have. None: the file may have any hash.

    Returns:
        int64 [D, 3]: for each document, the index after the document's last token, the number of
        the input in the plan, and the line of the document in the input (0: the whole input).

    Raises:
        DataError: the file is missing or damaged.
    """
    path = docs_path(tokens_dir, unit)
    data = read_bytes(path)
    rows, rest = divmod(len(data) - HEADER_BYTES, 3 * 8)
    whole = rows >= 0 and not rest and data[:HEADER_BYTES] == npy_header((rows, 3), "int64")
    if not whole or (xxh3 is not None and files.xxh3_bytes(data) != xxh3):
        raise DamageError(f"{path}: its content is damaged (header or hash differs)")
    table = np.frombuffer(data, little_endian("int64"), offset=HEADER_BYTES).reshape(-1, 3)
    if (np.diff(table[:, 0], prepend=0) <= 0).any():  # a document has at least EOS
        raise DamageError(f"{path}: the document ends in column 0 do not increase")
    return table


def read_ids(tokens_dir: Path, unit: int) -> np.ndarray | None:
    """Return the hashes of a unit's document ids, uint8 [D, 16]; None if no document has an id."""
    try:
        data = files.read_regular(ids_path(tokens_dir, unit))
    except FileNotFoundError:
        return None
    return np.frombuffer(data, np.uint8, offset=HEADER_BYTES).reshape(-1, ID_BYTES)


class _PlainArray:
    """Reader of the ids in the .npy file of a token array."""

    def __init__(self, path: Path, dtype: str):
        self._path, self._file = path, files.open_regular(path)
        self._itemsize = little_endian(dtype).itemsize

    def close(self) -> None:
        self._file.close()

    def read_into(self, out: np.ndarray, start: int) -> None:
        """Fill `out` [n] with n consecutive ids. The first id has the index `start`.

        `out` is contiguous and has the dtype of the array.
        """
        view = out.view(np.uint8).data
        offset = HEADER_BYTES + start * self._itemsize
        while view:
            count = os.preadv(self._file.fileno(), [view], offset)
            if count == 0:
                raise DamageError(f"{self._path}: contains fewer tokens than its sidecar states")
            view, offset = view[count:], offset + count

    def read_rows(self, out: np.ndarray, rows: np.ndarray, starts: np.ndarray) -> None:
        """For each i, fill out[rows[i]] with consecutive ids, of which the first has the index
        starts[i]. `out` is [number of rows, ids per row].

        Most of the time is spent in system calls, one per row.
        """
        fd, size = self._file.fileno(), out.shape[1] * self._itemsize
        offsets = (HEADER_BYTES + starts * self._itemsize).tolist()
        for row, start, offset in zip(rows.tolist(), starts.tolist(), offsets, strict=True):
            if os.preadv(fd, (out[row],), offset) != size:
                self.read_into(out[row], start)


class TokenArrayReader:
    """Reader of ranges of ids from the token arrays (.npy or packed) in a folder.

    Files are not memory-mapped. At most 256 files are open at a time.
    """

    def __init__(self, tokens_dir: Path, dtype: str):
        self._dir, self._dtype = tokens_dir, dtype
        # The least recently used array is first.
        self._open: OrderedDict[int, _PlainArray | PackedArray] = OrderedDict()

    def close(self) -> None:
        while self._open:
            self._open.popitem()[1].close()

    def read_into(self, out: np.ndarray, unit: int, start: int) -> None:
        """Copy the ids [start, start + n) of the token array of `unit` to `out` [n].

        `out` is contiguous and has the dtype of the arrays.
        """
        self._opened(unit).read_into(out, start)

    def read(self, unit: int, start: int, stop: int) -> np.ndarray:
        """Return the ids [start, stop) of the token array of `unit` as a new array."""
        out = np.empty(stop - start, little_endian(self._dtype))
        self.read_into(out, unit, start)
        return out

    def read_rows(self, out: np.ndarray, rows: np.ndarray, unit: int, starts: np.ndarray) -> None:
        """For each i, copy the ids [starts[i], starts[i] + C) of the token array of `unit` to
        out[rows[i]]. `out` is [number of rows, C]."""
        self._opened(unit).read_rows(out, rows, starts)

    def _opened(self, unit: int) -> _PlainArray | PackedArray:
        array = self._open.pop(unit, None)
        if array is None:
            if len(self._open) == _OPEN_FILES:
                self._open.popitem(last=False)[1].close()
            packed = array_path(self._dir, unit, packed=True)
            try:
                array = _PlainArray(array_path(self._dir, unit), self._dtype)
            except FileNotFoundError:
                if not packed.exists():
                    raise
                array = PackedArray(packed, self._dtype)
        self._open[unit] = array
        return array
