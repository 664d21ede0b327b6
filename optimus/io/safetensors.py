"""The safetensors files of a directory as torch reads them: types, tensors by name, shapes."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from optimus.errors import CheckpointError
from optimus.io.tensor_file import INDEX, MODEL, Stretch, TensorFile, weight_map

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "BF16": torch.bfloat16,
    "F16": torch.float16,
}


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
        try:
            return weight_map(self.path)
        except FileNotFoundError:
            raise CheckpointError(
                f"{self.path}: neither {MODEL} nor {INDEX} is there; other formats of weights "
                "are not read"
            ) from None

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
