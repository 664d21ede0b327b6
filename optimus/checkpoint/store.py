"""The checkpoints of one run: where the next one goes, which to load, which may leave.

`checkpoints/step-00001000/` is a full checkpoint, `checkpoints/model-00001000/` a persistent
model-only one (also a Hugging Face directory). Readable without torch."""

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

logger = logging.getLogger(__name__)

KEPT_FULL = 2
_REMOVED = "removed-"
"""Marks the temporary names of directories under removal: no save writes to them."""
NOTHING: Mapping[Path, str] = MappingProxyType({})


def checkpoints_dir(run_dir: str | os.PathLike) -> Path:
    return Path(run_dir) / "checkpoints"


def full_path(run_dir: str | os.PathLike, step: int) -> Path:
    return checkpoints_dir(run_dir) / f"step-{step:08d}"


def model_path(run_dir: str | os.PathLike, step: int) -> Path:
    return checkpoints_dir(run_dir) / f"model-{step:08d}"


def newest_valid(
    run_dir: str | os.PathLike, thorough: bool = True, but: Mapping[Path, str] = NOTHING
) -> Manifest | None:
    """The full checkpoint of the highest step that is right; tells what it reads again, and skips.

    `thorough`: every byte is read. Otherwise those of the states are left to whoever loads them and
    finds damage; he then asks again for any `but` those paths.
    """
    for path in reversed(_of_kind(run_dir, "step")):
        if path in but:
            continue
        # An error of reading may pass, and a newest one costs what was done since the other.
        for what in ("reading again, for", "passing over a damaged checkpoint:"):
            try:
                return _checked(path, thorough)
            except CheckpointError as error:
                logger.warning("%s %s", what, one_line(error))
    return None


def resolve(
    path: str | os.PathLike, thorough: bool = True, but: Mapping[Path, str] = NOTHING
) -> Path:
    """The checkpoint that a CKPT argument means: itself, or the newest valid one of a run.

    `thorough` and `but` as in `newest_valid`; by default its every byte is checked. Any other
    directory is returned as it is, perhaps a Hugging Face one.
    """
    path = Path(path)
    if is_checkpoint(path):
        if path in but:
            raise CheckpointError(but[path])
        return _checked(path, thorough).path
    if checkpoints_dir(path).is_dir():
        if newest := newest_valid(path, thorough, but):
            return newest.path
        raise CheckpointError(f"{path}: a run directory without a valid checkpoint")
    if not path.exists():
        raise CheckpointError(f"{path}: no such checkpoint or run directory")
    return path


def _checked(path: Path, thorough: bool) -> Manifest:
    """The manifest of a checkpoint that is right; raises CheckpointError."""
    manifest = read_manifest(path)
    manifest.verify() if thorough else manifest.check(weights=False)
    return manifest


