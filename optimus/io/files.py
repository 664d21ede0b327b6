"""Atomic and durable file writes, file hashes, and reads that accept only regular files.

A write creates a file with a temporary name, syncs the file and renames it to its final name. A
sync of the directory makes the rename durable. A file with its final name is therefore complete,
even after a power cut. Hashes are xxh3-64 in lower-case hexadecimal.
"""

from __future__ import annotations

import contextlib
import errno
import io
import json
import logging
import os
import re
import stat
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, Self

import xxhash

from optimus.errors import CheckpointError, ConfigError, reason_of

logger = logging.getLogger(__name__)

_READ_BYTES = 4 << 20
_DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS)
_TEMPORARY = re.compile(r"\..+\.[0-9]+\.[0-9a-f]+\.tmp", re.DOTALL)
_HASH_HEAD = b',\n "self_xxh3": "'
_HASH_TAIL = b'"\n}\n'
_HASH_BYTES = len(_HASH_HEAD) + 16 + len(_HASH_TAIL)
_warned_devices: set[int] = set()
"""Device numbers of the file systems for which `fsync_dir` has logged a warning."""


class Closing:
    """Base class of context managers that call `close` at the end of the `with` block."""

    def close(self) -> None:
        """Release files, threads or memory. More than one call is allowed."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def fsync_dir(path: str | os.PathLike) -> None:
    """fsync a directory. If a file was created, renamed or removed in the directory before, a power
    cut cannot undo this change.

    If a file system cannot fsync directories, the function only logs a warning, once per file
    system.

    Raises:
        OSError: The directory cannot be opened, or fsync fails for another reason.
    """
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
        device = os.fstat(fd).st_dev
        if device not in _warned_devices:
            reason = "its file system cannot fsync directories; a power cut may lose new files"
            logger.warning("%s: %s", os.fspath(path), reason)
        _warned_devices.add(device)
    finally:
        os.close(fd)


def sync_to_disk(fd: int) -> None:
    """fsync a file and drop it from the page cache, so that the next read comes from the disk."""
    os.fsync(fd)
    drop_cached(fd)


def drop_cached(fd: int) -> None:
    """Ask the kernel to drop a file from the page cache. Some file systems ignore the request."""
    with contextlib.suppress(OSError, AttributeError):
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)


def make_dirs(path: str | os.PathLike) -> None:
    """Create a directory and its missing parents, durably. Raises OSError."""
    os.makedirs(path, exist_ok=True)
    # Sync all parents: a process that was killed may have created some parents without fsync.
    for parent in Path(path).resolve().parents:
        with contextlib.suppress(PermissionError):  # this user cannot open the directory
            fsync_dir(parent)
        if os.path.ismount(parent):
            break


def temporary_name(path: str | os.PathLike) -> Path:
    """Return a unique path in the directory of `path`, with the name `.NAME.HOST.PID.RANDOM.tmp`.
    NAME is the name of `path`."""
    path = Path(path)
    return path.with_name(f".{path.name}.{_host()}.{os.getpid()}.{uuid.uuid4().hex[:8]}.tmp")


def is_temporary(path: str | os.PathLike) -> bool:
    """Return True if the name of `path` has the form of the names that `temporary_name` returns."""
    return _TEMPORARY.fullmatch(Path(path).name) is not None


def is_temporary_of_this_host(path: str | os.PathLike) -> bool:
    """Return True if the name of `path` has the form of the names that `temporary_name` returns on
    this host."""
    fields = Path(path).name.rsplit(".", 4)  # .NAME, HOST, PID, RANDOM, tmp
    return is_temporary(path) and len(fields) == 5 and fields[1] == _host()


def _host() -> str:
    """Return the host name for temporary names, without dots and with at most 24 characters."""
    # File systems limit the length of a file name to 255 bytes.
    return os.uname().nodename.replace(".", "-").replace("/", "-")[:24] or "host"


def commit(temporary: str | os.PathLike, final: str | os.PathLike) -> None:
    """Rename a synced file or directory to its final name, durably. Raises OSError."""
    os.rename(temporary, final)
    fsync_dir(Path(final).parent)
    # Without this fsync, the old name could exist again after a power cut. The old name would refer
    # to the renamed directory, from which files may have been removed after the rename.
    if Path(temporary).parent != Path(final).parent:
        fsync_dir(Path(temporary).parent)


@contextlib.contextmanager
def atomic_writer(path: str | os.PathLike, temporary: Path | None = None) -> Iterator[BinaryIO]:
    """Context manager that yields a temporary binary file for writing. If the `with` block ends
    without an exception, this file replaces `path` durably. Raises OSError.

    Args:
        path: The file to replace.
        temporary: Path of the temporary file. The default is a unique path next to `path`.
    """
    temporary = temporary or temporary_name(path)
    try:
        with open(temporary, "xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        commit(temporary, path)
    except BaseException as error:
        if isinstance(error, OSError) and error.errno in _DISK_ERRORS and not error.filename:
            error.filename = os.fspath(path)  # errors of write(2) have no file name
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise


def check_output(path: str | os.PathLike, option: str) -> None:
    """Check that a file can be created. Call this before a long computation of the file's content.

    Args:
        path: The file.
        option: Command-line option with the value `path`, for messages.

    Raises:
        ConfigError: No file can be created in the folder of the file, or `path` is itself a folder,
            a device or a pipe. `atomic_writer` would replace a device or a pipe by a file.
    """
    if os.path.isdir(path):
        problem = os.strerror(errno.EISDIR)
    elif os.path.exists(path) and not os.path.isfile(path):
        problem = "not a regular file"
    else:
        problem = _problem_of(Path(path))
    if problem:
        raise ConfigError(f"{option} {path}: {problem}; use another file")


def check_output_dir(path: str | os.PathLike, option: str) -> None:
    """Check that files can be created in the directory `path`. If the directory does not exist,
    check that the directory and its missing parents can be created. Arguments and exception as for
    `check_output`."""
    existing = Path(path)
    while not os.path.lexists(existing) and existing != existing.parent:
        existing = existing.parent
    if problem := _problem_of(existing / "file"):
        raise ConfigError(f"{option} {path}: {problem}; use another directory")


def _problem_of(path: Path) -> str:
    """Create a temporary file next to `path` and remove it. Return "" if this succeeds, else the
    cause of the error."""
    temporary = temporary_name(path)
    try:
        temporary.touch(exist_ok=False)
        temporary.unlink()
    except OSError as error:
        return reason_of(error)
    return ""


def write_bytes(path: str | os.PathLike, data: bytes) -> None:
    """Write `data` to `path`, atomically and durably. Raises OSError."""
    with atomic_writer(path) as file:
        file.write(data)


def write_json(path: str | os.PathLike, value: Any) -> None:
    """Write `value` to `path` as indented JSON, atomically and durably. Raises OSError."""
    write_bytes(path, (json.dumps(value, indent=1) + "\n").encode())


def checked_json(value: dict[str, Any]) -> bytes:
    """Return `value` as indented JSON, with `self_xxh3` as an additional last key. The value of
    this key is a hash of the JSON text before the key."""
    body = json.dumps(value, indent=1).encode()[:-2]  # without the closing "\n}"
    return body + _HASH_HEAD + xxh3_bytes(body).encode() + _HASH_TAIL


def parse_checked_json(data: bytes) -> dict[str, Any]:
    """Parse the JSON that `checked_json` has returned. Raises ValueError if a byte of the JSON has
    changed."""
    body, tail = data[:-_HASH_BYTES], data[-_HASH_BYTES:]
    if tail != _HASH_HEAD + xxh3_bytes(body).encode() + _HASH_TAIL:
        raise ValueError("damaged: the content does not match the hash in self_xxh3")
    return json.loads(data)


def open_regular(path: str | os.PathLike, root: str | os.PathLike | None = None) -> io.FileIO:
    """Open a regular file for unbuffered reading. Raise an error for other kinds of files.

    A read from a FIFO or a device might never end.

    Args:
        path: The file.
        root: A directory that contains `path`. If given, a symbolic link below `root` is an error.

    Raises:
        OSError: The file cannot be opened or is not a regular file. The attribute
            `filename` of the error is `path`.
    """
    # Without O_NONBLOCK, open(2) of a FIFO blocks. Reads of regular files ignore the flag.
    flags = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        os.fsencode(path)
    except UnicodeEncodeError:  # JSON can contain lone surrogates, file names cannot
        raise OSError(errno.EILSEQ, os.strerror(errno.EILSEQ), os.fspath(path)) from None
    fd = os.open(path, flags) if root is None else _open_in(Path(root), Path(path), flags)
    try:
        mode = os.fstat(fd).st_mode
        if stat.S_ISDIR(mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), os.fspath(path))
        if not stat.S_ISREG(mode):
            raise OSError(errno.EINVAL, "not a regular file", os.fspath(path))
        return os.fdopen(fd, "rb", buffering=0)
    except BaseException:
        os.close(fd)
        raise


def open_append(path: str | os.PathLike) -> io.FileIO:
    """Open a regular file for unbuffered appending, and create it if it does not exist.

    Raises:
        OSError: The file cannot be opened, is not a regular file, or is a symbolic link.
    """
    # O_NONBLOCK as in `open_regular`. O_NOFOLLOW: a link could lead to a file elsewhere.
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    fd = os.open(path, flags, 0o666)
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise OSError(errno.EINVAL, "not a regular file", os.fspath(path))
    return os.fdopen(fd, "ab", buffering=0)


def _open_in(root: Path, path: Path, flags: int) -> int:
    """Open `path`, which is below the directory `root`, and return a file descriptor. Raises
    OSError if a component of the path below `root` is a symbolic link."""
    fd = os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    for name in path.relative_to(root).parts:
        try:
            next_fd = os.open(name, flags | os.O_NOFOLLOW, dir_fd=fd)
        except OSError as error:
            raise OSError(error.errno, error.strerror, os.fspath(path)) from None
        finally:
            os.close(fd)
        fd = next_fd
    return fd


def read_regular(
    path: str | os.PathLike,
    limit_bytes: int | None = None,
    root: str | os.PathLike | None = None,
) -> bytes:
    """Return the content of a regular file.

    Args:
        path: The file.
        limit_bytes: Largest allowed size of the file. The default is the size that the file system
            reports for the file, but at least 4 MiB.
        root: A directory that contains `path`. If given, a symbolic link below `root` is an error.

    Raises:
        OSError: The file cannot be read, is not a regular file or is larger than the limit.
    """
    with io.BufferedReader(open_regular(path, root)) as file:
        size, most = _size_and_most(file)
        limit = most if limit_bytes is None else min(limit_bytes, most)
        content = b"" if size > limit else file.read(limit + 1)
    if content is None:  # a file of /proc that has no bytes yet
        raise OSError(errno.EAGAIN, os.strerror(errno.EAGAIN), os.fspath(path))
    if max(size, len(content)) > limit:
        raise _too_large(path, limit)
    return content


def _size_and_most(file: io.IOBase) -> tuple[int, int]:
    """Return the size of an open file, and the maximum number of bytes to read from it."""
    # The size of many files of /proc is reported as 0, and reads of some of them never end.
    size = os.fstat(file.fileno()).st_size
    return size, max(size, _READ_BYTES)


def _too_large(path: str | os.PathLike, limit_bytes: int) -> OSError:
    return OSError(errno.EFBIG, f"larger than {limit_bytes:,} bytes", os.fspath(path))


def xxh3_bytes(data: Any) -> str:
    """Return the xxh3-64 hash of a bytes-like object, in hexadecimal."""
    return xxhash.xxh3_64_hexdigest(data)


def xxh3_file(path: str | os.PathLike) -> str:
    """Return the xxh3-64 hash of a file's content, in hexadecimal. Raises OSError."""
    digest = xxhash.xxh3_64()
    with open_regular(path) as file:
        _, most = _size_and_most(file)
        left = most
        while block := file.read(_READ_BYTES):
            digest.update(block)
            left -= len(block)
            if left < 0:
                raise _too_large(path, most)
    return digest.hexdigest()


def read_at(fd: int, start: int, out: memoryview, path: Path) -> None:
    """Fill `out` with the bytes of an open file that begin at byte `start`.

    Error messages name the file by `path`.

    Raises:
        CheckpointError: The bytes cannot be read, or the file is too short.
    """
    try:
        while out:
            count = os.preadv(fd, [out], start)
            if not count:
                raise CheckpointError(
                    f"{path}: ends before byte {start + len(out)}; replace the incomplete file"
                )
            out, start = out[count:], start + count
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror}") from None
