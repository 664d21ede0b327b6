"""Workspaces: directories that protect the files of a run from processes of earlier starts of this
run.

A process of an earlier start may still exist when a run is started again: the process was
suspended, or its node was disconnected, and it continues later. A lock does not exclude such a
process, because a lock of a dead node may be released late or never. Therefore a start changes the
run directory only by renames from or to its workspace, the directory `checkpoints/.work-NAME`. The
next start creates a new workspace, moves the earlier workspace into it, and removes the earlier
workspace there. From then on, all renames of the earlier start fail, and its processes cannot
create files in the removed workspace.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import shutil
import stat
import time
import uuid
from collections.abc import Iterable
from pathlib import Path
from typing import BinaryIO

from optimus.errors import ConfigError, OptimusError, reason_of
from optimus.io import files

logger = logging.getLogger(__name__)

_PREFIX = ".work-"
_OLD = ".old-"
"""Name prefix of the workspaces of earlier starts while a later start removes them."""
_FENCE_S = 60.0
"""Maximum time, in seconds, for which a start tries to empty the workspace of an earlier start. A
process of the earlier start may still create files in that workspace."""
_NOT_EMPTY = (errno.ENOTEMPTY, errno.EEXIST)


class Workspace:
    """Directory in which one start of a run writes files before they get their final paths.

    All ranks of the start use the same workspace.
    """

    def __init__(self, path: Path) -> None:
        """Use the workspace `path`, which another process of the same start has opened."""
        self.path = path
        self._reaches = {path.parent: True}
        """Maps a folder to True if files can be renamed from the workspace to this folder, else to
        False."""

    @classmethod
    def open(cls, folder: Path, name: str = "", within: Workspace | None = None) -> Workspace:
        """Create a workspace, and remove all other workspaces in the same folder.

        Read checkpoints and metrics only after this call: until then, a process of an earlier start
        may still change them.

        Args:
            folder: The folder of the workspaces, `checkpoints/` of the run.
            name: Name of the workspace. The default is a unique name.
            within: Workspace of the supervisor that starts the run. If another supervisor has
                removed this workspace, the function raises FileNotFoundError and does not change
                the folder.

        Raises:
            ConfigError: A directory is not writable, so the workspace cannot be created or another
                workspace cannot be removed. The folder is not changed.
            OptimusError: A process of an earlier start creates files faster than this start can
                move them, or a later start has removed the new workspace.
            OSError: For another reason, the workspace cannot be created or another workspace cannot
                be removed.
        """
        check_writable(folder)
        files.make_dirs(folder)
        workspace = cls(folder / f"{_PREFIX}{name or uuid.uuid4().hex[:12]}")
        # If two starts create workspaces at the same time, at least one of the starts finds the
        # workspace of the other.
        if within is None:
            workspace.path.mkdir()
        else:
            new = within.temporary(workspace.path)
            new.mkdir()
            os.rename(new, workspace.path)
        for other in find_workspaces(folder):
            if other != workspace.path:
                # A start that is suspended here cannot remove the workspace of a later start: the
                # target is in this workspace, which the later start has removed.
                with contextlib.suppress(FileNotFoundError):
                    os.rename(other, workspace.path / f"{_OLD}{other.name}")
        workspace._remove_old()
        if not workspace.is_open():
            raise OptimusError(
                f"{folder}: another start of this run has removed the workspace of this start; "
                "this start ends"
            )
        files.fsync_dir(folder)
        return workspace

    def _remove_old(self) -> None:
        """Move the content of the workspaces of earlier starts to this workspace, and remove the
        empty directories."""
        # Renames by earlier starts already fail. But a client of a network file system may refer to
        # a directory by its inode number. Such a client can create files in the directory until the
        # directory is removed.
        end = time.monotonic() + _FENCE_S
        while old := list(self.path.glob(f"{_OLD}*")):
            for path in old:
                self._empty(path)
            if time.monotonic() > end:
                raise OptimusError(
                    f"{old[0]}: a process of an earlier start still creates files in this folder; "
                    "end that process"
                )

    def _empty(self, path: Path) -> None:
        """Move the content of the earlier workspace `path` to this workspace. Remove the earlier
        workspace, unless a process has created further files in it."""
        try:
            folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError as error:
            # No start creates a link or a file with this name. The target of a link is not changed.
            if error.errno not in (errno.ENOTDIR, errno.ELOOP):
                raise
            path.unlink()
            return
        try:
            for entry in os.listdir(folder):
                with contextlib.suppress(FileNotFoundError):
                    os.rename(entry, self.path / entry, src_dir_fd=folder)
        finally:
            os.close(folder)
        try:
            os.rmdir(path)
        except OSError as error:
            if error.errno not in (*_NOT_EMPTY, errno.ENOENT):
                raise

    def is_open(self) -> bool:
        """Return False if a later start has removed this workspace."""
        return self.path.is_dir()

    def temporary(self, final: str | os.PathLike) -> Path:
        """Return a unique path, for a file or directory that will be renamed to `final`.

        The path is in the workspace if a rename from the workspace to `final` is possible. If
        `final` is on another mount than `checkpoints/`, the path is next to `final`.
        """
        final = Path(final)
        return files.temporary_name(self.path / final.name if self._reach(final.parent) else final)

    def _reach(self, folder: Path) -> bool:
        if folder not in self._reaches:
            # Try a rename: two mounts of the same file system have the same device number.
            probe = self.path / f".probe-{uuid.uuid4().hex}"
            target = files.temporary_name(folder / "probe")
            os.close(os.open(probe, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
            try:
                os.rename(probe, target)
                os.unlink(target)
                self._reaches[folder] = True
            except OSError as error:
                os.unlink(probe)
                if error.errno != errno.EXDEV:
                    raise
                self._reaches[folder] = False
        return self._reaches[folder]

    def write_bytes(self, path: Path, data: bytes) -> None:
        """Replace the file `path` atomically and durably by a file with the content `data`. Raises
        OSError."""
        os.close(self.open_append(path, data))

    def open_append(self, path: Path, data: bytes) -> int:
        """Replace the file `path` durably by a new file with the content `data`.

        Returns:
            A file descriptor that appends to the new file. If another process later calls this
            method with the same path, that call replaces the file. Bytes that this descriptor
            appends after the replacement are lost.

        Raises:
            OSError: The file cannot be written, or a process that started later has removed this
                workspace.
        """
        temporary = self.temporary(path)
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        fd = os.open(temporary, flags, 0o644)
        try:
            view = memoryview(data)
            while view:
                view = view[os.write(fd, view) :]
            os.fsync(fd)
            files.commit(temporary, path)
        except BaseException as error:
            os.close(fd)
            with contextlib.suppress(OSError):
                os.unlink(temporary)
            if isinstance(error, OSError) and not error.filename:
                error.filename = os.fspath(path)  # errors of write(2) have no file name
            raise
        return fd

    def close(self) -> None:
        """Remove the workspace if it is empty. If it is not empty, the next start of the run
        removes it."""
        with contextlib.suppress(OSError):
            os.rmdir(self.path)


class CreatedPaths:
    """The files and directories that a start of a run creates. `remove` removes them if the run is
    refused.

    Args:
        run_dir: The run directory.
        folders: Names of directories in `run_dir` that the start creates. A directory is removed
            only if it is empty.
        others: Names of other files and directories in `run_dir` that the start creates, except the
            lock file.
    """

    def __init__(self, run_dir: Path, folders: Iterable[str], others: Iterable[str] = ()) -> None:
        self._lock = run_dir / LOCK
        self._others = [path for name in others if not os.path.lexists(path := run_dir / name)]
        inner = [*(run_dir / name for name in folders), *self._others, self._lock]
        self._inner = [path for path in inner if not os.path.lexists(path)]
        """Paths in the run directory that did not exist before."""
        self._outer = [path for path in (run_dir, *run_dir.parents) if not os.path.lexists(path)]

    def remove(self, lock: BinaryIO | None, workspace: Workspace | None = None) -> None:
        """Remove the paths that did not exist before, and close the lock file.

        Args:
            lock: The result of `lock_run_dir`; None if another run may use the directory.
            workspace: Workspace of this start, in a directory that `others` names; None if the
                start has created no file. Files are renamed into the workspace and removed there.
                If a later start has removed the workspace, the renames fail and the files remain.
        """
        if workspace is not None:
            entries = [p for p in self._others if p != workspace.path.parent]
            if len(entries) < len(self._others):
                entries += (p for p in workspace.path.parent.glob("*") if p != workspace.path)
            for path in entries:
                with contextlib.suppress(OSError):
                    os.rename(path, workspace.path / path.name)
            shutil.rmtree(workspace.path, ignore_errors=True)
        if lock is not None:
            is_replaced = not os.fstat(lock.fileno()).st_nlink
            for path in self._inner if not is_replaced else []:
                with contextlib.suppress(OSError):
                    path.unlink() if path == self._lock else path.rmdir()
            lock.close()  # NFS keeps a removed file in its directory until the file is closed
        for path in self._outer:
            with contextlib.suppress(OSError):
                path.rmdir()


def find_workspaces(folder: Path) -> list[Path]:
    """Return the paths of the workspaces in a folder, sorted. Symbolic links are left out."""
    paths = folder.glob(f"{_PREFIX}*")
    return sorted(path for path in paths if path.is_dir() and not path.is_symlink())


def check_writable(folder: Path) -> None:
    """Raise ConfigError if `Workspace.open(folder)` would fail because `folder`, or a workspace in
    it, is not writable. A folder that does not exist is accepted. The function changes no
    files."""
    if not folder.is_dir():
        return
    directories = [folder]
    for directory in directories:
        # Another start may remove the workspace in the meantime.
        if not os.access(directory, os.R_OK | os.W_OK | os.X_OK) and os.path.lexists(directory):
            raise ConfigError(
                f"{directory} is not writable; run chmod u+rwx on it, or choose another "
                "train.run_dir"
            )
        if directory == folder:
            directories += find_workspaces(folder)
        elif directory.parent == folder:
            # A directory can be moved to another directory only if it is itself writable.
            directories += (p for p in directory.glob("*") if p.is_dir() and not p.is_symlink())


# -- Lock -----------------------------------------------------------------------------------------

LOCK = ".lock"
"""Name of the lock file in a run directory. The lock prevents users from starting two runs in one
directory by mistake. If another start replaces the lock, workspaces protect the directory."""


def lock_run_dir(path: Path, owner: bytes = b"", replace: bool = False) -> BinaryIO:
    """Create a run directory if it does not exist, and lock it.

    The directory is locked until the caller closes the file that this function returns.

    Args:
        path: `train.run_dir`.
        owner: Bytes that describe the locking process. The function writes these bytes to the lock
            file, from which `read_lock_owner` reads them.
        replace: True to replace the lock file by a new file, because the process that has locked
            the old file is suspended or on a lost node.

    Raises:
        ConfigError: The directory cannot be created, or another run has locked it.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"train.run_dir = {str(path)!r}: cannot create the directory: "
            f"{error.strerror}; choose another directory"
        ) from None
    while True:
        file = _open_lock_file(path, replace)
        with contextlib.suppress(OSError):  # earlier versions let other users read the file
            os.fchmod(file.fileno(), 0o600)
        _lock(file, path, fcntl.LOCK_EX)
        if os.fstat(file.fileno()).st_nlink:
            break
        file.close()  # a refused run removed the file after this process had opened it
    try:
        file.truncate(0)
        file.write(owner)
    except OSError as error:
        file.close()
        raise ConfigError(
            f"train.run_dir = {str(path)!r}: cannot write {LOCK}: {reason_of(error)}; choose "
            "another directory"
        ) from None
    if path.stat().st_mode & stat.S_IWOTH:
        logger.warning(
            "%s: every user of this machine can write to this directory and replace its "
            "checkpoints; run chmod o-w on it",
            path,
        )
    return file


