"""Token arrays T_i and their tables of documents: written by tokenizing, read by sharding.

Shapes: T tokens of a unit, D documents. `unit-*.npy` is [T] in the data set's dtype;
`unit-*.docs.npy` is int64 [D, 3], a row (end, input, line) for each document: the offset after
its EOS, the number of its input in the plan, its line there (0: the whole file). Where documents
have ids of their own, `unit-*.ids.npy` is uint8 [D, 16], their hashes.

With `--fused`, `unit-*.packed` replaces `unit-*.npy`: zstd frames of BLOCK_TOKENS tokens each
(fewer where a checkpoint restored); int64 [frames + 1, 2], first token and offset of each frame,
and their ends; _FOOT. A file under this name is whole. Sizes and hashes in sidecars are those of
the .npy that it replaces, so that nothing else of a data set depends on the storage of its tokens.
"""

from __future__ import annotations

import bisect
import os
import struct
from array import array
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import xxhash

from data_prep.layout import HEADER_BYTES, little_endian, npy_header, read_bytes, unit_name
from optimus.errors import ConfigError, DamageError, DataError
from optimus.io import files

BLOCK_TOKENS = 8192
"""A row of 2048 costs 30 us to unpack; smaller blocks pack less well."""
_LEVEL = 3
_MAGIC = b"OPTPACK1"
_FOOT = struct.Struct("<8sQQ16s")  # magic, frames, tokens, xxh3 of the index


def packed_path(tokens_dir: Path, unit: int) -> Path:
    """Where unit `unit`'s packed token array lies, if it is packed."""
    return tokens_dir / f"{unit_name(unit)}.packed"


def is_packed(tokens_dir: Path, unit: int, tokens: int) -> bool:
    """Whether a whole packed array of so many tokens stands for the unit's."""
    try:
        with PackedArray(packed_path(tokens_dir, unit), "uint16") as array:
            return array.tokens == tokens
    except (OSError, DataError):
        return False


def require_zstd() -> None:
    """Raises ConfigError where zstandard is not installed."""
    try:
        import zstandard  # noqa: F401
    except ImportError:
        raise ConfigError(
            "--fused packs tokens with zstandard, which is not installed; pip install zstandard"
        ) from None


def _pack(ids: np.ndarray) -> bytes:
    import zstandard

    return zstandard.ZstdCompressor(level=_LEVEL, write_checksum=True).compress(ids.tobytes())


def _unpack(data: bytes | memoryview, dtype: np.dtype, tokens: int | None = None) -> np.ndarray:
    """Raises ValueError for a frame that is damaged or does not hold `tokens` tokens."""
    import zstandard

    try:
        if tokens is not None and zstandard.frame_content_size(data) != tokens * dtype.itemsize:
            raise ValueError("a frame does not hold the tokens that its index says")
        return np.frombuffer(zstandard.ZstdDecompressor().decompress(data), dtype)
    except zstandard.ZstdError as error:
        raise ValueError(str(error)) from None


def packed_share(ids: np.ndarray) -> float:
    """Bytes of `ids`, of an array's dtype, when packed, over those when not."""
    frames = (ids[first : first + BLOCK_TOKENS] for first in range(0, len(ids), BLOCK_TOKENS))
    return sum(len(_pack(frame)) for frame in frames) / ids.nbytes


