"""Errors that are shown to users, and `Outcome`, the report on the end of a run or a command.

A mistake of the user raises an OptimusError, whose message is one line with the remedy. A bug of
Optimus raises another exception, such as AssertionError. Before a run ends, its ranks agree on one
Outcome.
"""

from __future__ import annotations

import errno
import json
import unicodedata
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from enum import Enum
from types import MappingProxyType
from typing import Literal

_LINE_CHARS = 2000
"""Maximum number of characters that `one_line` returns."""
_DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EROFS)

Phase = Literal["launch", "meeting", "setup", "training", "benchmark"]
"""Phases of a rank. launch: read the command. meeting: rendezvous with the other ranks. setup:
build the model and the optimizer. training: update the weights. benchmark: run `optimus bench`."""


class OutcomeKind(Enum):
    """Ways in which a run or a command can end. The values appear in JSON output."""

    DONE = "done"
    FAILED = "failed"
    USAGE = "usage"
    STOPPED = "stopped"
    NONFINITE = "nonfinite"
    LOST_PEER = "lost_peer"
    INTERRUPTED = "interrupted"

    @property
    def exit_status(self) -> int:
        """Exit status of a process that ends with an outcome of this kind. README lists the
        statuses."""
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
    """Report from one rank about the end of a run or a command.

    Attributes:
        kind: Way in which the run ends; determines the exit status.
        message: One line for the user.
        rank: Rank that reports the Outcome; 0 if all ranks report the same.
        host: Host name of that rank's machine.
        step: Number of the update in which that rank ended; 0 before the first update.
        phase: Phase in which that rank ended.
    """

    kind: OutcomeKind
    message: str
    rank: int = 0
    host: str = ""
    step: int = 0
    phase: Phase = "launch"

    def to_json(self) -> str:
        """Return a JSON object with one key for each attribute."""
        return json.dumps({**asdict(self), "kind": self.kind.value})

    @classmethod
    def from_json(cls, text: str | bytes) -> Outcome:
        """Parse the result of `to_json`. Raises ValueError for any other text."""
        try:
            fields = json.loads(text)
            return cls(**{**fields, "kind": OutcomeKind(fields["kind"])})
        except (KeyError, TypeError) as error:
            raise ValueError(f"not an Outcome: {text!r:.200}") from error


class OptimusError(Exception):
    """Base class of the errors that users see. The message of each error is one line."""

    kind = OutcomeKind.FAILED

    @property
    def exit_code(self) -> int:
        """Exit status of a process that ends with this error."""
        return self.kind.exit_status


class ConfigError(OptimusError):
    """Raised if a setting or argument is unknown, has a wrong type or value, or contradicts another
    setting or argument."""

    kind = OutcomeKind.USAGE


class DoesNotFit(ConfigError):
    """Raised if a run needs more device memory, host memory or disk space than is available.

    Attributes:
        missing: Maps the name of a tier (device, host or disk) to the number of missing bytes.
    """

    def __init__(self, message: str, missing: Mapping[str, int] = MappingProxyType({})) -> None:
        super().__init__(message)
        self.missing = dict(missing)


class LaunchError(ConfigError):
    """Raised if the rendezvous address, or an environment variable that the launcher sets, cannot
    be used.

    Attributes:
        of_rank: True if the error concerns this rank alone. If False, all ranks of the machine
            raise the error, and only the first of them prints it.
    """

    def __init__(self, message: str, of_rank: bool = False) -> None:
        super().__init__(message)
        self.of_rank = of_rank


class DataError(OptimusError):
    """Raised if a data set or an input file is missing, damaged, or does not fit the model."""

    kind = OutcomeKind.USAGE


class DamageError(DataError):
    """Raised if the content of a file has changed since Optimus wrote it."""

    kind = OutcomeKind.FAILED


class CheckpointError(OptimusError):
    """Raised if a checkpoint is missing, is damaged or belongs to another model."""

    kind = OutcomeKind.USAGE


class Stopped(OptimusError):
    """Raised if the run wrote a checkpoint and stopped because of a signal or its deadline."""

    kind = OutcomeKind.STOPPED


class NonFiniteError(OptimusError):
    """Raised on all ranks if a loss, a gradient or an optimizer state contains a NaN or
    infinity."""

    kind = OutcomeKind.NONFINITE


class LostPeerError(OptimusError):
    """Raised if another rank died, or a collective did not complete within its time limit."""

    kind = OutcomeKind.LOST_PEER


def refuse_if(condition: object, message: str) -> None:
    """Raise ConfigError with `message` if `condition` is true."""
    if condition:
        raise ConfigError(message)


def as_optimus_error(error: Exception) -> OptimusError | None:
    """Return the error to show to the user, or None if `error` is a bug of Optimus.

    If `error` is an OSError of a file or a disk, it is converted to an OptimusError.
    """
    if isinstance(error, OptimusError):
        return error
    if not isinstance(error, OSError):
        return None
    if error.filename is None and error.errno not in _DISK_ERRORS:
        return None
    reason = reason_of(error)
    if error.filename:
        reason = f"{error.filename}: {reason}"
    return OptimusError(f"{reason}; fix this problem and run the same command again to continue")


def reason_of(error: OSError) -> str:
    """Return the cause of a file error as a phrase, such as "Permission denied"."""
    if error.errno == errno.ELOOP:  # usually from open(2) with O_NOFOLLOW
        return "a symbolic link that is not followed, or a loop of links"
    return error.strerror or str(error)


def one_line(text: object) -> str:
    """Return `text` as one printable line. If the line has more than _LINE_CHARS characters, its
    middle is replaced by ` [...] `."""
    line = printable(" ".join(str(text).split()))
    if len(line) <= _LINE_CHARS:
        return line
    return f"{line[: _LINE_CHARS - 500]} [...] {line[-480:]}"


def printable(text: str) -> str:
    """Return `text` with these characters escaped: control characters (except tabs), invisible
    format characters (except joiners), line ends and lone surrogates."""
    if text.isprintable():
        return text
    # Unicode categories. Cc: terminal escapes; Cf: invisible marks, such as those that reverse the
    # reading direction; Cs: lone surrogates; Zl, Zp: line ends.
    escaped = ("Cc", "Cf", "Cs", "Zl", "Zp")
    kept = "\t\u200c\u200d"  # joiners are part of words and of emoji
    return "".join(
        ascii(character)[1:-1]
        if unicodedata.category(character) in escaped and character not in kept
        else character
        for character in text
    )


def printable_lines(text: str) -> str:
    """Apply `printable` to each line of `text` and keep the line ends."""
    return "\n".join(map(printable, text.split("\n")))


def counted(number: int, noun: str, plural: str = "") -> str:
    """Return a number followed by a noun, such as `1 shard` or `2,000 shards`.

    Args:
        number: Number to print.
        noun: Noun in the singular.
        plural: Plural of `noun`. If it is empty, an s is added to `noun`.
    """
    return f"{number:,} {noun if number == 1 else plural or noun + 's'}"
