"""Cache of compiled kernels on disk, shared by many processes.

The folder CACHE/<backend>-<key>/ is one cache entry: a compiled library, and the file `info.json`
with the inputs of the compilation. A process that has a file lock writes the two files to a
temporary folder, and then renames the folder.

Loading a library runs its code. Therefore a cache entry is used only if untrusted users cannot have
written it. Trusted users are root, the user of this process and the owner of the cache folder. If
root runs this process, only root is trusted.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import json
import math
import os
import pwd
import shutil
import stat
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

RECORD = "info.json"
LOCK_WAIT_S = 900.0
"""Longest time in seconds that a process waits while another process compiles."""
_POLL_S = 0.1
_MAX_LINKS = 40
"""Maximum number of symbolic links that are followed to resolve a path. Linux has the same
limit."""
_MAX_RECORD_BYTES = 1 << 20
"""Maximum number of bytes that are read from an info.json file."""


class KernelError(RuntimeError):
    """Raised if compiled kernels are not available. The message contains the cause and the
    remedy."""


def cache_dir() -> Path:
    """Return the cache folder.

    The folder is the value of the environment variable OPTIMUS_KERNELS_CACHE. The default is
    `optimus-kernels` in the user's cache directory, XDG_CACHE_HOME or ~/.cache.

    Raises:
        KernelError: none of the variables is set, and the user has no home directory.
    """
    setting = os.environ.get("OPTIMUS_KERNELS_CACHE")
    if setting:
        return Path(setting)
    try:
        base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    except RuntimeError as error:
        raise KernelError(
            "this user has no home directory; set OPTIMUS_KERNELS_CACHE to a writable directory"
        ) from error
    return Path(base) / "optimus-kernels"


@dataclass(frozen=True)
class Entry:
    """One entry of the cache: a compiled library with its info.json."""

    path: Path
    """Folder that contains the library and info.json."""
    record: dict[str, Any]
    """Content of info.json: the inputs of the build, the time of the build, and the file name and
    hash of the library."""

    @property
    def library(self) -> Path:
        return self.path / self.record["library"]

    @property
    def key(self) -> str:
        return self.path.name


def key_of(fields: dict[str, Any]) -> str:
    """Return a hash of `fields`, the inputs of a compilation, as 16 hexadecimal digits."""
    text = json.dumps(fields, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def entries(backend: str) -> list[Entry]:
    """Return the trusted, intact cache entries of a backend, the newest first. The order is the
    same on all ranks."""
    usable = [entry for entry in map(read_entry, _paths(backend)) if entry is not None]
    return sorted(usable, key=lambda entry: (-entry.record["built_at"], entry.key))


def refused(backend: str) -> dict[str, str]:
    """Return a dict that maps the name of each refused cache entry of a backend to the reason. An
    entry is refused if it is not trusted or has an invalid info.json."""
    reasons = {}
    for path in _paths(backend):
        try:
            with _opened(path):
                continue
        except FileNotFoundError:
            continue  # incomplete: it is compiled again
        except (OSError, ValueError) as error:
            reasons[path.name] = " ".join(str(error).split())
    return reasons


def read_entry(path: Path) -> Entry | None:
    """Return the cache entry in the folder `path`; None if the entry is absent, incomplete, damaged
    or not trusted."""
    try:
        with _opened(path) as (entry, library), open(library, "rb", closefd=False) as content:
            digest = hashlib.file_digest(content, "sha256").hexdigest()
    except (OSError, ValueError):
        return None
    return entry if digest == entry.record["sha256"] else None


def open_library(entry: Entry) -> int:
    """Check that a cache entry is still trusted. Return a new file descriptor of its library.

    Raises:
        KernelError: the library is absent, or an untrusted user may have written the entry.
    """
    try:
        with _opened(entry.path) as (_, library):
            return os.dup(library)
    except (OSError, ValueError) as error:
        raise KernelError(f"{entry.library} cannot be loaded: {error}") from error


def _paths(backend: str) -> list[Path]:
    try:
        return sorted(cache_dir().glob(f"{backend}-*"))
    except OSError:
        return []


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[tuple[Entry, int]]:
    """Check that the cache entry in the folder `path` is trusted and has a valid info.json.

    Yields:
        (entry, open file descriptor of the entry's library).

    Raises:
        OSError: a file cannot be opened.
        ValueError: the entry is not trusted, or its info.json is invalid.
    """
    with contextlib.ExitStack() as stack:
        root, owners = _open_cache(path.parent)
        stack.callback(os.close, root)
        folder = _open_checked(path, root, owners, stat.S_ISDIR)
        stack.callback(os.close, folder)
        record = _open_checked(path / RECORD, folder, owners, stat.S_ISREG)
        with open(record, "rb") as file:
            entry = Entry(path, _parse_record(path, file.read(_MAX_RECORD_BYTES)))
        library = _open_checked(entry.library, folder, owners, stat.S_ISREG)
        stack.callback(os.close, library)
        yield entry, library


def _open_checked(path: Path, folder: int, owners: set[int], is_kind: Callable[[int], bool]) -> int:
    """Open `path` for reading, check the open file, and return its descriptor.

    Args:
        path: the path to open.
        folder: descriptor of the parent folder of `path`.
        owners: ids of the trusted users.
        is_kind: function of a file's mode that returns True for the expected kind of file.

    Raises:
        ValueError: `path` is a symbolic link or of the wrong kind, or users outside `owners` may
            have changed the file or folder.
    """
    try:
        # Without O_NONBLOCK, opening a FIFO waits for a writer.
        file = os.open(path.name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=folder)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise ValueError(f"{path} is a symbolic link") from error
        raise OSError(error.errno, error.strerror, str(path)) from error
    # The open descriptor is checked, so that nobody can replace the file between check and use.
    reason = _why_untrusted(path, os.fstat(file), owners, is_kind)
    if reason:
        os.close(file)
        raise ValueError(reason)
    return file


def _parse_record(path: Path, content: bytes) -> dict[str, Any]:
    """Return the fields of an info.json file. Raises ValueError if a field is invalid."""
    try:
        record = json.loads(content)
        library, built_at = record["library"], record["built_at"]
        # Only the entry's folder has a checked owner and mode. A name that contains a path
        # separator could refer to a file outside this folder.
        is_file_name = Path(library).name == library and library not in ("", "..", RECORD)
        valid = is_file_name and isinstance(record["sha256"], str) and 0 <= built_at < math.inf
        # `backend` is a folder name: build.source_hash reads the sources in this folder.
        valid = valid and path.name.startswith(f"{record['backend']}-")
    except (KeyError, TypeError, RecursionError, OverflowError) as error:
        raise ValueError(f"{path / RECORD} is invalid: {error!r}") from error
    if not valid:
        raise ValueError(
            f"{path / RECORD} has an invalid value of library, sha256, built_at or backend"
        )
    return record


def _open_cache(root: Path) -> tuple[int, set[int]]:
    """Return (descriptor of the cache folder, ids of the trusted users). Raises ValueError if the
    folder is not trusted."""
    folder = os.open(root, os.O_RDONLY | os.O_DIRECTORY)
    try:
        status, user = os.fstat(folder), os.geteuid()
        # Root trusts only its own files.
        owners = {user, 0, status.st_uid} if user else {0}
        reason = _why_untrusted_cache(root, status, owners)
        if reason:
            raise ValueError(reason)
    except BaseException:
        os.close(folder)
        raise
    return folder, owners


def _why_untrusted_cache(root: Path, status: os.stat_result, owners: set[int]) -> str:
    """Return the reason why users outside `owners` may have changed or replaced the cache folder
    `root`; "" if they cannot."""
    real, folders, links = _walk(root)
    for link in links:
        of_link = link.lstat()
        if of_link.st_uid not in (0, os.geteuid()):
            return f"the path of the cache has another user's link {_describe(link, of_link)}"
    reason = _why_untrusted(real, status, owners, stat.S_ISDIR)
    if reason:
        return reason
    # A user who can rename a folder of the path can replace the cache folder. A sticky bit prevents
    # this if the user of this process or root owns the cache folder. If another user owns the cache
    # folder, the sticky bit is not sufficient: that user may already have replaced the original
    # folder.
    foreign = status.st_uid not in (0, os.geteuid())
    for above in folders:
        mode = above.stat()
        others = mode.st_mode & (stat.S_IWGRP | stat.S_IWOTH if foreign else stat.S_IWOTH)
        protected = mode.st_mode & stat.S_ISVTX and not foreign
        if (others and not protected) or (foreign and mode.st_uid not in owners):
            return f"other users may replace the cache folder through {_describe(above, mode)}"
    return ""


def _walk(path: Path) -> tuple[Path, list[Path], list[Path]]:
    """Resolve all symbolic links in `path`. Return (real path, folders in which its components were
    looked up, links that were followed)."""
    # A user who can write to one of these folders can redirect the path. If a link refers to a
    # second link, a check of the parents of `path` and of the real path would not be sufficient.
    current, folders, links = Path("/"), dict[Path, None](), list[Path]()
    components = [*reversed(path.absolute().parts[1:])]
    while components:
        name = components.pop()
        if name == "..":
            current = current.parent
            continue
        folders[current] = None
        if not (current / name).is_symlink():
            current /= name
            continue
        links.append(current / name)
        if len(links) > _MAX_LINKS:
            raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(path))
        target = links[-1].readlink()
        if target.is_absolute():
            current = Path("/")
        components += reversed(target.parts[1:] if target.is_absolute() else target.parts)
    return current, list(folders), links


def _why_untrusted(
    path: Path, status: os.stat_result, owners: set[int], is_kind: Callable[[int], bool]
) -> str:
    """Return the reason not to trust the file or folder `path`: it is of the wrong kind, or users
    outside `owners` may have changed it. Return "" if `path` can be trusted."""
    if not is_kind(status.st_mode):
        kind = "a folder" if is_kind is stat.S_ISDIR else "a regular file"
        return f"{path} is not {kind}"
    if status.st_uid not in owners or status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        return f"other users may have changed {_describe(path, status)}"
    return ""


def _describe(path: Path, status: os.stat_result) -> str:
    try:
        owner = pwd.getpwuid(status.st_uid).pw_name
    except KeyError:
        owner = str(status.st_uid)
    return f"{path} (owner {owner}, mode {stat.S_IMODE(status.st_mode):04o})"


def install(name: str, compile_into: Callable[[Path], Path], record: dict[str, Any]) -> Entry:
    """Return the cache entry `name`. If the entry does not exist, compile its library first.

    While one process compiles, other processes that call this function wait. If the compilation
    fails, the waiting processes raise the same error and do not compile again.

    Args:
        name: name of the cache entry, `<backend>-<key>`.
        compile_into: function that compiles in a given folder and returns the path of the library.
        record: inputs of the compilation, which are written to info.json.

    Raises:
        KernelError: compilation failed, or the cache cannot be used.
    """
    root = cache_dir()
    started = time.time()
    entry = read_entry(root / name)
    if entry is not None:
        return entry
    try:
        for folder in reversed([root, *root.parents]):  # parents=True would ignore `mode`
            folder.mkdir(mode=0o700, exist_ok=True)
        try:
            os.close(_open_cache(root)[0])
        except ValueError as error:
            raise KernelError(
                f"the kernel cache is not used: {error}; if you own this folder and only its mode "
                "is wrong, run `chmod go-w` on the folder; otherwise set OPTIMUS_KERNELS_CACHE to "
                "a folder that only you can write"
            ) from error
        with _locked(root / f".{name}.lock"):
            entry = read_entry(root / name)
            if entry is not None:
                return entry
            failure = root / f".{name}.failed"
            with contextlib.suppress(FileNotFoundError):
                if failure.stat().st_mtime >= started:  # another process has failed during the wait
                    raise KernelError(failure.read_text())
                failure.unlink()
            for leftover in root.glob(f".{name}.*.tmp"):  # of a killed build
                shutil.rmtree(leftover, ignore_errors=True)
            return _compile(root, name, compile_into, record)
    except OSError as error:
        path = error.filename or root
        raise KernelError(
            f"{path}: {error.strerror}; set OPTIMUS_KERNELS_CACHE to a writable directory"
        ) from error


def _compile(
    root: Path, name: str, compile_into: Callable[[Path], Path], record: dict[str, Any]
) -> Entry:
    work = root / f".{name}.{uuid.uuid4().hex[:8]}.tmp"
    work.mkdir(mode=0o700)  # with any umask, nobody else can write to it
    try:
        library = compile_into(work)
        for path in work.iterdir():
            if path != library:
                shutil.rmtree(path) if path.is_dir() else path.unlink()
        content = {
            **record,
            "library": library.name,
            "sha256": hashlib.sha256(library.read_bytes()).hexdigest(),
            "built_at": time.time(),
        }
        (work / RECORD).write_text(json.dumps(content, indent=1) + "\n")
        # Under umask 002 the group could write the files, and the entry would be refused. Other
        # users may read the files, if the mode of the cache folder (by default 0700) permits it.
        for path, mode in ((library, 0o755), (work / RECORD, 0o644), (work, 0o755)):
            path.chmod(mode)
            _fsync(path)
        _rename(work, root / name)
        _fsync(root)
    except KernelError as error:
        with contextlib.suppress(OSError):
            (root / f".{name}.failed").write_text(str(error))
        raise
    finally:
        shutil.rmtree(work, ignore_errors=True)
    entry = read_entry(root / name)
    if entry is None:
        raise KernelError(f"{root / name} was damaged while it was written; check the disk")
    return entry


def _rename(work: Path, final: Path) -> None:
    """Rename the folder `work` to `final`. An existing folder `final` is replaced if it is a
    damaged cache entry, and kept if it is intact."""
    damaged = None
    if final.exists() and read_entry(final) is None:
        damaged = final.rename(work.with_name(f".{final.name}.{uuid.uuid4().hex[:8]}.tmp"))
    # Without file locks, two processes may compile the same entry. The first entry is kept.
    try:
        work.rename(final)
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
            raise
    if damaged is not None:
        shutil.rmtree(damaged, ignore_errors=True)


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
    try:
        deadline = time.monotonic() + LOCK_WAIT_S
        while not _try_lock(file):
            if time.monotonic() > deadline:
                raise KernelError(
                    f"lock {path} has been held for {LOCK_WAIT_S:.0f} s by another process that "
                    "compiles; end that process, or run `optimus kernels build` before the run"
                )
            time.sleep(_POLL_S)
        yield
    finally:
        os.close(file)


def _try_lock(file: int) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:  # without file locks, the atomic rename is sufficient
        if error.errno not in (errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOLCK):
            raise
    return True


def _fsync(path: Path) -> None:
    file = os.open(path, os.O_RDONLY)
    try:
        os.fsync(file)
    finally:
        os.close(file)
