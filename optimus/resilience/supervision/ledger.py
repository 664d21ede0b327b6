"""The ledger of a supervised run, `events.jsonl`, and the state of the run that its events define.

The ledger is a file to which the supervisor appends an event for each change of the run's state. A
new supervisor derives the state from these events alone, and continues with the same state.
Each line is a JSON object with one event. The key `hash` of the object contains a hash of the line
and, through the hash of the previous line, of all lines before.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from optimus.errors import ConfigError, counted, reason_of
from optimus.io import files
from optimus.io.workspace import Workspace

logger = logging.getLogger(__name__)

LEDGER = "events.jsonl"
NODES = "nodes.json"
FORMAT: Literal[1] = 1
"""Version of the ledger's format. Each SupervisorStarted event contains this version."""
_HASH = ', "hash": "'
_MOST_BYTES = 1 << 28
"""Maximum size of the ledger. An event takes about 300 bytes."""
_TAIL_CHARS = len(_HASH) + 16 + len('"}')

FailureKind = Literal["hard", "soft", "ambiguous", "shared"]
"""Types of failures. hard: the process or the node failed. soft: the node computed a non-finite
value. ambiguous: the observations do not identify a node with certainty. shared: the failure is not
attributed to a node, for example because ranks on several nodes ended with the same error."""
Standing = Literal["good", "suspect", "excluded"]
"""State that the supervisor assigns to a node. good: no failure is attributed to the node.
suspect: a failure may be due to the node. excluded: the node does not get ranks in the present and
later jobs of the run."""


_Number = Annotated[int, Field(ge=1)]
_Count = Annotated[int, Field(ge=0)]
_Nodes = Annotated[tuple[str, ...], Field(min_length=1)]


