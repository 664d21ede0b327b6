"""Our weights as a Hugging Face directory that transformers loads."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import torch
from torch import Tensor

from optimus.config import ModelConfig
from optimus.errors import CheckpointError, ConfigError, OptimusError, counted
from optimus.hf.config import config_to_hf
from optimus.hf.names import places
from optimus.io.files import commit, temporary_name, write_json
from optimus.io.safetensors_writer import (
    FilePlan,
    PlannedTensor,
    TensorWriter,
    create_files,
    plan_files,
)
from optimus.io.tensor_file import INDEX

FILE_BYTES = 5_000_000_000


def plan_hf(
    config: ModelConfig, dtypes: Mapping[str, torch.dtype], file_bytes: int = FILE_BYTES
) -> FilePlan:
    """The files of a model whose parameters are written in these dtypes, an expert a tensor."""
    tensors = (
        PlannedTensor(theirs, name, int(view.storage_offset()), dtypes[name], tuple(view.shape))
        for theirs, name, view in places(config, ())
    )
    return plan_files(tensors, file_bytes, {"format": "pt"})


def write_hf_json(directory: Path, config: ModelConfig, plan: FilePlan) -> None:
    """What a directory holds besides the files of its plan: config.json and, of several files, the
    index. Raises ConfigError if transformers cannot express the model."""
    if len(plan.sizes) > 1:
        total = sum(size - len(plan.headers[file]) for file, size in plan.sizes.items())
        index = {"metadata": {"total_size": total}, "weight_map": plan.file_of}
        write_json(directory / INDEX, index)
    dtype = str(plan.dtypes["embed.weight"]).removeprefix("torch.")
    write_json(directory / "config.json", config_to_hf(config, dtype))


def write_hf(
    directory: str | os.PathLike,
    config: ModelConfig,
    weights: Iterable[tuple[str, int, Tensor]],
    dtypes: Mapping[str, torch.dtype],
    file_bytes: int = FILE_BYTES,
    beside: Callable[[Path], None] = lambda directory: None,
) -> None:
    """Write config.json and safetensors, an expert a tensor, each parameter in its one of `dtypes`;
    `beside` puts further files into the directory.

    `weights` are (our name, first element, values) of stretches of flattened parameters, in any
    order, which come as they are needed: one is in memory at a time. Files hold at most
    `file_bytes` (more only where one tensor is larger). The directory appears complete or not at
    all.

    Raises ConfigError if the directory is there or transformers cannot express the
    model, CheckpointError if elements of a tensor are missing or superfluous, OptimusError if files
    cannot be written, and what `weights` raises.
    """
    directory = Path(directory)
    if directory.exists():
        raise ConfigError(f"{directory} exists already; remove it or choose another place")
    plan = plan_hf(config, dtypes, file_bytes)
    directory.parent.mkdir(parents=True, exist_ok=True)
    temporary = temporary_name(directory)
    temporary.mkdir()
    try:
        write_hf_json(temporary, config, plan)
        write_all(temporary, plan, weights)
        beside(temporary)
        commit(temporary, directory)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


def write_all(directory: Path, plan: FilePlan, weights: Iterable[tuple[str, int, Tensor]]) -> None:
    """Write the files of a plan from stretches of all parameters, and make them durable; raises as
    `write_hf` does."""
    missing = {
        name: sum(row.stop - row.start for row in rows) for name, rows in plan.slices.items()
    }
    with TensorWriter(directory, plan) as files:
        try:
            create_files(directory, plan)
            for name, start, values in weights:
                if name not in missing:
                    raise CheckpointError(
                        f"weights to write: tensor {name} has no place in the model"
                    )
                missing[name] -= values.numel()
                if missing[name] < 0:
                    break
                files.write(name, start, values)
            files.finish()
        except OSError as error:
            raise OptimusError(f"{directory}: weights not written: {error.strerror}") from None
    for name, left in missing.items():
        if left:
            raise CheckpointError(
                f"weights to write: tensor {name} is missing or of another size: "
                f"{counted(left, 'element')}"
            )
