"""The one commit protocol for files: a name is either absent or holds everything it promises.

Write under a unique temporary name in the same directory, fsync the file, rename it over the final
name, fsync the directory. A reader that finds the final name finds all its bytes, whatever was
killed or unplugged in between. Hashes are xxh3-64 in lower-case hexadecimal.
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
_DISK_TROUBLE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS)
_TEMPORARY = re.compile(r"\..+\.[0-9]+\.[0-9a-f]+\.tmp", re.DOTALL)
_HASH_HEAD = b',\n "self_xxh3": "'
_HASH_TAIL = b'"\n}\n'
_HASH_BYTES = len(_HASH_HEAD) + 16 + len(_HASH_TAIL)


_told: set[int] = set()
"""Devices of file systems that cannot do it, of which `fsync_dir` has warned."""


class Closing:
    """What is open until its `close`, or until the end of a `with` block."""

    def close(self) -> None:
        """Let go of what is open."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def fsync_dir(path: str | os.PathLike) -> None:
    """Make the directory's entries (creations, renames, removals) durable.

    A file system that knows no fsync of directories (EINVAL: some network ones and FUSE) orders
    them by itself or not at all: that is told once.
    """
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
        device = os.fstat(fd).st_dev
        if device not in _told:
            why = "its file system has no fsync of directories; a power cut may take new names"
            logger.warning("%s: %s", os.fspath(path), why)
        _told.add(device)
    finally:
        os.close(fd)


def sync_to_disk(fd: int) -> None:
    """fsync a file, and let the kernel's cache go of it: whoever reads it then reads the disk."""
    os.fsync(fd)
    drop_cached(fd)


def drop_cached(fd: int) -> None:
    """Let the kernel's cache go of a file: advice, which not every file system takes."""
    with contextlib.suppress(OSError, AttributeError):
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)


def make_dirs(path: str | os.PathLike) -> None:
    """Make a directory where there is none, with those above it, and all their names durable."""
    os.makedirs(path, exist_ok=True)
    for above in Path(path).resolve().parents:  # also those that a killed process made
        with contextlib.suppress(PermissionError):  # may be passed through, but not read
            fsync_dir(above)
        if os.path.ismount(above):
            break


def temporary_name(path: str | os.PathLike) -> Path:
    """A unique sibling of `path`, recognisable by `is_temporary`: `.NAME.HOST.PID.RANDOM.tmp`."""
    path = Path(path)
    return path.with_name(f".{path.name}.{_host()}.{os.getpid()}.{uuid.uuid4().hex[:8]}.tmp")


def is_temporary(path: str | os.PathLike) -> bool:
    """Whether `path` is a leftover of an unfinished commit. Other programs' .NAME.tmp is not."""
    return _TEMPORARY.fullmatch(Path(path).name) is not None


def is_temporary_of_this_host(path: str | os.PathLike) -> bool:
    """Whether `path` is such a leftover, of a process of this machine."""
    parts = Path(path).name.rsplit(".", 4)  # (.NAME, HOST, PID, RANDOM, tmp)
    return is_temporary(path) and len(parts) == 5 and parts[1] == _host()


def _host() -> str:
    """This machine's name without its dots, of at most 24 characters: names have 255 in all."""
    return os.uname().nodename.replace(".", "-").replace("/", "-")[:24] or "host"


def commit(temporary: str | os.PathLike, final: str | os.PathLike) -> None:
    """Rename a written, fsynced file or directory to its final name, durably."""
    os.rename(temporary, final)
    fsync_dir(Path(final).parent)


@contextlib.contextmanager
def atomic_writer(path: str | os.PathLike) -> Iterator[BinaryIO]:
    """A binary file that appears under `path`, complete and durable, only if the block succeeds."""
    temporary = temporary_name(path)
    try:
        with open(temporary, "xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        commit(temporary, path)
    except BaseException as error:
        if isinstance(error, OSError) and error.errno in _DISK_TROUBLE and not error.filename:
            error.filename = os.fspath(path)  # the system does not say where the disk was full
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise


def write_bytes(path: str | os.PathLike, data: bytes) -> None:
    """Atomically and durably make `path` hold exactly `data`."""
    with atomic_writer(path) as file:
        file.write(data)


def write_json(path: str | os.PathLike, value: Any) -> None:
    """Atomically and durably write `value` as readable JSON."""
    write_bytes(path, (json.dumps(value, indent=1) + "\n").encode())


def checked_json(value: dict[str, Any]) -> bytes:
    """`value` as readable JSON whose last key, `self_xxh3`, is the hash of all before it."""
    body = json.dumps(value, indent=1).encode()[:-2]  # without the closing "\n}"
    return body + _HASH_HEAD + xxh3_bytes(body).encode() + _HASH_TAIL


def parse_checked_json(data: bytes) -> dict[str, Any]:
    """The object in what `checked_json` made. Raises ValueError if any byte is another."""
    body, tail = data[:-_HASH_BYTES], data[-_HASH_BYTES:]
    if tail != _HASH_HEAD + xxh3_bytes(body).encode() + _HASH_TAIL:
        raise ValueError("damaged: its content does not match the hash on its last line")
    return json.loads(data)


def open_regular(path: str | os.PathLike, below: str | os.PathLike | None = None) -> io.FileIO:
    """Open a regular file for reading, without a buffer.

    A FIFO would wait for a writer, and a device can be read for ever: both may be named by a
    manifest or lie in a directory that another user made. With `below`, a directory that contains
    `path`, no link under that directory is followed. Raises OSError naming `path`.
    """
    # Without O_NONBLOCK a FIFO would wait already here; reads of regular files ignore it.
    flags = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC
    fd = os.open(path, flags) if below is None else _open_below(Path(path), Path(below), flags)
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


def _open_below(path: Path, below: Path, flags: int) -> int:
    """Open `path` from the directory `below` on, folder by folder: one that another process
    replaces by a link meanwhile is refused."""
    fd = os.open(below, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    for name in path.relative_to(below).parts:
        try:
            found = os.open(name, flags | os.O_NOFOLLOW, dir_fd=fd)
        except OSError as error:
            raise OSError(error.errno, error.strerror, os.fspath(path)) from None
        finally:
            os.close(fd)
        fd = found
    return fd


def read_regular(
    path: str | os.PathLike,
    limit_bytes: int | None = None,
    below: str | os.PathLike | None = None,
) -> bytes:
    """Return the content of a regular file; `below` as for `open_regular`. Raises OSError, also if
    it is larger than the limit."""
    with open_regular(path, below) as file:
        size = os.fstat(file.fileno()).st_size
        if limit_bytes is not None and size > limit_bytes:
            what = f"larger than {limit_bytes:,} bytes"
            raise OSError(errno.EFBIG, what, os.fspath(path))
        return file.readall()


def xxh3_bytes(data: Any) -> str:
    """xxh3-64 of a bytes-like object."""
    return xxhash.xxh3_64_hexdigest(data)


def xxh3_file(path: str | os.PathLike) -> str:
    """xxh3-64 of a file's content, read in blocks."""
    digest = xxhash.xxh3_64()
    with open_regular(path) as file:
        while block := file.read(_READ_BYTES):
            digest.update(block)
    return digest.hexdigest()


def read_at(fd: int, start: int, into: memoryview, path: Path) -> None:
    """Fill `into` with the bytes of an open file from `start` on. Raises CheckpointError naming
    `path` if they cannot be read or it ends before."""
    try:
        while into:
            count = os.preadv(fd, [into], start)
            if not count:
                raise CheckpointError(f"{path}: ends before byte {start + len(into)}")
            into, start = into[count:], start + count
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror}") from None
