"""Export of a model as a Hugging Face directory."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import torch
from torch import Tensor

from optimus.config import ModelConfig
from optimus.errors import CheckpointError, OptimusError, counted, refuse_if
from optimus.hf.config import config_to_hf
from optimus.hf.names import hf_tensors
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
    """Plan the safetensors files of an exported model.

    Args:
        config: the model.
        dtypes: dtype in which each Optimus parameter is written, by parameter name.
        file_bytes: limit of tensor bytes per file. A larger tensor gets a separate file.

    Returns:
        The plan. Each projection of an expert is a separate tensor.
    """
    tensors = (
        PlannedTensor(theirs, name, int(view.storage_offset()), dtypes[name], tuple(view.shape))
        for theirs, name, view in hf_tensors(config, ())
    )
    return plan_files(tensors, file_bytes, {"format": "pt"})


def write_hf_json(directory: Path, config: ModelConfig, plan: FilePlan) -> None:
    """Write config.json, and the index file if the plan has several safetensors files.

    Raises:
        ConfigError: transformers does not support the model.
    """
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
    add_files: Callable[[Path], None] = lambda directory: None,
) -> None:
    """Export a model as a Hugging Face directory, which is created completely or not at all.

    Args:
        directory: the directory to create; it must not exist.
        config: the model.
        weights: slices of flattened parameters in any order, as (parameter name, index of the first
            element, values).
        dtypes: dtype in which each Optimus parameter is written, by parameter name.
        file_bytes: limit of tensor bytes per file. A larger tensor gets a separate file.
        add_files: function that writes further files. Its argument is the temporary path of the new
            directory.

    Raises:
        ConfigError: the directory exists, or transformers does not support the model.
        CheckpointError: `weights` has too few or too many elements, or an unknown parameter.
        OptimusError: a safetensors file cannot be written, or `weights` raises OSError.
    """
    directory = Path(directory)
    refuse_if(
        directory.exists(), f"{directory} exists already; remove it or choose another directory"
    )
    plan = plan_hf(config, dtypes, file_bytes)
    directory.parent.mkdir(parents=True, exist_ok=True)
    temporary = temporary_name(directory)
    temporary.mkdir()
    try:
        write_hf_json(temporary, config, plan)
        write_all(temporary, plan, weights)
        add_files(temporary)
        commit(temporary, directory)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


def write_all(directory: Path, plan: FilePlan, weights: Iterable[tuple[str, int, Tensor]]) -> None:
    """Write the safetensors files of a plan and sync them to disk.

    Args:
        directory: the directory of the files; it must exist.
        plan: the files.
        weights: slices of flattened parameters in any order, as (parameter name, index of the first
            element, values).

    Raises:
        CheckpointError: `weights` has too few or too many elements, or an unknown parameter.
        OptimusError: a file cannot be written, or `weights` raises OSError.
    """
    missing = {
        name: sum(row.stop - row.start for row in rows) for name, rows in plan.slices.items()
    }
    with TensorWriter(directory, plan) as files:
        try:
            create_files(directory, plan)
            for name, start, values in weights:
                if name not in missing:
                    raise CheckpointError(
                        f"cannot write the weights: the model has no parameter {name}; "
                        "use weights of this model"
                    )
                missing[name] -= values.numel()
                if missing[name] < 0:
                    break
                files.write(name, start, values)
            files.finish()
        except OSError as error:
            raise OptimusError(f"{directory}: cannot write weights: {error.strerror}") from None
    for name, num_missing in missing.items():
        if num_missing:
            raise CheckpointError(
                f"cannot write the weights: {name} is missing or has "
                f"{counted(abs(num_missing), 'element')} too {'few' if num_missing > 0 else 'many'}"
                "; use weights of this model"
            )
