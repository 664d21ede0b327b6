"""Runs that share an output directory: they may overlap, and none may sweep another's work away."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

from optimus import files
from optimus.errors import DataError


@contextlib.contextmanager
def working_in(directory: str | os.PathLike) -> Iterator[Path]:
    """Make `directory`, and leave nothing half-written in it that a killed run left behind.

    Two runs at once are allowed: every commit is atomic and both write the same bytes. Leftovers
    of killed runs are removed only while no other run holds the directory, which a shared lock on
    it tells. Where the file system has no such locks they stay; they are never read.
    Raises DataError where the directory cannot be made or written to.
    """
    directory = Path(directory)
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise DataError(f"--out {str(directory)!r} cannot be made: {error.strerror}") from None
    if not os.access(directory, os.W_OK | os.X_OK):
        raise DataError(f"--out {str(directory)!r} may not be written to; choose another")
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        _sweep_if_alone(directory, fd)
        _lock(fd, fcntl.LOCK_SH)
        yield directory
        _sweep_if_alone(directory, fd)
    finally:
        os.close(fd)


def _lock(fd: int, mode: int) -> bool:
    try:
        fcntl.flock(fd, mode)
    except OSError as error:
        if error.errno in (errno.EWOULDBLOCK, errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP):
            return False
        raise
    return True


def _sweep_if_alone(directory: Path, fd: int) -> None:
    if not _lock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB):
        return
    for folder, _, names in os.walk(directory):
        for name in names:
            if files.is_temporary(name):
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(os.path.join(folder, name))
