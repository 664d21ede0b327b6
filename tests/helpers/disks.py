"""A file system of its own, to be full or read-only; a path that root cannot remove."""

from __future__ import annotations

import contextlib
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest


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
