"""Errors that users can meet, with their exit statuses.

Users' mistakes raise one of these with one line that names the key, the value and the remedy; the
command line prints that line and exits with `exit_code`. A bug of ours is an assertion instead.
"""

from __future__ import annotations

import unicodedata

_LINE_CHARS = 2000
"""Longest message. Of a longer one the middle is left out, since its remedy is at the end."""


class OptimusError(Exception):
    """Base of all expected failures. The message is one line; `exit_code` is the process status."""

    exit_code = 1

    def __init__(self, message: str, on_every_rank: bool = False) -> None:
        """`on_every_rank`: all ranks raise this same message, so only the first prints it."""
        super().__init__(message)
        self.on_every_rank = on_every_rank
        self.told_by_another: bool | None = None
        """True if another rank prints the message; None if the ranks have not agreed."""


class ConfigError(OptimusError):
    """An unknown key, a wrong type, or settings that cannot go together."""

    exit_code = 2


class DataError(OptimusError):
    """A data set or an input file that is missing, damaged, or does not fit the model."""

    exit_code = 2


class DamageError(DataError):
    """A file that Optimus wrote and whose content has changed."""

    exit_code = 1


class CheckpointError(OptimusError):
    """A checkpoint that is missing, damaged, or of another model."""

    exit_code = 2


class Stopped(OptimusError):
    """The run was asked to stop (signal or deadline) and has written a checkpoint."""

    exit_code = 3


class NonFiniteError(OptimusError):
    """A loss or gradient was NaN or infinite before any reduction; no checkpoint was written."""

    exit_code = 4


class LostPeerError(OptimusError):
    """Another rank died, or a collective did not complete within its time limit."""

    exit_code = 5


def one_line(text: object) -> str:
    """Return `text` folded onto one line and printable, for messages built from other libraries'
    errors and from names and values in files. The middle of a very long one is left out."""
    line = printable(" ".join(str(text).split()))
    if len(line) <= _LINE_CHARS:
        return line
    return f"{line[: _LINE_CHARS - 500]} [...] {line[-480:]}"


def printable(text: str) -> str:
    """Return `text` with control characters, line ends and lone surrogates as escapes: a terminal
    executes the first, and no encoding has the last."""
    return text if text.isprintable() else "".join(map(_printable, text))


def printable_lines(text: str) -> str:
    """Return `text` with its line ends and `printable` lines."""
    return "\n".join(map(printable, text.split("\n")))


def _printable(character: str) -> str:
    # Cc: terminal escapes; Cf: also marks that reverse the reading direction; Zl, Zp: line ends.
    escaped = unicodedata.category(character) in ("Cc", "Cf", "Cs", "Zl", "Zp")
    kept = character in "\t\u200c\u200d"  # joiners are part of words and of emoji
    return character if kept or not escaped else ascii(character)[1:-1]


def counted(number: int, noun: str, plural: str = "") -> str:
    """Return `number` with its noun, such as `1 shard` and `2,000 shards`.

    Args:
        number: Number of elements.
        noun: Their noun, in the singular.
        plural: Its plural if that is not `noun` with an s.
    """
    return f"{number:,} {noun if number == 1 else plural or noun + 's'}"
