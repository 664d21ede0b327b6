"""Faults of files and disks: damaged files, full and read-only disks, and broken file calls.

A file call is a call of libc that reads or changes files. The preloaded library file_calls.c counts
and records file calls. A call is broken if the library lets the call fail or kills the process at
the call.
"""

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
    """Flip bits of a byte of a file.

    Args:
        path: The file.
        at: Index of the byte (int), or its position as a fraction of the file size (float).
        bits: Mask of the bits.
    """
    content = bytearray(path.read_bytes())
    content[at if isinstance(at, int) else int(at * len(content))] ^= bits
    path.write_bytes(content)


def flip_bit(content: bytearray, generator: random.Random) -> None:
    """Flip a random bit."""
    content[generator.randrange(len(content))] ^= 1 << generator.randrange(8)


def truncate(content: bytearray, generator: random.Random) -> None:
    """Remove the end of `content`, from a random byte."""
    del content[generator.randrange(len(content)) :]


def zero(content: bytearray, generator: random.Random) -> None:
    """Set 512 bytes at a random position to zero. Zeros also change the padding in the header of a
    shard file, which consists of spaces."""
    at = generator.randrange(max(1, len(content) - 512))
    content[at : at + 512] = bytes(len(content[at : at + 512]))


def lengthen(content: bytearray, generator: random.Random) -> None:
    """Append a zero byte."""
    content += b"\0"


@contextlib.contextmanager
def small_disk(folder: Path, size: str) -> Iterator[Callable[[str], None]]:
    """Context manager that mounts a tmpfs of size `size` (an option of mount) at the new folder
    `folder`. Skip the test if mounting is not permitted.

    Yields:
        A function that remounts the file system with other options, such as "ro".
    """
    folder.mkdir()

    def mount(*options: str) -> bool:
        command = ["mount", *options, str(folder)]
        return subprocess.run(command, capture_output=True).returncode == 0

    def remount(options: str) -> None:
        assert mount("-o", f"remount,{options}"), f"cannot remount {folder} with {options}"

    if not shutil.which("mount") or not mount("-t", "tmpfs", "-o", f"size={size}", "optimus-test"):
        pytest.skip("needs the right to mount a tmpfs")
    try:
        yield remount
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


@contextlib.contextmanager
def immutable(*paths: Path) -> Iterator[None]:
    """Prevent all users, including root, from renaming, removing or changing the paths. Skip the
    test if chattr is not permitted."""
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
    """Effect of file_calls.c on a file call. The values equal those in file_calls.c."""

    NONE = 0
    KILL_BEFORE = 1
    KILL_AFTER = 2
    KILL_HALF_WAY = 3
    ENOSPC = 4
    EIO = 5
    SHORT = 6


class Breakage(NamedTuple):
    """Fault in the file calls of a rank that have the numbers `first` to `last`."""

    rank: int
    action: Action
    first: int
    last: int


class Call(NamedTuple):
    """A recorded file call, which succeeded."""

    op: str
    """create, mkdir, write, truncate, extend, fsync, rename, link, or unlink (also of a
    directory)."""
    pid: int
    number: int
    """Number of the call among all file calls of its process, including calls that only read and
    calls that fail."""
    path: str
    other: str
    """The new name of a rename or a link."""
    offset: int
    """Offset of a write; new size of a truncate or an extend."""
    data: bytes
    inode: int
    """Inode of the open file; 0 if the call has only a path."""


def why_not() -> str:
    """Return the reason why the library cannot be built on this machine, or ""."""
    if sys.platform != "linux" or shutil.which("cc") is None:
        return "needs Linux and a C compiler (cc) to build file_calls.c"
    return ""


def build_library(directory: Path) -> Path:
    """Compile file_calls.c. Return the path of the library, for LD_PRELOAD."""
    library = directory / "file_calls.so"
    source = Path(__file__).with_name("file_calls.c")
    flags = ["-O1", "-Wall", "-Werror", "-shared", "-fPIC", "-U_FORTIFY_SOURCE"]
    subprocess.run(["cc", *flags, str(source), "-o", str(library), "-ldl"], check=True)
    return library


def arm(
    under: Path, log: Path | None = None, breakage: Breakage | None = None, until: str = ""
) -> None:
    """Count, record and break the file calls of this process from now on.

    Args:
        under: The directory whose calls are counted.
        log: File of the record; None: no record.
        breakage: The broken calls; None: no broken call.
        until: After the first call with this text in its path, no call is broken.
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
    """Return the number of broken calls of this process."""
    return int(ctypes.CDLL(None).file_calls_hits())


def kill_after(seconds: float) -> None:
    """Kill this process by SIGKILL after `seconds` seconds, possibly in the middle of a system
    call."""
    assert ctypes.CDLL(None).file_calls_kill_after(ctypes.c_double(seconds)) == 0


def read_log(log: Path) -> list[Call]:
    """Return the recorded calls, in order."""
    calls = []
    with open(log, "rb") as file:
        while line := file.readline():
            fields = os.fsdecode(line[:-1]).split("\t")
            op, pid, number, offset, size, inode, path, other = fields
            path, other = (name and os.path.normpath(name) for name in (path, other))
            data = file.read(int(size))
            call = Call(op, int(pid), int(number), path, other, int(offset), data, int(inode))
            calls.append(call)
    return calls
