"""Atomic and durable file writes, file hashes, and reads that accept only regular files.

A file is committed in four steps: write under a unique temporary name in the same directory, fsync
the file, rename it to the final name, fsync the directory. If the final name exists, the file is
complete, even after a kill or a power cut at any point. Hashes are xxh3-64 in lower-case
hexadecimal.
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

from optimus.errors import CheckpointError

logger = logging.getLogger(__name__)

_READ_BYTES = 4 << 20
_DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS)
_TEMPORARY = re.compile(r"\..+\.[0-9]+\.[0-9a-f]+\.tmp", re.DOTALL)
_HASH_HEAD = b',\n "self_xxh3": "'
_HASH_TAIL = b'"\n}\n'
_HASH_BYTES = len(_HASH_HEAD) + 16 + len(_HASH_TAIL)
_warned_devices: set[int] = set()
"""Device numbers of the file systems for which `fsync_dir` has printed a warning."""


class Closing:
    """Base class of context managers that call `close` at the end of the `with` block."""

    def close(self) -> None:
        """Release files, threads or memory; may be called more than once."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def fsync_dir(path: str | os.PathLike) -> None:
    """fsync a directory, which makes creations, renames and removals of its files durable.

    Some network and FUSE file systems do not support this and return EINVAL or ENOTSUP. This is not
    an error; one warning per file system is printed.

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
            reason = "its file system has no fsync of directories; a power cut may lose new files"
            logger.warning("%s: %s", os.fspath(path), reason)
        _warned_devices.add(device)
    finally:
        os.close(fd)


def sync_to_disk(fd: int) -> None:
    """fsync a file and drop it from the page cache, so that the next read comes from the disk."""
    os.fsync(fd)
    drop_cached(fd)


def drop_cached(fd: int) -> None:
    """Ask the kernel to drop a file from the page cache. Not every file system supports this."""
    with contextlib.suppress(OSError, AttributeError):
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)


def make_dirs(path: str | os.PathLike) -> None:
    """Create a directory and its missing parents, durably. Raises OSError."""
    os.makedirs(path, exist_ok=True)
    # Sync all parents: a process that was killed may have created some of them without fsync.
    for parent in Path(path).resolve().parents:
        with contextlib.suppress(PermissionError):  # a directory that this user may not list
            fsync_dir(parent)
        if os.path.ismount(parent):
            break


def temporary_name(path: str | os.PathLike) -> Path:
    """Return a unique path in the directory of `path`, named `.NAME.HOST.PID.RANDOM.tmp`."""
    path = Path(path)
    return path.with_name(f".{path.name}.{_host()}.{os.getpid()}.{uuid.uuid4().hex[:8]}.tmp")


def is_temporary(path: str | os.PathLike) -> bool:
    """Return whether the name of `path` has the form that `temporary_name` returns.

    Such a file is left over from an interrupted write, unless a process is still writing it.
    Temporary files of other programs, such as `.NAME.tmp`, do not match.
    """
    return _TEMPORARY.fullmatch(Path(path).name) is not None


def is_temporary_of_this_host(path: str | os.PathLike) -> bool:
    """Return whether the name of `path` has the form that `temporary_name` returns on this host."""
    fields = Path(path).name.rsplit(".", 4)  # .NAME, HOST, PID, RANDOM, tmp
    return is_temporary(path) and len(fields) == 5 and fields[1] == _host()


def _host() -> str:
    """Return the host name for temporary names: without dots, and cut to 24 characters because file
    systems limit a file name to 255 bytes."""
    return os.uname().nodename.replace(".", "-").replace("/", "-")[:24] or "host"


def commit(temporary: str | os.PathLike, final: str | os.PathLike) -> None:
    """Rename a file or directory to its final name and fsync the parent directory. The content must
    be synced already. Raises OSError."""
    os.rename(temporary, final)
    fsync_dir(Path(final).parent)


@contextlib.contextmanager
def atomic_writer(path: str | os.PathLike) -> Iterator[BinaryIO]:
    """Yield a binary file that is committed as `path` when the `with` block ends. After an
    exception in the block, `path` is unchanged. Raises OSError."""
    temporary = temporary_name(path)
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


def write_bytes(path: str | os.PathLike, data: bytes) -> None:
    """Write `data` to `path`, atomically and durably. Raises OSError."""
    with atomic_writer(path) as file:
        file.write(data)


def write_json(path: str | os.PathLike, value: Any) -> None:
    """Write `value` to `path` as indented JSON, atomically and durably. Raises OSError."""
    write_bytes(path, (json.dumps(value, indent=1) + "\n").encode())


def checked_json(value: dict[str, Any]) -> bytes:
    """Return `value` as indented JSON, with a last key `self_xxh3` that is the hash of all bytes
    before this key. `parse_checked_json` verifies the hash."""
    body = json.dumps(value, indent=1).encode()[:-2]  # without the closing "\n}"
    return body + _HASH_HEAD + xxh3_bytes(body).encode() + _HASH_TAIL


def parse_checked_json(data: bytes) -> dict[str, Any]:
    """Parse JSON that `checked_json` returned. Raises ValueError if a byte has changed."""
    body, tail = data[:-_HASH_BYTES], data[-_HASH_BYTES:]
    if tail != _HASH_HEAD + xxh3_bytes(body).encode() + _HASH_TAIL:
        raise ValueError("damaged: its content does not match the hash on its last line")
    return json.loads(data)


def open_regular(path: str | os.PathLike, root: str | os.PathLike | None = None) -> io.FileIO:
    """Open a regular file for unbuffered reading.

    FIFOs and devices are refused, because paths may come from the files of another user. Opening a
    FIFO blocks until a writer opens it, and a read of a device may never end.

    Args:
        path: The file.
        root: A directory that contains `path`. If given, a symbolic link below `root` is an error,
            so that the file is always inside the directory. With None, links are followed.

    Raises:
        OSError: The file cannot be opened or is not a regular file. The error's filename is `path`.
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


def _open_in(root: Path, path: Path, flags: int) -> int:
    """Open `path` one path component at a time, starting from the directory `root`. O_NOFOLLOW
    refuses symbolic links, even those that another process creates during the call."""
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
        limit_bytes: Largest allowed size of the file; None: no limit.
        root: As for `open_regular`.

    Raises:
        OSError: The file cannot be read, is not a regular file or is larger than the limit.
    """
    with open_regular(path, root) as file:
        size = os.fstat(file.fileno()).st_size
        if limit_bytes is not None and size > limit_bytes:
            problem = f"larger than {limit_bytes:,} bytes"
            raise OSError(errno.EFBIG, problem, os.fspath(path))
        return file.readall()


def xxh3_bytes(data: Any) -> str:
    """Return the xxh3-64 hash of a bytes-like object, in hexadecimal."""
    return xxhash.xxh3_64_hexdigest(data)


def xxh3_file(path: str | os.PathLike) -> str:
    """Return the xxh3-64 hash of a file's content, in hexadecimal. Raises OSError."""
    digest = xxhash.xxh3_64()
    with open_regular(path) as file:
        while block := file.read(_READ_BYTES):
            digest.update(block)
    return digest.hexdigest()


def read_at(fd: int, start: int, out: memoryview, path: Path) -> None:
    """Fill `out` with bytes of an open file, from byte `start`. `path` is only for messages.

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
