"""Compiled kernels on disk, shared by many processes: an entry is absent or complete.

CACHE/<backend>-<key>/ holds the library and `info.json`, which records its build inputs and the
hash of its bytes. Both are written under a temporary name and renamed together. One builder at a
time holds CACHE/.<backend>-<key>.lock.

Loading a library runs its code, and a hash in the same folder proves nothing about its author.
Therefore an entry is used only if nobody but this user, root or the owner of a read-only cache can
have written it (`_why_untrusted`).
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

INFO = "info.json"
LOCK_WAIT_S = 900.0
"""Longest wait for another process that compiles; an AOT build for PVC takes minutes."""
_POLL_S = 0.1
_MOST_LINKS = 40
"""On the way to a file, as Linux has it."""
_INFO_BYTES = 1 << 20
"""Of an info.json that are read: more than any build writes."""


class KernelError(RuntimeError):
    """Kernels that cannot be had, in one line: what, why, and what to do."""


def cache_dir() -> Path:
    """OPTIMUS_KERNELS_CACHE, or optimus-kernels in the user's cache directory.

    Raises KernelError where there is no user's directory: a container may run under a number that
    no account has.
    """
    named = os.environ.get("OPTIMUS_KERNELS_CACHE")
    if named:
        return Path(named)
    try:
        base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    except RuntimeError as error:
        raise KernelError(
            "this user has no home directory; set OPTIMUS_KERNELS_CACHE to a writable directory"
        ) from error
    return Path(base) / "optimus-kernels"


@dataclass(frozen=True)
class Entry:
    """One compiled library."""

    path: Path
    """Its directory."""
    info: dict[str, Any]
    """Build inputs (the fields of `build.Target`), `library`, `sha256` and `built_at`."""

    @property
    def library(self) -> Path:
        return self.path / self.info["library"]

    @property
    def key(self) -> str:
        return self.path.name


def key_of(fields: dict[str, Any]) -> str:
    """16 hexadecimal digits that stand for everything a build depends on."""
    text = json.dumps(fields, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def entries(backend: str) -> list[Entry]:
    """Return the usable entries of a backend, newest first, in an order that all ranks share."""
    found = [entry for entry in map(read_entry, _paths(backend)) if entry is not None]
    return sorted(found, key=lambda entry: (-entry.info["built_at"], entry.key))


def refused(backend: str) -> dict[str, str]:
    """Return the entries of a backend that are not trusted: the reason by name."""
    reasons = {path.name: _why_untrusted_entry(path) for path in _paths(backend)}
    return {name: reason for name, reason in reasons.items() if reason}


def read_entry(path: Path) -> Entry | None:
    """Return the entry at `path`; None if it is absent, incomplete, damaged or not trusted."""
    if _why_untrusted_entry(path):
        return None
    try:
        info = _read_info(path)
        complete = _sha256(path / info["library"]) == info["sha256"]
    except (OSError, ValueError):
        return None
    return Entry(path, info) if complete else None


def _paths(backend: str) -> list[Path]:
    try:
        return sorted(cache_dir().glob(f"{backend}-*"))
    except OSError:
        return []


def _read_info(path: Path) -> dict[str, Any]:
    """Return info.json of the entry at `path`. Raises OSError or ValueError if it is not ours."""
    try:
        with open(path / INFO, "rb") as file:  # a regular file: _why_untrusted_entry has looked
            info = json.loads(file.read(_INFO_BYTES))
        library, built_at = info["library"], info["built_at"]
        # A name with a folder would lead out of the entry, whose owner and mode were checked.
        plain = Path(library).name == library and library not in ("", "..", INFO)
        valid = plain and isinstance(info["sha256"], str) and 0 <= built_at < math.inf
        # Its name leads to the sources that the library is compared with.
        valid = valid and path.name.startswith(f"{info['backend']}-")
    except (KeyError, TypeError, RecursionError, OverflowError) as error:
        raise ValueError(f"{path / INFO}: {error}") from error
    if not valid:
        raise ValueError(f"{path / INFO} holds other values than a build writes")
    return info


def _why_untrusted_entry(path: Path) -> str:
    """Return why the entry at `path` may hold another user's code; "" if it cannot."""
    reason = _why_untrusted_cache(path.parent)
    if reason or not os.path.lexists(path):
        return reason
    owners = _trusted_owners(path.parent)
    reason = _why_untrusted(path, owners, stat.S_ISDIR)
    if reason:
        return reason
    reason = _why_untrusted(path / INFO, owners, stat.S_ISREG)
    if reason:
        return reason
    try:
        library = path / _read_info(path)["library"]
    except (OSError, ValueError) as error:
        return "" if isinstance(error, FileNotFoundError) else " ".join(str(error).split())
    return _why_untrusted(library, owners, stat.S_ISREG)


