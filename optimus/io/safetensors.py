"""Safetensors files: look-up of tensors by name, checks of shapes, and parallel writes.

Several processes can write slices of parameters to the same files in any order. The names, shapes
and dtypes of the tensors determine the position of every byte, so that each process computes the
same `FilePlan`. The files have the same bytes as files that the safetensors library writes.
"""

from __future__ import annotations

import ctypes
import errno
import json
import math
import os
import sys
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy
import torch
from torch import Tensor

from optimus.errors import CheckpointError
from optimus.io import files
from optimus.io.tensor_file import INDEX, MODEL, TensorEntry, TensorFile, weight_map

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "BF16": torch.bfloat16,
    "F16": torch.float16,
}
_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_DTYPE_ORDER = tuple(DTYPES)
"""Order of the tensors' dtypes in a file. The safetensors library uses the same order."""
_NFS_MAGIC = 0x6969
"""File system type of NFS, as in statfs(2)."""
_WEIGHTS = numpy.arange(1, 65522, dtype=numpy.float64)
"""Weights of the 16-bit values of a block in `_weighted_sum`. A block has at most 65,521 values.
The weighted sum of a block is below 2^53 and therefore exact in fp64."""


class TensorFiles:
    """Reader that finds tensors by name in the safetensors files of a directory.

    If model.safetensors exists, only this file is read. If it does not exist, all files listed in
    model.safetensors.index.json are read. Files are opened on demand. Methods raise CheckpointError
    if a file cannot be read.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._open: dict[str, TensorFile] = {}
        self._file_of = self._read_names()

    def names(self) -> set[str]:
        return set(self._file_of)

    def find(self, name: str) -> tuple[TensorFile, TensorEntry]:
        """Return the open file that contains tensor `name`, and the tensor's header entry.

        Raises:
            CheckpointError: The tensor is missing or has an unsupported dtype, or its file cannot
                be read.
        """
        if name not in self._file_of:
            raise CheckpointError(
                f"{self.path}: tensor {name} is missing; use weights of this model"
            )
        file = self._file(self._file_of[name])
        if name not in file.tensors:
            raise CheckpointError(
                f"{file.path}: tensor {name} is missing, although {INDEX} lists it in this file; "
                "use weight and index files of the same model"
            )
        entry = file.tensors[name]
        if entry.dtype not in DTYPES:
            raise CheckpointError(
                f"{file.path}: tensor {name} has dtype {entry.dtype}, which is not supported; "
                f"convert the tensor to one of {', '.join(DTYPES)}"
            )
        return file, entry

    def close(self) -> None:
        for file in self._open.values():
            file.close()

    def __contains__(self, name: object) -> bool:
        return name in self._file_of

    def _read_names(self) -> dict[str, str]:
        if (self.path / MODEL).is_file():
            return dict.fromkeys(self._file(MODEL).tensors, MODEL)
        try:
            return weight_map(self.path)
        except FileNotFoundError:
            raise CheckpointError(
                f"{self.path}: neither {MODEL} nor {INDEX} exists; use weights in the safetensors "
                "format"
            ) from None

    def _file(self, name: str) -> TensorFile:
        if name not in self._open:
            self._open[name] = TensorFile(self.path / name)
        return self._open[name]


def check_shapes(
    path: str | os.PathLike,
    shapes: Mapping[str, Sequence[int]],
    expected: Mapping[str, Sequence[int]],
) -> None:
    """Check that weights have exactly the tensor names and shapes that a model expects.

    Args:
        path: File or directory of the weights, for the error message.
        shapes: Shape of each tensor of the weights. The keys are tensor names.
        expected: Shape of each tensor that the model expects. The keys are tensor names.

    Raises:
        CheckpointError: The weights lack a tensor of the model, contain a tensor that the model
            lacks, or contain a tensor with another shape than in the model. The message names the
            tensor.
    """
    if unmatched := sorted(shapes.keys() ^ expected.keys()):
        name = unmatched[0]
        problem = "does not exist in this model" if name in shapes else "is missing"
        raise CheckpointError(f"{path}: tensor {name} {problem}; use weights of this model")
    for name, shape in expected.items():
        if tuple(shapes[name]) != tuple(shape):
            raise CheckpointError(
                f"{path}: tensor {name} has shape {list(shapes[name])}, but this model needs "
                f"{list(shape)}; use weights of this model"
            )


def as_bytes(tensor: Tensor) -> memoryview:
    """Return a memoryview of the bytes of a contiguous CPU tensor."""
    return tensor.detach().reshape(-1).view(torch.uint8).numpy().data


class PlannedTensor(NamedTuple):
    """Name, dtype and shape of a tensor that will be written to a file, and its source.

    The values are consecutive elements of the flattened parameter with the name `parameter`. The
    first value is element `start`.
    """

    name: str
    parameter: str
    start: int
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.numel * self.dtype.itemsize


class ParamSlice(NamedTuple):
    """Elements [start, stop) of a flattened parameter, stored in `file` from byte `offset`."""

    start: int
    stop: int
    file: str
    offset: int


@dataclass(frozen=True)
class FilePlan:
    """Result of `plan_files`: the names, sizes and headers of safetensors files, and the position
    of each parameter in these files."""

    headers: dict[str, bytes]
    """Maps each file name to the bytes before the tensors: the header's length and the JSON
    header."""
    sizes: dict[str, int]
    """Maps each file name to the size of the file in bytes."""
    file_of: dict[str, str]
    """Maps each tensor name to the name of the file that contains the tensor."""
    slices: dict[str, list[ParamSlice]]
    """Maps each parameter name to the slices of the parameter in the files, sorted by `start`."""
    dtypes: dict[str, torch.dtype]
    """Maps each parameter name to the dtype in which the parameter is written."""


def plan_files(
    tensors: Iterable[PlannedTensor],
    file_bytes: float = math.inf,
    metadata: Mapping[str, str] | None = None,
) -> FilePlan:
    """Assign tensors to files in the given order. Return the plan of the files, with the header of
    each file and the position of each tensor.

    Args:
        tensors: All tensors to write.
        file_bytes: Maximum total size, in bytes, of the tensors in a file. A larger tensor is
            written to a separate file.
        metadata: Value of `__metadata__` in each header.
    """
    groups: list[list[PlannedTensor]] = [[]]
    group_bytes = 0
    for tensor in tensors:
        if group_bytes and group_bytes + tensor.nbytes > file_bytes:
            groups.append([])
            group_bytes = 0
        groups[-1].append(tensor)
        group_bytes += tensor.nbytes
    plan = FilePlan({}, {}, {}, {}, {})
    for number, group in enumerate(groups, start=1):
        file = f"model-{number:05}-of-{len(groups):05}.safetensors" if len(groups) > 1 else MODEL
        _add_file(plan, file, group, metadata)
    for slices in plan.slices.values():
        slices.sort()
    return plan


def _add_file(
    plan: FilePlan, file: str, tensors: list[PlannedTensor], metadata: Mapping[str, str] | None
) -> None:
    tensors = sorted(tensors, key=lambda t: (_DTYPE_ORDER.index(_NAMES[t.dtype]), t.name))
    header: dict[str, Any] = {"__metadata__": metadata} if metadata else {}
    data_bytes = 0
    for tensor in tensors:
        offsets = [data_bytes, data_bytes + tensor.nbytes]
        header[tensor.name] = {
            "dtype": _NAMES[tensor.dtype],
            "shape": tensor.shape,
            "data_offsets": offsets,
        }
        data_bytes = offsets[1]
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text = text.ljust(-(-len(text) // 8) * 8)
    plan.headers[file] = len(text).to_bytes(8, "little") + text
    offset = len(plan.headers[file])
    plan.sizes[file] = offset + data_bytes
    for tensor in tensors:
        param_slice = ParamSlice(tensor.start, tensor.start + tensor.numel, file, offset)
        plan.slices.setdefault(tensor.parameter, []).append(param_slice)
        plan.file_of[tensor.name], plan.dtypes[tensor.parameter] = file, tensor.dtype
        offset += tensor.nbytes


class Checksum(NamedTuple):
    """Checksum of byte ranges of a file: the number of bytes and a weighted sum of their values.

    The checksum of a union of disjoint ranges is the sum of their checksums, field by field.
    """

    nbytes: int = 0
    weighted_sum: int = 0

    def plus(self, data: memoryview, offset: int) -> Checksum:
        """Return the sum of this checksum and the checksum of `data`. `data` contains the bytes of
        the file from byte `offset` on. `offset` and the length of `data` must be even."""
        return Checksum(
            self.nbytes + len(data), self.weighted_sum + _weighted_sum(data, offset // 2)
        )


def _weighted_sum(data: memoryview, index: int) -> int:
    """Return the weighted sum of the 16-bit values in `data`. The weight of a value depends on its
    position in the file. `index` is the position of the first value, counted in 16-bit values."""
    # The value at position n of the file has the weight (n // 65521 + 1) * (n % 65521 + 1).
    values, total = numpy.frombuffer(data, numpy.uint16), 0
    while len(values):
        turn, skipped = divmod(index, len(_WEIGHTS))
        block = values[: len(_WEIGHTS) - skipped].astype(numpy.float64)
        # numpy.dot would call BLAS, which starts threads.
        block_sum = numpy.einsum("i,i->", block, _WEIGHTS[skipped : skipped + len(block)])
        total += (turn + 1) * int(block_sum)
        values, index = values[len(block) :], index + len(block)
    return total


def create_files(directory: Path, plan: FilePlan) -> None:
    """Create the files of a plan at their full sizes and write their headers.

    One process must call this function before any process writes tensors.

    Raises:
        OSError: A file exists or cannot be written.
    """
    for file, header in plan.headers.items():
        fd = os.open(directory / file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
        try:
            _write_at(fd, memoryview(header), 0)
            # The file gets its full size before tensors are written. On NFS, a client that extends
            # a file may overwrite another client's data with zeros.
            os.ftruncate(fd, plan.sizes[file])
        finally:
            os.close(fd)


class TensorWriter(files.Closing):
    """Writer of parameter slices into files that `create_files` has created.

    Several processes can write different slices at the same time. Methods raise OSError if a file
    cannot be opened or written.
    """

    def __init__(self, directory: Path, plan: FilePlan, checksums: bool = False) -> None:
        """Create a writer. The writer opens files when it first writes to them.

        Args:
            directory: Directory of the files.
            plan: The plan from which `create_files` has created the files.
            checksums: If True, the attribute `written` maps each file name to the checksum of the
                bytes that this writer has written to the file.
        """
        self._directory, self._plan, self._checksums = directory, plan, checksums
        self._fds: dict[str, int] = {}
        self._starts: dict[str, list[int]] = {}
        self.written: dict[str, Checksum] = {}

    def write(self, parameter: str, start: int, values: Tensor) -> None:
        """Write elements of a flattened parameter.

        Args:
            parameter: Name of the parameter in the plan.
            start: Index in the flattened parameter of the first element to write.
            values: The elements, on any device and of any dtype. The method converts them to the
                parameter's dtype in the plan.
        """
        values = values.to("cpu", self._plan.dtypes[parameter]).contiguous()
        self.write_bytes(parameter, start, as_bytes(values))

    def write_bytes(self, parameter: str, start: int, data: memoryview) -> None:
        """Write elements of a parameter from bytes. `data` contains the elements in the parameter's
        dtype in the plan. The other arguments are those of `write`."""
        slices, itemsize = self._plan.slices[parameter], self._plan.dtypes[parameter].itemsize
        if parameter not in self._starts:
            self._starts[parameter] = [param_slice.start for param_slice in slices]
        number = bisect_right(self._starts[parameter], start) - 1
        while data:
            first, stop, file, offset = slices[number]
            block = data[: (stop - start) * itemsize]
            offset += (start - first) * itemsize
            if self._checksums:
                self.written[file] = self.written.get(file, Checksum()).plus(block, offset)
            _write_at(self._fd(file), block, offset)
            data, start, number = data[len(block) :], stop, number + 1

    def finish(self) -> None:
        """fsync all files to which this writer has written."""
        for fd in self._fds.values():
            files.sync_to_disk(fd)

    def close(self) -> None:
        while self._fds:
            os.close(self._fds.popitem()[1])

    def _fd(self, file: str) -> int:
        if file not in self._fds:
            # With O_DSYNC, an NFS client sends exactly the bytes of each write. Without O_DSYNC, it
            # sends whole pages, which may overwrite the data of another client with old content.
            sync = os.O_DSYNC if _file_system(self._directory) == _NFS_MAGIC else 0
            self._fds[file] = os.open(self._directory / file, os.O_WRONLY | sync)
        return self._fds[file]


def _file_system(path: Path) -> int:
    """Return the file system type of `path` (f_type of statfs(2)), or 0 if it is unknown."""
    statfs = (ctypes.c_long * 64)()  # struct statfs: 120 bytes, of which f_type is the first field
    is_known = sys.platform == "linux" and not ctypes.CDLL(None).statfs(os.fsencode(path), statfs)
    return statfs[0] if is_known else 0


def _write_at(fd: int, data: memoryview, offset: int) -> None:
    while data:
        count = os.pwrite(fd, data, offset)
        if not count:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        data, offset = data[count:], offset + count
