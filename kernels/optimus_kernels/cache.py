"""Compiled kernels on disk, shared by many processes: an entry is absent or whole.

CACHE/<backend>-<key>/ holds the library and `info.json`, which says what it was built for and the
hash of its bytes. Both are written under a temporary name and renamed together; what does not match
its hash is never loaded. One builder at a time holds CACHE/.<backend>-<key>.lock.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import json
import os
import shutil
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
    """What it was built for: the fields of `build.Target`, `library`, `sha256`, `built_at`."""

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
    """Whole entries of a backend, newest first; in an order that all ranks share."""
    found = []
    with contextlib.suppress(OSError):
        for path in cache_dir().glob(f"{backend}-*"):
            entry = read_entry(path)
            if entry is not None:
                found.append(entry)
    return sorted(found, key=lambda entry: (-entry.info["built_at"], entry.key))


def read_entry(path: Path) -> Entry | None:
    """The entry at `path`; None if it is absent or not what its builder wrote."""
    try:
        info = json.loads((path / INFO).read_text())
        whole = _sha256(path / info["library"]) == info["sha256"]
        return Entry(path, info) if whole and info["built_at"] >= 0 else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def install(name: str, compile_into: Callable[[Path], Path], info: dict[str, Any]) -> Entry:
    """The entry `name`, compiled by `compile_into(directory) -> library` unless it is there.

    Processes that come meanwhile wait; if the one that compiled failed, they fail with its reason
    rather than try in turn. Raises KernelError.
    """
    root = cache_dir()
    started = time.time()
    entry = read_entry(root / name)
    if entry is not None:
        return entry
    try:
        root.mkdir(parents=True, exist_ok=True)
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
        for path in (library, work / INFO, work):
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
    file = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
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
