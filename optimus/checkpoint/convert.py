"""Conversion between Hugging Face directories and checkpoints.

The values of the weights do not change, unless the caller requests another dtype.
"""

from __future__ import annotations

import json
import logging
import os
from pathlib import Path
from typing import Any

from data_prep.dataset import read_manifest as read_data_manifest
from data_prep.dataset import sha256_of
from optimus.checkpoint import store
from optimus.checkpoint.format import (
    DATA_EOS,
    GENERATION_CONFIG,
    TEMPLATES,
    is_checkpoint,
    read_manifest,
    sidecars,
)
from optimus.checkpoint.weights import CONFIG, model_config_of, open_weights
from optimus.config import Config, ModelConfig, dump_toml, load_saved_config
from optimus.data.sentencepiece_json import has_pieces
from optimus.data.tokenizer import (
    TOKENIZER_CONFIG,
    TextTokenizer,
    add_transformers_files,
    eos_from_names,
    tokenizer_path,
)
from optimus.errors import CheckpointError, DataError, OptimusError, one_line
from optimus.hf import is_hf_directory, read_hf_config, write_all, write_hf
from optimus.io.files import read_regular, write_json
from optimus.io.safetensors import PlannedTensor, plan_files
from optimus.io.tensor_file import INDEX, MODEL, weight_map
from optimus.platform import dtype_of

logger = logging.getLogger(__name__)

_TEXTS = (".txt", ".jinja")
"""Suffixes of tokenizer files and chat templates that are copied without a check of their
content."""
_SIDECAR_BYTES, _SIDECARS_BYTES = 256 << 20, 1 << 30
"""Limits for the files that a conversion copies: tokenizer files, chat templates and the generation
configuration. The first number is the maximum size in bytes of a single file. The second number is
the maximum size in bytes of all these files together."""


def from_hf(source: str | os.PathLike, out: str | os.PathLike) -> None:
    """Convert a Hugging Face directory to a model-only checkpoint. The weights keep their dtypes.

    Args:
        source: The Hugging Face directory.
        out: Directory of the checkpoint. It must not exist.

    Raises:
        CheckpointError: The Hugging Face directory is incomplete or damaged, or `out` exists.
    """
    source = Path(source)
    if not is_hf_directory(source):
        raise CheckpointError(
            f'{source}: not a Hugging Face directory; it needs a config.json with "model_type"'
        )
    _check_links(source)
    config = read_hf_config(source)
    with open_weights(config, source) as weights:
        dtypes = weights.dtypes()
        tensors = (PlannedTensor(n, n, 0, dtypes[n], shape) for n, shape in weights.shapes.items())

        def write(directory: Path) -> None:
            write_all(directory, plan_files(tensors), weights.ranges())
            (directory / CONFIG).write_text(dump_toml(Config(model=config)), encoding="utf-8")
            _copy_sidecars(source, directory)

        store.write_checkpoint(out, write, kind="model", origin=f"from-hf {source.name}")


def to_hf(source: str | os.PathLike, out: str | os.PathLike, dtype: str | None = None) -> Path:
    """Convert a checkpoint to a complete Hugging Face directory.

    The function reads every byte of the checkpoint once, and compares the checkpoint with its
    checksums. If `source` is a run directory and the newest full checkpoint of the run is damaged,
    the function converts the next older full checkpoint.

    Args:
        source: A checkpoint or a run directory.
        out: Directory to create. It must not exist.
        dtype: Dtype of the converted weights, such as "bf16". None keeps the stored dtypes.

    Returns:
        The path of the checkpoint that was converted.

    Raises:
        CheckpointError: The checkpoint is damaged.
        ConfigError: `out` exists.
    """
    source, out = Path(source), Path(out)
    damaged: dict[Path, str] = {}
    while True:
        path = store.resolve(source, thorough=False, excluded=damaged)
        try:
            _write_hf(path, out, dtype)
            return path
        except CheckpointError as error:
            if path == source:
                raise
            logger.warning("skipping a damaged checkpoint: %s", one_line(error))
            damaged[path] = str(error)


def _write_hf(path: Path, out: Path, dtype: str | None) -> None:
    _check_links(path)
    config = model_config_of(path)
    config = config.model_copy(update={"eos_token_ids": eos_token_ids(path, config)})
    with open_weights(config, path) as weights:
        dtypes = weights.dtypes()
        if dtype is not None:
            dtypes = dict.fromkeys(dtypes, dtype_of(dtype))

        def add_files(directory: Path) -> None:
            _copy_sidecars(path, directory)
            for line in complete_hf(directory, config):
                logger.warning(line)

        write_hf(out, config, weights.ranges(), dtypes, add_files=add_files)


