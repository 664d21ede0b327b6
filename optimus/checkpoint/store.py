"""The checkpoints in the directory of a run: commit, selection for a start, and removal.

`checkpoints/step-00001000/` is a full checkpoint. `checkpoints/model-00001000/` is a model-only
checkpoint, which is also a Hugging Face directory. Names that start with a dot are temporary. This
module does not import torch.

Each start of a run has a separate directory, its workspace. A checkpoint is written to the
workspace, and committed by a rename out of the workspace. To remove a checkpoint, its directory is
first renamed into the workspace. A start removes the workspaces of earlier starts. Without their
workspace, the processes of an earlier start can rename no directory and therefore change no
checkpoint (optimus/io/workspace.py).
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import shutil
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from optimus.checkpoint.format import (
    FORMAT,
    MANIFEST,
    FileEntry,
    Manifest,
    is_checkpoint,
    read_manifest,
)
from optimus.checkpoint.shard_file import Stop
from optimus.errors import CheckpointError, OptimusError, counted, one_line
from optimus.io import files
from optimus.io.workspace import Workspace

logger = logging.getLogger(__name__)

KEPT_FULL = 2
"""Number of newest full checkpoints that `remove_old` keeps."""
QUARANTINE = "set-aside"
"""Folder in `checkpoints/` for checkpoints that later starts of the run must not load, for example
checkpoints of later steps. A start of the run moves such checkpoints to this folder. No command
removes checkpoints from this folder."""
_REMOVED = "removed-"
"""Prefix of the temporary names of directories that are being removed. No save writes to these
directories."""
_ASIDE = "aside-"
"""Prefix of the temporary names of checkpoints that are being moved to QUARANTINE."""
NOTHING: Mapping[Path, str] = MappingProxyType({})


def is_removed(path: Path) -> bool:
    """Return True if `path` has the temporary name of a directory that is being removed."""
    return path.name.startswith(f".{_REMOVED}")


def checkpoints_dir(run_dir: str | os.PathLike) -> Path:
    """Return the folder in a run directory that contains the checkpoints."""
    return Path(run_dir) / "checkpoints"


def full_path(run_dir: str | os.PathLike, step: int) -> Path:
    """Return the path of the full checkpoint of step `step`."""
    return checkpoints_dir(run_dir) / f"step-{step:08d}"


def model_path(run_dir: str | os.PathLike, step: int) -> Path:
    """Return the path of the model-only checkpoint of step `step`."""
    return checkpoints_dir(run_dir) / f"model-{step:08d}"


def open_workspace(
    run_dir: str | os.PathLike, name: str = "", within: Workspace | None = None
) -> Workspace:
    """Open the workspace for a new start of the run. The arguments are as for `Workspace.open`."""
    return adopt_workspace(run_dir, Workspace.open(checkpoints_dir(run_dir), name, within))


def adopt_workspace(run_dir: str | os.PathLike, workspace: Workspace) -> Workspace:
    """Move checkpoints from a workspace to QUARANTINE, and return the workspace.

    Call this if `workspace` has the content of the workspace of an earlier start. The earlier start
    may have moved checkpoints to its workspace, but not yet to QUARANTINE.
    """
    for path in workspace.path.glob(f".{_ASIDE}*"):  # an earlier start has not completed the move
        name = path.name.removeprefix(f".{_ASIDE}").split(".")[0]
        _move_to_quarantine(path, checkpoints_dir(run_dir), name)
    return workspace


# -- Creation and commit --------------------------------------------------------------------------


def write_checkpoint(
    path: str | os.PathLike, write_files: Callable[[Path], None], **facts: Any
) -> Manifest:
    """Create and commit a checkpoint at `path` in one call.

    Args:
        path: Directory of the checkpoint. It must not exist.
        write_files: Function that receives a directory and writes the checkpoint's files to it.
        facts: As for `commit`.

    Returns:
        The manifest of the checkpoint.
    """
    temporary = create(path)
    try:
        write_files(temporary)
        return commit(temporary, path, **facts)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


def create(
    path: str | os.PathLike,
    needed_bytes: int = 0,
    reserved_bytes: int = 0,
    workspace: Workspace | None = None,
) -> Path:
    """Create a temporary directory for the checkpoint that will be at `path`.

    Args:
        path: Directory of the committed checkpoint.
        needed_bytes: Size of the checkpoint in bytes.
        reserved_bytes: Number of bytes that a full checkpoint of the same step still needs, because
            its save has not ended.
        workspace: The workspace of the run; None outside a run.

    Returns:
        The temporary directory. It is in `workspace`, or next to `path` if `workspace` is None.

    Raises:
        OptimusError: The disk has less free space than `needed_bytes + reserved_bytes`.
        OSError: The directory cannot be created.
    """
    final = Path(path)
    if not final.parent.is_dir():
        files.make_dirs(final.parent)
    free = shutil.disk_usage(final.parent).free
    if free < needed_bytes + reserved_bytes:
        aside = final.parent / QUARANTINE
        size = sum(file.stat().st_size for file in aside.rglob("*") if file.is_file())
        hint = f", for example in {aside.name}/ ({size / 1e9:.3f} GB)" if size else ""
        reserved = reserved_bytes / 1e9
        due = f" and the full checkpoint of the same step {reserved:.3f} GB" if reserved else ""
        raise OptimusError(
            f"{final.name} not written: {final.parent} has {free / 1e9:.3f} GB free, but the "
            f"checkpoint needs {needed_bytes / 1e9:.3f} GB{due}; older checkpoints are removed "
            f"only after a save; free disk space{hint}"
        )
    temporary = workspace.temporary(final) if workspace else files.temporary_name(final)
    temporary.mkdir()
    return temporary


def commit(
    temporary: Path,
    path: str | os.PathLike,
    *,
    shards: Collection[str] = (),
    entries: Sequence[FileEntry] = (),
    stop: Stop | None = None,
    **facts: Any,
) -> Manifest:
    """Make the files durable, write the manifest, and rename `temporary` to `path`.

    Args:
        temporary: The directory that `create` returned.
        path: Directory of the committed checkpoint.
        shards: Names of the shard files. They are durable before this call, and only the index
            lists them.
        entries: Entries of the manifest for other files that are durable before this call.
        stop: If this Stop is set before the rename, the function does not commit. After the rename,
            `stop` can no longer be set.
        facts: Fields of `Manifest` except `files` and `path`.

    Returns:
        The manifest.

    Raises:
        OptimusError: `stop` was set before the rename.
        CheckpointError: `path` exists, or the files are not valid.
        OSError: A file cannot be read or written.
    """
    final = Path(path)
    known, described = {*shards, *(entry.name for entry in entries)}, list(entries)
    for file in sorted(temporary.rglob("*")):
        if file.is_dir():
            files.fsync_dir(file)
            continue
        name = file.relative_to(temporary).as_posix()
        if name in known:
            continue
        with open(file, "rb") as handle:
            os.fsync(handle.fileno())
        described.append(FileEntry(name, file.stat().st_size, files.xxh3_file(file)))
    described.sort(key=lambda entry: entry.name)
    fields = asdict(Manifest(files=tuple(described), path=temporary, **facts))
    del fields["path"]
    fields["begun"] = fields.pop("first_step")
    kept = {key: value for key, value in fields.items() if value is not None}
    files.write_bytes(temporary / MANIFEST, files.checked_json({"format": FORMAT, **kept}))
    manifest = read_manifest(temporary)
    manifest.check_shards()
    if final.exists():
        raise CheckpointError(f"{final} exists already; remove it or choose another path")
    if stop is not None and not stop.claim():
        raise OptimusError(f"{final.name}: the save was stopped")
    try:
        files.commit(temporary, final)
    except OSError:  # the fsync after the rename may have failed
        with contextlib.suppress(OSError):
            os.rename(final, temporary)
        raise
    return replace(manifest, path=final)


# -- Choice of a checkpoint -----------------------------------------------------------------------


def newest_valid(
    run_dir: str | os.PathLike, thorough: bool = True, excluded: Mapping[Path, str] = NOTHING
) -> Manifest | None:
    """Return the manifest of the newest valid full checkpoint; None if there is none.

    If a checkpoint cannot be read or is damaged, it is read a second time before it is skipped.
    Each failure is logged.

    Args:
        run_dir: The run directory.
        thorough: True to compare every byte with the checksums. False to leave the check of the
            states to the caller. If the caller finds damaged states, it adds the checkpoint to
            `excluded` and calls this function again.
        excluded: Paths of checkpoints to skip, each with a reason.
    """
    for path in reversed(_of_kind(run_dir, "step")):
        if path in excluded:
            continue
        # A read error may be temporary. Skipping the checkpoint would repeat updates of the run.
        for action in (
            "reading a checkpoint again after an error:",
            "skipping a damaged checkpoint:",
        ):
            try:
                return _check(path, thorough)
            except CheckpointError as error:
                logger.warning("%s %s", action, one_line(error))
    return None


def resolve(
    path: str | os.PathLike, thorough: bool = True, excluded: Mapping[Path, str] = NOTHING
) -> Path:
    """Return the checkpoint directory that a command's argument CKPT selects.

    Args:
        path: A checkpoint, a run directory, or any other directory.
        thorough: As for `newest_valid`.
        excluded: As for `newest_valid`.

    Returns:
        For a run directory, the newest valid full checkpoint of the run. For any other directory,
        `path`, which may be a Hugging Face directory.

    Raises:
        CheckpointError: The checkpoint is damaged or excluded, the run has no valid full
            checkpoint, or `path` does not exist.
    """
    path = Path(path)
    if is_checkpoint(path):
        if path in excluded:
            raise CheckpointError(excluded[path])
        return _check(path, thorough).path
    if checkpoints_dir(path).is_dir():
        if newest := newest_valid(path, thorough, excluded):
            return newest.path
        raise CheckpointError(f"{path}: a run directory without a valid checkpoint")
    if not path.exists():
        raise CheckpointError(f"{path}: no such checkpoint or run directory")
    return path


def _check(path: Path, thorough: bool) -> Manifest:
    """Return the manifest of the checkpoint at `path`. Raises CheckpointError if the checkpoint is
    not valid. `thorough` is as for `newest_valid`."""
    manifest = read_manifest(path)
    manifest.verify() if thorough else manifest.check(weights=False)
    return manifest


@dataclass(frozen=True)
class Start:
    """Description of the state from which a run starts: the checkpoint or the Hugging Face
    directory at `path`. If `path` is None, the run starts with newly initialized weights."""

    origin: str
    """The value of `checkpoint.load` when the run was started."""
    step: int = 0
    """Number of updates that the run has already done. A run that starts with the weights of
    another run has done none."""
    tokens: int = 0
    path: Path | None = None
    full: Manifest | None = None
    """Manifest of the full checkpoint; None if the run starts with new optimizer states."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Settings, by "section.key", of the run that saved the checkpoint at `path`; {} for a start at
    step 0."""
    first_step: int | None = 0
    """The step at which this run was started from `origin`; None if unknown."""


def decide_start(
    run_dir: str | os.PathLike, load: str, excluded: Mapping[Path, str] = NOTHING
) -> Start:
    """Return the state from which the run starts, as `checkpoint.load` selects it.

    The run continues from the newest valid full checkpoint in its run directory if `load` is "auto"
    or equal to the `origin` of this checkpoint. Therefore the same command continues a run after a
    failure. The states of a full checkpoint are not checked until they are loaded.

    Args:
        run_dir: The run directory.
        load: `checkpoint.load`.
        excluded: Paths of checkpoints that were found to be damaged, each with a reason.

    Raises:
        CheckpointError: `load` does not name a valid checkpoint, or the run has saved full
            checkpoints, but none is valid. In the second case, the user must decide whether to
            start the run from the beginning.
    """
    if load == "none":
        return Start("none")
    newest = newest_valid(run_dir, False, excluded)
    if newest is not None and _may_come_from(load, newest.path):
        return _start_at(newest.origin, newest, newest.first_step)
    if load.startswith("model@"):
        text = load.removeprefix("model@")
        available = [str(_step_of(path)) for path in _of_kind(run_dir, "model")]
        if text not in available:
            remedy = "the run has no model-only checkpoint at all; set auto or a path"
            if available:
                remedy = (
                    "the run has no model-only checkpoint of this step; set a step with a "
                    f"model-only checkpoint: {', '.join(available)}"
                )
            raise CheckpointError(f"checkpoint.load = {load!r}: {remedy}")
        model = read_manifest(model_path(run_dir, int(text)))
        model.check(weights=False)
        return replace(_start_at(load, model, model.step), full=None)
    path = None if load == "auto" else resolve(load, False, excluded)
    manifest = read_manifest(path) if path and is_checkpoint(path) else None
    is_full = manifest is not None and manifest.kind == "full"
    if newest is None:
        _refuse_if_saved(run_dir, load, manifest.step if manifest and is_full else 0)
    if path is None:
        return Start("none")
    if manifest is None:
        return Start(load, path=path)
    if is_full:
        return _start_at(load, manifest, manifest.step)
    if _is_in_run(path, run_dir):
        raise CheckpointError(
            f"checkpoint.load = {load!r} is a model-only checkpoint of this run; continue from it "
            f"with checkpoint.load=model@{manifest.step}, or start a new run in another "
            "train.run_dir"
        )
    return Start(load, path=path)


def _start_at(origin: str, manifest: Manifest, first_step: int | None) -> Start:
    """Return the `Start` of a run that continues from the full checkpoint with this manifest."""
    step, tokens, path = manifest.step, manifest.tokens, manifest.path
    return Start(origin, step, tokens, path, manifest, manifest.settings, first_step)


def _may_come_from(load: str, path: Path) -> bool:
    """Return True if a run with `checkpoint.load = load` may have saved the checkpoint at `path`.

    The function compares `load` with the manifest's `origin`, after resolving links in both. The
    result is also True if `load` is "auto" or if the manifest is damaged.
    """
    try:
        origin = read_manifest(path).origin
    except CheckpointError:
        return True
    return load == "auto" or os.path.realpath(origin) == os.path.realpath(load)


def _refuse_if_saved(run_dir: str | os.PathLike, load: str, first_step: int) -> None:
    """Raise CheckpointError if the run has saved a full checkpoint since its start at `first_step`.
    Call this only if the run has no valid full checkpoint."""
    directory, models = checkpoints_dir(run_dir), _of_kind(run_dir, "model")
    candidates = [*_of_kind(run_dir, "step"), *directory.glob(f"{QUARANTINE}/step-[0-9]*")]
    for model in models:
        # A model-only checkpoint of the first two intervals does not show that there was a full
        # checkpoint: the run may have been killed during the first full save, which may last until
        # the second full save is due.
        try:
            manifest = read_manifest(model)
        except CheckpointError:
            candidates.append(model)
            continue
        first = first_step if manifest.first_step is None else manifest.first_step
        if 0 < 2 * manifest.settings.get("checkpoint.interval", 0) < _step_of(model) - first:
            candidates.append(model)
    saved = [path for path in candidates if _may_come_from(load, path)]
    if saved:
        newest = max(saved, key=_step_of)
        other = f"resume with checkpoint.load=model@{_step_of(models[-1])}, or " if models else ""
        raise CheckpointError(
            f"{directory}: none of {counted(len(_of_kind(run_dir, 'step')), 'full checkpoint')} "
            "is valid, but the run has saved at least one full checkpoint, as "
            f"{newest.relative_to(directory)} shows; {other}start over with checkpoint.load=none "
            f"or in another train.run_dir, or move {newest.relative_to(directory)} away"
        )


# -- Removal --------------------------------------------------------------------------------------


def prepare_directory(run_dir: str | os.PathLike, start: Start, workspace: Workspace) -> None:
    """Remove the directories of unfinished saves. Move checkpoints to QUARANTINE if later starts of
    the run must not load them.

    Checkpoints of steps after `start.step` are moved. If the run starts without optimizer states,
    all full checkpoints are moved. If the run does not start from a checkpoint in its directory,
    all checkpoints are moved. Call this after the load, so that a failed load does not change the
    directory. A warning names each directory of an unfinished save that cannot be removed.

    Args:
        run_dir: The run directory.
        start: The start of the run.
        workspace: The workspace of the run.

    Raises:
        CheckpointError: A checkpoint cannot be moved. If the run continued nevertheless, its next
            start would load this checkpoint as the newest checkpoint.
    """
    directory = checkpoints_dir(run_dir)
    # Earlier versions created the directories of saves in `checkpoints/`.
    unfinished = [p for p in directory.iterdir() if files.is_temporary(p) and p.is_dir()]
    if left := remove_all([*unfinished, *workspace.path.iterdir()], workspace):
        for path, reason in left.items():
            logger.warning("cannot remove %s: %s", path, reason)
        logger.warning("%s; remove the directories above by hand", space_left(run_dir))
    is_own = start.path is not None and _is_in_run(start.path, run_dir)
    kept = _of_kind(run_dir, "model") if start.full is None else find_all(run_dir)
    kept = [path for path in kept if is_own and _step_of(path) <= start.step]
    moved = [path for path in find_all(run_dir) if path not in kept]
    for path in moved:
        _set_aside(path, workspace)
    files.fsync_dir(directory)


def set_newest_aside(run_dir: str | os.PathLike, workspace: Workspace) -> None:
    """Move the newest full checkpoint to QUARANTINE, so that the run continues from the second
    newest full checkpoint.

    Model-only checkpoints of the same or later steps are moved as well. If the run has fewer than
    two full checkpoints, nothing is moved. Raises CheckpointError if a checkpoint cannot be moved.
    """
    steps = _of_kind(run_dir, "step")
    if len(steps) > 1:
        for path in find_all(run_dir):
            if _step_of(path) >= _step_of(steps[-1]):
                _set_aside(path, workspace)


def _set_aside(path: Path, workspace: Workspace) -> None:
    temporary = workspace.temporary(path.with_name(f"{_ASIDE}{path.name}"))
    try:
        os.rename(path, temporary)
        _move_to_quarantine(temporary, path.parent, path.name)
    except OSError as error:
        raise CheckpointError(
            f"{path}: cannot be moved to {QUARANTINE}/: {error.strerror}; this run does not "
            "continue from it, so move it away by hand, and run the same command again"
        ) from None
    logger.info("moved %s to set-aside/: this run does not continue from it", path.name)


def _move_to_quarantine(temporary: Path, directory: Path, name: str) -> None:
    """Move the checkpoint at `temporary`, a path in a workspace, to `directory`/QUARANTINE.
    `directory` is `checkpoints/`. The checkpoint gets a unique name that begins with `name`."""
    aside = directory / QUARANTINE
    files.make_dirs(aside)
    unique = files.temporary_name(aside / name).with_suffix("")
    files.commit(temporary, unique.with_name(unique.name.lstrip(".")))


def remove_old(
    run_dir: str | os.PathLike, workspace: Workspace, keep_models: int, keep_every: int = 0
) -> dict[Path, str]:
    """Remove old checkpoints of a run, and directories that earlier removals could not remove.

    The function keeps the newest KEPT_FULL full checkpoints, the newest `keep_models` model-only
    checkpoints (0: all), and the model-only checkpoints of steps that are multiples of `keep_every`
    (0: none). If a directory cannot be removed, the function continues with the other directories.

    Returns:
        A dict that maps each path that cannot be removed to the reason.
    """
    models = _older_than_newest(_of_kind(run_dir, "model"), keep_models) if keep_models else []
    models = [path for path in models if not keep_every or _step_of(path) % keep_every]
    steps = _older_than_newest(_of_kind(run_dir, "step"), KEPT_FULL)
    # Earlier versions left directories of failed removals in `checkpoints/`.
    folders = (checkpoints_dir(run_dir), workspace.path)
    left = [path for folder in folders for path in folder.glob(f".{_REMOVED}*")]
    return remove_all([*left, *steps, *models], workspace)


def _older_than_newest(paths: list[Path], count: int) -> list[Path]:
    """Return the paths that are older than the newest `count` checkpoints with a readable manifest.

    `paths` are the paths of checkpoints in the order of steps.
    """
    for number in reversed(range(len(paths))):
        with contextlib.suppress(CheckpointError):
            read_manifest(paths[number])
            count -= 1
        if count == 0:
            return paths[:number]
    return []


def remove_all(paths: Iterable[Path], workspace: Workspace) -> dict[Path, str]:
    """Remove checkpoints of a run, and temporary directories in its workspace.

    Returns:
        A dict that maps each directory that cannot be removed completely to the reason.
    """
    left = {}
    for path in paths:
        renamed = path
        try:
            # Rename the directory before files are removed, because a directory named step-* or
            # model-* must always have all its files.
            if not files.is_temporary(path) and path.parent != workspace.path:
                renamed = workspace.temporary(path.with_name(f"{_REMOVED}{path.name}"))
                files.commit(path, renamed)
            _delete(renamed)
        except OSError as error:
            inside = Path(error.filename or path).name
            detail = "" if inside in (path.name, renamed.name) else f"{inside}: "
            remaining = renamed if os.path.lexists(renamed) else path
            left[remaining] = f"{detail}{error.strerror}"
    return left


def _delete(path: Path) -> None:
    """Remove a directory with its content, a file, or a link without its target."""
    if path.is_symlink() or not path.is_dir():
        path.unlink()
        return
    try:
        shutil.rmtree(path)
    except OSError:
        shutil.rmtree(path, ignore_errors=True)  # remove all files that can be removed
        if os.path.lexists(path):
            raise


def space_left(run_dir: str | os.PathLike) -> str:
    """Return the text "DIRECTORY has N GB free" for the run's checkpoint directory."""
    directory = checkpoints_dir(run_dir)
    return f"{directory} has {shutil.disk_usage(directory).free / 1e9:.3f} GB free"


def _is_in_run(path: Path, run_dir: str | os.PathLike) -> bool:
    """Return True if `path` is a checkpoint of the run or a link to a checkpoint of the run."""
    return any(path.samefile(checkpoint) for checkpoint in find_all(run_dir))


def find_all(run_dir: str | os.PathLike) -> list[Path]:
    """Return the paths of all full and model-only checkpoints of the run, in the order of steps.
    The checkpoints may be invalid."""
    return sorted([*_of_kind(run_dir, "model"), *_of_kind(run_dir, "step")], key=_step_of)


def _of_kind(run_dir: str | os.PathLike, kind: str) -> list[Path]:
    """Return the paths of the run's full checkpoints (`kind` "step") or model-only checkpoints
    ("model"), in the order of steps. Directories with other names, such as copies, are ignored."""
    directory = checkpoints_dir(run_dir)
    if not directory.is_dir():
        return []
    named = (p for p in directory.iterdir() if re.fullmatch(rf"{kind}-\d{{8,}}", p.name))
    return sorted((p for p in named if p.is_dir()), key=_step_of)


def _step_of(path: Path) -> int:
    digits = re.search(r"\d+", path.name)
    assert digits is not None, path
    return int(digits[0])
