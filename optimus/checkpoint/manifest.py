"""What a checkpoint directory holds, readable without torch.

A checkpoint is a directory whose `manifest.json` was written last, under a temporary name that is
renamed when everything in it is durable. `kind` is "full" (masters, moments, step: an index and the
shard files it names) or "model" (weights alone). A directory without a readable manifest, or with a
file of another size or hash than it says, is not a checkpoint.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import shutil
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, Field, InstanceOf, ValidationError

from optimus.checkpoint.index import INDEX, Index, decode
from optimus.checkpoint.threads import Stop, in_threads
from optimus.config.axes import AXES
from optimus.config.sections import MAX_PATTERN_CHARS, MAX_PATTERNS
from optimus.errors import CheckpointError, OptimusError, one_line
from optimus.io import files, tensor_file

FORMAT = 2
"""Format 1 held whole tensors and no hash of the manifest itself; of it models alone are read."""
MANIFEST = "manifest.json"
SET_ASIDE = "set-aside"
"""Where a start moves what it leaves behind, among a run's checkpoints. Nothing removes it."""
_CONFIGS = ("config.toml", "config.json")
_TOKENIZERS = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json")
"""A checkpoint that lists one of these files was saved with a tokenizer."""
TEMPLATES = "additional_chat_templates"
"""A folder of chat templates, of at most _MAX_TEMPLATES entries in _MAX_LEVELS levels."""
_MAX_TEMPLATES, _MAX_LEVELS = 1_000, 8
_TOKENIZER_FILES = (
    *(*_TOKENIZERS, "special_tokens_map.json", "added_tokens.json", "vocab.json", "merges.txt"),
    *("chat_template.jinja", "chat_template.json", TEMPLATES),
)
GENERATION_CONFIG = "generation_config.json"
SIDECARS = (*_TOKENIZER_FILES, GENERATION_CONFIG)
"""Files and a folder of a Hugging Face directory that a checkpoint may have, too."""
_READ_BY_NAME = (tensor_file.INDEX, *_CONFIGS)
"""Other files that readers open by their names. Weights are found by their suffix instead."""
FROZEN = "optim.frozen"
DATA_EOS = "data.eos_token_id"
"""The key of `settings` that holds the token which ends each document of a run's data."""
_BLOCKS_A_TASK = 16
"""Of verifying: 64 MiB, beside which opening a file and reading its header costs nothing."""
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
"""Settings of a checkpoint that are used for more than a comparison, and their types."""
_MOST_RANKS = 1 << 22
_MANIFEST_BYTES = 4 << 20
"""Largest manifest that is read; ours have some kilobytes."""
_COMPANION_BYTES, _INDEX_BYTES = 256 << 20, 1 << 30
"""Largest files besides weights, and largest index: 40 times that of 400,000 pieces."""
_FORMAT_1 = re.compile(rb'\s*\{\s*"format": *1\b')


def _plain_name(name: str) -> str:
    """Refuse the name of a file that may not be in the checkpoint's directory."""
    if "\0" in name or "\\" in name or not {"", ".", ".."}.isdisjoint(name.split("/")):
        raise ValueError("must be a file of the checkpoint, named relative to its directory")
    os.fsencode(name)
    return name


_Int = Annotated[int, Field(strict=True, ge=0, lt=1 << 56)]
_Ranks = Annotated[int, Field(strict=True, ge=1, le=1 << 20)]
_Float = Annotated[float, Field(strict=True, ge=0, allow_inf_nan=False)]
_Name = Annotated[InstanceOf[str], AfterValidator(_plain_name)]
_Hash = Annotated[str, Field(pattern="^[0-9a-f]{16}$")]


@dataclass(frozen=True)
class FileEntry:
    name: _Name
    size: _Int
    xxh3: _Hash


