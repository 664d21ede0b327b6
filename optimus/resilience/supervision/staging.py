"""Functions that copy the Python environment to the disks of the nodes.

Thousands of ranks that import from a shared file system open millions of files there. The
supervisor therefore packs the environment into an archive once per job. Each agent unpacks the
archive on its node, and mpiexec starts the ranks from these copies. This module does not import
torch.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import shutil
import stat
import sys
import tarfile
import tempfile
from collections.abc import Mapping
from pathlib import Path

from optimus.errors import ConfigError
from optimus.io import files
from optimus.io.workspace import Workspace

ARCHIVE = "environment.tar"
_PREFIX, _PACKAGES = "prefix", "packages"
"""Names of the folders in an archive: the virtual environment, and packages that are installed
elsewhere."""
_OURS = ("optimus", "data_prep", "optimus_kernels")


def check_environment() -> None:
    """Raise ConfigError if this interpreter's environment cannot be copied."""
    if sys.prefix == sys.base_prefix:
        raise ConfigError(
            f"--stage: {sys.prefix} is not a virtual environment; install Optimus in one "
            "(python -m venv --system-site-packages), or remove --stage"
        )


def pack_environment(path: Path, workspace: Workspace) -> str:
    """Write the Python environment of the ranks to an archive, and return the archive's hash.

    The archive contains the virtual environment of this interpreter and the packages of Optimus.
    The same files give the same hash.

    Args:
        path: The archive.
        workspace: Workspace in which the archive is written before it replaces `path`.

    Raises:
        OSError: A file cannot be read or written.
    """
    prefix = Path(sys.prefix)
    with (
        files.atomic_writer(path, workspace.temporary(path)) as file,
        tarfile.open(fileobj=file, mode="w", format=tarfile.PAX_FORMAT) as archive,
    ):
        archive.add(prefix, _PREFIX)  # in the order of names
        for name in _OURS:
            spec = importlib.util.find_spec(name)
            assert spec is not None and spec.origin is not None
            folder = Path(spec.origin).parent
            if not folder.is_relative_to(prefix):
                archive.add(folder, f"{_PACKAGES}/{name}")
    return files.xxh3_file(path)


def staged_folder(parent: Path, digest: str) -> Path:
    """Return the path of a node's copy of the environment. The path is the same on all nodes.

    Args:
        parent: Folder on a disk of the node.
        digest: Hash of the archive.
    """
    return parent / f"optimus-{os.geteuid()}-{digest}"


def staged_python(folder: Path) -> str:
    """Return the path of the Python interpreter in a copy of the environment."""
    return str(folder / _PREFIX / "bin" / "python")


def staged_variables(folder: Path, environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return environment variables for the Python interpreter in `folder`, a copy of the
    environment. With these variables, the interpreter imports packages from this copy."""
    paths = [str(folder / _PACKAGES), *filter(None, [environ.get("PYTHONPATH")])]
    return {"PYTHONPATH": os.pathsep.join(paths)}


def unpack_environment(archive: Path, digest: str, parent: Path) -> None:
    """Unpack the archive of an environment on this node, unless this node already has a copy.

    Raises:
        OSError: A file cannot be read or written, the content of the archive has another hash, or
            another user could replace the copy.
    """
    folder, status = staged_folder(parent, digest), os.stat(parent)
    is_shared = status.st_mode & (stat.S_IWGRP | stat.S_IWOTH) and not status.st_mode & stat.S_ISVTX
    if is_shared or status.st_uid not in (0, os.geteuid()):
        raise OSError(
            f"other users can replace folders of {parent}; pass another folder with --stage"
        )
    with contextlib.suppress(FileNotFoundError):
        _check_copy(folder)
        return
    copy = Path(tempfile.mkdtemp(prefix="optimus-stage-", dir=parent))  # mode 0700
    try:
        local = copy / ARCHIVE
        shutil.copyfile(archive, local)  # a single sequential read of the shared file
        if files.xxh3_file(local) != digest:
            raise OSError(f"{archive} has changed since it was packed")
        with tarfile.open(local) as packed:
            packed.extractall(copy, filter="fully_trusted")  # links point to the base Python
        local.unlink()
        try:
            os.rename(copy, folder)
        except OSError:
            if not os.path.lexists(folder):
                raise
            _check_copy(folder)  # another agent or an attacker was faster
    finally:
        shutil.rmtree(copy, ignore_errors=True)


def _check_copy(folder: Path) -> None:
    """Raise OSError if another user may have made or changed the copy in `folder`. Raise
    FileNotFoundError if the folder does not exist."""
    status = os.lstat(folder)
    is_writable = status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid() or is_writable:
        raise OSError(
            f"{folder} is not a directory that only this user can write; pass another folder with "
            "--stage"
        )


def remove_environment(digest: str, parent: Path) -> None:
    """Remove the copy of an environment on this node."""
    shutil.rmtree(staged_folder(parent, digest), ignore_errors=True)
