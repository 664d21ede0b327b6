"""Safetensors files, read by stretches of bytes: what lies where stands in their headers.

Nothing is mapped into memory: an error of the disk is an exception then, and what reading takes is
what its caller asks for.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from optimus.errors import CheckpointError, one_line
from optimus.io import files

MODEL = "model.safetensors"
INDEX = "model.safetensors.index.json"
DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "BF16": torch.bfloat16,
    "F16": torch.float16,
}

_HEADER_BYTES = 100_000_000
"""At most: as the safetensors library has it."""
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
        if begin > min(self.size, 8 + _HEADER_BYTES):
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
    known, size = DTYPES.get(dtype), math.prod(shape)
    if known is not None and stop - start != size * known.itemsize:
        raise ValueError(f"tensor {name} takes {stop - start} bytes")
    if not size and math.prod(filter(None, shape)) >= _MOST:
        raise ValueError(f"tensor {name} has no elements, but too large sizes")
    return Stretch(dtype, tuple(shape), begin + start, begin + stop)


class TensorFiles:
    """The tensors of a directory's model.safetensors, or of the files that its index names."""

    def __init__(self, path: Path) -> None:
        """Raises CheckpointError, as all methods do."""
        self.path = path
        self._open: dict[str, TensorFile] = {}
        self._file_of = self._table()

    def names(self) -> set[str]:
        return set(self._file_of)

    def find(self, name: str) -> tuple[TensorFile, Stretch]:
        """The file that holds a tensor, and where."""
        if name not in self._file_of:
            raise CheckpointError(f"{self.path}: tensor {name} is missing")
        file = self._file(self._file_of[name])
        if name not in file.tensors:
            raise CheckpointError(f"{file.path}: tensor {name} is missing")
        stored = file.tensors[name]
        if stored.dtype not in DTYPES:
            raise CheckpointError(
                f"{file.path}: tensor {name} is of {stored.dtype}, not one of {', '.join(DTYPES)}"
            )
        return file, stored

    def close(self) -> None:
        for file in self._open.values():
            file.close()

    def __contains__(self, name: object) -> bool:
        return name in self._file_of

    def _table(self) -> dict[str, str]:
        if (self.path / MODEL).is_file():
            return dict.fromkeys(self._file(MODEL).tensors, MODEL)
        index = self.path / INDEX
        try:
            content = files.read_regular(index, _HEADER_BYTES)
            found = dict(json.loads(content)["weight_map"])
            for name, file in found.items():
                if type(file) is not str or "\0" in file or Path(file).name != file:
                    raise ValueError(f"tensor {name} is in no file")
            return found
        except FileNotFoundError:
            raise CheckpointError(
                f"{self.path}: neither {MODEL} nor {index.name} is there; other formats of weights "
                "are not read"
            ) from None
        except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
            raise CheckpointError(f"{index}: not readable: {one_line(error)}") from None

    def _file(self, name: str) -> TensorFile:
        if name not in self._open:
            self._open[name] = TensorFile(self.path / name)
        return self._open[name]


def check_shapes(
    path: str | os.PathLike,
    found: Mapping[str, Sequence[int]],
    expected: Mapping[str, Sequence[int]],
) -> None:
    """Refuse weights that are not just the tensors of these names and shapes: CheckpointError names
    the first that is missing, superfluous or of another shape."""
    if odd := sorted(found.keys() ^ expected.keys()):
        where = "has no place in this model, but is in" if odd[0] in found else "is missing in"
        raise CheckpointError(f"tensor {odd[0]} {where} {path}")
    for name, shape in expected.items():
        if tuple(found[name]) != tuple(shape):
            raise CheckpointError(
                f"{path}: tensor {name} has shape {list(found[name])}, this model's has "
                f"{list(shape)}"
            )


def as_bytes(tensor: Tensor) -> memoryview:
    """The bytes of a contiguous host tensor, where they are."""
    return tensor.detach().reshape(-1).view(torch.uint8).numpy().data