def _copy_sidecars(source: Path, target: Path) -> None:
    """Copy the tokenizer, chat templates and generation configuration from `source` to `target`.

    A link in a downloaded directory can refer to any file of this user, and the user may publish
    the copies. Therefore links to files outside `source` are refused.

    Raises:
        CheckpointError: A file is a link to a file outside `source`, is too large, or does not have
            the format that its name implies.
    """
    _resolve_inside(source / TEMPLATES, source)
    copied_bytes = 0
    for name in sidecars(source):
        content = _read_sidecar(source / name, source)
        copied_bytes += len(content)
        if copied_bytes > _SIDECARS_BYTES:
            raise CheckpointError(
                f"{source}: tokenizer files and chat templates together have more than "
                f"{_SIDECARS_BYTES:,} bytes; remove files that the model does not need"
            )
        copy = target / name
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_bytes(content)
        del content  # free it before the next file is read


def _check_links(source: Path) -> None:
    """Raise CheckpointError if a configuration or a weight file in the directory `source` is a
    symbolic link to a file outside this directory."""
    for name in ("config.json", CONFIG, MODEL, INDEX):
        _resolve_inside(source / name, source)
    if (source / MODEL).is_file() or not (source / INDEX).is_file():
        return
    for name in sorted(set(weight_map(source).values())):
        _resolve_inside(source / name, source)


def _resolve_inside(path: Path, source: Path) -> tuple[Path, Path]:
    """Resolve all links in `path`. Return (resolved path, allowed directory that contains it).

    `source` is an allowed directory. If `source` is a snapshot in the cache of the Hugging Face
    hub, the folder blobs/ of the same repository in the cache is also allowed. For a path in
    blobs/, the second result is the folder of the repository. Raises CheckpointError if the
    resolved path is in any other directory.
    """
    # path.resolve() would raise RuntimeError for a loop of links. With realpath, the later read
    # raises OSError.
    real, home = Path(os.path.realpath(path)), source.resolve()
    if real.is_relative_to(home):
        return real, home
    # The hub's cache keeps contents in blobs/, next to the folder with the snapshots.
    repository = home.parent.parent
    if home.parent.name == "snapshots" and real.parent == repository / "blobs":
        return real, repository
    raise CheckpointError(
        f"{path}: links to {real}, outside its directory; replace the link by a copy or remove it"
    )


def _read_sidecar(path: Path, source: Path) -> bytes:
    """Return the content of the tokenizer file, chat template or generation configuration `path` in
    the directory `source`. Raises CheckpointError if the file must not be copied."""
    real, below = _resolve_inside(path, source)
    try:
        content = read_regular(real, _SIDECAR_BYTES, below)
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror}") from None
    if path.suffix in _TEXTS:
        return content
    kind = "a sentencepiece model" if path.suffix == ".model" else "a JSON object"
    is_vocabulary = path.name in ("tokenizer.json", "tokenizer.model")
    if is_vocabulary and has_pieces(content):
        return content
    try:
        parsed = json.loads(content)
    except (ValueError, RecursionError):
        parsed = None
    if not isinstance(parsed, dict) or (path.name == "tokenizer.json" and "model" not in parsed):
        raise CheckpointError(f"{path}: the file is not {kind}; replace it or remove it")
    return content


def eos_token_ids(path: Path, config: ModelConfig) -> tuple[int, ...]:
    """Return the ids of the tokens at which a model ends a text; () if they are unknown.

    The first id is the id of the token that ended the documents in training. It is in the manifest
    of the checkpoint. Earlier versions wrote manifests without this id. For such a manifest, the id
    is read from the data set, if the data set still exists and has the same tokenizer. A checkpoint
    that was converted from a Hugging Face directory has no such id.

    The ids of `model.eos_token_ids` follow. If neither the training data nor `model.eos_token_ids`
    provides an id, the id is read from the tokenizer files.

    Args:
        path: A checkpoint or a Hugging Face directory.
        config: Configuration of the model in this directory.
    """
    of_data = None
    file = tokenizer_path(path)
    if is_checkpoint(path) and file.is_file() and not (path / TOKENIZER_CONFIG).is_file():
        of_data = read_manifest(path).settings.get(DATA_EOS)
        if of_data is None:
            of_data = _eos_of_data_sets(path, file)
    if of_data is None and not config.eos_token_ids and file.is_file():
        of_data = _eos_of_tokenizer(file)
    return with_data_eos(config, of_data)


def with_data_eos(config: ModelConfig, of_data: int | None) -> tuple[int, ...]:
    """Return `of_data` and `model.eos_token_ids`, without duplicates and without ids outside the
    vocabulary.

    Args:
        config: Configuration of the model.
        of_data: Id of the token that ends each document of the training data; None if unknown.
    """
    ids = [*([] if of_data is None else [of_data]), *config.eos_token_ids]
    return tuple(dict.fromkeys(token for token in ids if 0 <= token < config.vocab_size))


