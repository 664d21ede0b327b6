"""The file manifest.json of a checkpoint, and checks of the checkpoint's files.

A checkpoint is a directory with a `manifest.json`, which lists the sizes and hashes of the
directory's other files. A save writes all files to a temporary directory, the manifest last, and
then renames the directory. A checkpoint is valid if its manifest is readable and all files have the
listed sizes and hashes.

`kind` is "full" or "model". A full checkpoint has the master weights and the moments in shard files
(optimus/checkpoint/shard_file.py) and an index (optimus/checkpoint/index.py). A model-only
checkpoint has only the weights, in safetensors files. This module does not import torch.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, Field, InstanceOf, ValidationError

from optimus.checkpoint.index import INDEX, Index, decode
from optimus.checkpoint.shard_file import (
    in_threads,
)
from optimus.config import MAX_PATTERN_CHARS, MAX_PATTERNS
from optimus.config.axes import AXES
from optimus.errors import CheckpointError, one_line
from optimus.io import files, tensor_file

FORMAT = 2
"""Version of the checkpoint format. Checkpoints of format 1 had whole tensors and no hash of the
manifest. This version of Optimus can read model-only checkpoints of format 1, but not full
checkpoints of format 1."""
MANIFEST = "manifest.json"
_CONFIGS = ("config.toml", "config.json")
_TOKENIZERS = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json")
"""Names of tokenizer files. A checkpoint whose manifest lists one of these files was saved with a
tokenizer."""
TEMPLATES = "additional_chat_templates"
"""Name of the folder of chat templates in a checkpoint. The folder must contain at most
_MAX_TEMPLATES entries and at most _MAX_LEVELS levels of folders."""
_MAX_TEMPLATES, _MAX_LEVELS = 1_000, 8
_TOKENIZER_FILES = (
    *(*_TOKENIZERS, "special_tokens_map.json", "added_tokens.json", "vocab.json", "merges.txt"),
    *("chat_template.jinja", "chat_template.json", TEMPLATES),
)
GENERATION_CONFIG = "generation_config.json"
SIDECARS = (*_TOKENIZER_FILES, GENERATION_CONFIG)
"""Names of the optional files of a checkpoint, as in Hugging Face directories: tokenizer, chat
templates (with the folder TEMPLATES) and generation configuration."""
_READ_BY_NAME = (tensor_file.INDEX, *_CONFIGS)
"""Names of files that readers of a checkpoint open by name, in addition to SIDECARS. Readers find
weight files by their suffix."""
FROZEN = "optim.frozen"
DATA_EOS = "data.eos_token_id"
"""Key in `Manifest.settings`. The value is the id of the token that ends each document of the run's
training data."""
_BLOCKS_A_TASK = 16
"""Number of blocks, of 4 MiB each, that a thread verifies each time it opens a shard file."""
_READ_SETTINGS = {
    **dict.fromkeys((f"parallel.{axis}" for axis in AXES), int),
    **dict.fromkeys(("train.batch_tokens", "train.seq_len", "train.max_steps"), int),
    **dict.fromkeys(("train.eval_interval", "checkpoint.interval", DATA_EOS), int),
    **dict.fromkeys(("optim.warmup_steps", "optim.decay_steps"), int),
    **dict.fromkeys(("optim.lr", "optim.min_lr"), int | float),
    **dict.fromkeys(("optim.sharding", "optim.schedule", "parallel.schedule"), str),
    **dict.fromkeys(("train.dtype", "checkpoint.scatter", "data.identity"), str),
    FROZEN: list,
}
"""Types of the manifest settings that the code reads. All other settings in a manifest are only
compared with the settings of a run."""
_SETTING = re.compile(r"[a-z_]+(\.[a-z0-9_]+)+")
_MOST_RANKS, _MOST_BATCH_TOKENS = 1 << 22, 1 << 40
_MANIFEST_BYTES = 4 << 20
"""Maximum size, in bytes, of a manifest. A save writes a manifest of a few kilobytes."""
_SIDECAR_BYTES, _INDEX_BYTES = 256 << 20, 1 << 30
"""Maximum sizes of files, in bytes. The first number applies to a tokenizer or configuration file.
The second number applies to index.jsonl, and is 40 times the size of an index of 400,000 slices."""
_FORMAT_1 = re.compile(rb'\s*\{\s*"format": *1\b')


def _plain_name(name: str) -> str:
    """Return `name` if it is a relative path inside the checkpoint's directory; else raise
    ValueError."""
    if "\0" in name or "\\" in name or not {"", ".", ".."}.isdisjoint(name.split("/")):
        raise ValueError("the name must be a path within the checkpoint, without .., \\ and NUL")
    os.fsencode(name)
    return name


_Int = Annotated[int, Field(strict=True, ge=0, lt=1 << 56)]
_Ranks = Annotated[int, Field(strict=True, ge=1, le=1 << 20)]
_Float = Annotated[float, Field(strict=True, ge=0, allow_inf_nan=False)]
_Name = Annotated[InstanceOf[str], AfterValidator(_plain_name)]
_Hash = Annotated[str, Field(pattern="^[0-9a-f]{16}$")]


@dataclass(frozen=True)
class FileEntry:
    """Manifest entry for one file of the checkpoint: path, size in bytes and hash."""

    name: _Name
    size: _Int
    xxh3: _Hash


class _Fields(BaseModel):
    """Pydantic model of manifest.json that checks the types and ranges of the fields.

    The hash of the manifest detects damage of the file, but not an invalid value that a program has
    written. The checks of the fields detect such a value.
    """

    kind: Literal["full", "model"]
    step: _Int
    tokens: _Int
    updates: _Int
    origin: InstanceOf[str]
    settings: dict[str, Any]
    files: tuple[FileEntry, ...]
    loss_scale: dict[Literal["scale", "good_steps", "skipped"], _Float] | None = None
    ranks: dict[str, _Ranks] | None = None
    first_step: _Int | None = Field(None, alias="begun")


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """The content of manifest.json.

    `step` and `tokens` are the numbers of updates and of tokens that the run had processed when the
    checkpoint was saved. `updates` is the number of updates since the optimizer states were zero. A
    restart from a model-only checkpoint sets the optimizer states to zero. `origin` is the value of
    `checkpoint.load` when the run was started. `settings` maps "section.key" to the value of the
    setting.
    """

    kind: str
    step: int = 0
    tokens: int = 0
    updates: int = 0
    origin: str = "none"
    settings: Mapping[str, Any] = field(default_factory=dict)
    files: tuple[FileEntry, ...]
    path: Path
    loss_scale: Mapping[str, float] | None = None
    """State of dynamic loss scaling (fp16); None if the run did not scale the loss."""
    ranks: Mapping[str, int] | None = None
    """Sizes of the mesh axes of the run that saved the checkpoint, and under the key `per_node` the
    number of ranks on a node."""
    first_step: int | None = None
    """The step at which the run was started from `origin`; None if the step is unknown."""

    @property
    def is_sharded(self) -> bool:
        """True if the states are in shard files, as in every full checkpoint."""
        return any(entry.name == INDEX for entry in self.files)

    def check(self, hashed_bytes: float = math.inf, weights: bool = True) -> None:
        """Check the sizes and hashes of the checkpoint's files, except the hashes of shard files.

        For a shard file, this method checks only the size and the header. Readers of shard files
        check the hash of each block that they read.

        Args:
            hashed_bytes: Maximum size of a file whose hash is checked. For larger files, only the
                size is checked.
            weights: False to check only the sizes of safetensors files.

        Raises:
            CheckpointError: A file does not match the manifest or the index. The message names the
                first such file.
        """
        self._check_unlisted()
        for entry in self.files:
            size_only = entry.size > hashed_bytes or (
                not weights and entry.name.endswith(".safetensors")
            )
            (_check_size if size_only else _read_checked)(self.path / entry.name, entry)
        self.check_shards()

    def _check_unlisted(self) -> None:
        """Raise CheckpointError if the directory has a weight, configuration or tokenizer file that
        the manifest does not list. Tokenizer files are accepted if the checkpoint was saved without
        a tokenizer, because a user can add them later."""
        listed = {entry.name for entry in self.files}
        may_be_added = () if listed.intersection(_TOKENIZERS) else _TOKENIZER_FILES
        try:
            names = os.listdir(self.path)
        except OSError as error:
            raise CheckpointError(f"{self.path}: {error.strerror}") from None
        read = [name for name in names if name.endswith(".safetensors") or name in _READ_BY_NAME]
        for name in sorted([*read, *sidecars(self.path)]):
            if name not in listed and name.split("/")[0] not in may_be_added:
                raise CheckpointError(
                    f"{self.path / name}: the checkpoint's manifest does not list this file; "
                    "remove it"
                )

    def check_shards(self) -> None:
        """Compare the sizes and headers of the shard files, if there are any, with the index.
        Raises CheckpointError."""
        if self.is_sharded:
            index = self.index()
            numbers = range(len(index.shards))
            in_threads(lambda number: index.open(self.path, number).close(), numbers)

    def check_rows(self, index: Index) -> None:
        """Check the positions in the index, as `Index.check_rows` does. Raises CheckpointError with
        the path of the checkpoint."""
        try:
            index.check_rows(self.settings.get(FROZEN) or ())
        except CheckpointError as error:
            raise CheckpointError(f"{self.path}: {error}") from None

    def verify(self, threads: int = 0) -> None:
        """Compare every byte of the checkpoint with the hashes in the manifest and the index.
        Raises CheckpointError with the first element of `problems(threads)`, if there is one."""
        if problems := self.problems(threads):
            raise CheckpointError(problems[0])

    def problems(self, threads: int = 0) -> list[str]:
        """Compare every byte of the checkpoint with the hashes in the manifest and the index.

        Args:
            threads: Number of threads, as for `in_threads`.

        Returns:
            One line for each file that does not match. The line of a shard file names the first
            block that does not match.
        """
        checks: list[Callable[[], object]] = [
            *(partial(self._verify_file, entry) for entry in self.files),
            self._check_unlisted,
        ]
        problems = [problem for problem in in_threads(_problem, checks, threads) if problem]
        if not self.is_sharded:
            return problems
        try:
            index = self.index()
            self.check_rows(index)
        except CheckpointError as error:
            return problems or [str(error)]  # without an index, shard files cannot be checked

        def verify(number: int, blocks: range) -> None:
            with index.open(self.path, number) as file:
                file.verify(blocks)

        tasks = [
            (number, range(shard.num_blocks)[first : first + _BLOCKS_A_TASK])
            for number, shard in enumerate(index.shards)
            for first in range(0, shard.num_blocks, _BLOCKS_A_TASK)
        ]
        checks = [partial(verify, *task) for task in tasks]
        first_of: dict[int, str] = {}
        for (number, _), problem in zip(tasks, in_threads(_problem, checks, threads), strict=True):
            if problem:
                first_of.setdefault(number, problem)
        return [*problems, *first_of.values()]

    def _verify_file(self, entry: FileEntry) -> None:
        """Check the hash of the file in `entry`. Raises CheckpointError.

        Also check the header of a safetensors file, and check that model.safetensors.index.json
        names only files that the manifest lists.
        """
        path = self.path / entry.name
        _read_checked(path, entry)
        if entry.name.endswith(".safetensors"):
            tensor_file.TensorFile(path).close()
        elif entry.name == tensor_file.INDEX:
            listed = {entry.name for entry in self.files}
            for name in sorted(set(tensor_file.weight_map(self.path).values())):
                if name not in listed:
                    raise CheckpointError(
                        f"{path}: the index names {name}, which the manifest does not list"
                    )

    def index(self, data: bytes | None = None) -> Index:
        """Return the index of a full checkpoint.

        Args:
            data: Content of index.jsonl, read by another rank; None to read the file.

        Raises:
            CheckpointError: The checkpoint has no valid index.
        """
        if data is None:
            data = self.index_bytes()
        try:
            index = decode(data)
        except CheckpointError as error:
            raise CheckpointError(f"{self.path}: {error}") from None
        if index.step != self.step:
            raise CheckpointError(
                f"{self.path}: {INDEX} has step {index.step}, but {MANIFEST} has step {self.step}"
            )
        return index

    def index_bytes(self) -> bytes:
        """Return the content of index.jsonl, after a check of its hash. Raises CheckpointError."""
        for entry in self.files:
            if entry.name == INDEX:
                return _read_checked(self.path / INDEX, entry, wanted=True)
        raise CheckpointError(f"{self.path}: {MANIFEST} does not list {INDEX}")


def _problem(check: Callable[[], object]) -> str:
    """Call `check()`. Return the message if this call raises CheckpointError, else ""."""
    try:
        check()
    except CheckpointError as error:
        return str(error)
    return ""


def _read_checked(path: Path, entry: FileEntry, wanted: bool = False) -> bytes:
    """Compare the file `path` with the size and hash in `entry`. Return the content of the file if
    `wanted` is True, else b"". Raises CheckpointError if the file does not match."""
    _check_size(path, entry)
    try:
        content = files.read_regular(path, entry.size) if wanted else b""
        if (files.xxh3_bytes(content) if wanted else files.xxh3_file(path)) != entry.xxh3:
            raise CheckpointError(f"{path}: its content does not match its checksum")
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror}") from None
    return content


def _check_size(path: Path, entry: FileEntry) -> None:
    try:
        size = path.stat().st_size
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror}") from None
    if size != entry.size:
        raise CheckpointError(
            f"{path}: the file has {size} bytes, but the manifest says {entry.size}"
        )


def is_checkpoint(path: str | os.PathLike) -> bool:
    """Return True if a directory contains a manifest.json, which may be invalid."""
    return (Path(path) / MANIFEST).is_file()


def sidecars(directory: Path) -> list[str]:
    """Return the names in SIDECARS that exist in `directory`, as paths relative to `directory`.

    Instead of the folder TEMPLATES, the result contains the files in this folder and in its
    subfolders. Links to other folders are not followed.

    Raises:
        CheckpointError: The folder TEMPLATES is too large or too deep, or cannot be read.
    """
    names = [name for name in SIDECARS if os.path.lexists(directory / name)]
    if not os.path.isdir(directory / TEMPLATES):
        return names

    def refuse(error: OSError) -> None:
        raise CheckpointError(f"{error.filename}: {error.strerror}") from None

    names.remove(TEMPLATES)
    entries = 0
    for root, folders, in_folder in os.walk(directory / TEMPLATES, onerror=refuse):
        folder = Path(root).relative_to(directory)
        entries += len(folders) + len(in_folder)
        if entries > _MAX_TEMPLATES or len(folder.parts) > _MAX_LEVELS:
            raise CheckpointError(
                f"{directory / TEMPLATES}: more than {_MAX_TEMPLATES:,} entries or {_MAX_LEVELS} "
                "levels of folders; remove everything except chat templates"
            )
        names += [(folder / name).as_posix() for name in in_folder]
    return names


def read_manifest(path: str | os.PathLike) -> Manifest:
    """Return the manifest of a checkpoint directory.

    Raises:
        CheckpointError: There is no manifest, or a field has a type or a value that no save writes.
    """
    path = Path(path)
    try:
        data = files.read_regular(path / MANIFEST, _MANIFEST_BYTES)
        is_hashed = not _FORMAT_1.match(data)
        raw = files.parse_checked_json(data) if is_hashed else json.loads(data)
        if raw["format"] != FORMAT if is_hashed else (raw["format"], raw["kind"]) != (1, "model"):
            raise CheckpointError(
                f"{path}: {raw.get('kind')} checkpoint of format {raw['format']}; this version "
                f"reads format {FORMAT}"
            )
        fields = _Fields.model_validate(raw)
        _check_dependent(fields)
        return Manifest(path=path, **dict(fields))
    except FileNotFoundError:
        raise CheckpointError(f"{path}: no checkpoint here ({MANIFEST} is missing)") from None
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        reason = one_line(first["msg"]).removeprefix("Value error, ")
        key = ".".join(map(str, first["loc"]))
        raise CheckpointError(f"{path / MANIFEST}: not readable: {key}: {reason}") from None
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise CheckpointError(f"{path / MANIFEST}: not readable: {one_line(error)}") from None


def _check_dependent(fields: _Fields) -> None:
    """Check conditions that involve several fields of a manifest, or several entries of a field.
    Raises ValueError."""
    names = {entry.name for entry in fields.files}
    if len(names) != len(fields.files):
        raise ValueError('the key "files" lists a name twice')
    for key, kind in _READ_SETTINGS.items():
        if not isinstance(fields.settings.get(key), kind | None):
            raise ValueError(f"settings: {key} = {fields.settings[key]!r:.80} has a wrong type")
        value = fields.settings.get(key)
        if isinstance(value, bool) or (isinstance(value, (int, float)) and not -2 < value < 1e300):
            raise ValueError(f"settings: {key} = {value!r:.80} is not a possible value")
    if unknown := next((key for key in fields.settings if not _SETTING.fullmatch(key)), ""):
        raise ValueError(f"settings: {unknown!r:.80} is not a key of a configuration")
    step, tokens, updates, first = fields.step, fields.tokens, fields.updates, fields.first_step
    # A restart from weights alone sets `updates` to 0 and keeps `step`.
    if max(first or 0, updates) > step or tokens > step * _MOST_BATCH_TOKENS:
        raise ValueError(
            f"step = {step}, tokens = {tokens}, updates = {updates} and the first step {first} "
            "contradict each other"
        )
    frozen = fields.settings.get(FROZEN) or ()
    if len(frozen) > MAX_PATTERNS or not all(
        isinstance(pattern, str) and len(pattern) <= MAX_PATTERN_CHARS for pattern in frozen
    ):
        raise ValueError(
            f"settings: {FROZEN} is not a list of at most {MAX_PATTERNS:,} patterns of at most "
            f"{MAX_PATTERN_CHARS} characters"
        )
    # The list must include the files that every save of this kind writes.
    if fields.kind == "full" and INDEX not in names:
        raise ValueError(f'the key "files" lacks {INDEX}, which every full checkpoint has')
    if fields.kind == "model" and INDEX in names:
        raise ValueError(
            f'the key "files" lists {INDEX}, which a model-only checkpoint does not have'
        )
    if fields.kind == "model" and names.isdisjoint((tensor_file.MODEL, tensor_file.INDEX)):
        raise ValueError(
            f'the key "files" lists neither {tensor_file.MODEL} nor {tensor_file.INDEX}'
        )
    if names.isdisjoint(_CONFIGS):
        raise ValueError(f'the key "files" lists neither {_CONFIGS[0]} nor {_CONFIGS[1]}')
    for entry in fields.files:
        most = _INDEX_BYTES if entry.name == INDEX else _SIDECAR_BYTES
        if entry.size > most and not entry.name.endswith(".safetensors"):
            raise ValueError(f"files: {entry.name} is larger than {most:,} bytes")
    scale, ranks = fields.loss_scale, fields.ranks
    if scale is not None and scale.keys() != {"scale", "good_steps", "skipped"}:
        raise ValueError(
            'the key "loss_scale" needs scale, good_steps and skipped, but has '
            f"{', '.join(scale) or 'none'}"
        )
    if ranks is None:
        return
    sizes = [ranks.get(axis, 1) for axis in AXES]
    known = {"pp", "per_node"} <= ranks.keys() <= {*AXES, "per_node"}
    if not known or math.prod(sizes) > _MOST_RANKS:
        raise ValueError(f"ranks = {ranks} is not a mesh of at most {_MOST_RANKS:,} ranks")
