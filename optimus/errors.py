"""Errors that users can meet, and the Outcome that ends a run or a command.

A user's mistake raises one of these errors with one line that names the key, the value and the
remedy; the command line prints that line and exits with the status of the error's kind. A bug of
Optimus is an assertion instead. An error concerns one rank; before ranks end, they agree on one
Outcome (optimus.distributed.agreement).
"""

from __future__ import annotations

import errno
import json
import unicodedata
from dataclasses import asdict, dataclass
from enum import Enum
from typing import Literal

_LINE_CHARS = 2000
"""Largest number of characters of a message. Of a longer one the middle is left out, since the
remedy is at the end."""
_DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EROFS)

Phase = Literal["launch", "meeting", "setup", "training", "benchmark"]
"""Phases of a rank: reading its command, meeting the other ranks, building its states, doing its
updates, and benchmarking."""


class OutcomeKind(Enum):
    """Ways in which a run or a command can end. The values are their names in JSON output."""

    DONE = "done"
    FAILED = "failed"
    USAGE = "usage"
    STOPPED = "stopped"
    NONFINITE = "nonfinite"
    LOST_PEER = "lost_peer"
    INTERRUPTED = "interrupted"

    @property
    def exit_status(self) -> int:
        """The exit status of a process that ends in this way; README lists them."""
        return _EXIT_STATUS[self]


_EXIT_STATUS = {
    OutcomeKind.DONE: 0,
    OutcomeKind.FAILED: 1,
    OutcomeKind.USAGE: 2,
    OutcomeKind.STOPPED: 3,
    OutcomeKind.NONFINITE: 4,
    OutcomeKind.LOST_PEER: 5,
    OutcomeKind.INTERRUPTED: 130,
}


@dataclass(frozen=True)
class Outcome:
    """The way in which a run or a command ends, as one rank reports it.

    Attributes:
        kind: Determines the exit status.
        message: One line for the user.
        rank: The rank that reports it; 0 if all ranks report the same.
        host: The machine of that rank.
        step: The update that the rank was doing; 0 before the first.
        phase: What the rank was doing.
    """

    kind: OutcomeKind
    message: str
    rank: int = 0
    host: str = ""
    step: int = 0
    phase: Phase = "launch"

    def to_json(self) -> str:
        """Return the JSON object with a key for each attribute."""
        return json.dumps({**asdict(self), "kind": self.kind.value})

    @classmethod
    def from_json(cls, text: str | bytes) -> Outcome:
        """Return the Outcome that `to_json` wrote. Raises ValueError for any other text."""
        try:
            fields = json.loads(text)
            return cls(**{**fields, "kind": OutcomeKind(fields["kind"])})
        except (KeyError, TypeError) as error:
            raise ValueError(f"not an Outcome: {text!r:.200}") from error


class OptimusError(Exception):
    """Base of all expected failures. The message is one line."""

    kind = OutcomeKind.FAILED

    @property
    def exit_code(self) -> int:
        """The exit status of a process that ends with this error."""
        return self.kind.exit_status


class ConfigError(OptimusError):
    """An unknown key, a wrong type, or settings that cannot go together."""

    kind = OutcomeKind.USAGE


class LaunchError(ConfigError):
    """Environment variables of a launcher, or an address, with which ranks cannot meet.

    Attributes:
        of_rank: True if it concerns this rank alone; otherwise all ranks of the machine find it.
    """

    def __init__(self, message: str, of_rank: bool = False) -> None:
        super().__init__(message)
        self.of_rank = of_rank


class DataError(OptimusError):
    """A data set or an input file that is missing, damaged, or does not fit the model."""

    kind = OutcomeKind.USAGE


class DamageError(DataError):
    """A file that Optimus wrote and whose content has changed."""

    kind = OutcomeKind.FAILED


class CheckpointError(OptimusError):
    """A checkpoint that is missing, damaged, or of another model."""

    kind = OutcomeKind.USAGE


class Stopped(OptimusError):
    """A signal or the deadline stopped the run, which has written a checkpoint."""

    kind = OutcomeKind.STOPPED


class NonFiniteError(OptimusError):
    """A NaN or an infinity in a loss, a gradient or an optimizer state. All ranks of a run raise it
    together, and no checkpoint contains the value."""

    kind = OutcomeKind.NONFINITE


class LostPeerError(OptimusError):
    """Another rank died, or a collective did not complete within its time limit."""

    kind = OutcomeKind.LOST_PEER


def as_optimus_error(error: Exception) -> OptimusError | None:
    """Return the error to show the user: `error` itself, or an OptimusError of one line if a file
    or disk failed. None for a bug, which is shown with its stack."""
    if isinstance(error, OptimusError):
        return error
    if not isinstance(error, OSError):
        return None
    if error.filename is None and error.errno not in _DISK_ERRORS:
        return None
    reason = f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    return OptimusError(f"{reason}; fix it and give the same command again to continue")


def one_line(text: object) -> str:
    """Return `text` folded onto one line and printable, for messages built from other libraries'
    errors and from names and values in files. The middle of a very long line is left out."""
    line = printable(" ".join(str(text).split()))
    if len(line) <= _LINE_CHARS:
        return line
    return f"{line[: _LINE_CHARS - 500]} [...] {line[-480:]}"


def printable(text: str) -> str:
    """Return `text` with control characters, line ends and lone surrogates as escapes. A terminal
    would execute control characters, and no encoding has lone surrogates."""
    return text if text.isprintable() else "".join(map(_printable, text))


def printable_lines(text: str) -> str:
    """Return `text` with `printable` applied to each line; line ends are kept."""
    return "\n".join(map(printable, text.split("\n")))


def _printable(character: str) -> str:
    # Cc: terminal escapes; Cf: among others, marks that reverse the reading direction; Cs: lone
    # surrogates; Zl, Zp: line ends.
    escaped = unicodedata.category(character) in ("Cc", "Cf", "Cs", "Zl", "Zp")
    kept = character in "\t\u200c\u200d"  # joiners are part of words and of emoji
    return character if kept or not escaped else ascii(character)[1:-1]


def counted(number: int, noun: str, plural: str = "") -> str:
    """Return `number` with its noun, such as `1 shard` and `2,000 shards`.

    Args:
        number: Number of elements.
        noun: Noun for an element, in the singular.
        plural: Plural of `noun` if it is not `noun` with an s.
    """
    return f"{number:,} {noun if number == 1 else plural or noun + 's'}"
