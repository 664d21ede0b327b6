"""Packed (compressed) token arrays, which `--fused` writes instead of .npy files.

`unit-*.packed` contains zstd frames, an index and a footer (_FOOT). A frame has BLOCK_TOKENS
tokens; the last frame can have fewer. The index is int64 [frames + 1, 2]. It has a row (index of
the first token, offset of the frame in bytes) for each frame, and a last row (number of tokens,
offset of the index in bytes). The sidecar of a packed array states the size and hash of a .npy file
with the same tokens. Other files therefore do not depend on the format of the array.
"""

from __future__ import annotations

import bisect
import os
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import xxhash

from data_prep.layout import (
    HEADER_BYTES,
    little_endian,
    npy_header,
)
from optimus.errors import ConfigError, DamageError
from optimus.io import files

BLOCK_TOKENS = 8192
"""Number of tokens in a zstd frame. With frames of this size, it takes 30 us to read and decompress
a row of 2048 tokens. With smaller frames, the compressed array would be larger."""
_READ_TOKENS = 128 * BLOCK_TOKENS
_LEVEL = 3
_MAGIC = b"OPTPACK1"
_FOOT = struct.Struct("<8sQQ16s")  # magic, frames, tokens, xxh3 of the index


def require_zstd() -> None:
    """Raise ConfigError if zstandard is not installed."""
    try:
        import zstandard  # noqa: F401
    except ImportError:
        raise ConfigError(
            "--fused packs tokens with zstandard, which is not installed; pip install zstandard"
        ) from None


def _pack(ids: np.ndarray) -> bytes:
    import zstandard

    return zstandard.ZstdCompressor(level=_LEVEL, write_checksum=True).compress(ids.tobytes())


def _unpack(data: bytes | memoryview, dtype: np.dtype, tokens: int) -> np.ndarray:
    """Decompress a zstd frame, and return its ids. Raises ValueError if the frame is damaged or
    does not have `tokens` tokens."""
    import zstandard

    try:
        if zstandard.frame_content_size(data) != tokens * dtype.itemsize:
            raise ValueError("the size of a frame differs from the index of the file")
        return np.frombuffer(zstandard.ZstdDecompressor().decompress(data), dtype)
    except zstandard.ZstdError as error:
        raise ValueError(str(error)) from None


def _unpack_blocks(data: bytes | memoryview, dtype: np.dtype) -> Iterator[np.ndarray]:
    """Decompress a zstd frame of any length. Yield its ids in blocks of at most _READ_TOKENS ids.

    A frame of a few bytes can become gigabytes. Therefore the frame is not decompressed at once.
    Raises ValueError if the frame is damaged.
    """
    import zstandard

    try:
        left = zstandard.frame_content_size(data)
        if left < 0 or left % dtype.itemsize:
            raise ValueError("the size of a frame is not a multiple of the size of a token")
        with zstandard.ZstdDecompressor().stream_reader(data) as reader:
            while left:
                block = reader.read(min(left, _READ_TOKENS * dtype.itemsize))
                if not block or len(block) % dtype.itemsize:
                    raise ValueError("the content of a frame is shorter than its header states")
                left -= len(block)
                yield np.frombuffer(block, dtype)
    except zstandard.ZstdError as error:
        raise ValueError(str(error)) from None


def packed_share(ids: np.ndarray) -> float:
    """Return (size of the compressed `ids`) / (size of `ids` in memory)."""
    frames = (ids[first : first + BLOCK_TOKENS] for first in range(0, len(ids), BLOCK_TOKENS))
    return sum(len(_pack(frame)) for frame in frames) / ids.nbytes