@dataclass(frozen=True)
class Start:
    """Where a run begins: at `step`, from the weights or the full state at `path`, if any."""

    origin: str
    step: int = 0
    tokens: int = 0
    path: Path | None = None
    full: Manifest | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Of the run that made `step` updates."""
    begun: int | None = 0
    """The step at which this run was begun, from whatever `origin` was then; None: unknown."""


def decide_start(run_dir: str | os.PathLike, load: str, but: Mapping[Path, str] = NOTHING) -> Start:
    """What `checkpoint.load` means here and now, `but` for checkpoints found damaged: why, by path.

    The same command given again after a failure goes on from the run's own newest checkpoint: a
    checkpoint remembers the `origin` that its run was started with. The states of a full one are
    checked only as they are loaded. Raises CheckpointError, also rather than begin anew where that
    command has led to a full checkpoint already: that is for the user to say.
    """
    if load == "none":
        return Start("none")
    own = newest_valid(run_dir, False, but)
    if own is not None and _led_to(load, own.path):
        return _start(own.origin, own, own.begun)
    if load.startswith("model@"):
        return _start_from_model(run_dir, load)
    path = None if load == "auto" else resolve(load, False, but)
    manifest = read_manifest(path) if path and is_checkpoint(path) else None
    is_full = manifest is not None and manifest.kind == "full"
    if own is None:
        _refuse_if_begun(run_dir, load, manifest.step if manifest and is_full else 0)
    if path is None:
        return Start("none")
    if manifest is None:
        return Start(load, path=path)
    if is_full:
        return _start(load, manifest, manifest.step)
    if _is_own(path, run_dir):
        raise CheckpointError(
            f"checkpoint.load = {load!r} is a model of this very run; go back to it with "
            f"checkpoint.load=model@{manifest.step}, or start a new run in another train.run_dir"
        )
    return Start(load, path=path)


def _led_to(load: str, path: Path) -> bool:
    """Whether a run with this `checkpoint.load`, however its path is spelt, made the checkpoint at
    `path`, or may have: of a damaged one it may be unknown."""
    try:
        origin = read_manifest(path).origin
    except CheckpointError:
        return True
    return load == "auto" or os.path.realpath(origin) == os.path.realpath(load)


def _refuse_if_begun(run_dir: str | os.PathLike, load: str, begun: int) -> None:
    """Raise CheckpointError if the run, of which no full checkpoint is valid, has had one since the
    step at which it was begun."""
    directory, models = checkpoints_dir(run_dir), _of_kind(run_dir, "model")
    fulls = [*_of_kind(run_dir, "step"), *directory.glob(f"{SET_ASIDE}/step-[0-9]*")]
    late = [model for model in models if _is_late(model, begun)]
    found = [one for one in [*fulls, *late] if _led_to(load, one)]
    if found:
        newest = max(found, key=_step_of)
        other = f"from a model: checkpoint.load=model@{_step_of(models[-1])}, or " if models else ""
        raise CheckpointError(
            f"{directory}: none of {counted(len(_of_kind(run_dir, 'step')), 'full checkpoint')} "
            "is valid, but "
            f"there is {newest.relative_to(directory)}; start {other}over with "
            "checkpoint.load=none, in another train.run_dir, or once you have moved that away"
        )


def _is_late(model: Path, begun: int) -> bool:
    """Whether its run had a full checkpoint before this model: killed before that, a run begins
    anew without a question. The first may be under way until the second is due."""
    try:
        manifest = read_manifest(model)
    except CheckpointError:
        return True
    interval = manifest.settings.get("checkpoint.interval", 0)
    begun = begun if manifest.begun is None else manifest.begun  # its origin may have gone on
    return 0 < 2 * interval < _step_of(model) - begun


def _start_from_model(run_dir: str | os.PathLike, load: str) -> Start:
    text = load.removeprefix("model@")
    available = [str(_step_of(path)) for path in _of_kind(run_dir, "model")]
    if text not in available:
        raise CheckpointError(
            f"checkpoint.load = {load!r}: this run keeps the models of steps "
            f"{', '.join(available) or '(none)'}"
        )
    manifest = read_manifest(model_path(run_dir, int(text)))
    manifest.check(weights=False)
    return replace(_start(load, manifest, manifest.step), full=None)


def _start(origin: str, manifest: Manifest, begun: int | None) -> Start:
    """At the step of a checkpoint, from its full state."""
    step, tokens, path = manifest.step, manifest.tokens, manifest.path
    return Start(origin, step, tokens, path, manifest, manifest.settings, begun)


def prepare_directory(run_dir: str | os.PathLike, start: Start) -> None:
    """Remove leftovers of unfinished saves; set aside checkpoints that this start leaves behind.

    Called once the start has been loaded, so that a start that fails leaves all as it was. Each
    leftover that cannot be removed is named in a warning. Raises CheckpointError if a checkpoint
    cannot be set aside: the next start would load it as the newest one.
    """
    directory = checkpoints_dir(run_dir)
    files.make_dirs(directory)
    leftovers = [p for p in directory.iterdir() if files.is_temporary(p) and p.is_dir()]
    if left := remove_all(leftovers):
        for path, why in left.items():
            logger.warning("cannot remove %s: %s", path, why)
        logger.warning("%s; remove them by hand", space_left(run_dir))
    is_own = start.path is not None and _is_own(start.path, run_dir)
    stay = _of_kind(run_dir, "model") if start.full is None else find_all(run_dir)
    stay = [path for path in stay if is_own and _step_of(path) <= start.step]
    left_behind = [path for path in find_all(run_dir) if path not in stay]
    aside = directory / SET_ASIDE
    if left_behind:
        files.make_dirs(aside)
    for path in left_behind:
        target = files.temporary_name(aside / path.name).with_suffix("")
        target = target.with_name(target.name.lstrip("."))
        try:
            files.commit(path, target)
        except OSError as error:
            raise CheckpointError(
                f"{path}: cannot be moved to {SET_ASIDE}/: {error.strerror}; this start leaves it "
                "behind: move it away by hand and give the same command again"
            ) from None
        logger.info("set aside %s, which this start leaves behind", path.name)
    files.fsync_dir(directory)


def remove_old(
    run_dir: str | os.PathLike, keep_models: int, keep_every: int = 0
) -> dict[Path, str]:
    """Remove the checkpoints that retention does not keep, and what earlier removals left.

    Retention keeps the newest two full checkpoints, the newest `keep_models` models (0: all) and
    the models of steps that are multiples of `keep_every` (0: none of those). Each of the others is
    tried, whatever becomes of the rest.

    Returns: why, for each path that cannot be removed.
    """
    models = _older_than_newest(_of_kind(run_dir, "model"), keep_models) if keep_models else []
    models = [path for path in models if not keep_every or _step_of(path) % keep_every]
    steps = _older_than_newest(_of_kind(run_dir, "step"), KEPT_FULL)
    return remove_all([*checkpoints_dir(run_dir).glob(f".{_REMOVED}*"), *steps, *models])


def _older_than_newest(paths: list[Path], count: int) -> list[Path]:
    """The paths older than the newest `count` that can be checkpoints: have a readable manifest."""
    for number in reversed(range(len(paths))):
        with contextlib.suppress(CheckpointError):
            read_manifest(paths[number])
            count -= 1
        if count == 0:
            return paths[:number]
    return []


def remove_all(paths: Iterable[Path]) -> dict[Path, str]:
    """Remove directories of `checkpoints/`. Returns: why, for each that stays or stays in part."""
    left = {}
    for path in paths:
        aside = path
        try:
            if not files.is_temporary(path):  # a step-* or model-* has all its files at any time
                aside = files.temporary_name(path.with_name(_REMOVED + path.name))
                files.commit(path, aside)
            _delete(aside)
        except OSError as error:
            inside = Path(error.filename or path).name
            what = "" if inside in (path.name, aside.name) else f"{inside}: "
            still = aside if os.path.lexists(aside) else path
            left[still] = f"{what}{error.strerror}"
    return left


def _delete(path: Path) -> None:
    """Remove a directory, or a link to one: what a user has moved elsewhere stays there."""
    if path.is_symlink():
        path.unlink()
        return
    try:
        shutil.rmtree(path)
    except OSError:
        shutil.rmtree(path, ignore_errors=True)  # a file that cannot be removed keeps no other
        if os.path.lexists(path):
            raise


def space_left(run_dir: str | os.PathLike) -> str:
    """The free space of the disk that has the run's checkpoints, for messages."""
    directory = checkpoints_dir(run_dir)
    return f"{directory} has {shutil.disk_usage(directory).free / 1e9:.3f} GB free"


def _is_own(path: Path, run_dir: str | os.PathLike) -> bool:
    """Whether a checkpoint, however its path is spelt, is one of the run's, links among them."""
    return any(path.samefile(one) for one in find_all(run_dir))


def find_all(run_dir: str | os.PathLike) -> list[Path]:
    """The run's checkpoints of both kinds, valid or not, oldest step first."""
    return sorted([*_of_kind(run_dir, "model"), *_of_kind(run_dir, "step")], key=_step_of)


def _of_kind(run_dir: str | os.PathLike, kind: str) -> list[Path]:
    """Directories that bear a name of ours, oldest step first; copies by users are let be."""
    directory = checkpoints_dir(run_dir)
    if not directory.is_dir():
        return []
    named = (p for p in directory.iterdir() if re.fullmatch(rf"{kind}-\d{{8,}}", p.name))
    return sorted((p for p in named if p.is_dir()), key=_step_of)


def _step_of(path: Path) -> int:
    digits = re.search(r"\d+", path.name)
    assert digits is not None, path
    return int(digits[0])


SET_ASIDE = "set-aside"
"""Where a start moves what it leaves behind, among a run's checkpoints. Nothing removes it."""


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
