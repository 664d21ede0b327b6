"""Safetensors files, written by stretches of parameters in any order, by several writers at once.

What lies where follows from names, shapes and dtypes alone: a plan that every writer makes for
itself, of the very bytes that the safetensors library would write.
"""

from __future__ import annotations

import json
import math
import os
from bisect import bisect_right
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from optimus.model.tensor_files import DTYPES, MODEL, as_bytes

_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_ORDER = tuple(DTYPES)
"""In which the library puts tensors of several types; those of one type go by name."""


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
    headers: Mapping[str, bytes]
    """What each file begins with."""
    sizes: Mapping[str, int]
    """Of each file."""
    names: Mapping[str, str]
    """The file of each tensor, by its name there."""
    rows: Mapping[str, list[Row]]
    """Of each parameter of ours, ascending."""
    dtypes: Mapping[str, torch.dtype]
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
    about, at = {"__metadata__": metadata} if metadata else {}, 0
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


class TensorWriter:
    """One writer's part of the files of a plan, in a directory that others may write in too."""

    def __init__(self, directory: Path, plan: FilePlan) -> None:
        """All methods raise OSError."""
        self._directory, self._plan = directory, plan
        self._fds: dict[str, int] = {}
        self._starts: dict[str, list[int]] = {}

    def write_headers(self) -> None:
        """For one of the writers to do."""
        for file, header in self._plan.headers.items():
            self._put(file, memoryview(header), 0)

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
            self._put(row.file, part, row.at + (start - row.start) * size)
            data, start, number = data[len(part) :], row.stop, number + 1

    def finish(self) -> None:
        """Make all that this one wrote durable."""
        for fd in self._fds.values():
            os.fsync(fd)

    def close(self) -> None:
        while self._fds:
            os.close(self._fds.popitem()[1])

    def __enter__(self) -> TensorWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _put(self, file: str, data: memoryview, at: int) -> None:
        if file not in self._fds:
            flags = os.O_WRONLY | os.O_CREAT
            self._fds[file] = os.open(self._directory / file, flags, 0o644)
        while data:
            count = os.pwrite(self._fds[file], data, at)
            data, at = data[count:], at + count
