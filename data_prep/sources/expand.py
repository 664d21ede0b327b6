"""Names that a pattern stands for: a file, a directory or a glob, in a file system with links.

The library's `**` follows every link again and again: two links to the directory they lie in are
2^40 names to it. Here each directory is entered once, under the shortest of its paths.
"""

from __future__ import annotations

import glob
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import PurePath

_EVERYTHING = "**"


@dataclass(frozen=True)
class Told:
    """Who is told of what a directory or `**` does not give."""

    hidden: Callable[[str], None]
    """Of names with a leading dot."""
    unread: Callable[[str, str | None], None]
    """Of directories that may not be read, and why."""


def expand(pattern: str, told: Told) -> Iterator[str]:
    """Names that `pattern` stands for, also links to nothing and directories, perhaps repeated."""
    if os.path.isdir(pattern):
        found = _below_each(pattern, "*", told)
    elif os.path.isfile(pattern):
        found = iter([pattern])
    else:
        found = _match(pattern, told)
    return (str(PurePath(name)) for name in found)  # ./a//b and a/b are one file


def _match(pattern: str, told: Told) -> Iterator[str]:
    head, everything, tail = _divide(pattern)
    if not everything:
        yield from glob.iglob(pattern)
        return
    for folder in filter(os.path.isdir, glob.iglob(head)) if head else [""]:
        yield from _below_each(folder, tail or "*", told)


def _divide(pattern: str) -> tuple[str, str, str]:
    """A pattern before, at and behind its first component `**`; all of it, if there is none."""
    parts = pattern.split(os.sep)
    if _EVERYTHING not in parts:
        return pattern, "", ""
    place = parts.index(_EVERYTHING)
    head = os.sep.join(parts[:place])
    return (head or os.sep if place else ""), _EVERYTHING, os.sep.join(parts[place + 1 :])


def _below_each(folder: str, tail: str, told: Told) -> Iterator[str]:
    for place in _folders(folder, told):
        yield from _match(os.path.join(glob.escape(place), tail), told)


def _folders(top: str, told: Told) -> Iterator[str]:
    """`top` and the directories below it, each real one once: level by level, so the shortest."""
    seen: set[tuple[int, int]] = set()
    level = [top]
    while level:
        below: list[str] = []
        for folder in sorted(level, key=lambda name: os.path.join(name, "")):
            place = os.stat(folder or os.curdir)
            if (place.st_dev, place.st_ino) in seen:
                continue
            seen.add((place.st_dev, place.st_ino))
            yield folder
            below += _in_folder(folder, told)
        level = below


def _in_folder(folder: str, told: Told) -> list[str]:
    """Directories in a folder, without those that begin with a dot."""
    found = []
    try:
        with os.scandir(folder or os.curdir) as entries:
            for entry in entries:
                name = os.path.join(folder, entry.name)
                if entry.name.startswith("."):
                    told.hidden(str(PurePath(name)))
                elif entry.is_dir():
                    found.append(name)
    except OSError as error:
        told.unread(folder or os.curdir, error.strerror)
    return found