class PackedStore:
    """Writer of a packed (compressed) token array, for a TokenArrayWriter. `file` must be empty."""

    def __init__(self, file: BinaryIO, dtype: str):
        self._file, self._name, self._dtype = file, dtype, little_endian(dtype)
        # For each written frame and the next frame: index of the first token, and offset in bytes.
        self._starts, self._offsets = [0], [0]
        self._open = np.empty(0, self._dtype)  # the last ids, which do not fill a frame yet

    def append(self, ids: np.ndarray) -> None:
        """Append ids. `ids` must have the dtype of the array."""
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
        """Remove all tokens after the first `tokens`."""
        frame = bisect.bisect_right(self._starts, tokens) - 1
        kept = self.read(self._starts[frame], tokens)
        del self._starts[frame + 1 :], self._offsets[frame + 1 :]
        self._file.seek(self._offsets[frame])
        self._file.truncate()
        self._open = kept

    def read(self, first: int, stop: int) -> np.ndarray:
        """Return the ids with the indices [first, stop) among all appended ids."""
        self._file.flush()
        frame = bisect.bisect_right(self._starts, first) - 1
        frames, begin = [], self._starts[frame]
        with open(self._file.name, "rb") as written:
            written.seek(self._offsets[frame])
            while frame + 1 < len(self._starts) and self._starts[frame] < stop:
                size = self._offsets[frame + 1] - self._offsets[frame]
                frames.append(_unpack(written.read(size), self._dtype, BLOCK_TOKENS))
                frame += 1
        ids = np.concatenate([*frames, self._open])
        return ids[first - begin : stop - begin]

    def save(self, first: int, stop: int) -> bytes:
        """Return the ids with the indices [first, stop) as a zstd frame, for a checkpoint."""
        return _pack(self.read(first, stop))

    def saved_ids(self, saved: bytes | memoryview) -> Iterator[np.ndarray]:
        """Yield the ids in `saved`, a result of `save`, in blocks. Raises ValueError if `saved` is
        damaged."""
        return _unpack_blocks(saved, self._dtype)

    def finish(self) -> dict[str, Any]:
        """Complete the file. Return the size and the hash that a .npy file with the same ids would
        have."""
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
    """Context manager that reads the ids in a packed token array. Threads must not share a
    PackedArray."""

    def __init__(self, path: Path, dtype: str):
        """Open the file `path`. Raises DamageError if the file is damaged, and OSError if the file
        is missing."""
        self._path, self._name, self._dtype = path, dtype, little_endian(dtype)
        self._file = files.open_regular(path)
        self._fd = self._file.fileno()
        try:
            end = os.fstat(self._fd).st_size - _FOOT.size
            foot = os.pread(self._fd, _FOOT.size, max(end, 0))
            if end < 0 or foot[: len(_MAGIC)] != _MAGIC:
                raise self._damaged("is incomplete")
            _, frames, self.tokens, xxh3 = _FOOT.unpack(foot)
            size = 16 * (frames + 1)
            index = os.pread(self._fd, min(size, end), max(end - size, 0))
            if xxhash.xxh3_64_hexdigest(index).encode() != xxh3 or len(index) != size:
                raise self._damaged("its index does not match its hash")
            self._starts, self._offsets = np.frombuffer(index, "<i8").reshape(-1, 2).T
            edges = (self._starts[0], self._starts[-1], self._offsets[0], self._offsets[-1])
            tokens, sizes = np.diff(self._starts), np.diff(self._offsets)
            # Frames of more than BLOCK_TOKENS tokens could need any amount of memory.
            full = (tokens[:-1] == BLOCK_TOKENS).all() and (tokens[-1:] > 0).all()
            full &= (tokens[-1:] <= BLOCK_TOKENS).all() and (sizes > 0).all()
            if edges != (0, self.tokens, 0, end - size) or not full:
                raise self._damaged("the offsets in its index are wrong")
        except BaseException:
            self._file.close()
            raise
        # Number and ids of the last frame that was decompressed.
        self._last: tuple[int, np.ndarray] = (-1, np.empty(0, self._dtype))

    def __enter__(self) -> PackedArray:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._file.close()

    def _damaged(self, why: str) -> DamageError:
        return DamageError(f"{self._path}: {why}; remove this file and run the same command again")

    def read_into(self, out: np.ndarray, start: int) -> None:
        """Fill `out` [n] with n consecutive ids. The first id has the index `start`.

        `out` has the dtype of the array.
        """
        frame = int(np.searchsorted(self._starts, start, side="right")) - 1
        filled = 0
        while filled < len(out):
            ids = self._frame(frame)
            begin = start + filled - int(self._starts[frame])
            ids = ids[begin : begin + len(out) - filled]
            out[filled : filled + len(ids)] = ids
            filled, frame = filled + len(ids), frame + 1

    def read_rows(self, out: np.ndarray, rows: np.ndarray, starts: np.ndarray) -> None:
        """For each i, fill out[rows[i]] with consecutive ids, of which the first has the index
        starts[i]. `out` is [number of rows, ids per row]."""
        for row, start in zip(rows.tolist(), starts.tolist(), strict=True):
            self.read_into(out[row], start)

    def _frame(self, frame: int) -> np.ndarray:
        if self._last[0] != frame:
            if frame + 1 >= len(self._starts):
                raise self._damaged("contains fewer tokens than its sidecar states")
            first, stop = self._offsets[frame : frame + 2].tolist()
            tokens = int(self._starts[frame + 1] - self._starts[frame])
            try:
                data = os.pread(self._fd, stop - first, first)
                self._last = frame, _unpack(data, self._dtype, tokens)
            except ValueError as error:
                raise self._damaged(str(error)) from None
        return self._last[1]

    def blocks(self) -> Iterator[np.ndarray]:
        """Yield all ids in blocks. Raises DamageError if the array is damaged."""
        for frame in range(len(self._starts) - 1):
            yield self._frame(frame)

    def describe(self) -> dict[str, Any]:
        """Return the size and the hash that a .npy file with the same ids would have. Raises
        DamageError if the packed array is damaged."""
        digest = xxhash.xxh3_64(npy_header((self.tokens,), self._name))
        for ids in self.blocks():
            digest.update(ids.data)
        size = HEADER_BYTES + self.tokens * self._dtype.itemsize
        return {"size": size, "xxh3": digest.hexdigest()}
