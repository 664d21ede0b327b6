"""Input files of a command: search, kinds of files, and division into units of work.

A unit is a range of consecutive input files, which becomes one token array per split. The division
into units depends only on the names and sizes of the files, so that all workers and all later runs
have the same units. The search reads each directory once, under its shortest path. In contrast,
`**` of Python's glob module follows a link each time it finds the link: for a directory with two
links to itself, the module would return 2^40 paths.
"""

from __future__ import annotations

import fnmatch
import functools
import glob
import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePath
from typing import Literal

from optimus.errors import DataError, counted

_EVERYTHING = "**"


@dataclass
class _Skipped:
    """Paths that a search for input files has left out."""

    hidden: list[str] = field(default_factory=list)
    """Paths whose last component has a leading dot."""
    unread: list[tuple[str, str]] = field(default_factory=list)
    """Directories that cannot be read: pairs (path, reason)."""


def _expand(pattern: str, skipped: _Skipped) -> Iterator[str]:
    """Yield the paths that match `pattern`, including directories and broken links. A path may
    occur more than once."""
    if os.path.isdir(pattern):
        names = _match_below(pattern, "*", skipped)
    elif os.path.isfile(pattern):
        names = iter([pattern])
    else:
        names = _match(pattern, skipped)
    return (str(PurePath(name)) for name in names)  # converts ./a//b to a/b


def _match(pattern: str, skipped: _Skipped) -> Iterator[str]:
    components = pattern.split(os.sep)
    if _EVERYTHING not in components:
        yield from glob.iglob(pattern)
        return
    index = components.index(_EVERYTHING)
    head, tail = os.sep.join(components[:index]) or os.sep, os.sep.join(components[index + 1 :])
    for folder in filter(os.path.isdir, glob.iglob(head)) if index else [""]:
        yield from _match_below(folder, tail or "*", skipped)


def _match_below(top: str, tail: str, skipped: _Skipped) -> Iterator[str]:
    for folder in _folders(top, skipped):
        yield from _match(os.path.join(glob.escape(folder), tail), skipped)


def _folders(top: str, skipped: _Skipped) -> Iterator[str]:
    """Yield `top` and the directories below `top`, level by level. Each directory is yielded once,
    under its shortest path."""
    seen: set[tuple[int, int]] = set()
    level = [top]
    while level:
        below: list[str] = []
        for folder in sorted(level, key=lambda name: os.path.join(name, "")):
            status = os.stat(folder or os.curdir)
            if (status.st_dev, status.st_ino) in seen:
                continue
            seen.add((status.st_dev, status.st_ino))
            yield folder
            below += _in_folder(folder, skipped)
        level = below


def _in_folder(folder: str, skipped: _Skipped) -> list[str]:
    """Return the paths of the directories in `folder`. Directories with a leading dot are added to
    `skipped` instead.

    If `folder` cannot be read, add it to `skipped` and return [].
    """
    folders = []
    try:
        with os.scandir(folder or os.curdir) as entries:
            for entry in entries:
                name = os.path.join(folder, entry.name)
                if entry.name.startswith("."):
                    skipped.hidden.append(str(PurePath(name)))
                elif entry.is_dir():
                    folders.append(name)
    except OSError as error:
        skipped.unread.append((folder or os.curdir, str(error.strerror)))
    return folders


UNIT_BYTES = 4 << 20
"""Default value of `--unit-size`, in bytes. The tokenization of a unit of this size takes 3 s. A
file that is larger is a unit by itself. Several smaller files share a unit, so that a million
source files do not become a million token arrays."""

