"""Whole tensors in safetensors files: of models alone."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from optimus.errors import CheckpointError, OptimusError, one_line

MODEL = "model.safetensors"


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """One safetensors file of all `tensors`, in their own dtypes.

    Raises OptimusError if it cannot be written, say on a full disk.
    """
    try:
        save_file({name: tensor.detach().cpu() for name, tensor in tensors.items()}, path)
    except SafetensorError as error:
        raise OptimusError(
            f"{path.parent.name}/{path.name} not written: {one_line(error)}"
        ) from None


def read_tensors(path: Path, into: Mapping[str, Tensor]) -> None:
    """Fill each tensor of `into` from the file, casting where dtypes differ.

    Raises CheckpointError naming the first tensor that is missing, superfluous or of another shape.
    """
    check_tensors(path, into)
    with open_tensors(path) as file:
        for name, target in into.items():
            target.data.copy_(file.get_tensor(name))


def check_tensors(path: Path, expected: Mapping[str, Tensor]) -> None:
    """Compare the names and shapes in a file's header with `expected`; refuse as `read_tensors`."""
    with open_tensors(path) as file:
        stored = set(file.keys())
        if odd := sorted(stored ^ set(expected)):
            where = (
                "is missing in" if odd[0] not in stored else "has no place in this model, but is in"
            )
            raise CheckpointError(f"tensor {odd[0]} {where} {path}")
        for name, tensor in expected.items():
            shape = file.get_slice(name).get_shape()
            if list(shape) != list(tensor.shape):
                raise CheckpointError(
                    f"{path}: tensor {name} has shape {list(shape)}, this model's has "
                    f"{list(tensor.shape)}"
                )


@contextlib.contextmanager
def open_tensors(path: Path) -> Iterator[Any]:
    """The file with its lazy `get_tensor(name)`; CheckpointError if it cannot be read."""
    try:
        with safe_open(path, framework="pt") as file:
            yield file
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{path}: {one_line(error)}") from None


def read_all_tensors(path: Path) -> dict[str, Tensor]:
    """Every tensor of a file, in its own dtype."""
    try:
        return load_file(path)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{path}: {one_line(error)}") from None
