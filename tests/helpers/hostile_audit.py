"""The file accesses of a command that reads mutated files, compared with what it may touch.

A case has a folder with `inside`, where the command runs, and `outside`, whose files contain
CANARY. An audit hook notes each access by name outside `inside`; a listing before and after the
case shows changes; the canary in an output or a file shows that content was read or copied.
"""

from __future__ import annotations

import contextlib
import os
import stat
import sys
from collections.abc import Iterator
from pathlib import Path

from tests.helpers.hostile_changes import CANARY

FILE_BYTES = 64 << 20
"""Largest file that a case may write."""
_WRITES = {"os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.symlink", "os.link", "os.truncate"}
_PROGRAMS = ("g++", "c++", "clang++", "nvcc", "icpx", "gcc", "ldconfig", "ld")


class Audit:
    """Audit hook that notes files outside the folder that are opened by name, other programs, and
    pickles.

    The target of a link in the folder may be opened, since users keep files elsewhere; the canary
    shows whether its content is printed or copied.
    """

    def __init__(self) -> None:
        self.problem, self._is_on = "", False
        self._inside, self._names_files = "", False
        system = (sys.prefix, sys.base_prefix, sys.exec_prefix, "/proc", "/sys", "/usr", "/lib")
        roots = [os.path.realpath(path) for path in sys.path if path]
        self._system = tuple({*map(os.path.realpath, system), *system, *roots})

    @contextlib.contextmanager
    def watching(self, inside: Path, names_files: bool) -> Iterator[None]:
        """Note the accesses of the block. `names_files`: files anywhere may be read."""
        self.problem, self._is_on = "", True
        self._inside, self._names_files = os.path.normpath(inside), names_files
        try:
            yield
        finally:
            self._is_on = False

    def __call__(self, event: str, arguments: tuple) -> None:
        if not self._is_on or self.problem:
            return
        if event == "open":
            path, _, flags = arguments
            if isinstance(path, (str, bytes)):
                writes = bool(flags and flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT))
                access = "opened for writing" if writes else "opened"
                self._check(os.fsdecode(path), access, writes)
        elif event in _WRITES:
            for path in arguments[: 2 if event in ("os.rename", "os.link") else 1]:
                if isinstance(path, (str, bytes)):
                    self._check(os.fsdecode(path), event, True)
        elif event in ("pickle.find_class", "os.system"):
            self.problem = f"{event} {arguments}"[:200]
        elif event == "subprocess.Popen":
            name = os.path.basename(os.fsdecode(arguments[0] or b""))
            if name not in _PROGRAMS:
                self.problem = f"started {name}"

    def _check(self, path: str, access: str, writes: bool) -> None:
        full = os.path.normpath(os.path.join(os.getcwd(), path))
        if _is_below(full, self._inside):
            return
        if not writes and (self._names_files or any(_is_below(full, p) for p in self._system)):
            return
        if full in ("/dev/null", "/dev/urandom", "/etc/localtime", "/etc/mime.types"):
            return
        self.problem = f"{access} outside the directory: {os.path.relpath(full, self._inside)}"


def _is_below(path: str, root: str) -> bool:
    return path == root or path.startswith(root.rstrip("/") + "/")


def make_folder(folder: Path) -> list[tuple]:
    """Make the folder of a case: `inside` for its files, `outside` for those that no command may
    touch. Return its listing."""
    (folder / "outside").mkdir(parents=True)
    (folder / "inside").mkdir(mode=0o700)
    for name in ("secret", "secret.json", "secret.npy"):
        is_json = name.endswith(".json")
        content = f'{{"{CANARY}": 1}}\n' if is_json else f"{CANARY} 1\n"
        (folder / "outside" / name).write_text(content)
    return listing(folder)


def listing(folder: Path) -> list[tuple]:
    """Return path, mode, size and time of all in a case's folder except `inside` and reports."""
    entries = []
    for parent, folders, names in os.walk(folder):
        if Path(parent) == folder:
            folders[:] = [name for name in folders if name != "inside"]
            names = [name for name in names if name not in ("stdout", "stderr", "report")]
        for name in (*folders, *names):
            path = Path(parent, name)
            status = path.lstat()
            size = status.st_size if stat.S_ISREG(status.st_mode) else 0
            entries.append((str(path), status.st_mode, size, status.st_mtime_ns * bool(size)))
    return sorted(entries)


def file_with_canary(inside: Path) -> str:
    """Return the name of a file below `inside` that has content of `outside`; "" if none has."""
    for parent, _, names in os.walk(inside):
        for name in names:
            path = Path(parent, name)
            status = path.lstat()
            is_small = stat.S_ISREG(status.st_mode) and status.st_size < FILE_BYTES
            if is_small and CANARY.encode() in path.read_bytes():
                return name
    return ""
