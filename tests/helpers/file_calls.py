"""The preloaded shim that numbers, records and breaks file calls (file_calls.c), from Python."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import sys
from enum import IntEnum
from pathlib import Path
from typing import NamedTuple


class Action(IntEnum):
    """What becomes of a call; the numbers are the shim's."""

    NONE = 0
    KILL_BEFORE = 1
    KILL_BEHIND = 2
    KILL_HALF_WAY = 3
    ENOSPC = 4
    EIO = 5
    SHORT = 6


class Breakage(NamedTuple):
    """Calls `first` to `last` of rank `rank` meet `action`."""

    rank: int
    action: Action
    first: int
    last: int


class Call(NamedTuple):
    """One call that succeeded."""

    op: str
    """create, mkdir, write, truncate, extend, fsync, rename, link or unlink (of directories too)"""
    pid: int
    number: int
    """Of this process's calls, those counted that read or failed."""
    path: str
    other: str
    """The new name, of a rename or a link."""
    offset: int
    """Of a write; the new size, of truncate and extend."""
    data: bytes
    inode: int
    """Of what was open; 0 where a call was given a path alone."""


def why_not() -> str:
    """Why the shim cannot be built here, or nothing."""
    if sys.platform != "linux" or shutil.which("cc") is None:
        return "needs Linux and a C compiler (cc) to build what breaks a save at each call"
    return ""


def build(directory: Path) -> Path:
    """The library to be preloaded."""
    library = directory / "file_calls.so"
    source = Path(__file__).with_suffix(".c")
    flags = ["-O1", "-Wall", "-Werror", "-shared", "-fPIC", "-U_FORTIFY_SOURCE"]
    subprocess.run(["cc", *flags, str(source), "-o", str(library), "-ldl"], check=True)
    return library


def arm(
    under: Path, log: Path | None = None, breakage: Breakage | None = None, until: str = ""
) -> None:
    """From now on count this process's calls below `under`; record and break them.

    `until`: from the first call of a path that contains it on, no call is broken.
    """
    _, action, first, last = breakage or Breakage(0, Action.NONE, 0, 0)
    ctypes.CDLL(None).file_calls_arm(
        os.fsencode(under),
        os.fsencode(log or ""),
        ctypes.c_long(first),
        ctypes.c_long(last),
        int(action),
        os.fsencode(until),
    )


def hits() -> int:
    """Return how many calls of this process were broken."""
    return ctypes.CDLL(None).file_calls_hits()


def kill_after(seconds: float) -> None:
    """End this process by SIGKILL then, in the midst of whatever it does."""
    assert ctypes.CDLL(None).file_calls_kill_after(ctypes.c_double(seconds)) == 0


def read_log(log: Path) -> list[Call]:
    """What was recorded, in order."""
    calls = []
    with open(log, "rb") as file:
        while line := file.readline():
            words = os.fsdecode(line[:-1]).split("\t")
            op, pid, number, offset, size, inode, path, other = words
            path, other = (one and os.path.normpath(one) for one in (path, other))
            data = file.read(int(size))
            where = (path, other, int(offset), data, int(inode))
            calls.append(Call(op, int(pid), int(number), *where))
    return calls
