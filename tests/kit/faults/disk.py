"""Faults of files and disks: damaged files, full and read-only disks, and a preloaded shim that
numbers, records and breaks file calls (file_calls.c)."""

from __future__ import annotations

import contextlib
import ctypes
import os
import random
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from enum import IntEnum
from pathlib import Path
from typing import NamedTuple

import pytest


def flip(path: Path, at: float = -1, bits: int = 1) -> None:
    """Some bits of a byte: of number `at`, or where that is a fraction, so far into the file."""
    content = bytearray(path.read_bytes())
    content[at if isinstance(at, int) else int(at * len(content))] ^= bits
    path.write_bytes(content)


def flip_one(content: bytearray, generator: random.Random) -> None:
    content[generator.randrange(len(content))] ^= 1 << generator.randrange(8)


def truncate(content: bytearray, generator: random.Random) -> None:
    del content[generator.randrange(len(content)) :]


def zero(content: bytearray, generator: random.Random) -> None:
    """A stretch that holds something; of the shard files' headers most is spaces."""
    at = generator.randrange(max(1, len(content) - 512))
    content[at : at + 512] = bytes(len(content[at : at + 512]))


def lengthen(content: bytearray, generator: random.Random) -> None:
    content += b"\0"


@contextlib.contextmanager
def small_disk(place: Path, size: str) -> Iterator[Callable[[str], None]]:
    """A tmpfs at `place`, and what changes its options; skips where this user may not mount."""
    place.mkdir()

    def mount(*options: str) -> bool:
        command = ["mount", *options, str(place)]
        return subprocess.run(command, capture_output=True).returncode == 0

    if not shutil.which("mount") or not mount("-t", "tmpfs", "-o", f"size={size}", "optimus-test"):
        pytest.skip("needs the right to mount a tmpfs")
    try:
        yield lambda options: mount("-o", f"remount,{options}") or pytest.fail("cannot remount")
    finally:
        subprocess.run(["umount", "-l", str(place)], check=True)


@contextlib.contextmanager
def immutable(*paths: Path) -> Iterator[None]:
    """Paths that nobody can rename, remove or change; skips where this cannot be set."""
    names = [str(path) for path in paths]

    def chattr(flag: str) -> bool:
        return subprocess.run(["chattr", flag, *names], capture_output=True).returncode == 0

    if not shutil.which("chattr") or not chattr("+i"):
        pytest.skip("needs the right to set chattr +i")
    try:
        yield
    finally:
        subprocess.run(["chattr", "-i", *(name for name in names if Path(name).exists())])


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
    source = Path(__file__).with_name("file_calls.c")
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
