"""Weights of Hugging Face directories: names of tensors, checks, and export.

Optimus has two merged parameters for all experts of a layer. A Hugging Face directory usually has
three tensors per expert: gate, up and down. `pieces` splits a merged parameter into these tensors.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor

from optimus.config import ModelConfig
from optimus.errors import CheckpointError, OptimusError, counted, refuse_if
from optimus.hf.config import config_to_hf
from optimus.io.files import commit, temporary_name, write_json
from optimus.io.safetensors import (
    FilePlan,
    PlannedTensor,
    TensorFiles,
    TensorWriter,
    check_shapes,
    create_files,
    plan_files,
)
from optimus.io.tensor_file import INDEX
from optimus.model.transformer import Transformer

FILE_BYTES = 5_000_000_000
# Maps prefixes of parameter names within a block to the prefixes in transformers. The rest of a
# name is the same.
_IN_BLOCK = {
    "attention_norm.": "input_layernorm.",
    "mlp_norm.": "post_attention_layernorm.",
    "attention.": "self_attn.",
    "mlp.router.": "mlp.gate.",
}
_OUTSIDE = {
    "embed.weight": "model.embed_tokens.weight",
    "final_norm.weight": "model.norm.weight",
    "head.weight": "lm_head.weight",
}
_GATE_UP = "mlp.experts.gate_up"
_DOWN = "mlp.experts.down"
_ANGLES = "rotary_emb.inv_freq"  # tensors that early releases of transformers 4 saved


def is_expert(name: str) -> bool:
    """Return True if the Optimus parameter `name` contains the weights of all experts of a
    layer."""
    return name.endswith((_GATE_UP, _DOWN))


def hf_name(name: str) -> str:
    """Return the name that transformers 5 uses for the Optimus parameter `name`.

    Optimus and transformers 5 both merge the weights of all experts of a layer into two parameters
    (`gate_up` and `down`), so that every Optimus parameter has one counterpart in transformers 5.
    """
    if name in _OUTSIDE:
        return _OUTSIDE[name]
    _, layer, rest = name.split(".", 2)
    if is_expert(name):
        return f"model.layers.{layer}.{rest}_proj"
    for prefix, hf_prefix in _IN_BLOCK.items():
        if rest.startswith(prefix):
            rest = hf_prefix + rest.removeprefix(prefix)
            break
    return f"model.layers.{layer}.{rest}"


def pieces(name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Split an Optimus parameter into the tensors of a Hugging Face directory.

    Args:
        name: name of the parameter.
        tensor: value of the parameter.

    Yields:
        (name in the Hugging Face directory, view of `tensor`).
    """
    if not is_expert(name):
        yield hf_name(name), tensor
        return
    prefix = f"model.layers.{name.split('.')[1]}.mlp.experts"
    for number, expert in enumerate(tensor):
        if name.endswith(_DOWN):
            yield f"{prefix}.{number}.down_proj.weight", expert
        else:
            gate, up = expert.chunk(2)
            yield f"{prefix}.{number}.gate_proj.weight", gate
            yield f"{prefix}.{number}.up_proj.weight", up


def check_hf_weights(config: ModelConfig, path: str | os.PathLike) -> None:
    """Check the names, shapes and dtypes of the weights in a directory. Reads only file headers.

    Args:
        config: the configuration of the model that the weights must fit.
        path: Hugging Face directory.

    Raises:
        CheckpointError: a tensor of the model is missing; or a tensor in the files is not in the
            model, has another shape or is not floating-point; or a file cannot be read.
    """
    files = TensorFiles(Path(path))
    try:
        expected = {theirs: tuple(view.shape) for theirs, _, view in hf_tensors(config, files)}
    except (RuntimeError, TypeError, OverflowError):
        raise CheckpointError(
            f"{path}: config.json describes a tensor with more elements than torch can count; "
            "fix the sizes in config.json"
        ) from None
    names = set(files.names())
    # Ignored tensors: rotary angles, and the output head of a model with tied embeddings.
    unused = {name for name in names if name.endswith(_ANGLES)} | {_OUTSIDE["head.weight"]}
    shapes = {name: files.find(name)[1].shape for name in names - (unused - expected.keys())}
    files.close()
    check_shapes(path, shapes, expected)


def hf_tensors(config: ModelConfig, names: Container[str]) -> Iterator[tuple[str, str, Tensor]]:
    """Yield the tensors that a Hugging Face directory must have for a model.

    Args:
        config: the configuration of the model.
        names: names of the tensors in the directory. If `names` contains the merged tensors of a
            layer's experts, these tensors are yielded. If not, three tensors are yielded for each
            expert.

    Yields:
        (name of the tensor in the directory, name of the Optimus parameter, view of the parameter
        on the meta device).
    """
    with torch.device("meta"):
        model = Transformer(config)
    for name, parameter in model.named_parameters():
        if is_expert(name) and hf_name(name) in names:
            yield hf_name(name), name, parameter
            continue
        for theirs, view in pieces(name, parameter):
            yield theirs, name, view


def plan_hf(
    config: ModelConfig, dtypes: Mapping[str, torch.dtype], file_bytes: int = FILE_BYTES
) -> FilePlan:
    """Plan the safetensors files of an exported model.

    Args:
        config: the configuration of the model.
        dtypes: maps the name of each Optimus parameter to the dtype in which it is written.
        file_bytes: maximum number of tensor bytes per file. A larger tensor gets a separate file.

    Returns:
        The names, sizes and tensors of the files. Each projection of an expert is a separate
        tensor.
    """
    tensors = (
        PlannedTensor(theirs, name, int(view.storage_offset()), dtypes[name], tuple(view.shape))
        for theirs, name, view in hf_tensors(config, ())
    )
    return plan_files(tensors, file_bytes, {"format": "pt"})


def write_hf_json(directory: Path, config: ModelConfig, plan: FilePlan) -> None:
    """Write config.json to `directory`, and the index file if `plan` has several safetensors files.

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
    """Export a model to a new Hugging Face directory.

    The directory is written under a temporary name and then renamed.

    Args:
        directory: the directory to create; it must not exist.
        config: the configuration of the model.
        weights: slices of flattened parameters in any order, as (parameter name, index of the first
            element, values).
        dtypes: maps the name of each Optimus parameter to the dtype in which it is written.
        file_bytes: maximum number of tensor bytes per file. A larger tensor gets a separate file.
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
    """Write the safetensors files of a model and sync the files to disk.

    Args:
        directory: the directory of the files; it must exist.
        plan: the files to write, from `plan_hf`.
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
                        f"cannot write the weights: the input contains {name}, which is not a "
                        "parameter of the model; use weights that belong to this model"
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
                f"cannot write the weights: the input for {name} has "
                f"{counted(abs(num_missing), 'element')} too {'few' if num_missing > 0 else 'many'}"
                "; use weights that belong to this model"
            )