class PackedStore:
    """Where a TokenArrayWriter puts ids, packed. `file` is at its start."""

    def __init__(self, file: BinaryIO, dtype: str):
        self._file, self._name, self._dtype = file, dtype, little_endian(dtype)
        self._starts, self._offsets = [0], [0]  # of each frame, and of the next
        self._open = np.empty(0, self._dtype)  # not yet a frame

    def append(self, ids: np.ndarray) -> None:
        """Add ids of the array's dtype."""
        ids = np.concatenate([self._open, ids])
        whole = len(ids) // BLOCK_TOKENS * BLOCK_TOKENS
        for first in range(0, whole, BLOCK_TOKENS):
            self._write(ids[first : first + BLOCK_TOKENS])
        self._open = ids[whole:]

    def _write(self, ids: np.ndarray) -> None:
        data = _pack(ids)
        self._file.write(data)
        self._starts.append(self._starts[-1] + len(ids))
        self._offsets.append(self._offsets[-1] + len(data))

    def truncate(self, tokens: int) -> None:
        """Drop all but the first `tokens`."""
        frame = bisect.bisect_right(self._starts, tokens) - 1
        kept = self.read(self._starts[frame], tokens)
        del self._starts[frame + 1 :], self._offsets[frame + 1 :]
        self._file.seek(self._offsets[frame])
        self._file.truncate()
        self._open = kept

    def read(self, first: int, stop: int) -> np.ndarray:
        """Ids [first, stop) again."""
        self._file.flush()
        frame = bisect.bisect_right(self._starts, first) - 1
        parts, begin = [], self._starts[frame]
        with open(self._file.name, "rb") as written:
            written.seek(self._offsets[frame])
            while frame + 1 < len(self._starts) and self._starts[frame] < stop:
                size = self._offsets[frame + 1] - self._offsets[frame]
                parts.append(_unpack(written.read(size), self._dtype))
                frame += 1
        ids = np.concatenate([*parts, self._open])
        return ids[first - begin : stop - begin]

    def save(self, first: int, stop: int) -> bytes:
        """Ids [first, stop) for a checkpoint."""
        return _pack(self.read(first, stop))

    def restore(self, saved: bytes | memoryview) -> int:
        """Append what `save` gave; how many ids."""
        ids = _unpack(saved, self._dtype)
        self.append(ids)
        return len(ids)

    def finish(self) -> dict[str, Any]:
        """Complete the file; size and hash of the .npy that it stands for."""
        if len(self._open):
            self._write(self._open)
        index = np.array([self._starts, self._offsets], "<i8").T.tobytes()
        digest = xxhash.xxh3_64_hexdigest(index).encode()
        foot = _FOOT.pack(_MAGIC, len(self._starts) - 1, self._starts[-1], digest)
        self._file.write(index + foot)
        self._file.flush()
        with PackedArray(Path(self._file.name), self._name) as written:
            return written.describe()


class PackedArray:
    """Reads ids of a packed token array. A context manager; not for two threads."""

    def __init__(self, path: Path, dtype: str):
        """Raises DamageError for a file that is damaged, OSError for one that is not there."""
        self._path, self._name, self._dtype = path, dtype, little_endian(dtype)
        self._file = files.open_regular(path)
        self._fd = self._file.fileno()
        try:
            end = os.fstat(self._fd).st_size - _FOOT.size
            foot = os.pread(self._fd, _FOOT.size, max(end, 0))
            if end < 0 or foot[: len(_MAGIC)] != _MAGIC:
                raise self._damaged("has no end")
            _, frames, self.tokens, xxh3 = _FOOT.unpack(foot)
            size = 16 * (frames + 1)
            index = os.pread(self._fd, min(size, end), max(end - size, 0))
            if xxhash.xxh3_64_hexdigest(index).encode() != xxh3 or len(index) != size:
                raise self._damaged("its index does not match its hash")
            self._starts, self._offsets = np.frombuffer(index, "<i8").reshape(-1, 2).T
            edges = (self._starts[0], self._starts[-1], self._offsets[0], self._offsets[-1])
            ascending = (np.diff(self._starts) > 0).all() and (np.diff(self._offsets) > 0).all()
            if edges != (0, self.tokens, 0, end - size) or not ascending:
                raise self._damaged("its index does not describe it")
        except BaseException:
            self._file.close()
            raise
        self._last: tuple[int, np.ndarray] = (-1, np.empty(0, self._dtype))  # unpacked

    def __enter__(self) -> PackedArray:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def _damaged(self, why: str) -> DamageError:
        return DamageError(f"{self._path}: {why}; remove it and give the command again")

    def read_into(self, out: np.ndarray, start: int) -> None:
        """Fill `out` (1-D, of the array's dtype) with the ids from `start` on. Or DamageError."""
        frame = int(np.searchsorted(self._starts, start, side="right")) - 1
        filled = 0
        while filled < len(out):
            ids = self._frame(frame)
            begin = start + filled - int(self._starts[frame])
            part = ids[begin : begin + len(out) - filled]
            out[filled : filled + len(part)] = part
            filled, frame = filled + len(part), frame + 1

    def _frame(self, frame: int) -> np.ndarray:
        if self._last[0] != frame:
            if frame + 1 >= len(self._starts):
                raise self._damaged("is shorter than its sidecar says")
            first, stop = self._offsets[frame : frame + 2].tolist()
            tokens = int(self._starts[frame + 1] - self._starts[frame])
            try:
                data = os.pread(self._fd, stop - first, first)
                self._last = frame, _unpack(data, self._dtype, tokens)
            except ValueError as error:
                raise self._damaged(str(error)) from None
        return self._last[1]

    def describe(self) -> dict[str, Any]:
        """Size and hash of the .npy that it stands for. Raises DamageError."""
        digest = xxhash.xxh3_64(npy_header((self.tokens,), self._name))
        for frame in range(len(self._starts) - 1):
            digest.update(self._frame(frame).data)
        size = HEADER_BYTES + self.tokens * self._dtype.itemsize
        return {"size": size, "xxh3": digest.hexdigest()}


