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
import shutil
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from optimus import files
from optimus.checkpoint.index import INDEX, Index, decode
from optimus.checkpoint.threads import Stop, in_threads
from optimus.errors import CheckpointError, OptimusError, one_line

FORMAT = 2
"""Format 1 held whole tensors and no hash of the manifest itself; of it models alone are read."""
MANIFEST = "manifest.json"
SET_ASIDE = "set-aside"
"""Where a start moves what it leaves behind, among a run's checkpoints. Nothing removes it."""
DATA_EOS = "data.eos_token_id"
"""The key of `settings` that holds the token which ends each document of a run's data."""
_BLOCKS_A_TASK = 16
"""Of verifying: 64 MiB, beside which opening a file and reading its header costs nothing."""
_FIELDS = ("kind", "step", "tokens", "updates", "origin", "settings")


@dataclass(frozen=True)
class FileEntry:
    name: str
    size: int
    xxh3: str


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
        for entry in self.files:
            is_later = not weights and entry.name.endswith(".safetensors")
            compare = _read_checked if entry.size <= hashed_bytes and not is_later else _check_size
            compare(self.path / entry.name, entry)
        self.check_shards()

    def check_shards(self) -> None:
        """Compare sizes and headers of the shard files, if any; raises CheckpointError."""
        if self.is_sharded:
            index = self.index()
            numbers = range(len(index.shards))
            in_threads(lambda number: index.open(self.path, number).close(), numbers)

    def verify(self, threads: int = 0) -> None:
        """Compare every byte; CheckpointError names the first file that differs."""
        if problems := self.problems(threads):
            raise CheckpointError(problems[0])

    def problems(self, threads: int = 0) -> list[str]:
        """What is not as it was written: a line for each such file, with the first place."""
        checks = [partial(_read_checked, self.path / one.name, one) for one in self.files]
        found = [problem for problem in in_threads(_problem, checks, threads) if problem]
        if not self.is_sharded:
            return found
        try:
            index = self.index()
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
        """The index file's content. Raises CheckpointError."""
        entry = next(one for one in self.files if one.name == INDEX)
        return _read_checked(self.path / INDEX, entry, wanted=True)


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
        content = path.read_bytes() if wanted else b""
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


def read_manifest(path: str | os.PathLike) -> Manifest:
    """The manifest of a checkpoint directory; CheckpointError if there is no usable one."""
    path = Path(path)
    try:
        data = (path / MANIFEST).read_bytes()
        raw = json.loads(data)
        if raw["format"] == FORMAT:
            files.parse_checked_json(data)
        elif raw["format"] != 1 or raw["kind"] != "model":
            raise CheckpointError(
                f"{path}: {raw.get('kind')} checkpoint of format {raw['format']}, this version "
                f"reads {FORMAT}"
            )
        entries = tuple(FileEntry(**entry) for entry in raw["files"])
        fields = {key: raw[key] for key in _FIELDS}
        fields |= {key: raw.get(key) for key in ("loss_scale", "ranks", "begun")}
        return Manifest(files=entries, path=path, **fields)
    except FileNotFoundError:
        raise CheckpointError(f"{path}: no checkpoint here ({MANIFEST} is missing)") from None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{path / MANIFEST}: not readable: {one_line(error)}") from None


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
            f"{needed_bytes / 1e9:.3f} GB beside the checkpoints that it replaces{due}; make room"
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
