"""Whole tensors in one safetensors file under our names: what `optimus convert from-hf` makes."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from torch import Tensor

from optimus.errors import CheckpointError
from optimus.model.tensor_files import TensorFile


def check_tensors(path: Path, expected: Mapping[str, Tensor]) -> None:
    """Compare the names and shapes in a file's header with `expected`.

    Raises CheckpointError naming the first tensor that is missing, superfluous or of another shape.
    """
    file = TensorFile(path)
    file.close()
    if odd := sorted(file.tensors.keys() ^ expected.keys()):
        where = (
            "is missing in"
            if odd[0] not in file.tensors
            else "has no place in this model, but is in"
        )
        raise CheckpointError(f"tensor {odd[0]} {where} {path}")
    for name, tensor in expected.items():
        shape = file.tensors[name].shape
        if shape != tuple(tensor.shape):
            raise CheckpointError(
                f"{path}: tensor {name} has shape {list(shape)}, this model's has "
                f"{list(tensor.shape)}"
            )
