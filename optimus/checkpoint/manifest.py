"""What a checkpoint directory holds, readable without torch.

A checkpoint is a directory whose `manifest.json` was written last, under a temporary name that is
renamed when everything in it is durable. `kind` is "full" (masters, moments, step) or "model"
(weights alone). A directory without a readable manifest, or with a file of another size or hash
than its manifest says, is not a checkpoint.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from optimus import files
from optimus.errors import CheckpointError, one_line

FORMAT = 1
MANIFEST = "manifest.json"
_FIELDS = ("kind", "step", "tokens", "updates", "origin", "settings")


@dataclass(frozen=True)
class FileEntry:
    name: str
    size: int
    xxh3: str


@dataclass(frozen=True)
class Manifest:
    """The sealed description of one checkpoint.

    `step` counts updates of the run, `updates` those of this optimizer (fewer after a restart from
    a model alone), `tokens` those read; `origin` is the `checkpoint.load` its run began with;
    `settings` maps "section.key" to its value.
    """

    kind: str
    step: int
    tokens: int
    updates: int
    origin: str
    settings: Mapping[str, Any]
    files: tuple[FileEntry, ...]
    path: Path
    loss_scale: Mapping[str, float] | None = None
    """State of dynamic loss scaling (fp16); None without it."""

    def verify(self) -> None:
        """Compare files with sizes and hashes; CheckpointError names the first that differs."""
        for entry in self.files:
            path = self.path / entry.name
            try:
                size = path.stat().st_size
                if size != entry.size:
                    raise CheckpointError(
                        f"{path}: {size} bytes, but its manifest says {entry.size}"
                    )
                if files.xxh3_file(path) != entry.xxh3:
                    raise CheckpointError(f"{path}: its content does not match its checksum")
            except OSError as error:
                raise CheckpointError(f"{path}: {error.strerror}") from None


def is_checkpoint(path: str | os.PathLike) -> bool:
    """Whether a directory claims to be a checkpoint of ours."""
    return (Path(path) / MANIFEST).is_file()


def read_manifest(path: str | os.PathLike) -> Manifest:
    """The manifest of a checkpoint directory; CheckpointError if there is no usable one."""
    path = Path(path)
    try:
        raw = json.loads((path / MANIFEST).read_text())
        if raw["format"] != FORMAT:
            raise CheckpointError(
                f"{path}: checkpoint format {raw['format']}, this version reads {FORMAT}"
            )
        entries = tuple(FileEntry(**entry) for entry in raw["files"])
        fields = {key: raw[key] for key in _FIELDS}
        return Manifest(files=entries, path=path, **fields, loss_scale=raw.get("loss_scale"))
    except FileNotFoundError:
        raise CheckpointError(f"{path}: no checkpoint here ({MANIFEST} is missing)") from None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{path / MANIFEST}: not readable: {one_line(error)}") from None


def seal(
    path: str | os.PathLike,
    write_files: Callable[[Path], None],
    *,
    kind: str,
    step: int = 0,
    tokens: int = 0,
    updates: int = 0,
    origin: str = "none",
    settings: Mapping[str, Any] | None = None,
    loss_scale: Mapping[str, float] | None = None,
) -> Manifest:
    """Make a checkpoint at `path`: `write_files(directory)` puts the files, this seals them."""
    final = Path(path)
    final.parent.mkdir(parents=True, exist_ok=True)
    temporary = files.temporary_name(final)
    temporary.mkdir()
    try:
        write_files(temporary)
        entries = _make_durable(temporary)
        manifest = {
            "format": FORMAT,
            "kind": kind,
            "step": step,
            "tokens": tokens,
            "updates": updates,
            "origin": origin,
            "settings": dict(settings or {}),
            "files": [asdict(entry) for entry in entries],
        }
        if loss_scale is not None:
            manifest["loss_scale"] = dict(loss_scale)
        files.write_json(temporary / MANIFEST, manifest)
        if final.exists():
            raise CheckpointError(f"{final} exists already; remove it or choose another place")
        files.commit(temporary, final)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    return read_manifest(final)


def _make_durable(directory: Path) -> list[FileEntry]:
    """fsync all that lies below, and describe the files."""
    entries = []
    for path in sorted(directory.rglob("*")):
        if path.is_dir():
            files.fsync_dir(path)
            continue
        with open(path, "rb") as handle:
            os.fsync(handle.fileno())
        name = path.relative_to(directory).as_posix()
        entries.append(FileEntry(name, path.stat().st_size, files.xxh3_file(path)))
    return entries