def _open_lock_file(path: Path, replace: bool) -> BinaryIO:
    """Open the lock file of the run directory `path`, and create it if it does not exist. See
    `lock_run_dir` for the argument `replace` and the error."""
    # The mode is 0600, because any user who can open the file can lock it. O_NOFOLLOW is set,
    # because opening a symbolic link could create a file in another directory.
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        if replace:
            (path / LOCK).unlink(missing_ok=True)
        return os.fdopen(os.open(path / LOCK, flags, 0o600), "r+b", buffering=0)
    except OSError as error:
        raise ConfigError(
            f"train.run_dir = {str(path)!r}: cannot open {LOCK}: {reason_of(error)}; "
            "choose another directory"
        ) from None


def read_lock_owner(path: Path) -> bytes:
    """Return the argument `owner` of the last call of `lock_run_dir` for the run directory `path`;
    b"" if the lock file cannot be read."""
    with contextlib.suppress(OSError):
        return files.read_regular(path / LOCK, 1 << 10)
    return b""


def check_not_in_use(path: Path) -> None:
    """Raise ConfigError if another run has locked the run directory `path`. The function creates no
    files."""
    try:
        with files.open_regular(path / LOCK) as file:
            _lock(file, path, fcntl.LOCK_SH)
    except FileNotFoundError:
        return
    except ConfigError as error:
        raise ConfigError(
            f"{error}; if you check a job that will start after the other run has ended, add "
            "--skip-run-dir-check"
        ) from None
    except OSError as error:
        raise ConfigError(
            f"train.run_dir = {str(path)!r}: cannot open {LOCK}: {reason_of(error)}; choose "
            "another directory"
        ) from None


def _lock(file: BinaryIO, run_dir: Path, kind: int) -> None:
    """Lock `file`, the open lock file of `run_dir`. `kind` is fcntl.LOCK_SH or fcntl.LOCK_EX. If
    another process has locked the file, close `file` and raise ConfigError."""
    try:
        fcntl.flock(file, kind | fcntl.LOCK_NB)
    except OSError:
        file.close()
        raise ConfigError(
            f"train.run_dir = {str(run_dir)!r} is in use by another run; choose another directory "
            "or wait until that run ends"
        ) from None
