"""Runs that share an output directory: they may overlap, and none may sweep another's work away."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
from collections.abc import Collection, Iterator
from pathlib import Path

from optimus.errors import DataError
from optimus.io import files

_ABANDONED_S = 86_400.0
_in_use: list[Path] = []
"""Directories that this process is working in."""


def make_folder(folder: Path, out: Path) -> None:
    """Make the folder that `--out` needs. Raises DataError where nothing can be written there."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise DataError(f"--out {str(out)!r} cannot be made: {error.strerror}") from None
    if not os.access(folder, os.W_OK | os.X_OK):
        raise DataError(f"--out {str(out)!r} may not be written to; choose another")


@contextlib.contextmanager
def working_in(directory: str | os.PathLike, rank: int = 0) -> Iterator[Path]:
    """Make `directory`, and leave nothing half-written in it that a killed run left behind.

    Several runs at once are allowed: every commit is atomic and all write the same bytes. Leftovers
    of killed runs of this machine are removed while no other run of this machine holds the
    directory, which a shared lock on it tells; none needs to reach other machines. Other leftovers
    stay until nobody has written into them for a day and rank 0 passes. Raises DataError where the
    directory cannot be made or written to.
    """
    directory = Path(directory)
    make_folder(directory, directory)
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    _in_use.append(directory)
    try:
        _sweep(directory, fd, everywhere=rank == 0)
        _lock(fd, fcntl.LOCK_SH)
        yield directory
        _sweep(directory, fd, everywhere=rank == 0)
    finally:
        _in_use.remove(directory)
        os.close(fd)


def remove_temporaries(pids: Collection[int]) -> list[Path]:
    """Remove what these processes of this machine, all ended or stopped, left half-written.

    Return the directories in use, each once.
    """
    directories = list(dict.fromkeys(_in_use))
    for directory in directories:
        for folder, _, names in os.walk(directory):
            for name in filter(files.is_temporary_of_this_host, names):
                if int(name.rsplit(".", 3)[1]) in pids:  # .NAME.HOST.PID.RANDOM.tmp
                    with contextlib.suppress(OSError):
                        os.unlink(os.path.join(folder, name))
    return directories


def _lock(fd: int, mode: int) -> bool:
    try:
        fcntl.flock(fd, mode)
    except OSError as error:
        if error.errno in (errno.EWOULDBLOCK, errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP):
            return False
        raise
    return True


def _sweep(directory: Path, fd: int, everywhere: bool) -> None:
    alone = _lock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    if not (alone or everywhere):
        return
    now = None
    for folder, _, names in os.walk(directory):
        for name in filter(files.is_temporary, names):
            path = os.path.join(folder, name)
            if not (alone and files.is_temporary_of_this_host(name)):
                if not everywhere:
                    continue
                now = now or _file_system_time(directory)
                if _modified(path, now) > now - _ABANDONED_S:
                    continue
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)


def _modified(path: str, otherwise: float) -> float:
    try:
        return os.stat(path).st_mtime
    except FileNotFoundError:
        return otherwise


def _file_system_time(directory: Path) -> float:
    """Now, by the clock that stamps files there, which need not be this machine's."""
    path = files.temporary_name(directory / "now")
    try:
        with open(path, "xb", buffering=0) as file:
            file.write(b"now")
            return os.fstat(file.fileno()).st_mtime
    finally:
        path.unlink(missing_ok=True)