class _Fields(BaseModel):
    """The fields of manifest.json and what they may hold, however its hash was made."""

    kind: Literal["full", "model"]
    step: _Int
    tokens: _Int
    updates: _Int
    origin: InstanceOf[str]
    settings: dict[str, Any]
    files: tuple[FileEntry, ...]
    loss_scale: dict[Literal["scale", "good_steps", "skipped"], _Float] | None = None
    ranks: dict[str, _Ranks] | None = None
    begun: _Int | None = None


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """The sealed description of one checkpoint.

    `step` counts updates of the run, `updates` those of this optimizer (fewer after a restart from
    a model alone), `tokens` those read; `origin` is the `checkpoint.load` its run began with;
    `settings` maps "section.key" to its value.
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
    """State of dynamic loss scaling (fp16); None without it."""
    ranks: Mapping[str, int] | None = None
    """Sizes of the mesh that wrote it, and `per_node`, how many ranks a node had."""
    begun: int | None = None
    """The step that its run was begun at; None where that was not noted."""

    @property
    def is_sharded(self) -> bool:
        """Whether its states lie in shard files, as those of every full checkpoint do."""
        return any(entry.name == INDEX for entry in self.files)

    def check(self, hashed_bytes: float = math.inf, weights: bool = True) -> None:
        """Compare files with their hashes (larger ones than `hashed_bytes`, and without `weights`
        those of a model alone, with their sizes alone), shard files with their sizes and headers:
        what can be done at once. The bytes of shard files, and of weights by whoever streams them,
        are compared when they are read. CheckpointError names the first that differs."""
        self._check_unlisted()
        for entry in self.files:
            is_later = not weights and entry.name.endswith(".safetensors")
            compare = _read_checked if entry.size <= hashed_bytes and not is_later else _check_size
            compare(self.path / entry.name, entry)
        self.check_shards()

    def _check_unlisted(self) -> None:
        """Raise CheckpointError for weights, configurations and sidecar files that the manifest
        does not list. A tokenizer may be added to a checkpoint that was saved without one."""
        listed = {entry.name for entry in self.files}
        may_be_added = () if listed.intersection(_TOKENIZERS) else _TOKENIZER_FILES
        try:
            found = os.listdir(self.path)
        except OSError as error:
            raise CheckpointError(f"{self.path}: {error.strerror}") from None
        read = [name for name in found if name.endswith(".safetensors") or name in _READ_BY_NAME]
        for name in sorted([*read, *sidecars(self.path)]):
            if name not in listed and name.split("/")[0] not in may_be_added:
                raise CheckpointError(
                    f"{self.path / name}: its manifest does not list it; remove it"
                )

    def check_shards(self) -> None:
        """Compare sizes and headers of the shard files, if any; raises CheckpointError."""
        if self.is_sharded:
            index = self.index()
            numbers = range(len(index.shards))
            in_threads(lambda number: index.open(self.path, number).close(), numbers)

    def check_rows(self, index: Index) -> None:
        """Check that the index leads to every element of every parameter once. Raises
        CheckpointError."""
        try:
            index.check_rows(self.settings.get(FROZEN) or ())
        except CheckpointError as error:
            raise CheckpointError(f"{self.path}: {error}") from None

    def verify(self, threads: int = 0) -> None:
        """Compare every byte; CheckpointError names the first file that differs."""
        if problems := self.problems(threads):
            raise CheckpointError(problems[0])

    def problems(self, threads: int = 0) -> list[str]:
        """What is not as it was written: a line for each such file, with the first place."""
        checks: list[Callable[[], object]] = [partial(self._verify_file, one) for one in self.files]
        checks.append(self._check_unlisted)
        found = [problem for problem in in_threads(_problem, checks, threads) if problem]
        if not self.is_sharded:
            return found
        try:
            index = self.index()
            self.check_rows(index)
        except CheckpointError as error:
            return found or [str(error)]  # nobody knows what shard files should hold
        tasks = [
            (number, range(shard.num_blocks)[first : first + _BLOCKS_A_TASK])
            for number, shard in enumerate(index.shards)
            for first in range(0, shard.num_blocks, _BLOCKS_A_TASK)
        ]
        checks = [partial(index.verify, self.path, *task) for task in tasks]
        first_of: dict[int, str] = {}
        for (number, _), problem in zip(tasks, in_threads(_problem, checks, threads), strict=True):
            if problem:
                first_of.setdefault(number, problem)
        return [*found, *first_of.values()]

    def _verify_file(self, entry: FileEntry) -> None:
        """Compare a file with its hash, and read its header if it holds weights."""
        path = self.path / entry.name
        _read_checked(path, entry)
        if entry.name.endswith(".safetensors"):
            tensor_file.TensorFile(path).close()
        elif entry.name == tensor_file.INDEX:
            listed = {one.name for one in self.files}
            for name in sorted(set(tensor_file.weight_map(self.path).values())):
                if name not in listed:
                    raise CheckpointError(f"{path}: names {name}, which the manifest does not list")

    def index(self, data: bytes | None = None) -> Index:
        """Where the states lie; `data`: the index file's content, if another rank has read it."""
        if data is None:
            data = self.index_bytes()
        try:
            index = decode(data)
        except CheckpointError as error:
            raise CheckpointError(f"{self.path}: {error}") from None
        if index.step != self.step:
            raise CheckpointError(f"{self.path}: its index is of step {index.step}")
        return index

    def index_bytes(self) -> bytes:
        """Return the index file's content. Raises CheckpointError."""
        for entry in self.files:
            if entry.name == INDEX:
                return _read_checked(self.path / INDEX, entry, wanted=True)
        raise CheckpointError(f"{self.path}: its manifest lists no {INDEX}, so no states")


