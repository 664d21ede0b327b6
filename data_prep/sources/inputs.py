"""Input files of a command, their kinds, and their division into units of work.

The result depends on names and sizes alone, so that all workers and all later runs agree. The
library's `**` follows links repeatedly: two links to their own directory are 2^40 names. Here each
directory is entered once, under its shortest path.
"""

from __future__ import annotations

import fnmatch
import functools
import glob
import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Literal

from optimus.errors import DataError, counted

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


UNIT_BYTES = 4 << 20
"""Default `--unit-size`: some 3 seconds of tokenizing. A larger file is a unit of its own;
smaller ones share one, so that a million source files do not become a million arrays, each with a
tail."""

_JSON_LINES = (
    *(".jsonl", ".ndjson"),
    *(kind + packing for kind in (".json", ".jsonl", ".ndjson") for packing in (".gz", ".zst")),
)
_COMMENT = re.compile(r"(^|\s)#.*")
_REFUSED = {
    ".json": "rename it to .jsonl if it holds one JSON object a line",
    ".parquet.gz": "unpack it first (parquet packs its own columns)",
    ".parquet.zst": "unpack it first (parquet packs its own columns)",
    ".tar.zst": "unpack it first",
    ".tzst": "unpack it first",
    ".bz2": "unpack it with bunzip2 first",
    ".xz": "unpack it with unxz first",
    ".zip": "unpack it first",
    ".tar": "unpack it first",
    ".tar.gz": "unpack it first",
    ".tgz": "unpack it first",
}


@dataclass(frozen=True)
class InputFile:
    """An input by its name, as the command line reached it, and its size in bytes on disk."""

    name: str
    size: int


def find_inputs(
    patterns: Sequence[str],
    exclude: Sequence[str] = (),
    out: str | os.PathLike | None = None,
    say: Callable[[str], None] = lambda line: None,
) -> tuple[InputFile, ...]:
    """Every file that `patterns` name and `exclude` does not, once, sorted by name.

    Patterns and `@FILE` are as docs/formats/dataset.md and the help of `--input` say; `say` is told
    how many names with a leading dot are left out. `exclude` patterns are matched against whole
    names, and their `*` crosses directories. Files below `out`, our own output, are no input.
    Raises DataError for a pattern that matches nothing, a link to nothing, a directory that may not
    be read, and a kind of file that is not read yet.
    """

    def unread(folder: str, why: str | None) -> None:
        if not (_matches(os.path.join(folder, ""), exclude) or _below(folder, out)):
            raise DataError(f"{folder}: cannot be read: {why}; fix it, or --exclude '{folder}/*'")

    hidden: list[str] = []
    names: set[str] = set()
    for pattern in _with_lists(patterns):
        found = set(expand(pattern, Told(hidden.append, unread)))
        files = {name for name in found if os.path.isfile(name)}
        for name in sorted(found - files):
            if not (os.path.isdir(name) or _matches(name, exclude) or _below(name, out)):
                what = "links to nothing" if os.path.islink(name) else "is no regular file"
                raise DataError(f"{name}: {what}; fix it, or --exclude it")
        if not files:
            raise DataError(f"--input {pattern!r} matches no file; check the path and its quotes")
        names |= files
    kept = sorted(_each_file_once([name for name in names if not _matches(name, exclude)], out))
    if not kept and not all(_matches(name, exclude) for name in names):
        raise DataError(
            f"--input names only files below --out {str(out)!r}, and what is there is output; "
            "choose an --out that does not hold the inputs"
        )
    if not kept:
        raise DataError(
            f"--exclude leaves none of the {counted(len(names), 'file')} that --input names"
        )
    for name in kept:
        kind_of(name)
    unseen = sorted(n for n in set(hidden) if not (_matches(n, exclude) or _below(n, out)))
    if unseen:
        say(
            f"left out: {counted(len(unseen), 'name')} with a leading dot, such as "
            f"{unseen[0]}; name them in --input to read them"
        )
    return tuple(InputFile(name, os.path.getsize(name)) for name in kept)


def _matches(name: str, exclude: Sequence[str]) -> bool:
    return any(fnmatch.fnmatchcase(name, no) for no in exclude)


def _below(name: str, out: str | os.PathLike | None) -> bool:
    """Whether a name lies in our own output."""
    if out is None:
        return False
    folder, base = os.path.split(name)
    own = os.path.join(os.path.realpath(out), "")
    return os.path.join(os.path.realpath(folder), base).startswith(own)


def _with_lists(patterns: Sequence[str]) -> Iterable[str]:
    for pattern in patterns:
        if not pattern:
            raise DataError("--input '' names nothing; the working directory is --input .")
        if not pattern.startswith("@"):
            yield pattern
            continue
        try:
            text = require_file(pattern[1:], "--input @").read_text("utf-8")
        except UnicodeDecodeError:
            raise DataError(f"--input {pattern!r}: the list is not UTF-8 text") from None
        lines = (_COMMENT.sub("", line).strip() for line in text.splitlines())
        listed = [line for line in lines if line]
        if not listed:
            raise DataError(f"--input {pattern!r}: the list names nothing; one path or glob a line")
        yield from listed


def _each_file_once(names: Sequence[str], out: str | os.PathLike | None) -> list[str]:
    """Names of distinct files that do not lie below `out`, of several the shortest."""
    own = os.path.join(os.path.realpath(out), "") if out is not None else None
    real_folder = functools.cache(os.path.realpath)  # a million files share few folders
    first: dict[str, str] = {}
    for name in sorted(names, key=lambda name: (name.count(os.sep), name)):
        folder, base = os.path.split(name)
        real = os.path.join(real_folder(folder), base)
        if os.path.islink(real):
            real = os.path.realpath(real)
        if own is None or not real.startswith(own):
            first.setdefault(real, name)
    return list(first.values())


def kind_of(name: str) -> Literal["text", "jsonl", "parquet"]:
    """How a file is read, by the end of its name. Raises DataError for a kind not read yet."""
    lower = name.lower()
    if lower.endswith(_JSON_LINES):
        return "jsonl"
    if lower.endswith(".parquet"):
        return "parquet"
    for ending, remedy in _REFUSED.items():
        if lower.endswith(ending):
            raise DataError(f"{name}: {ending} files are not read; {remedy}, or --exclude it")
    return "text"


def packing_of(name: str) -> Literal["gzip", "zstd"] | None:
    """What a file is unpacked with, by the end of its name."""
    lower = name.lower()
    if lower.endswith(".gz"):
        return "gzip"
    return "zstd" if lower.endswith(".zst") else None


def group_units(inputs: Sequence[InputFile], unit_bytes: int) -> tuple[tuple[int, int], ...]:
    """Units as ranges [first, stop) of `inputs`, in order, each a run of whole files.

    A unit ends before the file that would take it over `unit_bytes`; a file larger than that is
    alone in its unit.
    """
    units: list[tuple[int, int]] = []
    first = held = 0
    for index, file in enumerate(inputs):
        if index > first and held + file.size > unit_bytes:
            units.append((first, index))
            first, held = index, 0
        held += file.size
    units.append((first, len(inputs)))
    return tuple(units)


def require_file(path: str | os.PathLike, flag: str) -> Path:
    """`path` if it is a readable file, else a DataError naming `flag`."""
    path = Path(path)
    if not path.is_file():
        raise DataError(f"{flag} {str(path)!r} is not a file; check the path")
    if not os.access(path, os.R_OK):
        raise DataError(f"{flag} {str(path)!r} may not be read; check its permissions")
    return path
