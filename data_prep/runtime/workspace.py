"""Output directories that several runs can use at the same time.

A run does not remove the unfinished files of another run that is still working.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import stat
import time
from collections.abc import Collection, Iterator
from pathlib import Path

from optimus.errors import DataError
from optimus.io import files

_ABANDONED_S = 86_400.0
_LOCK = ".lock"
_LOCK_S, _POLL_S = 60.0, 0.05
"""Seconds that a run waits while another run holds the exclusive lock, and seconds between two
attempts to take the lock."""
_in_use: list[Path] = []
"""Output directories in which this process is working."""


def make_folder(folder: Path, out: Path) -> None:
    """Make a directory, unless it exists, and check that it is writable.

    Args:
        folder: The directory to make.
        out: The value of `--out`, for the error message.

    Raises:
        DataError: the folder cannot be made or is not writable.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise DataError(f"--out {str(out)!r} cannot be made: {error.strerror}") from None
    if not os.access(folder, os.W_OK | os.X_OK):
        raise DataError(f"--out {str(out)!r} is not writable; choose another directory")


@contextlib.contextmanager
def working_in(directory: str | os.PathLike, rank: int = 0) -> Iterator[Path]:
    """Context manager for work in `directory`. The directory is created if it does not exist.

    At its start and at its end, the context manager removes the incomplete files of killed runs.
    Several runs can work in the directory at the same time, because a file gets its final name only
    when the file is complete, and all runs write the same bytes. A lock shows if another run of
    this user works in the directory. If there is no such run, the context manager removes all
    incomplete files that this user has written from this machine. Other machines possibly cannot
    see the lock. Therefore any other incomplete file is removed only by rank 0, and only if no
    process has written to the file for a day.

    Raises:
        DataError: the directory cannot be made, is not writable or stays locked.
    """
    directory = Path(directory)
    make_folder(directory, directory)
    lock = _Lock(directory / _LOCK)
    _in_use.append(directory)
    try:
        _sweep(directory, lock.is_alone(), everywhere=rank == 0)
        lock.share()
        yield directory
        _sweep(directory, lock.is_alone(), everywhere=rank == 0)
    finally:
        _in_use.remove(directory)
        lock.close()


def remove_temporaries(pids: Collection[int]) -> list[Path]:
    """Remove the temporary files of the processes `pids` of this machine.

    Only the directories in which this process works are searched. All processes in `pids` must have
    stopped writing.

    Returns:
        The searched directories, each once.
    """
    directories = list(dict.fromkeys(_in_use))
    for directory in directories:
        for folder, _, names in os.walk(directory):
            for name in filter(files.is_temporary_of_this_host, names):
                if int(name.rsplit(".", 3)[1]) in pids:  # .NAME.HOST.PID.RANDOM.tmp
                    with contextlib.suppress(OSError):
                        os.unlink(os.path.join(folder, name))
    return directories


class _Lock:
    """Lock of an output directory: a file that every run of this user locks while the run works.

    A run takes a shared lock. To remove the incomplete files of killed runs, a run takes the
    exclusive lock. The file has mode 0600: a user who can read the file can lock the file, and thus
    stop a run. If the file cannot be created or belongs to another user, there is no lock, and
    `is_alone` returns False.
    """

    def __init__(self, path: Path):
        self._path, self._fd = path, -1
        self._open()

    def is_alone(self) -> bool:
        """Try to take the exclusive lock. Return True on success, which means that no other run has
        the lock."""
        return bool(self._flock(fcntl.LOCK_EX)) and self._is_named()

    def share(self) -> None:
        """Take the shared lock. Raises DataError if a process keeps the exclusive lock for more
        than _LOCK_S seconds."""
        until = time.monotonic() + _LOCK_S
        while (has_lock := self._flock(fcntl.LOCK_SH)) is not None:
            if has_lock and self._is_named():
                return
            if has_lock:  # another run has removed the file
                os.close(self._fd)
                self._open()
            elif time.monotonic() > until:
                raise DataError(
                    f"{self._path}: another process has locked this file for {_LOCK_S:g} s; end "
                    "that process or remove the file"
                )
            else:
                time.sleep(_POLL_S)

    def close(self) -> None:
        """Release the lock. The last run removes the lock file."""
        if self._fd < 0:
            return
        if self.is_alone():
            with contextlib.suppress(OSError):
                os.unlink(self._path)
        os.close(self._fd)
        self._fd = -1

    def _open(self) -> None:
        """Open the lock file, and set `_fd` to its descriptor. Set `_fd` to -1 if the file cannot
        be opened or belongs to another user."""
        self._fd = -1
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        with contextlib.suppress(OSError):
            fd = os.open(self._path, flags, 0o600)
            about = os.fstat(fd)
            if stat.S_ISREG(about.st_mode) and about.st_uid == os.geteuid() and about.st_nlink <= 1:
                self._fd = fd
                os.fchmod(fd, 0o600)  # `chmod -R` may have allowed other users to read the file
            else:
                os.close(fd)

    def _flock(self, mode: int) -> bool | None:
        """Try to take the lock without waiting. Return True on success.

        The result is None if there is no lock file or the file system has no locks.
        """
        if self._fd < 0:
            return None
        try:
            fcntl.flock(self._fd, mode | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno == errno.EWOULDBLOCK:
                return False
            if error.errno in (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP):
                return None
            raise
        return True

    def _is_named(self) -> bool:
        """Return True if the path of the lock file still refers to the file that this object has
        opened."""
        try:
            return os.path.samestat(os.lstat(self._path), os.fstat(self._fd))
        except OSError:
            return False


def _sweep(directory: Path, alone: bool, everywhere: bool) -> None:
    if not (alone or everywhere):
        return
    now = None
    for folder, _, names in os.walk(directory):
        for name in filter(files.is_temporary, names):
            path = os.path.join(folder, name)
            is_ours = False
            if alone and files.is_temporary_of_this_host(name):
                with contextlib.suppress(OSError):  # another process has removed the file
                    # Runs of other users may use other locks.
                    is_ours = os.lstat(path).st_uid == os.geteuid()
            if not is_ours:
                if not everywhere:
                    continue
                now = now or _file_system_time(directory)
                try:
                    if os.stat(path).st_mtime > now - _ABANDONED_S:
                        continue
                except FileNotFoundError:
                    continue
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)


def _file_system_time(directory: Path) -> float:
    """Return the present time of the clock that sets the modification times in `directory`.

    On a network file system, the clock of the file server sets the modification times.
    """
    path = files.temporary_name(directory / "now")
    try:
        with open(path, "xb", buffering=0) as file:
            file.write(b"now")
            return os.fstat(file.fileno()).st_mtime
    finally:
        path.unlink(missing_ok=True)
