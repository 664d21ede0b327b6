"""Writing and reading tensors of checkpoints, and sending loaded ones to all ranks."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from optimus.dist.collectives import Group, broadcast
from optimus.errors import CheckpointError, OptimusError, one_line

MODEL = "model.safetensors"
OPTIMIZER = "optimizer.safetensors"
_BLOCK = 1 << 24


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
    try:
        with safe_open(path, framework="pt") as file:
            stored = set(file.keys())
            if odd := sorted(stored ^ set(into)):
                where = (
                    "is missing in" if odd[0] not in stored else "does not belong to this model in"
                )
                raise CheckpointError(f"tensor {odd[0]} {where} {path}")
            for name, target in into.items():
                source = file.get_tensor(name)
                if source.shape != target.shape:
                    raise CheckpointError(
                        f"{path}: tensor {name} has shape {list(source.shape)}, this model's has "
                        f"{list(target.shape)}"
                    )
                target.data.copy_(source)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{path}: {one_line(error)}") from None


def share(flats: list[Tensor], group: Group) -> None:
    """Model broadcasting: the first rank's flat buffers on every rank, block by block."""
    for flat in flats:
        for block in flat.split(_BLOCK):
            broadcast(block, group)


def moments(names: Mapping[str, Tensor], kind: str) -> dict[str, Tensor]:
    """Tensor names of one AdamW moment in the optimizer file."""
    return {f"{kind}.{name}": tensor for name, tensor in names.items()}


def stored_dtype(directory: Path) -> str:
    """The type in which a directory keeps its weights, as `train.dtype` names it."""
    for path in sorted(directory.glob("*.safetensors")):
        if path.name == OPTIMIZER:
            continue
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 - not a dictionary
                return _DTYPES[file.get_slice(name).get_dtype()]
    raise CheckpointError(f"{directory}: no safetensors file with weights")


_DTYPES = {"F32": "fp32", "BF16": "bf16", "F16": "fp16"}
