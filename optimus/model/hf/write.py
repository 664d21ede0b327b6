"""Our weights as a Hugging Face directory that transformers loads."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from optimus.config import ModelConfig
from optimus.errors import CheckpointError, ConfigError, OptimusError, one_line
from optimus.files import commit, temporary_name, write_json
from optimus.model.hf.config import config_to_hf
from optimus.model.hf.names import pieces
from optimus.model.transformer import Transformer

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}

# Our parameter's name and how many of its pieces come before: where a tensor on disk is found.
_Place = tuple[str, int]


def write_hf(
    directory: str | os.PathLike,
    config: ModelConfig,
    state_dict: Mapping[str, Tensor],
    dtype: str | None = None,
    shard_bytes: int = 5_000_000_000,
) -> None:
    """Write config.json and safetensors, an expert a tensor.

    `dtype` is "fp32", "bf16", "fp16", or None for each tensor's own, without a change of a bit.
    `state_dict` has our names and whole tensors on any device; it may load them when asked. Files
    hold at most `shard_bytes` (more only where one tensor is larger), and no more than one file's
    tensors are held beside the model. The directory appears complete or not at all.

    Raises ConfigError if the directory is there and not empty or transformers cannot express the
    model, CheckpointError if a tensor is missing or superfluous.
    """
    directory = Path(directory)
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise ConfigError(f"{directory} exists and is not empty; name a new directory")
    with torch.device("meta"):
        expected = Transformer(config).state_dict()
    for name in sorted(expected.keys() ^ state_dict.keys()):
        fault = "is missing" if name in expected else "has no place in the model"
        raise CheckpointError(f"weights to write: tensor {name} {fault}")
    if dtype is None:
        kept = {name: tensor.dtype for name, tensor in state_dict.items()}
    else:
        kept = dict.fromkeys(expected, _DTYPES[dtype])
    expected = {name: tensor.to(kept[name]) for name, tensor in expected.items()}
    fields = config_to_hf(config, str(kept["embed.weight"]).removeprefix("torch."))
    directory.parent.mkdir(parents=True, exist_ok=True)
    temporary = temporary_name(directory)
    temporary.mkdir()
    try:
        _write_weights(temporary, expected, state_dict, shard_bytes)
        write_json(temporary / "config.json", fields)
        if directory.exists():
            directory.rmdir()
        commit(temporary, directory)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


def _write_weights(
    directory: Path,
    expected: Mapping[str, Tensor],
    state_dict: Mapping[str, Tensor],
    shard_bytes: int,
) -> None:
    """`expected` are tensors on the meta device, of the shapes and dtypes to write."""
    shards = _plan(expected, shard_bytes)
    weight_map: dict[str, str] = {}
    for number, shard in enumerate(shards, start=1):
        name = f"model-{number:05}-of-{len(shards):05}.safetensors"
        name = name if len(shards) > 1 else "model.safetensors"
        _write_shard(directory / name, shard, expected, state_dict)
        weight_map |= dict.fromkeys(shard, name)
    if len(shards) > 1:
        total = sum(tensor.numel() * tensor.itemsize for tensor in expected.values())
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        write_json(directory / "model.safetensors.index.json", index)


def _plan(expected: Mapping[str, Tensor], shard_bytes: int) -> list[dict[str, _Place]]:
    """Which tensors each file holds, in the model's order: {name on disk: its place} by file."""
    shards: list[dict[str, _Place]] = [{}]
    filled = 0
    for name, tensor in expected.items():
        for number, (their_name, piece) in enumerate(pieces(name, tensor)):
            size = piece.numel() * piece.itemsize
            if filled and filled + size > shard_bytes:
                shards.append({})
                filled = 0
            shards[-1][their_name] = (name, number)
            filled += size
    return shards


def _write_shard(
    file: Path,
    shard: Mapping[str, _Place],
    expected: Mapping[str, Tensor],
    state_dict: Mapping[str, Tensor],
) -> None:
    tensors: dict[str, Tensor] = {}
    name, parts = "", []
    for their_name, (ours, number) in shard.items():
        if ours != name:
            name, value = ours, state_dict[ours].detach()
            if value.shape != expected[ours].shape:
                raise CheckpointError(
                    f"weights to write: tensor {ours} has shape {list(value.shape)}, the model "
                    f"{list(expected[ours].shape)}"
                )
            parts = list(pieces(ours, value))
        tensors[their_name] = parts[number][1].to("cpu", expected[ours].dtype).contiguous()
    try:
        save_file(tensors, file, metadata={"format": "pt"})
    except SafetensorError as error:
        raise OptimusError(f"{file.name} not written: {one_line(error)}") from None
    with open(file, "rb") as written:
        os.fsync(written.fileno())