ID_BYTES = 16
"""Of the hash of a document's id."""
_OPEN_FILES = 256
_EOS_IN_TEXT = "the tokenizer gave the EOS id for plain text; name another with --eos"


def array_path(tokens_dir: Path, unit: int) -> Path:
    """Where unit `unit`'s token array lies."""
    return tokens_dir / f"{unit_name(unit)}.npy"


def docs_path(tokens_dir: Path, unit: int) -> Path:
    """Where unit `unit`'s table of documents lies."""
    return tokens_dir / f"{unit_name(unit)}.docs.npy"


def ids_path(tokens_dir: Path, unit: int) -> Path:
    """Where the hashes of the ids of unit `unit`'s documents lie, if any has one."""
    return tokens_dir / f"{unit_name(unit)}.ids.npy"


def sidecar_path(tokens_dir: Path, unit: int) -> Path:
    """The completion mark of unit `unit`, written after everything else of it."""
    return tokens_dir / f"{unit_name(unit)}.json"


def _at(where: str, what: str) -> str:
    return f"{where}: {what}" if where else what


class PlainStore:
    """Where a TokenArrayWriter puts ids: the array itself. `file` is at its start."""

    def __init__(self, file: BinaryIO, dtype: str):
        self._file, self._dtype, self._itemsize = file, dtype, little_endian(dtype).itemsize
        file.write(bytes(HEADER_BYTES))  # replaced by `finish`, when the length is known

    def append(self, ids: np.ndarray) -> None:
        """Add ids of the array's dtype."""
        self._file.write(ids.data)

    def truncate(self, tokens: int) -> None:
        """Drop all but the first `tokens`."""
        self._file.seek(self._offset(tokens))
        self._file.truncate()

    def _offset(self, tokens: int) -> int:
        return HEADER_BYTES + tokens * self._itemsize

    def save(self, first: int, stop: int) -> bytes:
        """Ids [first, stop) for a checkpoint."""
        self._file.flush()
        size = (stop - first) * self._itemsize
        with open(self._file.name, "rb") as written:
            written.seek(self._offset(first))
            ids = written.read(size)
        assert len(ids) == size
        return ids

    def restore(self, saved: bytes | memoryview) -> int:
        """Append what `save` gave; how many ids."""
        self._file.write(saved)
        return len(saved) // self._itemsize

    def finish(self) -> dict[str, Any]:
        """Write the header; size and hash of the file, for the sidecar."""
        tokens = (self._file.tell() - HEADER_BYTES) // self._itemsize
        self._file.seek(0)
        self._file.write(npy_header((tokens,), self._dtype))
        self._file.flush()
        return {"size": os.path.getsize(self._file.name), "xxh3": files.xxh3_file(self._file.name)}