def _problem(check: Callable[[], object]) -> str:
    """What a check refuses, or nothing."""
    try:
        check()
    except CheckpointError as error:
        return str(error)
    return ""


def _read_checked(path: Path, entry: FileEntry, wanted: bool = False) -> bytes:
    """Compare a file with its size and hash; its content, if that is `wanted`."""
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
        raise CheckpointError(f"{path}: {size} bytes, but its manifest says {entry.size}")


def is_checkpoint(path: str | os.PathLike) -> bool:
    """Whether a directory claims to be a checkpoint of ours."""
    return (Path(path) / MANIFEST).is_file()


def sidecars(directory: Path) -> list[str]:
    """Return the names of the files of SIDECARS that are in a directory, relative to it. Links to
    folders are not followed below TEMPLATES.

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
    for root, folders, found in os.walk(directory / TEMPLATES, onerror=refuse):
        folder = Path(root).relative_to(directory)
        entries += len(folders) + len(found)
        if entries > _MAX_TEMPLATES or len(folder.parts) > _MAX_LEVELS:
            raise CheckpointError(
                f"{directory / TEMPLATES}: more than {_MAX_TEMPLATES:,} entries or {_MAX_LEVELS} "
                "levels of folders; remove everything except chat templates"
            )
        names += [(folder / name).as_posix() for name in found]
    return names


def read_manifest(path: str | os.PathLike) -> Manifest:
    """Return the manifest of a checkpoint directory. Raises CheckpointError if there is no usable
    one, or a field has a type or a value that no save writes."""
    path = Path(path)
    try:
        data = files.read_regular(path / MANIFEST, _MANIFEST_BYTES)
        is_hashed = not _FORMAT_1.match(data)
        raw = files.parse_checked_json(data) if is_hashed else json.loads(data)
        if raw["format"] != FORMAT if is_hashed else (raw["format"], raw["kind"]) != (1, "model"):
            raise CheckpointError(
                f"{path}: {raw.get('kind')} checkpoint of format {raw['format']}, this version "
                f"reads {FORMAT}"
            )
        fields = _Fields.model_validate(raw)
        _check_dependent(fields)
        return Manifest(path=path, **dict(fields))
    except FileNotFoundError:
        raise CheckpointError(f"{path}: no checkpoint here ({MANIFEST} is missing)") from None
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        reason = one_line(first["msg"]).removeprefix("Value error, ")
        what = f"{'.'.join(map(str, first['loc']))}: {reason}"
        raise CheckpointError(f"{path / MANIFEST}: not readable: {what}") from None
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise CheckpointError(f"{path / MANIFEST}: not readable: {one_line(error)}") from None


def _check_dependent(fields: _Fields) -> None:
    """Check what several fields or entries must agree on. Raises ValueError."""
    names = [entry.name for entry in fields.files]
    if len(set(names)) != len(names):
        raise ValueError("files has a name twice")
    for key, kind in _READ_SETTINGS.items():
        if not isinstance(fields.settings.get(key), kind | None):
            raise ValueError(f"settings: {key} = {fields.settings[key]!r:.80} is of another type")
    frozen = fields.settings.get(FROZEN) or ()
    if len(frozen) > MAX_PATTERNS or not all(
        isinstance(pattern, str) and len(pattern) <= MAX_PATTERN_CHARS for pattern in frozen
    ):
        raise ValueError(
            f"settings: {FROZEN} is not a list of at most {MAX_PATTERNS:,} patterns of at most "
            f"{MAX_PATTERN_CHARS} characters"
        )
    _check_listed(fields.kind, set(names))
    for entry in fields.files:
        most = _INDEX_BYTES if entry.name == INDEX else _COMPANION_BYTES
        if entry.size > most and not entry.name.endswith(".safetensors"):
            raise ValueError(f"files: {entry.name} is larger than {most:,} bytes")
    scale, ranks = fields.loss_scale, fields.ranks
    if scale is not None and scale.keys() != {"scale", "good_steps", "skipped"}:
        raise ValueError(f"loss_scale has only {', '.join(scale) or 'no field'}")
    if ranks is None:
        return
    sizes = [ranks.get(axis, 1) for axis in AXES]
    if not {"pp", "per_node"} <= ranks.keys() or math.prod(sizes) > _MOST_RANKS:
        raise ValueError(f"ranks = {ranks} is no mesh of at most {_MOST_RANKS:,} ranks")


def _check_listed(kind: str, names: set[str]) -> None:
    """Check that the files of a checkpoint include what every save of its kind writes. Raises
    ValueError."""
    if kind == "full" and INDEX not in names:
        raise ValueError(f"files of a full checkpoint lists no {INDEX}")
    if kind == "model" and INDEX in names:
        raise ValueError(f"files of a model lists {INDEX}, which only a full checkpoint has")
    if kind == "model" and names.isdisjoint((tensor_file.MODEL, tensor_file.INDEX)):
        raise ValueError(f"files lists neither {tensor_file.MODEL} nor {tensor_file.INDEX}")
    if names.isdisjoint(_CONFIGS):
        raise ValueError(f"files lists neither {' nor '.join(_CONFIGS)}")


def seal(path: str | os.PathLike, write_files: Callable[[Path], None], **facts: Any) -> Manifest:
    """Make a checkpoint at `path`: `write_files(directory)` puts the files, this seals them with
    the `facts` that `finish` takes."""
    temporary = begin(path)
    try:
        write_files(temporary)
        return finish(temporary, path, **facts)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


def begin(path: str | os.PathLike, needed_bytes: int = 0, beside: int = 0) -> Path:
    """A fresh directory in which the checkpoint that will be at `path` is written.

    Raises OptimusError if there is less room than it and `beside` will need, the bytes of a full
    one that is due with it, and OSError.
    """
    final = Path(path)
    if not final.parent.is_dir():
        files.make_dirs(final.parent)
    free = shutil.disk_usage(final.parent).free
    if free < needed_bytes + beside:
        due = f", and the full one of its step {beside / 1e9:.3f} GB" if beside else ""
        raise OptimusError(
            f"{final.name} not written: {final.parent} has {free / 1e9:.3f} GB free, but it needs "
            f"{needed_bytes / 1e9:.3f} GB before it removes older checkpoints{due}; make room"
            f"{_told_aside(final.parent / SET_ASIDE)}"
        )
    temporary = files.temporary_name(final)
    temporary.mkdir()
    return temporary


def _told_aside(aside: Path) -> str:
    """What a user might remove first, if anything is there."""
    size = sum(one.stat().st_size for one in aside.rglob("*") if one.is_file())
    return f", say in {aside.name}/: {size / 1e9:.3f} GB that no start reads" if size else ""


def finish(
    temporary: Path,
    path: str | os.PathLike,
    *,
    shards: Collection[str] = (),
    entries: Sequence[FileEntry] = (),
    stop: Stop | None = None,
    **facts: Any,
) -> Manifest:
    """Seal what `begin` began: all is made durable, described by a manifest of these `facts` (those
    of `Manifest`, `files` and `path` apart), and renamed. `shards` are files that their writers
    have made durable and that the index describes, `entries` such that are described already.
    Raises OptimusError instead once `stop` is set, which it no longer can be behind that, and
    OSError."""
    final = Path(path)
    known = {*shards, *(entry.name for entry in entries)}
    entries = sorted([*_make_durable(temporary, known), *entries], key=lambda entry: entry.name)
    told = asdict(Manifest(files=tuple(entries), path=temporary, **facts))
    kept = {key: value for key, value in told.items() if key != "path" and value is not None}
    files.write_bytes(temporary / MANIFEST, files.checked_json({"format": FORMAT, **kept}))
    sealed = read_manifest(temporary)
    sealed.check_shards()
    if final.exists():
        raise CheckpointError(f"{final} exists already; remove it or choose another place")
    if stop is not None and not stop.claim():
        raise OptimusError(f"{final.name}: no longer wanted")
    try:
        files.commit(temporary, final)
    except OSError:  # perhaps of the fsync behind the rename: a failed save leaves no name
        with contextlib.suppress(OSError):
            os.rename(final, temporary)
        raise
    return replace(sealed, path=final)


def _make_durable(directory: Path, known: Collection[str]) -> list[FileEntry]:
    """fsync all that lies below but for what is `known`, and describe the files."""
    entries = []
    for path in sorted(directory.rglob("*")):
        if path.is_dir():
            files.fsync_dir(path)
            continue
        name = path.relative_to(directory).as_posix()
        if name in known:
            continue
        with open(path, "rb") as handle:
            os.fsync(handle.fileno())
        entries.append(FileEntry(name, path.stat().st_size, files.xxh3_file(path)))
    return entries
