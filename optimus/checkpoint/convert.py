"""Between Hugging Face directories and checkpoints of ours, tensor by tensor without a change."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

from torch import Tensor

from optimus import files
from optimus.checkpoint import manager
from optimus.checkpoint.manifest import seal
from optimus.checkpoint.tensors import MODEL, write_tensors
from optimus.checkpoint.weights import CONFIG, model_config_of, weights_of
from optimus.config import Config, dump_toml
from optimus.errors import CheckpointError
from optimus.model.hf import is_hf_directory, load_hf_model, read_hf_config, write_hf

_TOKENIZER_FILES = (
    *("tokenizer.json", "tokenizer.model"),
    *("tokenizer_config.json", "special_tokens_map.json"),
)


def from_hf(source: str | os.PathLike, out: str | os.PathLike) -> None:
    """Make a model checkpoint of ours at `out` from a Hugging Face directory, in its own dtypes."""
    source = Path(source)
    if not is_hf_directory(source):
        raise CheckpointError(
            f"{source}: not a Hugging Face directory (config.json and safetensors)"
        )
    config, tensors = read_hf_config(source), load_hf_model(source).state_dict()

    def write(directory: Path) -> None:
        write_tensors(directory / MODEL, tensors)
        (directory / CONFIG).write_text(dump_toml(Config(model=config)), encoding="utf-8")
        _copy_tokenizer(source, directory)

    seal(out, write, kind="model", origin=f"from-hf {source.name}")


def to_hf(source: str | os.PathLike, out: str | os.PathLike, dtype: str | None = None) -> Path:
    """Write the weights of a checkpoint as a Hugging Face directory, as stored or in `dtype`; the
    checkpoint that `source` meant. Raises CheckpointError where it is damaged; a run's newest full
    one is passed over then."""
    out = Path(out)
    if out.exists():
        raise CheckpointError(f"{out} exists already; remove it or choose another place")
    source, weights = _read(Path(source))
    out.parent.mkdir(parents=True, exist_ok=True)
    temporary = files.temporary_name(out)
    try:
        write_hf(temporary, model_config_of(source), weights, dtype)
        _copy_tokenizer(source, temporary)
        files.commit(temporary, out)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    return source


def _read(source: Path) -> tuple[Path, dict[str, Tensor]]:
    """The checkpoint that `source` means and its weights; shard files are compared with their
    checksums as they are read, once."""
    damaged: dict[Path, str] = {}
    while True:
        path = manager.resolve(source, thorough=False, but=damaged)
        try:
            return path, weights_of(path)
        except CheckpointError as error:
            if path == source:
                raise
            print(f"optimus: passing over a damaged checkpoint: {error}", file=sys.stderr)
            damaged[path] = str(error)


def _copy_tokenizer(source: Path, target: Path) -> None:
    for name in _TOKENIZER_FILES:
        if (source / name).is_file():
            shutil.copyfile(source / name, target / name)
