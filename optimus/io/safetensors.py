"""Look-up of tensors by name in the safetensors files of a directory, and checks of shapes."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from optimus.errors import CheckpointError
from optimus.io.tensor_file import INDEX, MODEL, TensorEntry, TensorFile, weight_map

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "BF16": torch.bfloat16,
    "F16": torch.float16,
}


class TensorFiles:
    """Tensors in the safetensors files of a directory. If model.safetensors exists, only this file
    is read. Otherwise, the files that the index names are read.

    Files are opened on demand. Methods raise CheckpointError if a file cannot be read.
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
            raise CheckpointError(f"{self.path}: tensor {name} is missing")
        file = self._file(self._file_of[name])
        if name not in file.tensors:
            raise CheckpointError(
                f"{file.path}: tensor {name} is missing, although {INDEX} names this file"
            )
        entry = file.tensors[name]
        if entry.dtype not in DTYPES:
            raise CheckpointError(
                f"{file.path}: tensor {name} has dtype {entry.dtype}, which is not supported; "
                f"convert it to one of {', '.join(DTYPES)}"
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
        path: File or directory of the weights, for the message.
        shapes: Shape of each tensor of the weights. The keys are tensor names.
        expected: Shape of each tensor of the model. The keys are tensor names.

    Raises:
        CheckpointError: A tensor is missing, not in the model or of another shape. The message
            names it.
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