def _eos_of_data_sets(path: Path, tokenizer: Path) -> int | None:
    """Return the id of the token that ends the documents of a checkpoint's training data.

    The function reads the data sets in the order of the checkpoint's configuration, and returns the
    id of the first data set whose tokenizer is the file `tokenizer`. The result is None if no data
    set has this tokenizer, or if a data set cannot be read.
    """
    try:
        data = load_saved_config(path / CONFIG).data
        for dataset in (data.path, *(source.path for source in data.mix)):
            manifest = read_data_manifest(dataset) if dataset else None
            if manifest and manifest.tokenizer_sha256 == sha256_of(tokenizer):
                return manifest.eos_id
    except (OSError, OptimusError):
        pass
    return None


def _eos_of_tokenizer(file: Path) -> int | None:
    """Return the id of the `eos_token` in the tokenizer_config.json next to the tokenizer `file`.
    If there is no `eos_token`, return the result of `eos_from_names`. Return None if the tokenizer
    does not have this token or a file cannot be read."""
    try:
        named = _read_object(file.with_name(TOKENIZER_CONFIG)).get("eos_token")
        named = named.get("content") if isinstance(named, dict) else named
        return TextTokenizer(file).token_id(named) if named else eos_from_names(file)
    except DataError:
        return None


def complete_hf(directory: Path, config: ModelConfig) -> list[str]:
    """Add tokenizer_config.json and generation_config.json to a Hugging Face directory. If a file
    already exists, only replace its special tokens that are outside the vocabulary.

    Args:
        directory: A directory with config.json and a tokenizer.
        config: The configuration of the model. The caller has set its `eos_token_ids` to the result
            of the function `eos_token_ids`.

    Returns:
        Warnings, one line each.
    """
    eos, file, lines = config.eos_token_ids, tokenizer_path(directory), []
    bos, pad = (
        token if 0 <= token < config.vocab_size else None
        for token in (config.bos_token_id, config.pad_token_id)
    )
    if not eos:
        lines.append(
            "eos_token_id is not known, so generation stops only at its maximum length; set "
            "model.eos_token_ids in the run's configuration, or eos_token_id in config.json and "
            f"{GENERATION_CONFIG}"
        )
    if (directory / TOKENIZER_CONFIG).is_file():
        lines += _keep_within_vocabulary(directory / TOKENIZER_CONFIG, config)
    elif file.is_file():
        try:
            pad = add_transformers_files(
                file,
                eos=eos[0] if eos else None,
                bos=bos,
                pad=pad,
                vocab_size=config.vocab_size,
                max_length=config.max_position_embeddings,
            )
        except DataError as error:
            lines.append(f"{TOKENIZER_CONFIG} is not written: {error}")
    path = directory / GENERATION_CONFIG
    if path.is_file():
        return lines + _keep_within_vocabulary(path, config)
    pad = eos[0] if pad is None and eos else pad
    ids = {"bos_token_id": bos, "eos_token_id": list(eos) or None, "pad_token_id": pad}
    write_json(path, {key: token for key, token in ids.items() if token is not None})
    return lines


def _keep_within_vocabulary(path: Path, config: ModelConfig) -> list[str]:
    """Replace the special tokens in the file `path` that are outside the model's vocabulary.

    `path` is tokenizer_config.json or generation_config.json. A padding token is replaced by the
    end token, and a begin or end token is replaced by null. Returns a warning for each replaced
    token.
    """
    fields, file = _read_object(path), tokenizer_path(path.parent)
    tokenizer = TextTokenizer(file) if file.is_file() else None
    suffix = "_token_id" if path.name == GENERATION_CONFIG else "_token"

    def is_outside(token: Any) -> bool:
        if isinstance(token, list):
            return any(map(is_outside, token))
        token = token.get("content") if isinstance(token, dict) else token
        if isinstance(token, str) and tokenizer is not None:
            token_id = tokenizer.token_id(token)
            return token_id is None or token_id >= config.vocab_size
        return isinstance(token, int) and token >= config.vocab_size

    lines = []
    for key in (f"eos{suffix}", f"bos{suffix}", f"pad{suffix}"):
        if not is_outside(token := fields.get(key)):
            continue
        end = fields.get(f"eos{suffix}") if key.startswith("pad") else None
        fields[key] = end[0] if isinstance(end, list) else end
        text = (
            f"{path.name}: {key} = {token!r} is outside the model's vocabulary of "
            f"{config.vocab_size} ids; {fields[key]!r} is written instead"
        )
        lines.append(one_line(text))
    if lines:
        write_json(path, fields)
    return lines


def _read_object(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file; {} if the file does not exist or contains a JSON value that
    is not an object. Raises DataError."""
    try:
        content = json.loads(read_regular(path, _SIDECAR_BYTES)) if path.is_file() else {}
    except (OSError, ValueError, RecursionError) as error:
        raise DataError(f"{path}: not readable as JSON: {one_line(error)}") from None
    return content if isinstance(content, dict) else {}