class TokenArrayWriter:
    """Appends documents to one T_i. `file` is at its start and is written through once."""

    def __init__(self, file: BinaryIO, vocab_size: int, dtype: str, eos_id: int, packed: bool):
        self._store = PackedStore(file, dtype) if packed else PlainStore(file, dtype)
        self._vocab_size, self._dtype, self._eos_id = vocab_size, dtype, eos_id
        self._docs = array("q")
        self._ids = bytearray()
        self._taken = (0, 0)  # tokens and document values that `take` gave
        self.tokens = 0

    @property
    def documents(self) -> int:
        return len(self._docs) // 3

    def append(
        self,
        encoded: list[np.ndarray],
        sources: list[tuple[int, int]],
        own: Sequence[bytes] = (),
        where: Sequence[str] = (),
    ) -> None:
        """Documents' token ids, each followed by EOS here, with their (input, line).

        `own` are the hashes of the documents' own ids, of ID_BYTES, zeros for none; `where` they
        are is for the message of a DataError.

        Every id is checked before it is narrowed: numpy would wrap 70000 to 4464 without a word.
        """
        eos = np.array([self._eos_id], np.uint32)
        flat = np.concatenate([part for ids in encoded for part in (ids, eos)])
        if int(flat.max()) >= self._vocab_size:
            raise DataError(self._outside(int(flat.max())))
        if np.count_nonzero(flat == self._eos_id) != len(encoded):
            wrong = next(n for n, ids in enumerate(encoded) if np.any(ids == self._eos_id))
            raise DataError(_at(where[wrong] if where else "", _EOS_IN_TEXT))
        for ids, (source, line) in zip(encoded, sources, strict=True):
            self.tokens += len(ids) + 1
            self._docs.extend((self.tokens, source, line))
        self._ids += b"".join(own) or bytes(ID_BYTES * len(encoded))
        self._store.append(flat.astype(little_endian(self._dtype)))

    def extend(self, ids: np.ndarray, where: str = "") -> None:
        """Some ids of a document that `close` will end. Checked as in `append`."""
        if len(ids) and int(ids.max()) >= self._vocab_size:
            raise DataError(self._outside(int(ids.max())))
        if np.any(ids == self._eos_id):
            raise DataError(_at(where, _EOS_IN_TEXT))
        self._store.append(ids.astype(little_endian(self._dtype)))
        self.tokens += len(ids)

    def close(self, source: int, line: int, own: bytes = b"") -> None:
        """End the document that `extend` wrote."""
        self._store.append(np.array([self._eos_id], little_endian(self._dtype)))
        self.tokens += 1
        self._docs.extend((self.tokens, source, line))
        self._ids += own or bytes(ID_BYTES)

    def _outside(self, token: int) -> str:
        return (
            f"the tokenizer gave id {token}, outside its vocabulary of {self._vocab_size}; its "
            "tokenizer.json is inconsistent"
        )

    def drop_input(self, source: int) -> None:
        """Take back every document of the input appended last."""
        while self._docs and self._docs[-2] == source:
            del self._docs[-3:]
        self.tokens = self._docs[-3] if self._docs else 0
        del self._ids[self.documents * ID_BYTES :]
        self._taken = (0, 0)
        self._store.truncate(self.tokens)

    def take(self) -> list[bytes]:
        """Tokens and document rows since the last `take`, for a checkpoint."""
        tokens, values = self._taken
        ids = self._store.save(tokens, self.tokens)
        self._taken = (self.tokens, len(self._docs))
        rows = np.array(self._docs[values:], little_endian("int64")).tobytes()
        return [ids, rows, bytes(self._ids[values // 3 * ID_BYTES :])]

    def restore(
        self, ids: bytes | memoryview, rows: bytes | memoryview, own: bytes | memoryview
    ) -> None:
        """Append what `take` gave."""
        self.tokens += self._store.restore(ids)
        self._docs.extend(np.frombuffer(rows, little_endian("int64")).tolist())
        self._ids += own
        self._taken = (self.tokens, len(self._docs))

    def finish(self) -> dict[str, Any]:
        """Complete the file; size and hash of the array, for the sidecar."""
        return self._store.finish()

    def docs_bytes(self) -> bytes:
        """The table of documents as the content of a .npy file."""
        table = np.array(self._docs, little_endian("int64"))
        return npy_header((self.documents, 3), "int64") + table.tobytes()

    def ids_bytes(self) -> bytes:
        """The hashes of the documents' ids as a .npy file, nothing if none has an id."""
        if not any(self._ids):
            return b""
        return npy_header((self.documents, ID_BYTES), "uint8") + bytes(self._ids)


def read_docs(tokens_dir: Path, unit: int, xxh3: str | None = None) -> np.ndarray:
    """The document table of a unit, int64 [D, 3]; `xxh3` is the hash that its file should have.

    Raises DataError for a file that is not there or is damaged.
    """
    path = docs_path(tokens_dir, unit)
    data = read_bytes(path)
    rows, rest = divmod(len(data) - HEADER_BYTES, 3 * 8)
    whole = rows >= 0 and not rest and data[:HEADER_BYTES] == npy_header((rows, 3), "int64")
    if not whole or (xxh3 is not None and files.xxh3_bytes(data) != xxh3):
        raise DamageError(f"{path}: is damaged; optimus-data verify names the repair")
    table = np.frombuffer(data, little_endian("int64"), offset=HEADER_BYTES).reshape(-1, 3)
    if (np.diff(table[:, 0], prepend=0) <= 0).any():  # a document has its EOS at least
        raise DamageError(f"{path}: its documents do not follow one another")
    return table


def read_ids(tokens_dir: Path, unit: int) -> np.ndarray | None:
    """The hashes of the ids of a unit's documents, uint8 [D, 16]; None where none has an id."""
    try:
        data = files.read_regular(ids_path(tokens_dir, unit))
    except FileNotFoundError:
        return None
    return np.frombuffer(data, np.uint8, offset=HEADER_BYTES).reshape(-1, ID_BYTES)


class TokenArrayReader:
    """Reads runs of tokens out of the T_i, without mapping them: memory stays the caller's.

    At most 256 files are open at a time.
    """

    def __init__(self, tokens_dir: Path, dtype: str):
        self._dir = tokens_dir
        self._name, self._dtype = dtype, little_endian(dtype)
        self._open: OrderedDict[int, int | PackedArray] = OrderedDict()  # by unit, oldest first

    def close(self) -> None:
        while self._open:
            self._close_oldest()

    def _close_oldest(self) -> None:
        one = self._open.popitem(last=False)[1]
        os.close(one) if isinstance(one, int) else one.__exit__()

    def read_into(self, out: np.ndarray, unit: int, start: int) -> None:
        """Fill `out` (1-D, contiguous, of the arrays' dtype) with T_unit from `start` on."""
        one = self._opened(unit)
        if not isinstance(one, int):
            one.read_into(out, start)
            return
        view = out.view(np.uint8).data
        offset = HEADER_BYTES + start * self._dtype.itemsize
        while view:
            count = os.preadv(one, [view], offset)
            if count == 0:
                raise DamageError(
                    f"{array_path(self._dir, unit)}: is shorter than its sidecar says"
                )
            view, offset = view[count:], offset + count

    def read(self, unit: int, start: int, stop: int) -> np.ndarray:
        """T_unit[start:stop] as a new array."""
        out = np.empty(stop - start, self._dtype)
        self.read_into(out, unit, start)
        return out

    def descriptor(self, unit: int) -> int | None:
        """An open descriptor of the unit's array, good until the next call; None: it is packed."""
        one = self._opened(unit)
        return one if isinstance(one, int) else None

    def _opened(self, unit: int) -> int | PackedArray:
        one = self._open.pop(unit, None)
        if one is None:
            if len(self._open) == _OPEN_FILES:
                self._close_oldest()
            one = self._open_unit(unit)
        self._open[unit] = one
        return one

    def _open_unit(self, unit: int) -> int | PackedArray:
        packed = packed_path(self._dir, unit)
        try:
            with files.open_regular(array_path(self._dir, unit)) as file:
                return os.dup(file.fileno())
        except FileNotFoundError:
            if not packed.exists():
                raise
        return PackedArray(packed, self._name)