def _why_untrusted_cache(root: Path) -> str:
    """Return why others may have put entries into the cache folder; "" if they cannot."""
    try:
        root.stat()
    except OSError:
        return ""  # absent or unreadable: nothing is taken from it
    owners = _trusted_owners(root)
    try:
        real, folders, links = _walk(root)
    except OSError as error:
        return f"{error.filename or root}: {error.strerror}"
    for link in links:
        found = link.lstat()
        if found.st_uid not in (0, os.geteuid()):
            return f"another user's link leads to the cache folder: {_describe(link, found)}"
    reason = _why_untrusted(real, owners, stat.S_ISDIR)
    if reason:
        return reason
    # Whoever can rename a folder on the way can put another cache in this place. For a cache of
    # this user the sticky bit prevents that; a colleague's could have been put there first.
    foreign = real.stat().st_uid not in (0, os.geteuid())
    for above in folders:
        mode = above.stat()
        others = mode.st_mode & (stat.S_IWGRP | stat.S_IWOTH if foreign else stat.S_IWOTH)
        protected = mode.st_mode & stat.S_ISVTX and not foreign
        if (others and not protected) or (foreign and mode.st_uid not in owners):
            return f"others may replace the cache folder: {_describe(above, mode)}"
    return ""


def _walk(path: Path) -> tuple[Path, list[Path], list[Path]]:
    """Return the real path, every folder in which a component is looked up on the way there, and
    the links followed. A folder between two links is a parent of neither path. Raises OSError."""
    at, folders, links = Path("/"), dict[Path, None](), list[Path]()
    rest = [*reversed(path.absolute().parts[1:])]
    while rest:
        name = rest.pop()
        if name == "..":
            at = at.parent
            continue
        folders[at] = None
        if not (at / name).is_symlink():
            at /= name
            continue
        links.append(at / name)
        if len(links) > _MOST_LINKS:
            raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(path))
        target = links[-1].readlink()
        if target.is_absolute():
            at = Path("/")
        rest += reversed(target.parts[1:] if target.is_absolute() else target.parts)
    return at, list(folders), links


def _trusted_owners(root: Path) -> set[int]:
    """Return the users whose files in the cache `root` are used: this one, root and, for a user who
    is not root, the owner of the cache folder."""
    user = os.geteuid()
    with contextlib.suppress(OSError):
        return {user, 0, root.stat().st_uid} if user else {0}
    return {user, 0}


def _why_untrusted(path: Path, owners: set[int], is_kind: Callable[[int], bool]) -> str:
    """Return why another user may have written `path`; "" if none can have, or if it is absent."""
    try:
        found = path.lstat()
    except FileNotFoundError:
        return ""
    except OSError as error:
        return f"{path}: {error.strerror}"
    if not is_kind(found.st_mode):
        kind = "a folder" if is_kind is stat.S_ISDIR else "a regular file"
        return f"{path} is not {kind}"
    if found.st_uid not in owners or found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        return f"others may have changed it: {_describe(path, found)}"
    return ""


