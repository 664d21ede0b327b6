"""Safetensors files, written by stretches of parameters in any order, by several writers at once.

What lies where follows from names, shapes and dtypes alone: a plan that every writer makes for
itself, of the very bytes that the safetensors library would write.
"""

from __future__ import annotations

import ctypes
import errno
import json
import math
import os
import sys
from bisect import bisect_right
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy
import torch
from torch import Tensor

from optimus.io import files
from optimus.io.safetensors import DTYPES, as_bytes
from optimus.io.tensor_file import MODEL

_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_ORDER = tuple(DTYPES)
"""In which the library puts tensors of several types; those of one type go by name."""
_NFS = 0x6969
"""The type of such a file system: statfs(2)."""
_WEIGHTS = numpy.arange(1, 65522, dtype=numpy.float64)
"""A prime number of them. Products with 16-bit numbers add up to less than 2^53: exact."""


class Planned(NamedTuple):
    """A tensor of a file: elements `start` and on of our parameter `ours`, flattened."""

    name: str
    ours: str
    start: int
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.numel * self.dtype.itemsize


class Row(NamedTuple):
    """Elements [start, stop) of a flattened parameter lie in a file from byte `at` on."""

    start: int
    stop: int
    file: str
    at: int


@dataclass(frozen=True)
class FilePlan:
    headers: dict[str, bytes]
    """What each file begins with."""
    sizes: dict[str, int]
    """Of each file."""
    names: dict[str, str]
    """The file of each tensor, by its name there."""
    rows: dict[str, list[Row]]
    """Of each parameter of ours, ascending."""
    dtypes: dict[str, torch.dtype]
    """In which each parameter of ours is written."""


def plan_files(
    tensors: Iterable[Planned],
    file_bytes: float = math.inf,
    metadata: Mapping[str, str] | None = None,
) -> FilePlan:
    """Files of these tensors, in their order, of at most `file_bytes` of them each (more only where
    one tensor is larger)."""
    groups: list[list[Planned]] = [[]]
    filled = 0
    for one in tensors:
        if filled and filled + one.nbytes > file_bytes:
            groups.append([])
            filled = 0
        groups[-1].append(one)
        filled += one.nbytes
    plan = FilePlan({}, {}, {}, {}, {})
    for number, group in enumerate(groups, start=1):
        file = f"model-{number:05}-of-{len(groups):05}.safetensors" if len(groups) > 1 else MODEL
        _add_file(plan, file, group, metadata)
    for rows in plan.rows.values():
        rows.sort()
    return plan


def _add_file(
    plan: FilePlan, file: str, tensors: list[Planned], metadata: Mapping[str, str] | None
) -> None:
    tensors = sorted(tensors, key=lambda one: (_ORDER.index(_NAMES[one.dtype]), one.name))
    about: dict[str, Any] = {"__metadata__": metadata} if metadata else {}
    at = 0
    for one in tensors:
        offsets = [at, at + one.nbytes]
        about[one.name] = {
            "dtype": _NAMES[one.dtype],
            "shape": one.shape,
            "data_offsets": offsets,
        }
        at = offsets[1]
    text = json.dumps(about, separators=(",", ":"), ensure_ascii=False).encode()
    text = text.ljust(-(-len(text) // 8) * 8)
    plan.headers[file] = len(text).to_bytes(8, "little") + text
    begin = plan.sizes[file] = len(plan.headers[file])
    plan.sizes[file] += at
    for one in tensors:
        row = Row(one.start, one.start + one.numel, file, begin)
        plan.rows.setdefault(one.ours, []).append(row)
        plan.names[one.name], plan.dtypes[one.ours] = file, one.dtype
        begin += one.nbytes


class Tally(NamedTuple):
    """Of stretches of a file: how many bytes, and their `weigh`. Those of disjoint ones add up."""

    bytes: int = 0
    weight: int = 0

    def plus(self, data: memoryview, at: int) -> Tally:
        return Tally(self.bytes + len(data), self.weight + weigh(data, at))


def weigh(data: memoryview, at: int) -> int:
    """The sum of the 16-bit numbers of these bytes of a file from byte `at` on, each times a weight
    of its place, so that numbers which change places change it. Both even."""
    values, at, total, count = numpy.frombuffer(data, numpy.uint16), at // 2, 0, len(_WEIGHTS)
    while len(values):
        turn, begun = divmod(at, count)
        part = values[: count - begun].astype(numpy.float64)
        # Not numpy.dot: BLAS would divide it among threads of its own.
        here = numpy.einsum("i,i->", part, _WEIGHTS[begun : begun + len(part)])
        total += (turn + 1) * int(here)
        values, at = values[len(part) :], at + len(part)
    return total


def create_files(directory: Path, plan: FilePlan) -> None:
    """The files of a plan at their full size, with their headers: for one to do before any writes.
    Whoever finds one too short may fill it with zeros, over what another writes (NFS). Raises
    OSError."""
    for file, header in plan.headers.items():
        fd = os.open(directory / file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
        try:
            _put(fd, memoryview(header), 0)
            os.ftruncate(fd, plan.sizes[file])
        finally:
            os.close(fd)


class TensorWriter(files.Closing):
    """One writer's part of the files of a plan, which `create_files` made; others may write too."""

    def __init__(self, directory: Path, plan: FilePlan, counts: bool = False) -> None:
        """`counts`: whether to tell what is `written`. All methods raise OSError."""
        self._directory, self._plan, self._counts = directory, plan, counts
        self._fds: dict[str, int] = {}
        self._starts: dict[str, list[int]] = {}
        self.written: dict[str, Tally] = {}
        """By file."""

    def write(self, name: str, start: int, values: Tensor) -> None:
        """Elements `start` and on of our flattened parameter `name`, of any dtype and device."""
        values = values.to("cpu", self._plan.dtypes[name]).contiguous()
        self.write_bytes(name, start, as_bytes(values))

    def write_bytes(self, name: str, start: int, data: memoryview) -> None:
        """The same of elements in the dtype of the plan."""
        rows, size = self._plan.rows[name], self._plan.dtypes[name].itemsize
        if name not in self._starts:
            self._starts[name] = [row.start for row in rows]
        number = bisect_right(self._starts[name], start) - 1
        while data:
            row = rows[number]
            part = data[: (row.stop - start) * size]
            at = row.at + (start - row.start) * size
            if self._counts:
                self.written[row.file] = self.written.get(row.file, Tally()).plus(part, at)
            _put(self._fd(row.file), part, at)
            data, start, number = data[len(part) :], row.stop, number + 1

    def finish(self) -> None:
        """Make all that this one wrote durable."""
        for fd in self._fds.values():
            files.sync_to_disk(fd)

    def close(self) -> None:
        while self._fds:
            os.close(self._fds.popitem()[1])

    def _fd(self, file: str) -> int:
        if file not in self._fds:
            # An NFS client then sends just the bytes given, no whole pages: of those, others'
            # bytes may be old here.
            exact = os.O_DSYNC if _file_system(self._directory) == _NFS else 0
            self._fds[file] = os.open(self._directory / file, os.O_WRONLY | exact)
        return self._fds[file]


def _file_system(path: Path) -> int:
    """What statfs(2) calls its type; 0 where it cannot be told."""
    about = (ctypes.c_long * 64)()  # f_type comes first, and all of it takes 120 bytes
    is_known = sys.platform == "linux" and not ctypes.CDLL(None).statfs(os.fsencode(path), about)
    return about[0] if is_known else 0


def _put(fd: int, data: memoryview, at: int) -> None:
    while data:
        count = os.pwrite(fd, data, at)
        if not count:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        data, at = data[count:], at + count
