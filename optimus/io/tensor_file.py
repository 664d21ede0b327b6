"""Reader of the headers and byte ranges of safetensors files. This module does not import torch.

Files are read with pread. With mmap, a disk error would end the process by SIGBUS.
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
"""Bytes per element of each supported dtype. The keys are the names of dtypes in headers."""
HEADER_BYTES = 16 << 20
"""Maximum size of a header: 16 MiB, enough for 120,000 tensors. The maximum limits the memory that
the JSON parser uses."""
INDEX_BYTES = 64 << 20
"""Maximum size of model.safetensors.index.json: 64 MiB, enough for 500,000 tensor names."""
_MAX_ELEMENTS = 1 << 56
"""Exclusive limit for each dim of a tensor and for each byte offset in a header. Below this limit,
torch's signed 64-bit integers can represent the size of a tensor in bytes."""

traffic = {"opens": 0, "bytes": 0}
"""`opens`: number of files that this process has opened as TensorFile. `bytes`: number of bytes
that this process has read from these files. Tests reset the two numbers to 0."""


class TensorEntry(NamedTuple):
    """Entry of a tensor in the header of a safetensors file.

    The values of the tensor are the bytes [start, stop) of the file.
    """

    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int


class TensorFile:
    """An open safetensors file. `tensors` maps each tensor name to the tensor's header entry. The
    entries are sorted by byte offset."""

    def __init__(self, path: Path) -> None:
        """Open the file and read its header.

        Raises:
            CheckpointError: The file cannot be read, is truncated or has an invalid header.
        """
        self.path = path
        try:
            self._file = files.open_regular(path)
        except OSError as error:
            raise CheckpointError(f"{path}: {error.strerror}") from None
        traffic["opens"] += 1
        try:
            self.size = os.fstat(self._file.fileno()).st_size
            self.tensors = self._read_header()
        except BaseException:
            self.close()
            raise

    def read(self, start: int, out: memoryview) -> None:
        """Fill `out` with the bytes of the file that begin at byte `start`. Raises CheckpointError
        if the bytes cannot be read or the file is too short."""
        traffic["bytes"] += len(out)
        files.read_at(self._file.fileno(), start, out, self.path)

    def close(self) -> None:
        self._file.close()

    def __del__(self) -> None:
        if hasattr(self, "_file"):
            self.close()

    def _read_header(self) -> dict[str, TensorEntry]:
        length = bytearray(8)
        self.read(0, memoryview(length))
        data_start = 8 + int.from_bytes(length, "little")
        if 8 + HEADER_BYTES < data_start <= self.size:
            problem = f"the header has {data_start - 8:,} bytes, the limit is {HEADER_BYTES:,}"
            raise CheckpointError(f"{self.path}: {problem}; write the tensors to more files")
        if data_start > self.size:
            raise CheckpointError(
                f"{self.path}: truncated, or not a safetensors file; replace the file"
            )
        header = bytearray(data_start - 8)
        self.read(8, memoryview(header))
        try:
            fields = {n: entry for n, entry in json.loads(header).items() if n != "__metadata__"}
            entries = {n: _parse_entry(n, entry, data_start) for n, entry in fields.items()}
            # Sort by start, then by stop: an empty tensor precedes a tensor with the same start.
            entries = dict(sorted(entries.items(), key=lambda named: named[1][2:]))
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise CheckpointError(f"{self.path}: header not readable: {one_line(error)}") from None
        end = data_start
        for entry in entries.values():
            if entry.start != end:
                raise CheckpointError(
                    f"{self.path}: invalid header: gap or overlap of tensors at byte {end}; "
                    "replace the file"
                )
            end = entry.stop
        if end != self.size:
            raise CheckpointError(
                f"{self.path}: the file has {self.size} bytes, but its header describes {end} "
                "bytes; replace the file"
            )
        return entries


def _parse_entry(name: str, fields: dict[str, Any], data_start: int) -> TensorEntry:
    """Parse the header entry of the tensor `name`. `data_start` is the byte at which the tensors
    begin. The function adds `data_start` to the offsets of the entry.

    Raises ValueError, KeyError, TypeError or AttributeError if the entry is invalid.
    """
    dtype, shape, (start, stop) = fields["dtype"], fields["shape"], fields["data_offsets"]
    numbers = [*shape, start, stop]
    is_valid = all(type(n) is int and 0 <= n < _MAX_ELEMENTS for n in numbers)
    if type(dtype) is not str or not is_valid:
        raise ValueError(f"tensor {name} has an invalid dtype, shape or data_offsets")
    itemsize, numel = ITEMSIZES.get(dtype), math.prod(shape)
    if itemsize is not None and stop - start != numel * itemsize:
        raise ValueError(
            f"tensor {name} has {stop - start} bytes, but its shape and dtype need "
            f"{numel * itemsize} bytes"
        )
    if not numel and math.prod(filter(None, shape)) >= _MAX_ELEMENTS:
        raise ValueError(
            f"tensor {name} has the shape {list(shape)}, but the product of its nonzero dims must "
            f"be less than {_MAX_ELEMENTS}"
        )
    return TensorEntry(dtype, tuple(shape), data_start + start, data_start + stop)


def weight_map(directory: Path) -> dict[str, str]:
    """Read model.safetensors.index.json and return a dict from tensor names to file names.

    Args:
        directory: Directory of the index file and of the safetensors files.

    Raises:
        FileNotFoundError: The directory has no index file.
        CheckpointError: The index file cannot be read, or an entry is not a file name.
    """
    index = directory / INDEX
    try:
        file_of = dict(json.loads(files.read_regular(index, INDEX_BYTES))["weight_map"])
        for name, file in file_of.items():
            if type(file) is not str or "\0" in file or Path(file).name != file:
                raise ValueError(f"the entry of tensor {name} is {file!r}, not a file name")
            os.fsencode(file)  # raises UnicodeEncodeError, a ValueError, for an impossible name
        return file_of
    except FileNotFoundError:
        raise
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise CheckpointError(f"{index}: not readable: {one_line(error)}") from None
