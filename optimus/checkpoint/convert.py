"""Between Hugging Face directories and checkpoints of ours, tensor by tensor without a change."""

from __future__ import annotations

import os
import shutil
import sys
from functools import partial
from pathlib import Path

from optimus.checkpoint import manager
from optimus.checkpoint.manifest import seal
from optimus.checkpoint.weights import CONFIG, model_config_of, open_weights
from optimus.config import Config, dump_toml
from optimus.errors import CheckpointError
from optimus.model.hf import is_hf_directory, read_hf_config, write_hf
from optimus.model.hf.write import write_all
from optimus.model.tensor_writer import Planned, plan_files
from optimus.platform import dtype_of

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
    config = read_hf_config(source)
    with open_weights(config, source) as weights:
        dtypes = weights.dtypes()
        tensors = (Planned(n, n, 0, dtypes[n], shape) for n, shape in weights.shapes.items())

        def write(directory: Path) -> None:
            write_all(directory, plan_files(tensors), weights.stretches())
            (directory / CONFIG).write_text(dump_toml(Config(model=config)), encoding="utf-8")
            _copy_tokenizer(source, directory)

        seal(out, write, kind="model", origin=f"from-hf {source.name}")


def to_hf(source: str | os.PathLike, out: str | os.PathLike, dtype: str | None = None) -> Path:
    """Write the weights of a checkpoint as a Hugging Face directory, as stored or in `dtype`; the
    checkpoint that `source` meant. Every byte is read once and compared with its checksum. Raises
    CheckpointError where it is damaged; a run's newest full one is passed over then. Raises
    ConfigError where something is at `out`."""
    source, out = Path(source), Path(out)
    damaged: dict[Path, str] = {}
    while True:
        path = manager.resolve(source, thorough=False, but=damaged)
        try:
            _write_hf(path, out, dtype)
            return path
        except CheckpointError as error:
            if path == source:
                raise
            print(f"optimus: passing over a damaged checkpoint: {error}", file=sys.stderr)
            damaged[path] = str(error)


def _write_hf(path: Path, out: Path, dtype: str | None) -> None:
    config = model_config_of(path)
    with open_weights(config, path) as weights:
        dtypes = weights.dtypes()
        if dtype is not None:
            dtypes = dict.fromkeys(dtypes, dtype_of(dtype))
        beside = partial(_copy_tokenizer, path)
        write_hf(out, config, weights.stretches(), dtypes, beside=beside)


def _copy_tokenizer(source: Path, target: Path) -> None:
    for name in _TOKENIZER_FILES:
        if (source / name).is_file():
            shutil.copyfile(source / name, target / name)
