"""The header of a safetensors file, and its bytes by stretches. Needs no torch.

Nothing is mapped into memory: an error of the disk is an exception then, and what reading takes is
what its caller asks for.
"""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any, NamedTuple

from optimus.errors import CheckpointError, one_line
from optimus.io import files

MODEL = "model.safetensors"
INDEX = "model.safetensors.index.json"
ITEMSIZES = {"F64": 8, "F32": 4, "BF16": 2, "F16": 2}
"""Bytes of an element, for the types that are read."""
HEADER_BYTES = 16 << 20
"""Longest header that is read. A tensor takes about 130 bytes of it: this is 120,000 tensors in a
file, and 61 layers of 384 experts have 70,000 in all their files. The library allows 100,000,000
bytes, of which Python's parser could make 2.8 GB."""
INDEX_BYTES = 64 << 20
"""Longest index of several files that is read: a name each of 500,000 tensors."""
_MOST = 1 << 56
"""Elements, of which torch can count the bytes."""

traffic = {"opens": 0, "bytes": 0}
"""Of reading, since the process began or they were set to 0: files opened, bytes read."""


class Stretch(NamedTuple):
    """A tensor as the header of its file tells of it: bytes [start, stop) of the file."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int


class TensorFile:
    """One file; `tensors` are its stretches by name, in their order."""

    def __init__(self, path: Path) -> None:
        """Raises CheckpointError, as `read` does, if it cannot be read or is not complete."""
        self.path = path
        try:
            self._file = files.open_regular(path)
        except OSError as error:
            raise CheckpointError(f"{path}: {error.strerror}") from None
        traffic["opens"] += 1
        try:
            self.size = os.fstat(self._file.fileno()).st_size
            self.tensors = self._stretches()
        except BaseException:
            self.close()
            raise

    def read(self, start: int, into: memoryview) -> None:
        """Fill `into` with the bytes from `start` on."""
        traffic["bytes"] += len(into)
        files.read_at(self._file.fileno(), start, into, self.path)

    def close(self) -> None:
        self._file.close()

    def __del__(self) -> None:
        if hasattr(self, "_file"):
            self.close()

    def _stretches(self) -> dict[str, Stretch]:
        length = bytearray(8)
        self.read(0, memoryview(length))
        begin = 8 + int.from_bytes(length, "little")
        if 8 + HEADER_BYTES < begin <= self.size:
            what = f"header of {begin - 8:,} bytes, more than {HEADER_BYTES:,}"
            raise CheckpointError(f"{self.path}: {what}; divide the tensors among more files")
        if begin > self.size:
            raise CheckpointError(f"{self.path}: cut short, or no safetensors file")
        header = bytearray(begin - 8)
        self.read(8, memoryview(header))
        try:
            raw = {n: one for n, one in json.loads(header).items() if n != "__metadata__"}
            found = {name: _stretch(name, one, begin) for name, one in raw.items()}
            found = dict(sorted(found.items(), key=lambda item: item[1][2:]))  # empty ones first
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise CheckpointError(f"{self.path}: header not readable: {one_line(error)}") from None
        end = begin
        for one in found.values():
            if one.start != end:
                raise CheckpointError(f"{self.path}: its header leaves out bytes from {end} on")
            end = one.stop
        if end != self.size:
            raise CheckpointError(f"{self.path}: {self.size} bytes, but its header tells of {end}")
        return found


def _stretch(name: str, told: dict[str, Any], begin: int) -> Stretch:
    """A tensor that the header of a file tells of, whose tensors begin at byte `begin`. Raises
    ValueError, KeyError, TypeError and AttributeError."""
    dtype, shape, (start, stop) = told["dtype"], told["shape"], told["data_offsets"]
    sizes = [*shape, start, stop]
    if type(dtype) is not str or any(type(n) is not int or not 0 <= n < _MOST for n in sizes):
        raise ValueError(f"tensor {name} is not described by a type, sizes and offsets")
    known, size = ITEMSIZES.get(dtype), math.prod(shape)
    if known is not None and stop - start != size * known:
        raise ValueError(f"tensor {name} takes {stop - start} bytes")
    if not size and math.prod(filter(None, shape)) >= _MOST:
        raise ValueError(f"tensor {name} has no elements, but too large sizes")
    return Stretch(dtype, tuple(shape), begin + start, begin + stop)


def weight_map(directory: Path) -> dict[str, str]:
    """Return the file of each tensor, as the index of several files says. Raises FileNotFoundError,
    and CheckpointError if the index is not readable."""
    index = directory / INDEX
    try:
        found = dict(json.loads(files.read_regular(index, INDEX_BYTES))["weight_map"])
        for name, file in found.items():
            if type(file) is not str or "\0" in file or Path(file).name != file:
                raise ValueError(f"tensor {name} is in no file")
        return found
    except FileNotFoundError:
        raise
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise CheckpointError(f"{index}: not readable: {one_line(error)}") from None