class _Record(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


class SupervisorStarted(_Record):
    """Event: a supervisor has started, and supervises the run from now on."""

    kind: Literal["supervisor_started"] = "supervisor_started"
    time: float
    """Unix time of the event in seconds. All events have this attribute."""
    host: str
    pid: int
    job: str
    """Name of the scheduler's job; "" without a scheduler."""
    nodes: _Nodes
    """Names of the nodes of the job, in the order of the allocation."""
    settings: str
    """Hash of the settings that must not change in later jobs of the run."""
    format: Literal[1] = FORMAT


class AttemptStarted(_Record):
    """Event: the supervisor is about to start an attempt, a launch of all ranks of the run."""

    kind: Literal["attempt_started"] = "attempt_started"
    time: float
    attempt: _Number
    nodes: _Nodes
    """Nodes with ranks. The first rank of nodes[i] is rank i * ranks_per_node."""
    ranks_per_node: _Number
    port: Annotated[int, Field(ge=1, lt=1 << 16)]
    workspace: Annotated[str, Field(pattern="^[a-z0-9-]*$")] = ""
    """Unique name of the attempt's workspace and of the folder in which its ranks describe
    non-finite values. The number of the attempt is not unique: numbers repeat after a user has
    moved the ledger away."""
    load: Literal["newest", "older"] = "newest"
    """Checkpoint from which the attempt starts: the newest checkpoint, or the checkpoint before
    it."""
    skipped_steps: tuple[_Count, ...] = ()
    """The steps whose updates are skipped. The data of these steps gives non-finite values."""


class Progress(_Record):
    """Event: the ranks of a launch attempt have started their first update, or have committed a
    checkpoint."""

    kind: Literal["progress"] = "progress"
    time: float
    attempt: _Number
    milestone: Literal["first update", "checkpoint"]
    step: _Count


class AttemptEnded(_Record):
    """Event: an attempt (a launch of all ranks) has ended. After this event, the supervisor kills
    the remaining processes of the attempt on all nodes that it can reach."""

    kind: Literal["attempt_ended"] = "attempt_ended"
    time: float
    attempt: _Number
    outcome: Literal["done", "stopped", "failed", "usage", "interrupted"]
    """done: the run is complete. stopped: the ranks saved a checkpoint and ended. failed: a rank or
    a node failed. usage: ranks refused their configuration. interrupted: the ranks ended together
    with their agents or their job."""
    step: _Count
    """Last step that the launch attempt has reached."""
    failure: FailureKind | None = None
    nodes: tuple[str, ...] = ()
    """Nodes to which the failure is attributed, in the order in which they failed."""
    signature: str = ""
    """Text that is equal for failures with the same cause, for example "nonfinite 1a2b" or "signal
    11"."""
    evidence: tuple[str, ...] = ()
    """Observations, one line each, the strongest evidence first."""
    updates: _Count = 0
    """Number of updates that the first rank has completed in the attempt."""
    seconds: dict[str, float] = {}
    """Seconds that the first rank spent in each kind of phase. Its last phase, which is incomplete,
    is not counted."""


class NodeMarked(_Record):
    """Event: the supervisor has changed the standing of a node: good, suspect or excluded."""

    kind: Literal["node_marked"] = "node_marked"
    time: float
    node: str
    standing: Standing
    reason: str


class NextJob(_Record):
    """Event: the supervisor has submitted the job that continues the run after the present job, or
    the scheduler has refused the submission."""

    kind: Literal["next_job"] = "next_job"
    time: float
    job: str
    """Name of the next job; "" if the scheduler has refused it."""
    problem: str = ""
    """Reason why the scheduler has refused the job; "" if it has accepted the job."""


class VerdictReached(_Record):
    """Event: the supervisor has decided that the job ends, and whether another job continues the
    run."""

    kind: Literal["verdict"] = "verdict"
    time: float
    verdict: Literal["done", "continue", "stop"]
    reason: str
    status: int
    """Exit status of `optimus launch`."""


Event = Annotated[
    SupervisorStarted
    | AttemptStarted
    | Progress
    | AttemptEnded
    | NodeMarked
    | NextJob
    | VerdictReached,
    Field(discriminator="kind"),
]
_EVENT: TypeAdapter[Event] = TypeAdapter(Event)


class History:
    """The state of a supervised run after a sequence of events."""

    def __init__(self, events: Iterable[Event] = ()) -> None:
        self.events: list[Event] = []
        self.supervisors = 0
        """Number of supervisors that have supervised the run."""
        self.standings: dict[str, NodeMarked] = {}
        """Maps each node that has a NodeMarked event to the last of these events."""
        self.attempts: list[AttemptStarted] = []
        self.first_of_job = 0
        """Index in `attempts` of the first attempt of the present job."""
        self.job = ""
        self.ends: dict[int, AttemptEnded] = {}
        """Maps the number of each ended attempt to its AttemptEnded event."""
        self.checkpoints: dict[int, int] = {}
        """Maps the number of each attempt that has committed a checkpoint to the last committed
        step."""
        self.verdict: VerdictReached | None = None
        """The verdict of the last job; None if that job has not reached a verdict."""
        self.next_job: NextJob | None = None
        """The job that continues the run after the present job."""
        for event in events:
            self.add(event)

    def add(self, event: Event) -> None:
        """Append an event to `events`, and update the other attributes."""
        self.events.append(event)
        match event:
            case SupervisorStarted():
                # After a verdict or in another job, a supervisor does not take over the ranks of
                # the previous supervisor.
                if self.verdict is not None or event.job != self.job or not self.supervisors:
                    self.first_of_job, self.next_job = len(self.attempts), None
                self.supervisors, self.job, self.verdict = self.supervisors + 1, event.job, None
            case AttemptStarted():
                self.attempts.append(event)
            case Progress() if event.milestone == "checkpoint":
                self.checkpoints[event.attempt] = event.step
            case AttemptEnded():
                self.ends[event.attempt] = event
            case NodeMarked():
                self.standings[event.node] = event
            case NextJob():
                self.next_job = event
            case VerdictReached():
                self.verdict = event

    @property
    def running(self) -> AttemptStarted | None:
        """The start event of the running launch attempt; None if no attempt runs."""
        last = self.attempts[-1] if self.attempts else None
        return last if last is not None and last.attempt not in self.ends else None

    def attempts_of_job(self) -> list[AttemptStarted]:
        """Return the AttemptStarted events of the present job, in order."""
        return self.attempts[self.first_of_job :]

    def has_updated(self, attempt: AttemptStarted) -> bool:
        """Return True if a launch attempt has started its first update."""
        events = self.events
        return any(isinstance(e, Progress) and e.attempt == attempt.attempt for e in events)

    def failures(self, of_job: bool = False) -> list[AttemptEnded]:
        """Return the AttemptEnded events of failed attempts, in order.

        Args:
            of_job: If True, return only the events of the present job.
        """
        attempts = self.attempts[self.first_of_job if of_job else 0 :]
        ends = [self.ends[a.attempt] for a in attempts if a.attempt in self.ends]
        return [end for end in ends if end.outcome == "failed"]

    def standing(self, node: str) -> Standing:
        mark = self.standings.get(node)
        return mark.standing if mark is not None else "good"

    def summary(self) -> dict[str, Any]:
        """Return the present state of the run as a JSON object, for the file `nodes.json`."""
        verdict = self.verdict
        return {
            "verdict": verdict.verdict if verdict else None,
            "reason": verdict.reason if verdict else "",
            "status": verdict.status if verdict else None,
            "job": self.job,
            "next_job": self.next_job.job if self.next_job else "",
            "attempt": self.attempts[-1].attempt if self.attempts else 0,
            "nodes": {
                node: {"standing": mark.standing, "reason": mark.reason, "time": mark.time}
                for node, mark in sorted(self.standings.items())
            },
        }


class Ledger:
    """Appends events to the file `events.jsonl` of a supervised run.

    Only the current supervisor of the run has a Ledger.
    """

    def __init__(self, run_dir: Path, workspace: Workspace) -> None:
        """Read the ledger, and replace it by a new file with the same events.

        Earlier supervisors have opened the old file, so they can no longer change the ledger.

        Args:
            run_dir: The run directory.
            workspace: The workspace of this supervisor.

        Raises:
            ConfigError: The ledger is damaged.
            OSError: The ledger cannot be read or written.
        """
        self._path, self._workspace = run_dir / LEDGER, workspace
        self.history, lines = _load(run_dir)
        self._last_hash = _hash_of(lines[-1]) if lines else ""
        self._write_summary()  # first: nodes.json must not name an event that is not in the ledger
        content = "".join(f"{line}\n" for line in lines)
        self._fd = workspace.open_append(self._path, content.encode())

    def add(self, event: Event) -> None:
        """Append an event to the ledger and wait until it is on disk, then update `nodes.json`.

        Raises:
            OSError: The event cannot be written, for example because the disk is full. The ledger
                is unchanged, and the caller can try again.
        """
        text = json.dumps(event.model_dump(), ensure_ascii=False)
        body = text.encode("utf-8", "replace").decode()[:-1]  # [:-1]: without the closing brace
        line = f'{body}{_HASH}{_hash(body, self._last_hash)}"}}'
        data, size = memoryview(f"{line}\n".encode()), os.fstat(self._fd).st_size
        try:
            while data:
                data = data[os.write(self._fd, data) :]
            os.fsync(self._fd)
        except OSError:
            os.ftruncate(self._fd, size)  # otherwise the next event would follow half a line
            raise
        self._last_hash = _hash_of(line)
        self.history.add(event)
        self._write_summary()

    def close(self) -> None:
        os.close(self._fd)

    def _write_summary(self) -> None:
        path = self._path.with_name(NODES)
        summary = self.history.summary()
        summary |= {"events": len(self.history.events), "last_hash": self._last_hash}
        text = json.dumps(summary, indent=1)
        try:
            self._workspace.write_bytes(path, f"{text}\n".encode())
        except OSError as error:
            if not self._workspace.is_open():
                raise  # another supervisor has taken over
            logger.warning("%s is not updated: %s", path, error.strerror)


def read_history(run_dir: Path) -> History:
    """Return the state of a run, read from its ledger. The function changes no files. Raises
    ConfigError if the ledger is damaged or cannot be read."""
    return _load(run_dir)[0]


def _load(run_dir: Path) -> tuple[History, list[str]]:
    """Return (state of a run, lines of its ledger).

    `nodes.json` is written after each event and contains the number of events and the hash of the
    last event. These two values show if lines are missing at the end of the ledger. `nodes.json` is
    read before the ledger, because a supervisor may add events between the two reads.

    Raises:
        ConfigError: The ledger is damaged or cannot be read.
    """
    path, number, last_hash = run_dir / LEDGER, 0, ""
    with contextlib.suppress(OSError, ValueError, RecursionError):
        match json.loads(files.read_regular(run_dir / NODES, _MOST_BYTES)):
            case {"events": int(events), "last_hash": str(text)}:
                number, last_hash = events, text
    lines = read_lines(path)
    history = History(parse(path, lines))
    is_lost = number > len(lines) or (number > 0 and _hash_of(lines[number - 1]) != last_hash)
    if is_lost and path.exists():
        raise ConfigError(
            f"{path}: event {number}, which {NODES} names, is missing or has changed; restore "
            f"{LEDGER} from a backup, or remove {NODES} to continue with the first "
            f"{counted(len(lines), 'event')}"
        )
    return history, lines


def _damage(path: Path, reason: str) -> ConfigError:
    return ConfigError(
        f"{path}: {reason}, so the states of nodes are unknown; restore the file from a backup, or "
        "move the file away to continue without a record of failed nodes"
    )


def read_lines(path: Path) -> list[str]:
    """Return the complete lines of the ledger.

    A last line without a newline is left out: a crash interrupted its write, and no supervisor has
    acted on its event.

    Raises:
        ConfigError: The file cannot be read.
    """
    try:
        data = files.read_regular(path, _MOST_BYTES)
    except FileNotFoundError:
        return []
    except OSError as error:
        raise _damage(path, reason_of(error)) from None
    *lines, _ = data.decode("utf-8", "surrogateescape").split("\n")
    return lines


def parse(path: Path, lines: Sequence[str]) -> list[Event]:
    """Parse the lines of a ledger. Error messages name `path`.

    Raises:
        ConfigError: A line is damaged, missing or in the wrong order, or another version of Optimus
            has written it.
    """
    events: list[Event] = []
    running, last, last_hash = 0, 0, ""
    for number, line in enumerate(lines, 1):
        body = line[:-_TAIL_CHARS]
        expected = _hash(body, last_hash)
        if line[-_TAIL_CHARS:] != f'{_HASH}{expected}"}}':
            raise _damage(path, f"line {number} is damaged (its hash differs)")
        try:
            event = _EVENT.validate_json(f"{body}}}")
            running, last = _follow(event, running, last)
        except ValueError as error:  # also of pydantic
            is_event = not isinstance(error, ValidationError)
            reason = str(error) if is_event else f"not an event of format {FORMAT}"
            raise _damage(path, f"line {number} is damaged ({reason})") from None
        events.append(event)
        last_hash = expected
    return events


def _follow(event: Event, running: int, last: int) -> tuple[int, int]:
    """Return (number of the running launch attempt or 0, number of the last attempt) after an
    event.

    Args:
        event: The event.
        running: Number of the attempt that runs before the event; 0 if none runs.
        last: Number of the last attempt before the event.

    Raises:
        ValueError: The event cannot follow the events before it.
    """
    match event:
        case AttemptStarted() if not running and event.attempt > last:
            return event.attempt, event.attempt
        case Progress() if event.attempt == running:
            return running, last
        case AttemptEnded() if event.attempt == running:
            return 0, last
        case SupervisorStarted() | NodeMarked() | NextJob() | VerdictReached():
            return running, last
    raise ValueError(f"the event {event.kind} cannot follow the events before it")


def _hash_of(line: str) -> str:
    """Return the hash at the end of a line of the ledger."""
    return line[-_TAIL_CHARS:][len(_HASH) : -2]


def _hash(body: str, last_hash: str) -> str:
    return files.xxh3_bytes(f"{last_hash}\n{body}".encode("utf-8", "surrogateescape"))
