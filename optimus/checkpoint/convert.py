"""Between Hugging Face directories and checkpoints of ours, tensor by tensor without a change."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import torch

from optimus.checkpoint import manager
from optimus.checkpoint.manifest import seal
from optimus.checkpoint.tensors import MODEL, stored_dtype, write_tensors
from optimus.checkpoint.weights import CONFIG, load_weights, model_config_of
from optimus.config import Config, dump_toml
from optimus.errors import CheckpointError
from optimus.model.hf import is_hf_directory, write_hf
from optimus.model.transformer import Transformer
from optimus.platform import dtype_of

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json")


def from_hf(source: str | os.PathLike, out: str | os.PathLike) -> None:
    """Make a model checkpoint of ours at `out` from a Hugging Face directory, in its own dtype."""
    source = Path(source)
    if not is_hf_directory(source):
        raise CheckpointError(
            f"{source}: not a Hugging Face directory (config.json and safetensors)"
        )
    config, model = _load(source)

    def write(directory: Path) -> None:
        write_tensors(directory / MODEL, model.state_dict())
        (directory / CONFIG).write_text(dump_toml(Config(model=config)), encoding="utf-8")
        _copy_tokenizer(source, directory)

    seal(out, write, kind="model", origin=f"from-hf {source.name}")


def to_hf(source: str | os.PathLike, out: str | os.PathLike, dtype: str | None = None) -> None:
    """Write the weights of a checkpoint as a Hugging Face directory, as stored or in `dtype`."""
    source, out = manager.resolve(source), Path(out)
    if out.exists():
        raise CheckpointError(f"{out} exists already; remove it or choose another place")
    config, model = _load(source)
    out.mkdir(parents=True)
    write_hf(out, config, model.state_dict(), dtype or stored_dtype(source))
    _copy_tokenizer(source, out)


def _load(source: Path):
    config = model_config_of(source)
    with torch.device("meta"):
        model = Transformer(config).to(dtype_of(stored_dtype(source)))
    model.to_empty(device="cpu")
    load_weights(model, config, source)
    return config, model


def _copy_tokenizer(source: Path, target: Path) -> None:
    for name in _TOKENIZER_FILES:
        if (source / name).is_file():
            shutil.copyfile(source / name, target / name)