def _describe(path: Path, found: os.stat_result) -> str:
    try:
        owner = pwd.getpwuid(found.st_uid).pw_name
    except KeyError:
        owner = str(found.st_uid)
    return f"{path} (owner {owner}, mode {stat.S_IMODE(found.st_mode):04o})"


def install(name: str, compile_into: Callable[[Path], Path], info: dict[str, Any]) -> Entry:
    """Return the entry `name`, compiled by `compile_into(directory) -> library` unless it exists.

    Other processes wait while one compiles; if it fails, they fail with its reason instead of
    compiling in turn. Raises KernelError.
    """
    root = cache_dir()
    started = time.time()
    entry = read_entry(root / name)
    if entry is not None:
        return entry
    try:
        root.mkdir(mode=0o700, parents=True, exist_ok=True)
        reason = _why_untrusted_cache(root)
        if reason:
            raise KernelError(
                f"the kernel cache is not used: {reason}; run `chmod go-w` on that folder, or "
                "set OPTIMUS_KERNELS_CACHE to a folder that only you can write"
            )
        with _locked(root / f".{name}.lock"):
            entry = read_entry(root / name)
            if entry is not None:
                return entry
            _raise_failure_since(root, name, started)
            _remove_leftovers(root, name)
            return _compile(root, name, compile_into, info)
    except OSError as error:
        where = error.filename or root
        raise KernelError(
            f"{where}: {error.strerror}; set OPTIMUS_KERNELS_CACHE to a writable directory"
        ) from error


def _compile(
    root: Path, name: str, compile_into: Callable[[Path], Path], info: dict[str, Any]
) -> Entry:
    work = root / f".{name}.{uuid.uuid4().hex[:8]}.tmp"
    work.mkdir()
    try:
        library = compile_into(work)
        for path in work.iterdir():
            if path != library:
                shutil.rmtree(path) if path.is_dir() else path.unlink()
        whole = {
            **info,
            "library": library.name,
            "sha256": _sha256(library),
            "built_at": time.time(),
        }
        (work / INFO).write_text(json.dumps(whole, indent=1) + "\n")
        # Under umask 002 the group could change them, and the entry would be refused. Others may
        # read it: whether they can reach it is the decision of the cache folder's mode (0700).
        for path, mode in ((library, 0o755), (work / INFO, 0o644), (work, 0o755)):
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
        raise KernelError(f"{root / name} did not survive being written; look at the disk")
    return entry


def _rename(work: Path, final: Path) -> None:
    """Where locks do not work (some network file systems), the first to finish wins."""
    broken = None
    if final.exists() and read_entry(final) is None:
        broken = final.rename(work.with_name(f".{final.name}.{uuid.uuid4().hex[:8]}.tmp"))
    try:
        work.rename(final)
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
            raise
    if broken is not None:
        shutil.rmtree(broken, ignore_errors=True)


def _raise_failure_since(root: Path, name: str, started: float) -> None:
    """Somebody compiled in vain while this process waited."""
    note = root / f".{name}.failed"
    with contextlib.suppress(FileNotFoundError):
        if note.stat().st_mtime >= started:
            raise KernelError(note.read_text())
        note.unlink()


def _remove_leftovers(root: Path, name: str) -> None:
    """Of builders that were killed: the lock is held, so nobody else writes this entry."""
    for path in root.glob(f".{name}.*.tmp"):
        shutil.rmtree(path, ignore_errors=True)


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
    try:
        deadline = time.monotonic() + LOCK_WAIT_S
        while not _try_lock(file):
            if time.monotonic() > deadline:
                raise KernelError(
                    f"{path} has been held for {LOCK_WAIT_S:.0f} s by another process that "
                    "compiles; end it, or compile beforehand with `optimus kernels build`"
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
    except OSError as error:  # a file system without locks: renaming keeps entries whole
        if error.errno not in (errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOLCK):
            raise
    return True


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _fsync(path: Path) -> None:
    file = os.open(path, os.O_RDONLY)
    try:
        os.fsync(file)
    finally:
        os.close(file)
