"""Interface between a rank of a supervised run, its agent and the supervisor.

The agent sets environment variables when it starts a rank. The rank writes its progress to a small
memory-mapped file on the node, and the agent reads this file. The supervisor lists the updates to
skip in a file of the run directory. This module does not import torch.
"""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple, TypeAlias, get_args

from optimus.errors import ConfigError, reason_of
from optimus.io import files
from optimus.launch.environment import ATTEMPT
from optimus.observe.events import Recorder

SKIPPED_STEPS = "skipped_steps.json"
"""File in the run directory with the steps whose updates are skipped."""
_MAX_STEPS_BYTES = 1 << 20
NODE, WORKSPACE, PROGRESS, JOB_END = (
    f"OPTIMUS_{name}" for name in ("NODE", "WORKSPACE", "PROGRESS", "JOB_END")
)
RankPhase: TypeAlias = Literal["start", "load", "update", "evaluation", "save"]
"""Phase of a rank. start: the time before the first update, without the time to load the states."""
_PHASES = get_args(RankPhase)
_COLLECTIVES, _STEP, _PHASE, _BEGAN, _UPDATES, _FAILURE, _TOTALS = range(7)
"""Indices of the int64 values of a ProgressPage. From index _TOTALS on, the values are the total
times of the phases."""
_WORDS = _TOTALS + len(_PHASES)


@dataclass(frozen=True)
class Attempt:
    """The attempt (launch of all ranks of a supervised run) to which this rank belongs."""

    number: int
    node: str
    """Name of the node in the allocation."""
    workspace: Path
    """The workspace of the attempt, which the supervisor has opened."""
    progress: Path
    """File for the rank's progress, on a disk of the node."""
    job_end: float | None
    """Unix time at which the rank must have saved and ended; None without a limit."""

    def variables(self) -> dict[str, str]:
        """Return the environment variables from which `read_attempt` returns this object."""
        end = {} if self.job_end is None else {JOB_END: repr(self.job_end)}
        return end | {
            ATTEMPT: str(self.number),
            NODE: self.node,
            WORKSPACE: os.fspath(self.workspace),
            PROGRESS: os.fspath(self.progress),
        }


def read_attempt(environ: Mapping[str, str] = os.environ) -> Attempt | None:
    """Return the `Attempt` to which this rank belongs; None if the run has no supervisor."""
    if ATTEMPT not in environ:
        return None
    end = environ.get(JOB_END)
    return Attempt(
        int(environ[ATTEMPT]),
        environ[NODE],
        Path(environ[WORKSPACE]),
        Path(environ[PROGRESS]),
        None if end is None else float(end),
    )


def encode_skipped_steps(steps: Iterable[int]) -> bytes:
    """Return the bytes to write to SKIPPED_STEPS: a JSON object with the steps whose updates are
    skipped."""
    return (json.dumps({"steps": sorted({*steps})}) + "\n").encode()


def read_skipped_steps(run_dir: str | os.PathLike) -> tuple[int, ...]:
    """Return the steps whose updates a run skips, ascending; () without a file.

    Raises:
        ConfigError: The file cannot be read, or it is not the result of `encode_skipped_steps`.
    """
    path = Path(run_dir) / SKIPPED_STEPS
    try:
        data = files.read_regular(path, _MAX_STEPS_BYTES)
    except FileNotFoundError:
        return ()
    except OSError as error:
        raise ConfigError(f"{path}: {reason_of(error)}; make the file readable") from None
    with contextlib.suppress(ValueError, RecursionError):
        match json.loads(data):
            case {"steps": [*steps], **rest} if not rest:
                is_valid = all(type(step) is int and step > 0 for step in steps)
                if is_valid and steps == sorted({*steps}):
                    return tuple(steps)
    raise ConfigError(
        f'{path}: damaged: it must be {{"steps": [N, ...]}} with ascending step numbers; correct '
        "the file, or remove the file to skip no steps"
    )


class Progress(NamedTuple):
    """Progress of a rank, as its agent reads it from the file of a ProgressPage."""

    step: int
    """Number of the current or last update; 0 before the first update."""
    collectives: int
    """Number of collectives and messages that the rank has started."""
    phase: RankPhase
    phase_s: float
    """Seconds since the phase began."""
    updates: int
    """Number of updates that the rank has completed in the attempt."""
    failure: int
    """Exit status of the first error that this rank has raised; 0 without an error. The status does
    not change if the ranks then agree on the error of another rank."""
    seconds: dict[str, float]
    """Seconds that the rank has spent in each kind of phase, without the phase in progress."""


class ProgressPage(Recorder):
    """A page of memory in which a rank counts its collectives and records its phase.

    Writing does not need a system call. The page is an array of int64: number of collectives; step;
    index of the current phase; time at which this phase began, in ns of the node's monotonic clock;
    number of completed updates; exit status for the first error of this rank; and, for each kind of
    phase, the total time in completed phases in ns.
    """

    def __init__(self, path: Path | None) -> None:
        """Map the file `path` into memory. If `path` is None, use memory without a file. Raises
        OSError if the file cannot be mapped."""
        if path is None:
            self._words = memoryview(mmap.mmap(-1, mmap.PAGESIZE)).cast("q")
        else:
            with open(path, "r+b") as file:
                self._words = memoryview(mmap.mmap(file.fileno(), mmap.PAGESIZE)).cast("q")
        if path is None:
            self._words[_BEGAN] = time.monotonic_ns()

    def collective(self, axes: str, operation: str, num_bytes: int) -> None:
        self._words[_COLLECTIVES] += 1

    def enter(self, phase: RankPhase, step: int) -> None:
        """Record that the current phase is complete, and that `phase` begins in the update number
        `step`."""
        words, now = self._words, time.monotonic_ns()
        words[_TOTALS + words[_PHASE]] += now - words[_BEGAN]
        words[_UPDATES] += _PHASES[words[_PHASE]] == "update"
        words[_STEP], words[_PHASE], words[_BEGAN] = step, _PHASES.index(phase), now

    def fail(self, status: int) -> None:
        """Record the exit status of the first error of this rank; do nothing at later errors."""
        self._words[_FAILURE] = self._words[_FAILURE] or status


def create_page(path: Path) -> None:
    """Create the file of a ProgressPage for a rank that will be started. Raises OSError."""
    with open(path, "xb") as file:
        words = memoryview(bytearray(mmap.PAGESIZE)).cast("q")
        words[_BEGAN] = time.monotonic_ns()
        file.write(words)


def read_page(path: Path) -> Progress:
    """Return the progress of a rank from the file of its ProgressPage. Raises OSError."""
    words = memoryview(path.read_bytes()[: 8 * _WORDS]).cast("q")
    totals = zip(_PHASES, words[_TOTALS:], strict=True)
    return Progress(
        words[_STEP],
        words[_COLLECTIVES],
        _PHASES[words[_PHASE]],
        (time.monotonic_ns() - words[_BEGAN]) / 1e9,
        words[_UPDATES],
        words[_FAILURE],
        {phase: total / 1e9 for phase, total in totals},
    )