_JSON_LINES = (
    *(".jsonl", ".ndjson"),
    *(kind + packing for kind in (".json", ".jsonl", ".ndjson") for packing in (".gz", ".zst")),
)
_COMMENT = re.compile(r"(^|\s)#.*")
_REFUSED = {
    ".json": "rename it to .jsonl if it contains one JSON object per line",
    ".parquet.gz": "unpack it first (Parquet compresses each column itself)",
    ".parquet.zst": "unpack it first (Parquet compresses each column itself)",
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
    """The path and the size of an input file."""

    name: str
    """Path of the file: a value of `--input`, or a match of a pattern in `--input`."""
    size: int
    """Size on disk in bytes."""


def find_inputs(
    patterns: Sequence[str],
    exclude: Sequence[str] = (),
    out: str | os.PathLike | None = None,
    say: Callable[[str], None] = lambda line: None,
) -> tuple[InputFile, ...]:
    """Return the input files of a command, sorted by name and without duplicates.

    Args:
        patterns: Paths, globs and `@FILE`, as the help of `--input` describes.
        exclude: Patterns of names to leave out. A pattern must match the whole name; `*` also
            matches `/`.
        out: The output directory. Files below this directory are not inputs.
        say: Function that is called with a line of text if names with a leading dot were left out.

    Raises:
        DataError: a pattern matches nothing, a link is broken, a directory cannot be read, or a
            kind of file is not supported.
    """
    skipped = _Skipped()
    names: set[str] = set()
    for pattern in _with_lists(patterns):
        matches = set(_expand(pattern, skipped))
        for folder, reason in skipped.unread:
            if not (_matches(os.path.join(folder, ""), exclude) or _below(folder, out)):
                raise DataError(
                    f"{folder}: cannot be read: {reason}; fix it, or --exclude '{folder}/*'"
                )
        files = {name for name in matches if os.path.isfile(name)}
        for name in sorted(matches - files):
            if not (os.path.isdir(name) or _matches(name, exclude) or _below(name, out)):
                problem = "links to nothing" if os.path.islink(name) else "is no regular file"
                raise DataError(f"{name}: {problem}; fix it, or --exclude it")
        if not files:
            raise DataError(f"--input {pattern!r} matches no file; check the path and its quotes")
        names |= files
    kept = sorted(_each_file_once([name for name in names if not _matches(name, exclude)], out))
    if not kept and not all(_matches(name, exclude) for name in names):
        raise DataError(
            f"--input names only files below --out {str(out)!r}, which are not read as inputs; "
            "choose an --out that does not contain the inputs"
        )
    if not kept:
        raise DataError(
            f"--exclude leaves none of the {counted(len(names), 'file')} that --input names; "
            "change the patterns of --exclude"
        )
    for name in kept:
        kind_of(name)
    unseen = sorted(n for n in set(skipped.hidden) if not (_matches(n, exclude) or _below(n, out)))
    if unseen:
        say(
            f"left out: {counted(len(unseen), 'name')} with a leading dot, such as "
            f"{unseen[0]}; name them in --input to read them"
        )
    return tuple(InputFile(name, os.path.getsize(name)) for name in kept)


def _matches(name: str, exclude: Sequence[str]) -> bool:
    return any(fnmatch.fnmatchcase(name, no) for no in exclude)


def _below(name: str, out: str | os.PathLike | None) -> bool:
    """Return True if the path `name` is below the output directory `out`."""
    if out is None:
        return False
    folder, base = os.path.split(name)
    output = os.path.join(os.path.realpath(out), "")
    return os.path.join(os.path.realpath(folder), base).startswith(output)


def _with_lists(patterns: Sequence[str]) -> Iterable[str]:
    for pattern in patterns:
        if not pattern:
            raise DataError("--input '' names nothing; use --input . for the working directory")
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
            raise DataError(
                f"--input {pattern!r}: the list names nothing; write one path or glob per line"
            )
        yield from listed


def _each_file_once(names: Sequence[str], out: str | os.PathLike | None) -> list[str]:
    """Return one of `names` for each file that is not below `out`. If a file has several names,
    return the name with the fewest directories."""
    output = os.path.join(os.path.realpath(out), "") if out is not None else None
    real_folder = functools.cache(os.path.realpath)  # many files are in the same folder
    first: dict[str, str] = {}
    for name in sorted(names, key=lambda name: (name.count(os.sep), name)):
        folder, base = os.path.split(name)
        real = os.path.join(real_folder(folder), base)
        if os.path.islink(real):
            real = os.path.realpath(real)
        if output is None or not real.startswith(output):
            first.setdefault(real, name)
    return list(first.values())


def kind_of(name: str) -> Literal["text", "jsonl", "parquet"]:
    """Return the kind of the file `name`, from its suffix. Raises DataError for an unsupported
    suffix."""
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
    """Return the compression of the file `name`, from its suffix, or None if the file is not
    compressed."""
    lower = name.lower()
    if lower.endswith(".gz"):
        return "gzip"
    return "zstd" if lower.endswith(".zst") else None


def group_units(inputs: Sequence[InputFile], unit_bytes: int) -> tuple[tuple[int, int], ...]:
    """Divide the inputs into units of consecutive files.

    The size of a unit is the total size of its files on disk. A unit ends before the file with
    which its size would exceed `unit_bytes`. A file above `unit_bytes` is a unit by itself.

    Returns:
        For each unit, the range [first, stop) of its inputs.
    """
    units: list[tuple[int, int]] = []
    first = size = 0
    for index, file in enumerate(inputs):
        if index > first and size + file.size > unit_bytes:
            units.append((first, index))
            first, size = index, 0
        size += file.size
    units.append((first, len(inputs)))
    return tuple(units)


def require_file(path: str | os.PathLike, flag: str) -> Path:
    """Check that `path` is a readable file, and return `path` as a Path.

    Raises:
        DataError: `path` is not a readable file. The message begins with `flag`, the option that
            named the path.
    """
    path = Path(path)
    if not path.is_file():
        raise DataError(f"{flag} {str(path)!r} is not a file; check the path")
    if not os.access(path, os.R_OK):
        raise DataError(f"{flag} {str(path)!r} cannot be read; check the permissions of the file")
    return path
